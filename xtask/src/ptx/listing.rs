//! PTX read entry by entry: a canonical text whose digest says whether two builds are the same, and the instructions.
//!
//! Canonical text of an entry: its tokens, one space between them, followed by every function and variable of the file
//! that it reaches, in the order in which it reaches them. Dropped: comments, line breaks, `.version`, `.target`,
//! `.address_size`, `.file`, `.loc`, sections of debug information, labels that nothing jumps to. Renamed by order of
//! appearance: labels, parameters and variables of a function, and the reached functions and variables, since llc
//! numbers those through the whole file. Kept: registers with their numbers, and everything else. So an entry's digest
//! does not change when another entry of the same file does.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::base::hash::Sha256;

/// A PTX file, split into entries.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The entries, by name.
    pub entries: BTreeMap<String, Entry>,
    /// Names that more than one entry has.
    pub duplicates: BTreeSet<String>,
}

/// One entry with everything that it reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The canonical text.
    pub canonical: String,
    /// All instructions in the order of the canonical text.
    pub instructions: Vec<Instruction>,
    /// What is not an instruction and not a register: parameters, variables, attributes, sorted.
    pub declarations: Vec<String>,
}

/// One instruction, without the numbers of its registers and labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instruction {
    /// With all its suffixes, such as `ld.global.v4.b32`.
    pub opcode: String,
    /// Predicate and operands; registers by their kind alone.
    pub shape: String,
}

impl Entry {
    /// The sha256 of the canonical text.
    pub fn digest(&self) -> Sha256 {
        Sha256::of(self.canonical.as_bytes())
    }

    /// How many instructions of each class there are.
    pub fn mix(&self) -> BTreeMap<String, usize> {
        let mut mix = BTreeMap::new();
        for instruction in &self.instructions {
            *mix.entry(class(&instruction.opcode)).or_default() += 1;
        }
        mix
    }
}

impl Listing {
    /// Reads PTX. Anything is accepted; text that is not PTX has no entries.
    pub fn parse(text: &str) -> Self {
        let tokens = tokens(text);
        let items = items(&tokens);
        let mut by_name: HashMap<&str, &Item<'_>> = HashMap::new();
        for item in &items {
            let Some(name) = item.name else { continue };
            // A definition counts more than a declaration of the same name.
            let known = by_name.get(name).is_some_and(|known| known.is_definition());
            if !known {
                by_name.insert(name, item);
            }
        }
        let nameless: Vec<&Item<'_>> = items.iter().filter(|item| item.name.is_none()).collect();
        let mut listing = Listing::default();
        for item in items.iter().filter(|item| item.kind == Kind::Entry) {
            let name = item.name.unwrap_or_default().to_owned();
            let entry = Walk { by_name: &by_name, symbols: HashMap::new(), queue: VecDeque::new() }
                .entry(item, &nameless);
            if listing.entries.insert(name.clone(), entry).is_some() {
                listing.duplicates.insert(name);
            }
        }
        listing
    }
}

/// The class under which an instruction is counted: rounding arithmetic by its whole opcode, memory by its space,
/// integer arithmetic as `int`, everything else by its first word.
pub fn class(opcode: &str) -> String {
    let mut parts = opcode.split('.');
    let base = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let float = rest.iter().any(|part| super::FLOAT_TYPES.contains(part));
    let whole = super::FLOAT_OPS.contains(&base) || matches!(base, "cvt" | "testp" | "copysign");
    if (float && whole) || matches!(base, "mma" | "wmma" | "wgmma" | "tcgen05") {
        return opcode.to_owned();
    }
    if matches!(base, "ld" | "ldu" | "st" | "atom" | "red" | "cp" | "prefetch" | "ldmatrix" | "stmatrix") {
        let spaces = ["global", "shared", "local", "param", "const"];
        // `.shared::cta` is shared memory, too.
        let space = rest.iter().find_map(|part| {
            spaces.iter().find(|space| part.split_once("::").map_or(*part, |(space, _)| space) == **space)
        });
        return match space {
            Some(space) => format!("{base}.{space}"),
            None => base.to_owned(),
        };
    }
    if INTEGER_OPS.contains(&base) { "int".to_owned() } else { base.to_owned() }
}

