//! Splitting of text into words before byte-level merges, as the tokenizers' regular expressions do.
//!
//! The rules of most files are written as scanners, linear in the text whatever it holds; the others are the expressions
//! of their `tokenizer.json`, applied one after the other: each cuts the pieces that the one before left.

use std::borrow::Cow;

use fancy_regex::{Regex, RegexBuilder};
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

use crate::error::{Error, Result};

/// How a byte pair encoding cuts text, by the name in `tokenizer.ggml.pre`.
#[derive(Debug)]
pub struct Pretokenizer {
    steps: Vec<Step>,
    /// A word that is a token is that token, whatever the merges say.
    pub(super) whole_words: bool,
    /// Texts begin with the begin token unless the file says otherwise.
    pub(super) add_bos: bool,
    /// Merges start from characters with spaces written as in SentencePiece, not from bytes.
    pub(super) characters: bool,
}

/// One pass over the pieces that the passes before left.
#[derive(Debug)]
enum Step {
    Gpt2,
    /// As Llama 3, with at most this many digits in a word.
    Llama3 {
        digits: usize,
    },
    /// Every number alone.
    Numbers,
    /// Runs of numbers in threes, counted from their end.
    NumbersInThrees,
    /// Cuts before every three digits, counted from the end of their run.
    BeforeThreeDigits,
    /// Runs of digits that end a word in threes, counted from their end.
    DigitsInThreesAtWordEnd,
    /// What the expression matches, and what is between.
    Expression(Box<Regex>),
}

impl Pretokenizer {
    /// The rule of files that name none.
    pub const DEFAULT: &str = "default";

    /// The rule of this name.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if there is no such rule.
    pub fn from_name(name: &str) -> Result<Pretokenizer> {
        let steps = steps(name).ok_or_else(|| {
            Error::Tokenizer(format!(
                "pre-tokenizer {name:?} is not supported; these are: {}",
                NAMES.join(", ")
            ))
        })?;
        let steps = steps.collect::<std::result::Result<_, fancy_regex::Error>>();
        Ok(Pretokenizer {
            steps: steps.map_err(|error| Error::Tokenizer(format!("pre-tokenizer {name:?}: {error}")))?,
            whole_words: WHOLE_WORDS.contains(&name),
            add_bos: ADD_BOS.contains(&name),
            characters: CHARACTERS.contains(&name),
        })
    }

    /// Calls `word` with each piece of `text`, in order; the pieces together are the text.
    pub fn split<'a>(&self, text: &'a str, mut word: impl FnMut(&'a str)) {
        split_steps(&self.steps, text, &mut word);
    }
}

fn split_steps<'a>(steps: &[Step], text: &'a str, word: &mut dyn FnMut(&'a str)) {
    let Some((step, rest)) = steps.split_first() else {
        word(text);
        return;
    };
    let mut next = |piece: &'a str| {
        if !piece.is_empty() {
            split_steps(rest, piece, word);
        }
    };
    match step {
        Step::Gpt2 => split_with(text, gpt2, next),
        Step::Llama3 { digits } => split_with(text, |text| llama3(text, *digits), next),
        Step::Numbers => split_runs(
            text,
            is_number,
            |run, next| {
                for (at, c) in run.char_indices() {
                    next(&run[at..at + c.len_utf8()]);
                }
            },
            &mut next,
        ),
        Step::NumbersInThrees => split_runs(text, is_number, in_threes, &mut next),
        Step::BeforeThreeDigits => {
            let mut start = 0;
            // Digits from here to the end of their run.
            let mut left: usize = 0;
            for (at, _) in text.char_indices().filter(|(_, c)| is_digit(*c)) {
                if left == 0 {
                    left = text[at..].chars().take_while(|c| is_digit(*c)).count();
                }
                if left.is_multiple_of(3) {
                    next(&text[start..at]);
                    start = at;
                }
                left -= 1;
            }
            next(&text[start..]);
        }
        Step::DigitsInThreesAtWordEnd => split_digits_at_word_end(text, &mut next),
        Step::Expression(expression) => {
            let mut start = 0;
            // The limits of the machine are set beyond any text; if one is met, what is left stays one piece.
            for found in expression.find_iter(text).map_while(std::result::Result::ok) {
                next(&text[start..found.start()]);
                next(found.as_str());
                start = found.end();
            }
            next(&text[start..]);
        }
    }
}

