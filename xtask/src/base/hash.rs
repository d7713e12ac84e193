//! Hashes as types: a sha256 of bytes, and the sha256 of a source tree in SRI form.
//!
//! How a tree is hashed is not here; only how its hash is written down.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use sha2::Digest as _;

/// The sha256 of some bytes, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha256([u8; 32]);

/// The NAR sha256 of a source tree, written in SRI form: `sha256-` and 44 base64 characters.
///
/// The same value that `nix hash path --type sha256` prints.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeHash([u8; 32]);

/// A full git object name: 40 lower-case hexadecimal digits. Abbreviations, tags and branches are none.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(String);

/// Why a text is not the hash that it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The text has another length.
    #[error("expected {expected}, found {found} characters")]
    Length {
        /// What would be right.
        expected: &'static str,
        /// How many characters there are.
        found: usize,
    },
    /// A character is not allowed.
    #[error("expected {expected}, found {found:?} in it")]
    Character {
        /// What would be right.
        expected: &'static str,
        /// The first wrong character.
        found: char,
    },
    /// The text is not in SRI form at all.
    #[error("expected an SRI hash, `sha256-` and 44 base64 characters, found {0:?}")]
    Sri(String),
}

const SHA256_FORM: &str = "a sha256 of 64 lower-case hexadecimal digits";
const REVISION_FORM: &str = "a full git object name of 40 lower-case hexadecimal digits";

impl Sha256 {
    /// The sha256 of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Sha256(sha2::Sha256::digest(bytes).into())
    }

    /// The sha256 of everything that `reader` gives.
    ///
    /// # Errors
    /// The first read that fails.
    pub fn of_reader(mut reader: impl Read) -> io::Result<Self> {
        let mut hasher = sha2::Sha256::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(Sha256(hasher.finalize().into())),
                Ok(length) => hasher.update(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A digest that was computed elsewhere.
    pub fn from_bytes(digest: [u8; 32]) -> Self {
        Sha256(digest)
    }

    /// The 32 bytes of the digest.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl TreeHash {
    /// A digest that was computed elsewhere.
    pub fn from_bytes(digest: [u8; 32]) -> Self {
        TreeHash(digest)
    }

    /// The 32 bytes of the digest.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Revision {
    /// The 40 digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Sha256 {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        lower_hex(text, 64, SHA256_FORM)?;
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = nibble(pair[0]) << 4 | nibble(pair[1]);
        }
        Ok(Sha256(digest))
    }
}

impl FromStr for TreeHash {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let malformed = || ParseError::Sri(text.to_owned());
        let encoded = text.strip_prefix("sha256-").ok_or_else(malformed)?;
        let digest = BASE64.decode(encoded).map_err(|_| malformed())?;
        digest.try_into().map(TreeHash).map_err(|_| malformed())
    }
}

impl FromStr for Revision {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        lower_hex(text, 40, REVISION_FORM)?;
        Ok(Revision(text.to_owned()))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for TreeHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256-{}", BASE64.encode(self.0))
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! as_text {
    ($($name:ident),+) => {
        $(
            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, concat!(stringify!($name), "({})"), self)
                }
            }

            impl serde::Serialize for $name {
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }

            impl<'de> serde::Deserialize<'de> for $name {
                fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    let text = String::deserialize(deserializer)?;
                    text.parse().map_err(serde::de::Error::custom)
                }
            }
        )+
    };
}

as_text!(Sha256, TreeHash, Revision);

fn lower_hex(text: &str, length: usize, expected: &'static str) -> Result<(), ParseError> {
    if let Some(found) = text.chars().find(|c| !matches!(c, '0'..='9' | 'a'..='f')) {
        return Err(ParseError::Character { expected, found });
    }
    if text.len() != length {
        return Err(ParseError::Length { expected, found: text.len() });
    }
    Ok(())
}

fn nibble(digit: u8) -> u8 {
    if digit.is_ascii_digit() { digit - b'0' } else { digit - b'a' + 10 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    const EMPTY_SRI: &str = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";

    #[test]
    fn sha256_of_bytes_and_of_a_reader_agree_and_round_trip() {
        assert_eq!(Sha256::of(b"").to_string(), EMPTY);
        assert_eq!(Sha256::of_reader(io::empty()).unwrap(), EMPTY.parse().unwrap());
        let long = vec![7; 200_000];
        assert_eq!(Sha256::of_reader(long.as_slice()).unwrap(), Sha256::of(&long));
        assert_eq!(serde_json::to_string(&Sha256::of(b"")).unwrap(), format!("{EMPTY:?}"));
    }

    #[test]
    fn tree_hash_round_trips() {
        let hash: TreeHash = EMPTY_SRI.parse().unwrap();
        assert_eq!(hash.to_string(), EMPTY_SRI);
        assert_eq!(hash.as_bytes(), Sha256::of(b"").as_bytes());
    }

    #[test]
    fn malformed_hashes_say_what_is_wrong() {
        let error = |text: &str| text.parse::<Sha256>().unwrap_err().to_string();
        assert_eq!(error("abc"), "expected a sha256 of 64 lower-case hexadecimal digits, found 3 characters");
        assert_eq!(
            error(&EMPTY.to_uppercase()),
            "expected a sha256 of 64 lower-case hexadecimal digits, found 'E' in it"
        );
        for wrong in ["", "sha256-", "sha256-AAAA", "md5-AAAA", EMPTY, &EMPTY_SRI.replace('=', "")] {
            assert!(wrong.parse::<TreeHash>().is_err(), "{wrong}");
        }
        assert_eq!(
            "29396b7".parse::<Revision>().unwrap_err().to_string(),
            "expected a full git object name of 40 lower-case hexadecimal digits, found 7 characters"
        );
        assert!("main".parse::<Revision>().is_err());
    }
}
