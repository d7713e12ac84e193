//! Splitting of text into words before byte-level merges, as the tokenizers' regular expressions do.
//!
//! Written as scanners: the expressions need look-ahead, and a scanner is linear in the text whatever it holds.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// A splitting rule, named as `tokenizer.ggml.pre` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pretokenizer {
    /// `gpt-2`: contractions, letters, digits and others, each with one space before.
    Gpt2,
    /// `smollm`: every digit alone, the rest as in `gpt-2`.
    Smollm,
    /// `llama-bpe`: up to three digits, line ends kept with what precedes them.
    Llama3,
    /// `qwen2`: as `llama-bpe`, with every digit alone.
    Qwen2,
}

impl Pretokenizer {
    /// The names that are understood, for messages.
    pub const NAMES: &str = "gpt-2, llama-bpe, smollm, qwen2";

    /// The rule of this name, if it is supported. Names of other families that use the same rule count too.
    pub fn from_name(name: &str) -> Option<Pretokenizer> {
        match name {
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" => Some(Pretokenizer::Gpt2),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => {
                Some(Pretokenizer::Smollm)
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" | "dbrx" | "smaug-bpe" => {
                Some(Pretokenizer::Llama3)
            }
            "qwen2" | "stablelm2" | "deepseek-r1-qwen" | "megrez" | "hunyuan" => Some(Pretokenizer::Qwen2),
            _ => None,
        }
    }

    /// Calls `word` with each piece of `text`, in order; the pieces together are the text.
    pub fn split<'a>(self, text: &'a str, mut word: impl FnMut(&'a str)) {
        match self {
            Pretokenizer::Gpt2 => split_with(text, gpt2, word),
            Pretokenizer::Llama3 => split_with(text, |text| modern(text, 3), word),
            Pretokenizer::Qwen2 => split_with(text, |text| modern(text, 1), word),
            Pretokenizer::Smollm => {
                let mut rest = text;
                while !rest.is_empty() {
                    let plain = scan(rest, |c| class(c) != Class::Number);
                    split_with(&rest[..plain], gpt2, &mut word);
                    rest = &rest[plain..];
                    if let Some(digit) = rest.chars().next() {
                        word(&rest[..digit.len_utf8()]);
                        rest = &rest[digit.len_utf8()..];
                    }
                }
            }
        }
    }
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
fn modern(text: &str, digits: usize) -> usize {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(rule: Pretokenizer, text: &str) -> Vec<&str> {
        let mut out = Vec::new();
        rule.split(text, |word| out.push(word));
        assert_eq!(out.concat(), text);
        out
    }

    #[test]
    fn gpt2_words() {
        assert_eq!(
            pieces(Pretokenizer::Gpt2, "Hello, y'all!  I'm 1234 x\n\n  z "),
            ["Hello", ",", " y", "'", "all", "!", " ", " I", "'m", " 1234", " x", "\n\n ", " z", " "]
        );
    }

    #[test]
    fn smollm_splits_every_digit() {
        assert_eq!(
            pieces(Pretokenizer::Smollm, "in 1984, 7"),
            ["in", " ", "1", "9", "8", "4", ",", " ", "7"]
        );
    }

    #[test]
    fn llama_takes_three_digits_and_line_ends() {
        assert_eq!(
            pieces(Pretokenizer::Llama3, "a12345 (x);\n\n  B'LL\t\ty"),
            ["a", "123", "45", " (", "x", ");\n\n", " ", " B", "'LL", "\t", "\ty"]
        );
        assert_eq!(pieces(Pretokenizer::Qwen2, "12  \n x"), ["1", "2", "  \n", " x"]);
    }
}
