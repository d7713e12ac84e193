//! The keys of entries: hashes of everything that an entry is made of.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::report::error::Result;

/// A hash of everything that decides an entry's content; 128 bits are kept, since nobody gains by a collision.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub(super) String);

impl Key {
    /// Starts a key for entries of `kind`, whose recipe has the given version.
    pub fn builder(kind: &str, recipe: u32) -> KeyBuilder {
        KeyBuilder(Sha256::new()).field("kind", kind).field("recipe", &recipe.to_string())
    }

    /// The key of an entry that is one file with this hash.
    pub fn of_file(sha256: &crate::base::hash::Sha256) -> Self {
        Key(sha256.to_string())
    }
}

impl serde::Serialize for Key {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Key {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let plain = matches!(text.len(), 32 | 64)
            && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if plain {
            Ok(Key(text))
        } else {
            Err(serde::de::Error::custom("expected a key of 32 hexadecimal digits"))
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.0)
    }
}

/// Collects the fields of a [`Key`].
pub struct KeyBuilder(Sha256);

impl KeyBuilder {
    /// Adds a named field. Lengths are hashed too, so no two lists of fields look alike.
    #[must_use]
    pub fn field(mut self, name: &str, value: &str) -> Self {
        for part in [name, value] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// The key of all fields so far.
    pub fn finish(self) -> Key {
        let digest = self.0.finalize();
        Key(digest[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