const INTEGER_OPS: &[&str] = &[
    "add", "addc", "sub", "subc", "mul", "mul24", "mad", "mad24", "madc", "div", "rem", "abs", "neg", "min",
    "max", "popc", "clz", "bfind", "fns", "brev", "bfe", "bfi", "szext", "bmsk", "sad", "and", "or", "xor",
    "not", "cnot", "lop3", "shf", "shl", "shr", "prmt", "cvt", "slct",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Entry,
    Function,
    Other,
}

/// Something at file scope.
struct Item<'a> {
    kind: Kind,
    name: Option<&'a str>,
    external: bool,
    /// Everything before the body; a variable or declaration has no more.
    header: &'a [&'a str],
    /// Between the outermost braces.
    body: Option<&'a [&'a str]>,
}

impl Item<'_> {
    fn is_definition(&self) -> bool {
        self.body.is_some() || (self.kind == Kind::Other && !self.external)
    }
}

fn items<'a>(tokens: &'a [&'a str]) -> Vec<Item<'a>> {
    let mut items = Vec::new();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match *token {
            ".version" | ".address_size" => at += 2,
            ".target" => {
                at += 2;
                while tokens.get(at) == Some(&",") {
                    at += 2;
                }
            }
            ".section" => {
                while tokens.get(at).is_some_and(|token| *token != "{") {
                    at += 1;
                }
                at = closing(tokens, at) + 1;
            }
            ";" | "}" | ")" => at += 1,
            _ => {
                let (item, end) = item(tokens, at);
                items.push(item);
                at = end;
            }
        }
    }
    items
}

/// The item that begins at `start`, and where the next one may begin.
fn item<'a>(tokens: &'a [&'a str], start: usize) -> (Item<'a>, usize) {
    let mut kind = Kind::Other;
    let mut at = start;
    let (mut header_end, mut body, mut end) = (tokens.len(), None, tokens.len());
    while let Some(token) = tokens.get(at) {
        match *token {
            ".entry" => kind = Kind::Entry,
            ".func" => kind = Kind::Function,
            "(" => at = closing(tokens, at),
            ";" => {
                (header_end, end) = (at, at + 1);
                break;
            }
            "{" if kind == Kind::Other => at = closing(tokens, at),
            "{" => {
                let close = closing(tokens, at);
                (header_end, end) = (at, close + 1);
                body = Some(slice(tokens, at + 1, close));
                break;
            }
            _ => {}
        }
        at += 1;
    }
    let header = slice(tokens, start, header_end);
    let item = Item { kind, name: name_of(header), external: header.contains(&".extern"), header, body };
    (item, end.max(start + 1))
}

/// Where the bracket that opens at `open` closes; the end of the text when it does not.
fn closing(tokens: &[&str], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match *token {
            "(" | "{" => depth += 1,
            ")" | "}" => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

fn slice<'a, 'b>(tokens: &'a [&'b str], start: usize, end: usize) -> &'a [&'b str] {
    tokens.get(start..end.min(tokens.len())).unwrap_or_default()
}

