//! Byte-level byte pair encoding: merges of adjacent tokens, lowest rank first.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::pretokenize::Pretokenizer;
use super::spm::SPACE;

/// The merge table of a byte-level tokenizer.
#[derive(Debug)]
pub(super) struct Bpe {
    pub pretokenizer: Pretokenizer,
    /// The token of each single byte, where the vocabulary has one.
    pub bytes: [Option<u32>; 256],
    /// For a pair of tokens: the rank of their merge and the token that it makes.
    pub merges: HashMap<(u32, u32), (u32, u32)>,
    /// Whole words that are tokens are taken as they are, whatever the merges say.
    pub whole_words: Option<HashMap<Vec<u8>, u32>>,
    /// The token of each single character, where merges start from characters and not from bytes.
    pub characters: Option<HashMap<char, u32>>,
    /// Stands for a byte without a token.
    pub unknown: Option<u32>,
}

/// In merges from characters, a character without a token is this and its number. Vocabularies are smaller.
const NO_TOKEN: u32 = 1 << 31;

impl Bpe {
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        if self.characters.is_some() {
            let escaped: String = text.chars().map(|c| if c == ' ' { SPACE } else { c }).collect();
            self.encode_words(&escaped, out);
        } else {
            self.encode_words(text, out);
        }
    }

    fn encode_words(&self, text: &str, out: &mut Vec<u32>) {
        self.pretokenizer.split(text, |word| {
            if let Some(words) = &self.whole_words
                && let Some(token) = words.get(word.as_bytes())
            {
                out.push(*token);
                return;
            }
            match &self.characters {
                None => self.encode_word(word.as_bytes(), out),
                Some(characters) => self.encode_characters(word, characters, out),
            }
        });
    }

    fn encode_word(&self, word: &[u8], out: &mut Vec<u32>) {
        let tokens = word.iter().filter_map(|byte| self.bytes[usize::from(*byte)].or(self.unknown)).collect();
        out.extend(merge(tokens, |left, right| self.merges.get(&(left, right)).copied()));
    }
}

impl Bpe {
    fn encode_characters(&self, word: &str, characters: &HashMap<char, u32>, out: &mut Vec<u32>) {
        let tokens =
            word.chars().map(|c| characters.get(&c).copied().unwrap_or(NO_TOKEN | c as u32)).collect();
        for token in merge(tokens, |left, right| self.merges.get(&(left, right)).copied()) {
            match char::from_u32(token ^ NO_TOKEN).filter(|_| token >= NO_TOKEN) {
                None => out.push(token),
                Some(c) => {
                    let mut buffer = [0; 4];
                    let bytes = c.encode_utf8(&mut buffer).bytes();
                    out.extend(bytes.filter_map(|byte| self.bytes[usize::from(byte)].or(self.unknown)));
                }
            }
        }
    }
}

/// Merges adjacent symbols until no pair has a rank: lowest rank first, leftmost among equals.
pub(super) fn merge<R: Ord + Copy>(
    mut tokens: Vec<u32>,
    rank: impl Fn(u32, u32) -> Option<(R, u32)>,
) -> impl Iterator<Item = u32> {
    const NONE: usize = usize::MAX;
    const GONE: u32 = u32::MAX;
    let count = tokens.len();
    let mut next: Vec<usize> = (1..=count).map(|i| if i < count { i } else { NONE }).collect();
    let mut previous: Vec<usize> = (0..count).map(|i| i.checked_sub(1).unwrap_or(NONE)).collect();
    let mut queue = BinaryHeap::new();
    let candidate = |tokens: &[u32], left: usize, right: usize| {
        rank(tokens[left], tokens[right])
            .map(|(rank, merged)| Reverse((rank, left, right, tokens[left], tokens[right], merged)))
    };
    queue.extend((1..count).filter_map(|right| candidate(&tokens, right - 1, right)));
    while let Some(Reverse((_, left, right, left_token, right_token, merged))) = queue.pop() {
        // Stale if either side has changed since.
        if tokens[left] != left_token || tokens[right] != right_token || next[left] != right {
            continue;
        }
        tokens[left] = merged;
        tokens[right] = GONE;
        next[left] = next[right];
        if next[left] != NONE {
            previous[next[left]] = left;
            queue.extend(candidate(&tokens, left, next[left]));
        }
        if previous[left] != NONE {
            queue.extend(candidate(&tokens, previous[left], left));
        }
    }
    tokens.into_iter().filter(|token| *token != GONE)
}

/// The byte that a character of a byte-level vocabulary stands for.
///
/// Printable characters of Latin-1 stand for themselves; the other 68 bytes, in order, are U+0100 and up.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121) as u8 + 0x7f),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn merges_are_leftmost_among_equals_and_skip_stale_candidates() {
        // 1 1 -> 2 at rank 0; 2 1 -> 3 at rank 1
        let rank = |left, right| match (left, right) {
            (1, 1) => Some((0, 2)),
            (2, 1) => Some((1, 3)),
            _ => None,
        };
        assert_eq!(merge(vec![1; 5], rank).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(merge(vec![1], rank).collect::<Vec<_>>(), [1]);
        assert_eq!(merge(vec![], rank).count(), 0);
    }
}
