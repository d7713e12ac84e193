//! Text to tokens and back, with the vocabulary that a GGUF file carries.
//!
//! BPE of bytes (model `gpt2`) and of characters (model `gemma4`), and SentencePiece (models `llama` and `t5`). Chat templates are in [`crate::chat`].

mod bpe;
mod pretokenize;
mod spm;
mod stream;

use std::collections::{HashMap, HashSet};

use crate::error::{Error, Result};
use crate::gguf::Gguf;

use bpe::Bpe;
pub use pretokenize::Pretokenizer;
use spm::{SPACE, Spm};
pub use stream::TextStream;

/// What a token is for, as `tokenizer.ggml.token_type` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// Stands for text that the vocabulary cannot express.
    Unknown,
    /// Structures a conversation; never made from plain text.
    Control,
    /// Text that is matched before anything else.
    UserDefined,
    /// Not in use.
    Unused,
    /// A single byte.
    Byte,
}

#[derive(Debug)]
enum Model {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
}

/// A vocabulary and the way to apply it.
#[derive(Debug)]
pub struct Tokenizer {
    model: Model,
    /// What each token decodes to.
    decoded: Vec<Vec<u8>>,
    texts: Vec<String>,
    kinds: Vec<TokenKind>,
    /// Tokens that are matched in text before anything else, longest first.
    special: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    space_prefix: bool,
    /// Special tokens that take the whitespace after them.
    strip_right: HashSet<u32>,
    warnings: Vec<String>,
}

impl Tokenizer {
    /// Reads the vocabulary of a file.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is none, it is contradictory or of an unsupported kind; [`Error::Model`] if a key
    /// holds a value of another kind.
    pub fn from_gguf(file: &Gguf) -> Result<Tokenizer> {
        Tokenizer::read(file).map_err(|error| error.naming(file.name()))
    }