/// The first name outside of parentheses.
fn name_of<'a>(header: &[&'a str]) -> Option<&'a str> {
    // A pragma and the like declare nothing.
    let declares = [".entry", ".func", ".global", ".shared", ".const", ".local", ".param", ".tex"];
    header.iter().find(|token| declares.contains(token))?;
    let mut at = 0;
    while let Some(token) = header.get(at) {
        match *token {
            "(" => at = closing(header, at),
            token if super::is_name(token) => return Some(token),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Follows an entry through everything that it reaches.
struct Walk<'a> {
    by_name: &'a HashMap<&'a str, &'a Item<'a>>,
    symbols: HashMap<&'a str, String>,
    queue: VecDeque<&'a str>,
}

impl<'a> Walk<'a> {
    fn entry(mut self, item: &'a Item<'a>, nameless: &[&'a Item<'a>]) -> Entry {
        let mut entry =
            Entry { canonical: String::new(), instructions: Vec::new(), declarations: Vec::new() };
        if let Some(name) = item.name {
            self.symbols.insert(name, "$E".to_owned());
        }
        self.write(item, &mut entry);
        while let Some(name) = self.queue.pop_front() {
            if let Some(item) = self.by_name.get(name) {
                self.write(item, &mut entry);
            }
        }
        for item in nameless {
            self.write(item, &mut entry);
        }
        entry.declarations.sort();
        entry
    }

    fn write(&mut self, item: &'a Item<'a>, entry: &mut Entry) {
        let mut locals = Locals::of(item);
        let header = self.rename(item.header, &mut locals);
        push(&header, &mut entry.canonical);
        entry.declarations.push(header.join(" "));
        let Some(body) = item.body else {
            entry.canonical.push_str(";\n");
            return;
        };
        let body: Vec<&'a str> = without_unused_labels(body);
        let body = self.rename(&body, &mut locals);
        entry.canonical.push_str("{\n");
        push(&body, &mut entry.canonical);
        entry.canonical.push_str("}\n");
        statements(&body, entry);
    }

    fn rename(&mut self, tokens: &[&'a str], locals: &mut Locals<'a>) -> Vec<String> {
        tokens
            .iter()
            .map(|token| {
                if let Some(name) = locals.name(token) {
                    return name;
                }
                match self.by_name.get(token) {
                    Some(item) if !item.external => {
                        let next = self.symbols.len();
                        let queue = &mut self.queue;
                        let name = self.symbols.entry(token).or_insert_with(|| {
                            queue.push_back(token);
                            format!("$S{next}")
                        });
                        name.clone()
                    }
                    _ => (*token).to_owned(),
                }
            })
            .collect()
    }
}

/// The names that belong to one function, and what they become.
struct Locals<'a> {
    declared: BTreeSet<&'a str>,
    names: HashMap<&'a str, String>,
}

impl<'a> Locals<'a> {
    fn of(item: &Item<'a>) -> Self {
        let mut declared = BTreeSet::new();
        if item.kind == Kind::Other {
            return Locals { declared, names: HashMap::new() };
        }
        // Parameters and results: the name before each `,`, `)` or `[`, inside of parentheses.
        let mut depth = 0_usize;
        for pair in item.header.windows(2) {
            match pair[0] {
                "(" => depth += 1,
                ")" => depth = depth.saturating_sub(1),
                name if depth > 0 && super::is_name(name) && matches!(pair[1], "," | ")" | "[") => {
                    declared.insert(name);
                }
                _ => {}
            }
        }
        let body = item.body.unwrap_or_default();
        let mut declaring = false;
        let mut start = true;
        for (at, token) in body.iter().enumerate() {
            let next = body.get(at + 1).copied();
            match *token {
                ";" | "{" | "}" => (start, declaring) = (true, false),
                ".local" | ".shared" | ".param" if start => (start, declaring) = (false, true),
                name if start && next == Some(":") && super::is_name(name) => {
                    declared.insert(name);
                }
                ":" => {}
                name if declaring && super::is_name(name) && !name.starts_with('%') => {
                    declared.insert(name);
                    declaring = false;
                }
                _ => start = false,
            }
        }
        Locals { declared, names: HashMap::new() }
    }

    fn name(&mut self, token: &'a str) -> Option<String> {
        self.declared.contains(token).then(|| {
            let next = self.names.len();
            self.names.entry(token).or_insert_with(|| format!("$L{next}")).clone()
        })
    }
}

/// Drops `name:` where nothing else in the body says that name.
fn without_unused_labels<'a>(body: &[&'a str]) -> Vec<&'a str> {
    let mut uses: HashMap<&str, usize> = HashMap::new();
    for token in body {
        *uses.entry(token).or_default() += 1;
    }
    let mut kept = Vec::with_capacity(body.len());
    let mut at = 0;
    while let Some(token) = body.get(at) {
        let label = body.get(at + 1) == Some(&":")
            && matches!(kept.last(), None | Some(&";" | &"{" | &"}" | &":"))
            && super::is_name(token);
        if label && uses.get(token) == Some(&1) {
            at += 2;
            continue;
        }
        kept.push(*token);
        at += 1;
    }
    kept
}