/// Hands the parts of `text` that are not runs of `keep` to `next`, and runs to `inside`.
fn split_runs<'a>(
    text: &'a str,
    keep: impl Fn(char) -> bool,
    inside: impl Fn(&'a str, &mut dyn FnMut(&'a str)),
    next: &mut dyn FnMut(&'a str),
) {
    let mut rest = text;
    while !rest.is_empty() {
        let plain = scan(rest, |c| !keep(c));
        next(&rest[..plain]);
        rest = &rest[plain..];
        let run = scan(rest, &keep);
        inside(&rest[..run], next);
        rest = &rest[run..];
    }
}

/// Hands out `run` in threes of characters, counted from its end.
fn in_threes<'a>(run: &'a str, next: &mut dyn FnMut(&'a str)) {
    let count = run.chars().count();
    let mut start = 0;
    for (index, (at, _)) in run.char_indices().enumerate() {
        if (count - index).is_multiple_of(3) {
            next(&run[start..at]);
            start = at;
        }
    }
    next(&run[start..]);
}

/// `\d{1,3}(?=(?:\d{3})*\b)`, linear in the text.
fn split_digits_at_word_end<'a>(text: &'a str, next: &mut dyn FnMut(&'a str)) {
    let mut start = 0;
    let mut from = 0;
    while let Some(at) = text[from..].find(is_digit).map(|at| at + from) {
        let end = at + scan(&text[at..], is_digit);
        if !text[end..].starts_with(is_word) {
            next(&text[start..at]);
            in_threes(&text[at..end], next);
            start = end;
        }
        from = end;
    }
    next(&text[start..]);
}

fn is_number(c: char) -> bool {
    class(c) == Class::Number
}

/// `\d`
fn is_digit(c: char) -> bool {
    c.general_category() == GeneralCategory::DecimalNumber
}

/// `\w`, as Oniguruma has it: of the numbers that are no digits and no letters, those of Latin-1 count.
fn is_word(c: char) -> bool {
    c.is_alphabetic()
        || is_digit(c)
        || matches!(c, '²' | '³' | '¹' | '¼'..='¾')
        || c.general_category_group() == GeneralCategoryGroup::Mark
        || c.general_category() == GeneralCategory::ConnectorPunctuation
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Space,
    Other,
}

fn class(c: char) -> Class {
    if c.is_ascii() {
        return match c {
            'a'..='z' | 'A'..='Z' => Class::Letter,
            '0'..='9' => Class::Number,
            ' ' | '\t'..='\r' => Class::Space,
            _ => Class::Other,
        };
    }
    if c.is_whitespace() {
        return Class::Space;
    }
    match c.general_category_group() {
        GeneralCategoryGroup::Letter => Class::Letter,
        GeneralCategoryGroup::Number => Class::Number,
        _ => Class::Other,
    }
}

fn split_with<'a>(mut text: &'a str, first: impl Fn(&str) -> usize, mut word: impl FnMut(&'a str)) {
    while !text.is_empty() {
        let (piece, rest) = text.split_at(first(text));
        word(piece);
        text = rest;
    }
}

/// Bytes of the longest prefix whose characters all satisfy `keep`.
fn scan(text: &str, keep: impl Fn(char) -> bool) -> usize {
    text.find(|c| !keep(c)).unwrap_or(text.len())
}

/// Bytes of the whitespace run's part that `\s+(?!\S)` or else `\s+` takes.
fn whitespace(text: &str) -> usize {
    let run = scan(text, |c| class(c) == Class::Space);
    let last = text[..run].chars().next_back().map_or(0, char::len_utf8);
    // Followed by something: the last one is left for it, unless it is the only one.
    if run < text.len() && run > last { run - last } else { run }
}