    fn read(file: &Gguf) -> Result<Tokenizer> {
        let missing = |key: &str| Error::Tokenizer(format!("{} has no {key}", file.name()));
        let name = file.string("tokenizer.ggml.model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let texts = file.strings("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        if texts.is_empty() || texts.len() >= u32::MAX as usize {
            return Err(Error::Tokenizer(format!("the vocabulary has {} tokens", texts.len())));
        }
        let mut kinds = kinds(file, texts.len())?;
        let id = |key: &str| -> Result<Option<u32>> {
            match file.integer(key)? {
                // The files of some converters write all ones for "none".
                None | Some(0xffff_ffff) => Ok(None),
                Some(id) if id < texts.len() as u64 => Ok(Some(id as u32)),
                Some(id) => Err(Error::Tokenizer(format!("{key} is {id}, of {} tokens", texts.len()))),
            }
        };
        let mut warnings = Vec::new();
        // The values that SentencePiece gives them, for the files that name none.
        let usual = |token: u32| (name == "llama" && (token as usize) < texts.len()).then_some(token);
        let bos = id("tokenizer.ggml.bos_token_id")?.or(usual(1));
        let eos = id("tokenizer.ggml.eos_token_id")?.or(usual(2));
        let unknown = id("tokenizer.ggml.unknown_token_id")?.or(usual(0));
        let architecture = file.string("general.architecture")?.unwrap_or("");
        if ENCODERS.contains(&architecture) {
            let problem = format!("{architecture} is an encoder-only model, which writes no text");
            return Err(Error::Tokenizer(problem));
        }
        let ends = mark_ends(texts, &mut kinds, &id, eos)?;
        let (model, decoded) = match name {
            "gpt2" | "gemma4" => {
                let pretokenizer = read_pretokenizer(file, name, &mut warnings)?;
                let decode = if pretokenizer.characters { decode_spm } else { decode_bpe };
                let decoded: Vec<_> =
                    texts.iter().zip(&kinds).map(|(text, kind)| decode(text, *kind)).collect();
                (Model::Bpe(Box::new(read_bpe(file, pretokenizer, texts, &decoded, unknown)?)), decoded)
            }
            "llama" | "t5" => {
                if file.metadata().iter().any(|(key, _)| key == "tokenizer.ggml.precompiled_charsmap") {
                    let problem = "tokenizer.ggml.precompiled_charsmap, a character map, is not supported";
                    return Err(Error::Tokenizer(problem.into()));
                }
                let decoded = texts.iter().zip(&kinds).map(|(text, kind)| decode_spm(text, *kind)).collect();
                (Model::Spm(Box::new(read_spm(file, texts, &kinds, unknown, name == "t5")?)), decoded)
            }
            other => {
                let problem = format!("model {other:?} is not supported; these are: gpt2, gemma4, llama, t5");
                return Err(Error::Tokenizer(problem));
            }
        };
        let is_spm = matches!(model, Model::Spm(_));
        let begins = matches!(&model, Model::Bpe(bpe) if bpe.pretokenizer.add_bos);
        // Gemma 4's first files say that it has none.
        let add_bos = name == "gemma4"
            || file.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(name == "llama" || begins);
        let mut special: Vec<u32> = (0..texts.len() as u32)
            .filter(|id| {
                let kind = kinds[*id as usize];
                let marks = [TokenKind::Control, TokenKind::UserDefined, TokenKind::Unknown].contains(&kind);
                marks && !texts[*id as usize].is_empty()
            })
            .collect();
        special.sort_by_key(|id| std::cmp::Reverse(texts[*id as usize].len()));
        let title = file.string("general.name")?.unwrap_or("").to_lowercase();
        let strip_right = if title.contains("phi-3") || title.contains("phi3") {
            let plain = ["<unk>", "<s>", "<|endoftext|>"];
            special.iter().copied().filter(|id| !plain.contains(&texts[*id as usize].as_str())).collect()
        } else {
            HashSet::new()
        };
        Ok(Tokenizer {
            model,
            decoded,
            texts: texts.to_vec(),
            kinds,
            special,
            bos,
            eos,
            ends,
            add_bos: add_bos && bos.is_some(),
            add_eos: file.boolean("tokenizer.ggml.add_eos_token")?.unwrap_or(name == "t5") && eos.is_some(),
            space_prefix: file.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(is_spm) && is_spm,
            strip_right,
            warnings,
        })
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there are no tokens; never true of one that was read from a file.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The token that begins a text, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if there is one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether this token ends a generation.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// What the file leaves open and this took the usual way, for the user to know.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The token as the vocabulary spells it; empty for a token that is not there.
    pub fn text(&self, token: u32) -> &str {
        self.texts.get(token as usize).map_or("", String::as_str)
    }

    /// The bytes that a token stands for in a text: none for control tokens.
    pub fn bytes(&self, token: u32) -> &[u8] {
        match self.kinds.get(token as usize) {
            None | Some(TokenKind::Control | TokenKind::Unused) => &[],
            Some(_) => &self.decoded[token as usize],
        }
    }

    /// Encodes a text.
    ///
    /// `add_special` adds the begin and end tokens that the file asks for; `parse_special` makes control tokens from
    /// their names, which is right for templates and wrong for what a user typed.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Vec<u32> {
        let mut out = Vec::new();
        if add_special && self.add_bos {
            out.extend(self.bos);
        }
        let mut after_special = true;
        for fragment in self.fragments(text, parse_special) {
            match fragment {
                Fragment::Token(token) => {
                    out.push(token);
                    after_special = true;
                }
                Fragment::Text(text) => {
                    self.encode_text(text, after_special && self.space_prefix, &mut out);
                    after_special = false;
                }
            }
        }
        if add_special && self.add_eos {
            out.extend(self.eos);
        }
        out
    }

    fn encode_text(&self, text: &str, space_prefix: bool, out: &mut Vec<u32>) {
        match &self.model {
            Model::Bpe(bpe) => bpe.encode(text, out),
            Model::Spm(spm) => {
                let prefix = if space_prefix { " " } else { "" };
                let text: String =
                    prefix.chars().chain(text.chars()).map(|c| if c == ' ' { SPACE } else { c }).collect();
                spm.encode(&text, out);
            }
        }
    }

    /// Cuts the text at special tokens: those with longer names first, wherever they are.
    fn fragments<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Fragment<'a>> {
        let mut fragments = if text.is_empty() { vec![] } else { vec![Fragment::Text(text)] };
        for &token in &self.special {
            if !parse_special && self.kinds[token as usize] != TokenKind::UserDefined {
                continue;
            }
            let name = self.texts[token as usize].as_str();
            if !text.contains(name) {
                continue;
            }
            let mut cut = Vec::with_capacity(fragments.len());
            for fragment in fragments {
                let Fragment::Text(mut rest) = fragment else {
                    cut.push(fragment);
                    continue;
                };
                while let Some(at) = rest.find(name) {
                    if at > 0 {
                        cut.push(Fragment::Text(&rest[..at]));
                    }
                    cut.push(Fragment::Token(token));
                    rest = &rest[at + name.len()..];
                    if self.strip_right.contains(&token) {
                        rest = rest.trim_start_matches(|c: char| matches!(c, ' ' | '\t'..='\r'));
                    }
                }
                if !rest.is_empty() {
                    cut.push(Fragment::Text(rest));
                }
            }
            fragments = cut;
        }
        fragments
    }
}