/// One statement a line.
fn push(tokens: &[String], text: &mut String) {
    let mut space = false;
    for token in tokens {
        if space {
            text.push(' ');
        }
        text.push_str(token);
        space = token != ";";
        if !space {
            text.push('\n');
        }
    }
    if space {
        text.push('\n');
    }
}

/// Sorts a renamed body into instructions and declarations.
fn statements(body: &[String], entry: &mut Entry) {
    let mut rest = body;
    while let Some((first, after)) = rest.split_first() {
        // At the start of a statement a brace opens or closes a block; inside of one it is a vector.
        if matches!(first.as_str(), "{" | "}" | ";") || rest.get(1).is_some_and(|next| next == ":") {
            rest = if rest.get(1).is_some_and(|next| next == ":") { &after[1..] } else { after };
            continue;
        }
        let end = rest.iter().position(|token| token == ";").unwrap_or(rest.len());
        let (statement, after) = rest.split_at(end);
        rest = after;
        if first.starts_with('.') {
            if first != ".reg" {
                entry.declarations.push(statement.join(" "));
            }
            continue;
        }
        let opcode = if first == "@" {
            statement.iter().skip(1).position(|token| token != "!").map_or(0, |at| at + 2)
        } else {
            0
        };
        let Some(name) = statement.get(opcode) else { continue };
        let shape = statement.iter().enumerate().filter(|(at, _)| *at != opcode);
        let shape: Vec<&str> = shape.map(|(_, token)| kind_of(token)).collect();
        entry.instructions.push(Instruction { opcode: name.clone(), shape: shape.join(" ") });
    }
}

/// A register or label without its number; anything else as it is.
fn kind_of(token: &str) -> &str {
    if token.starts_with("$L") {
        return "$L";
    }
    let kind = token.trim_end_matches(|c: char| c.is_ascii_digit());
    if token.starts_with('%') && kind.len() < token.len() && kind.len() > 1 { kind } else { token }
}

/// Words, strings, and marks of one character.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    let mut line_start = true;
    while let Some(first) = rest.chars().next() {
        if first.is_whitespace() {
            line_start |= first == '\n';
            rest = rest.split_at(first.len_utf8()).1;
            continue;
        }
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| rest.split_at(end).1);
            continue;
        }
        if let Some(comment) = rest.strip_prefix("/*") {
            rest = comment.split_once("*/").map_or("", |(_, after)| after);
            continue;
        }
        let length = if first == '"' {
            rest.char_indices().skip(1).find(|(_, c)| *c == '"').map_or(rest.len(), |(at, _)| at + 1)
        } else {
            word(rest).max(first.len_utf8())
        };
        let (token, after) = rest.split_at(length);
        rest = after;
        if line_start && matches!(token, ".loc" | ".file") {
            rest = rest.find('\n').map_or("", |end| rest.split_at(end).1);
            continue;
        }
        line_start = false;
        tokens.push(token);
    }
    tokens
}

/// How long the word is that `text` starts with. `::` is part of a word, as in `shared::cta`.
fn word(text: &str) -> usize {
    let mut length = 0;
    loop {
        let rest = text.split_at(length).1;
        match rest.chars().next() {
            Some(c) if c.is_alphanumeric() || matches!(c, '_' | '$' | '%' | '.') => length += c.len_utf8(),
            Some(':') if length > 0 && rest.starts_with("::") => length += 2,
            _ => return length,
        }
    }
}

#[cfg(test)]
mod tests;
