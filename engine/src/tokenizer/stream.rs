//! Text from tokens as they come, cut only between characters.

use super::Tokenizer;

/// Collects the bytes of tokens and gives out whole characters.
#[derive(Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Adds a token and returns the text that is complete now.
    ///
    /// Bytes that can no longer become a character are replaced by U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        self.push_bytes(tokenizer.bytes(token))
    }

    /// Adds bytes and returns the text that is complete now.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut out = String::new();
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = used + invalid.len() == self.pending.len();
            if invalid.is_empty() || (at_end && may_continue(invalid)) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
        self.pending.drain(..used);
        out
    }

    /// The rest: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }
}

/// Whether these bytes, which are no character, begin one.
fn may_continue(bytes: &[u8]) -> bool {
    let needed = match bytes[0] {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => return false,
    };
    bytes.len() < needed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_out_whole_and_broken_ones_are_replaced() {
        let mut stream = TextStream::default();
        let mut out = Vec::new();
        for byte in "a\u{e9}\u{1f999}z".bytes() {
            out.push(stream.push_bytes(&[byte]));
        }
        assert_eq!(out, ["a", "", "\u{e9}", "", "", "", "\u{1f999}", "z"]);
        assert_eq!(stream.push_bytes(&[0xf0, 0x9f]), "");
        assert_eq!(stream.push_bytes(b"x"), "\u{fffd}x");
        assert_eq!(stream.push_bytes(&[0x80, b'y', 0xe2]), "\u{fffd}y");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }
}
