//! Text to tokens and back, with the vocabulary that a GGUF file carries.
//!
//! Byte-level BPE (model `gpt2`) and SentencePiece (models `llama` and `t5`). Chat templates are in [`crate::chat`].

mod bpe;
mod pretokenize;
mod spm;
mod stream;

use std::collections::HashMap;

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
        let kinds = kinds(file, texts.len())?;
        let id = |key: &str| -> Result<Option<u32>> {
            match file.integer(key)? {
                // The files of some converters write all ones for "none".
                None | Some(0xffff_ffff) => Ok(None),
                Some(id) if id < texts.len() as u64 => Ok(Some(id as u32)),
                Some(id) => Err(Error::Tokenizer(format!("{key} is {id}, of {} tokens", texts.len()))),
            }
        };
        let bos = id("tokenizer.ggml.bos_token_id")?;
        let eos = id("tokenizer.ggml.eos_token_id")?;
        let unknown = id("tokenizer.ggml.unknown_token_id")?;
        let (model, decoded) = match name {
            "gpt2" => {
                let decoded: Vec<_> =
                    texts.iter().zip(&kinds).map(|(text, kind)| decode_bpe(text, *kind)).collect();
                (Model::Bpe(Box::new(read_bpe(file, texts, &decoded, unknown)?)), decoded)
            }
            "llama" | "t5" => {
                let decoded = texts.iter().zip(&kinds).map(|(text, kind)| decode_spm(text, *kind)).collect();
                (Model::Spm(Box::new(read_spm(file, texts, &kinds, unknown, name == "t5")?)), decoded)
            }
            other => {
                let problem = format!("model {other:?} is not supported; these are: gpt2, llama, t5");
                return Err(Error::Tokenizer(problem));
            }
        };
        let is_spm = matches!(model, Model::Spm(_));
        let llama3 = matches!(&model, Model::Bpe(bpe) if bpe.pretokenizer == Pretokenizer::Llama3);
        let add_bos = file.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(name == "llama" || llama3);
        let mut special: Vec<u32> = (0..texts.len() as u32)
            .filter(|id| {
                let kind = kinds[*id as usize];
                let marks = [TokenKind::Control, TokenKind::UserDefined, TokenKind::Unknown].contains(&kind);
                marks && !texts[*id as usize].is_empty()
            })
            .collect();
        special.sort_by_key(|id| std::cmp::Reverse(texts[*id as usize].len()));
        let mut ends: Vec<u32> = [eos, id("tokenizer.ggml.eot_token_id")?].into_iter().flatten().collect();
        ends.extend((0..texts.len() as u32).filter(|id| {
            kinds[*id as usize] == TokenKind::Control && END_NAMES.contains(&texts[*id as usize].as_str())
        }));
        ends.sort_unstable();
        ends.dedup();
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

/// Control tokens with these names end a generation, also in files that do not say so.
const END_NAMES: [&str; 10] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<|end_of_sentence|>",
];

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

fn read_bpe(file: &Gguf, texts: &[String], decoded: &[Vec<u8>], unknown: Option<u32>) -> Result<Bpe> {
    let pre = file.string("tokenizer.ggml.pre")?.ok_or_else(|| {
        Error::Tokenizer(format!(
            "{} has no tokenizer.ggml.pre, so it is not known how to split",
            file.name()
        ))
    })?;
    let pretokenizer = Pretokenizer::from_name(pre).ok_or_else(|| {
        Error::Tokenizer(format!(
            "pre-tokenizer {pre:?} is not supported; these are: {}",
            Pretokenizer::NAMES
        ))
    })?;
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
    let whole_words = (pretokenizer == Pretokenizer::Llama3).then(|| {
        let mut words = HashMap::with_capacity(decoded.len());
        for (id, text) in decoded.iter().enumerate() {
            words.entry(text.clone()).or_insert(id as u32);
        }
        words
    });
    Ok(Bpe { pretokenizer, bytes, merges, whole_words, unknown })
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