/// Tokens with these names end a generation, whatever their type, also in files that do not say so: llama.cpp's list.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|end_of_sentence|>",
    // Paddings and separators of code completion.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Architectures whose models take texts and write none.
const ENCODERS: &[&str] = &[
    "bert",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "t5encoder",
];

/// The tokens that end a generation, sorted; those known by name become control tokens.
fn mark_ends(
    texts: &[String],
    kinds: &mut [TokenKind],
    id: &dyn Fn(&str) -> Result<Option<u32>>,
    eos: Option<u32>,
) -> Result<Vec<u32>> {
    let mut named: HashMap<&str, u32> = HashMap::new();
    for (id, text) in texts.iter().enumerate() {
        if END_NAMES.contains(&text.as_str()) {
            named.entry(text).or_insert(id as u32);
        }
    }
    // The conversations of gpt-oss and Solar hold <|end|> within an answer, those of Gemma 4 have a plain </s>.
    let all = |names: &[&str]| names.iter().all(|name| named.contains_key(name));
    let mut plain = Vec::new();
    if all(&["<|return|>", "<|call|>", "<|end|>"])
        || (all(&["<|flush|>", "<|end|>"]) && (all(&["<|call|>"]) || all(&["<|calls|>"])))
    {
        plain.extend(named.remove("<|end|>").map(|token| (token, TokenKind::UserDefined)));
    }
    if named.contains_key("<|tool_response>") {
        plain.extend(named.remove("</s>").map(|token| (token, TokenKind::Normal)));
    }
    for token in named.values() {
        kinds[*token as usize] = TokenKind::Control;
    }
    let mut ends: Vec<u32> = named.into_values().chain(eos).collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ends.extend(id(key)?);
    }
    for (token, kind) in plain {
        kinds[token as usize] = kind;
        ends.retain(|end| *end != token);
    }
    for (token, text) in texts.iter().enumerate() {
        // gpt-oss writes the parts of an answer with these.
        if ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"].contains(&text.as_str()) {
            kinds[token] = TokenKind::UserDefined;
        }
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

fn kinds(file: &Gguf, count: usize) -> Result<Vec<TokenKind>> {
    let Some(numbers) = file.integers("tokenizer.ggml.token_type")? else {
        return Ok(vec![TokenKind::Normal; count]);
    };
    if numbers.len() != count {
        let problem = format!("tokenizer.ggml.token_type has {} entries for {count} tokens", numbers.len());
        return Err(Error::Tokenizer(problem));
    }
    let kind = |number: &i64| match number {
        2 => TokenKind::Unknown,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        5 => TokenKind::Unused,
        6 => TokenKind::Byte,
        _ => TokenKind::Normal,
    };
    Ok(numbers.iter().map(kind).collect())
}

fn decode_bpe(text: &str, kind: TokenKind) -> Vec<u8> {
    if matches!(kind, TokenKind::Normal | TokenKind::Byte)
        && let Some(bytes) = text.chars().map(bpe::byte_of).collect()
    {
        return bytes;
    }
    text.as_bytes().to_vec()
}

fn decode_spm(text: &str, kind: TokenKind) -> Vec<u8> {
    if kind == TokenKind::Byte
        && let Some(byte) = byte_name(text)
    {
        return vec![byte];
    }
    text.replace(SPACE, " ").into_bytes()
}