/// The first word of `text`, which is not empty:
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
fn gpt2(text: &str) -> usize {
    for ending in ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"] {
        if text.starts_with(ending) {
            return ending.len();
        }
    }
    let space = usize::from(text.starts_with(' '));
    match text[space..].chars().next().map(class) {
        None | Some(Class::Space) => whitespace(text),
        Some(kind) => space + scan(&text[space..], |c| class(c) == kind),
    }
}

/// The first word of `text`, which is not empty:
/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,D}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`.
fn llama3(text: &str, digits: usize) -> usize {
    let lower: String = text.chars().take(3).map(|c| c.to_ascii_lowercase()).collect();
    for ending in ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"] {
        if lower.starts_with(ending) {
            return ending.len();
        }
    }
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return 0 };
    let is_letter = |c: char| class(c) == Class::Letter;
    let is_line_end = |c: char| matches!(c, '\r' | '\n');
    let kind = class(first);
    if kind == Class::Letter {
        return scan(text, is_letter);
    }
    if kind != Class::Number && !is_line_end(first) && chars.next().is_some_and(is_letter) {
        return first.len_utf8() + scan(&text[first.len_utf8()..], is_letter);
    }
    if kind == Class::Number {
        let run = text.chars().take(digits).take_while(|c| class(*c) == Class::Number);
        return run.map(char::len_utf8).sum();
    }
    let space = usize::from(first == ' ');
    if text[space..].chars().next().is_some_and(|c| class(c) == Class::Other) {
        let end = space + scan(&text[space..], |c| class(c) == Class::Other);
        return end + scan(&text[end..], is_line_end);
    }
    let run = scan(text, |c| class(c) == Class::Space);
    match text[..run].rfind(is_line_end) {
        Some(last) => last + 1,
        None => whitespace(text),
    }
}

/// The first of several alternatives of an expression, as many files write it.
macro_rules! contraction {
    () => {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// Words by the case of their letters; `$end` may follow a word.
macro_rules! cased_words {
    ($upper:literal, $lower:literal, $end:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?",
            $upper,
            "*",
            $lower,
            "+",
            $end,
            "|",
            r"[^\r\n\p{L}\p{N}]?",
            $upper,
            "+",
            $lower,
            "*",
            $end
        )
    };
}

const UNICODE_CASED: &str = cased_words!(
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    concat!(contraction!(), "?")
);
const TEKKEN: &str = concat!(
    cased_words!(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", ""),
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O_REST: &str = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU_REST: &str = r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = concat!(
    r"\p{Han}+|",
    cased_words!(
        r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]",
        r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]",
        concat!(contraction!(), "?")
    ),
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_LLM_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const DEEPSEEK_HAN: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const JAPANESE_HAN: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";

/// A step before it is compiled.
enum Rule {
    Plain(Step),
    Expression(Cow<'static, str>),
}

/// The steps of the rule of this name: the names and rules of llama.cpp, with the expressions of `tokenizer.json` where
/// llama.cpp approximates them.
fn steps(name: &str) -> Option<impl Iterator<Item = std::result::Result<Step, fancy_regex::Error>>> {
    let text = |expression: &'static str| Rule::Expression(expression.into());
    let llama3 = |digits| Rule::Plain(Step::Llama3 { digits });
    let gpt2 = || Rule::Plain(Step::Gpt2);
    let numbers = || Rule::Plain(Step::Numbers);
    let rules = match name {
        "default" => vec![text(r"[\p{P}\$\+<=>\^~\|]+"), gpt2(), text(r"\p{N}+"), text("[0-9][0-9][0-9]")],
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4"
        | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v1-en" | "jina-v2-code"
        | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "roberta-bpe" => vec![gpt2()],
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => {
            vec![numbers(), gpt2()]
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" | "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" | "glm5" => vec![llama3(3)],
        "qwen2" | "stablelm2" | "deepseek-r1-qwen" | "megrez" | "hunyuan" | "kormo" | "f2llmv2"
        | "solar-open" | "grok-2" => vec![llama3(1)],
        "jais-2" => vec![text(concat!(
            contraction!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)",
            r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        ))],
        "qwen35" => vec![text(concat!(
            contraction!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ))],
        "deepseek-llm" => vec![
            text(r"[\r\n]"),
            text(DEEPSEEK_LLM_LETTERS),
            text(r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"),
            text(r"\s+$"),
            text(DEEPSEEK_HAN),
            text(r"\p{N}+"),
        ],
        "deepseek-coder" => {
            vec![text(r"[\r\n]"), text(r"\s?\p{L}+"), text(r"\s?\p{P}+"), text(DEEPSEEK_HAN), numbers()]
        }
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
            vec![text(r"\p{N}{1,3}"), text(JAPANESE_HAN), text(DEEPSEEK_V3)]
        }
        "spark2_5" => vec![text(r"\p{N}{1,3}"), text(JAPANESE_HAN), text(SPARK), numbers()],
        "youtu" => vec![
            text(
                r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
            ),
            Rule::Expression([UNICODE_CASED, YOUTU_REST].concat().into()),
        ],
        "falcon" => vec![text(r"[\p{P}\$\+<=>\^~\|`]+"), gpt2(), text("[0-9][0-9][0-9]")],
        "poro-chat" | "bloom" | "gpt3-finnish" => vec![text(BLOOM)],
        "viking" => vec![text(BLOOM), numbers()],
        "tekken" => vec![text(TEKKEN)],
        "chameleon" => vec![
            text("<sentinel:[0-9]+>"),
            text("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            text(r"([\t\n]|    |  )"),
            numbers(),
            text(r"[\p{P}!-/:-@\[-`{-~]"),
            gpt2(),
        ],
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" | "granite-embed-multi-97m" => {
            vec![Rule::Expression([UNICODE_CASED, GPT4O_REST].concat().into())]
        }
        "tiny_aya" | "cohere2moe" => vec![
            Rule::Plain(Step::DigitsInThreesAtWordEnd),
            Rule::Expression([UNICODE_CASED, GPT4O_REST].concat().into()),
        ],
        "kimi-k2" => vec![text(KIMI)],
        "superbpe" => vec![text(r"\p{N}+"), Rule::Plain(Step::BeforeThreeDigits)],
        "bailingmoe" | "bailingmoe2" | "llada-moe" => vec![text(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        "seed-coder" => vec![text(concat!(
            contraction!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        ))],
        "ufakzeka" => {
            vec![text(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")]
        }
        "afmoe" => vec![
            Rule::Plain(Step::NumbersInThrees),
            text(
                r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
            ),
            text(DEEPSEEK_V3),
        ],
        "laguna" => vec![text(r"[^\n]+|[\n]+"), llama3(1)],
        "exaone-moe" => vec![text(concat!(
            contraction!(),
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]",
            r"|\s+(?!\S)|\s+"
        ))],
        "gemma4" | "granite-embed-multi-311m" | "sarvam-moe" => vec![text(r"[^\n]+|[\n]+")],
        "minicpm5" => vec![
            text(r"\p{N}{1,3}"),
            text(concat!(
                contraction!(),
                r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )),
        ],
        _ => return None,
    };
    Some(rules.into_iter().map(|rule| match rule {
        Rule::Plain(step) => Ok(step),
        Rule::Expression(text) => {
            let expression = RegexBuilder::new(&text).backtrack_limit(usize::MAX).build()?;
            Ok(Step::Expression(Box::new(expression)))
        }
    }))
}

const WHOLE_WORDS: &[&str] = &[
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "minicpm5",
    "youtu",
    "glm4",
    "glm5",
    "tekken",
    "granite-embed-multi-97m",
];
const ADD_BOS: &[&str] = &[
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
    "gemma4",
    "granite-embed-multi-311m",
];
const CHARACTERS: &[&str] = &["gemma4", "granite-embed-multi-311m", "sarvam-moe"];

/// Every name, for messages.
const NAMES: &[&str] = &[
    "a.x-4.0",
    "afmoe",
    "bailingmoe",
    "bailingmoe2",
    "bloom",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "cohere2moe",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone-moe",
    "exaone4",
    "f2llmv2",
    "falcon",
    "falcon-h1",
    "falcon3",
    "gemma4",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "gpt-4o",
    "gpt3-finnish",
    "granite-docling",
    "granite-embed-multi-311m",
    "granite-embed-multi-97m",
    "grok-2",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "jais",
    "jais-2",
    "jina-de",
    "jina-es",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "jina-v5-nano",
    "joyai-llm",
    "kanana2",
    "kimi-k2",
    "kormo",
    "laguna",
    "lfm2",
    "llada-moe",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "llama4",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "minicpm5",
    "minimax-m2",
    "modern-bert",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "roberta-bpe",
    "sarvam-moe",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "spark2_5",
    "stablelm2",
    "starcoder",
    "superbpe",
    "talkie",
    "tekken",
    "tiny_aya",
    "trillion",
    "ufakzeka",
    "viking",
    "youtu",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let mut out = Vec::new();
        let rule = Pretokenizer::from_name(name).expect("a rule");
        rule.split(text, |word| out.push(word));
        assert_eq!(out.concat(), text);
        out
    }

    #[test]
    fn gpt2_words() {
        assert_eq!(
            pieces("gpt-2", "Hello, y'all!  I'm 1234 x\n\n  z "),
            ["Hello", ",", " y", "'", "all", "!", " ", " I", "'m", " 1234", " x", "\n\n ", " z", " "]
        );
    }

    #[test]
    fn smollm_splits_every_digit() {
        assert_eq!(pieces("smollm", "in 1984, 7"), ["in", " ", "1", "9", "8", "4", ",", " ", "7"]);
    }

    #[test]
    fn llama_takes_three_digits_and_line_ends() {
        assert_eq!(
            pieces("llama-bpe", "a12345 (x);\n\n  B'LL\t\ty"),
            ["a", "123", "45", " (", "x", ");\n\n", " ", " B", "'LL", "\t", "\ty"]
        );
        assert_eq!(pieces("qwen2", "12  \n x"), ["1", "2", "  \n", " x"]);
    }

    #[test]
    fn every_name_has_a_rule_whose_pieces_are_the_text() {
        let text = "It's 12345 in the\u{301} ΣΑΣ HTMLParser, 東京タワー١٢٣٤ ½12x9876_\r\n\n \t  q  <sentinel:12> ½1234!";
        for name in NAMES {
            assert!(!pieces(name, text).is_empty(), "{name}");
            assert!(pieces(name, &" A".repeat(3000)).concat().len() == 6000, "{name}");
        }
        assert!(Pretokenizer::from_name("frob").is_err_and(|error| error.to_string().contains("\"frob\"")));
    }

    #[test]
    fn a_long_run_of_one_class_stays_whole_words() {
        for (name, words) in [("gpt-4o", 1), ("tekken", 1), ("deepseek-v3", 1), ("kimi-k2", 1), ("qwen35", 1)]
        {
            let text = "A".repeat(300_000);
            assert_eq!(pieces(name, &text).len(), words, "{name}");
        }
    }

    #[test]
    fn digits_in_threes_count_from_the_end() {
        assert_eq!(pieces("afmoe", "x1234567"), ["x", "1", "234", "567"]);
        assert_eq!(pieces("superbpe", "x1234567y123"), ["x", "1", "234", "567", "y", "123"]);
        assert_eq!(pieces("superbpe", "½1234"), ["½1", "234"]);
        assert_eq!(pieces("tiny_aya", "1234567 1234x"), ["1", "234", "567", " ", "123", "4", "x"]);
        assert_eq!(pieces("tiny_aya", "1234½"), ["123", "4½"]);
        assert_eq!(pieces("tiny_aya", "1234⅓"), ["1", "234", "⅓"]);
    }

    #[test]
    fn words_by_case() {
        assert_eq!(pieces("gpt-4o", "HTMLParser's x"), ["HTMLParser's", " x"]);
        assert_eq!(pieces("gpt-4o", "fooBarBAZ"), ["foo", "Bar", "BAZ"]);
        assert_eq!(pieces("kimi-k2", "abc東京def"), ["abc", "東京", "def"]);
        assert_eq!(pieces("default", "a12345!?"), ["a", "123", "45", "!?"]);
    }
}