/// The byte of a token named `<0xNN>`.
fn byte_name(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

fn read_pretokenizer(file: &Gguf, model: &str, warnings: &mut Vec<String>) -> Result<Pretokenizer> {
    if model == "gemma4" {
        return Pretokenizer::from_name("gemma4");
    }
    match file.string("tokenizer.ggml.pre")? {
        Some(name) if !name.is_empty() => Pretokenizer::from_name(name),
        _ => {
            warnings.push(format!(
                "{} has no tokenizer.ggml.pre; text is split by the default rule, which may not be the model's",
                file.name()
            ));
            Pretokenizer::from_name(Pretokenizer::DEFAULT)
        }
    }
}

fn read_bpe(
    file: &Gguf,
    pretokenizer: Pretokenizer,
    texts: &[String],
    decoded: &[Vec<u8>],
    unknown: Option<u32>,
) -> Result<Bpe> {
    let lines = file
        .strings("tokenizer.ggml.merges")?
        .ok_or_else(|| Error::Tokenizer(format!("{} has no tokenizer.ggml.merges", file.name())))?;
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(texts.len());
    for (id, text) in texts.iter().enumerate() {
        ids.entry(text).or_insert(id as u32);
    }
    let mut bytes = [None; 256];
    for code in 0..0x144 {
        if let Some(c) = char::from_u32(code)
            && let Some(byte) = bpe::byte_of(c)
        {
            bytes[usize::from(byte)] = ids.get(c.encode_utf8(&mut [0; 4]) as &str).copied();
        }
    }
    let characters = pretokenizer.characters.then(|| {
        bytes = [None; 256];
        let mut characters = HashMap::new();
        for (text, id) in &ids {
            let mut chars = text.chars();
            if let (Some(c), None) = (chars.next(), chars.next()) {
                characters.insert(c, *id);
            }
            if let Some(byte) = byte_name(text) {
                bytes[usize::from(byte)] = Some(*id);
            }
        }
        characters
    });
    let mut merges = HashMap::with_capacity(lines.len());
    let mut joined = String::new();
    for (rank, line) in lines.iter().enumerate() {
        // The separator is the first space after the first character: a side may itself begin with one.
        let first = line.chars().next().map_or(0, char::len_utf8);
        let Some(at) = line[first..].find(' ').map(|at| at + first) else {
            let problem = format!("merge {rank} is {line:?}, expected two tokens with a space between");
            return Err(Error::Tokenizer(problem));
        };
        let (left, right) = (&line[..at], &line[at + 1..]);
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        // Merges of tokens that the vocabulary lacks can never apply.
        if let (Some(left), Some(right), Some(merged)) =
            (ids.get(left), ids.get(right), ids.get(joined.as_str()))
        {
            merges.entry((*left, *right)).or_insert((rank as u32, *merged));
        }
    }
    let mut whole_words = HashMap::new();
    for (id, text) in decoded.iter().enumerate() {
        // Of words of characters only line ends are looked up; the token of a single byte is none.
        let lines = pretokenizer.characters && texts[id].bytes().all(|byte| byte == b'\n');
        if pretokenizer.whole_words || lines {
            whole_words.entry(text.clone()).or_insert(id as u32);
        }
    }
    let whole_words = (!whole_words.is_empty()).then_some(whole_words);
    Ok(Bpe { pretokenizer, bytes, merges, whole_words, characters, unknown })
}

fn read_spm(
    file: &Gguf,
    texts: &[String],
    kinds: &[TokenKind],
    unknown: Option<u32>,
    unigram: bool,
) -> Result<Spm> {
    let scores = match file.floats("tokenizer.ggml.scores")? {
        Some(scores) if scores.len() == texts.len() => scores.to_vec(),
        Some(scores) => {
            let problem =
                format!("tokenizer.ggml.scores has {} entries for {} tokens", scores.len(), texts.len());
            return Err(Error::Tokenizer(problem));
        }
        None => return Err(Error::Tokenizer(format!("{} has no tokenizer.ggml.scores", file.name()))),
    };
    let mut ids = HashMap::with_capacity(texts.len());
    let mut bytes = [None; 256];
    let mut longest = 0;
    for (id, text) in texts.iter().enumerate() {
        ids.entry(text.clone()).or_insert(id as u32);
        longest = longest.max(text.len());
        if kinds[id] == TokenKind::Byte
            && let Some(byte) = byte_name(text)
        {
            bytes[usize::from(byte)] = Some(id as u32);
        }
    }
    Ok(Spm { ids, scores, bytes, unknown, unigram, longest })
}
