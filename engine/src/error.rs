//! The engine's error type: what was found, what was expected and where.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// The result of an engine operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong between a file name and a token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be opened, mapped, read or written.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The verb: "open", "map", "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are not a well-formed GGUF file.
    #[error("{file}: {place}, byte {offset}: {problem}")]
    Gguf {
        /// The file's name as given.
        file: String,
        /// The key, the tensor or the part of the header.
        place: String,
        /// Where in the file the offending field starts.
        offset: u64,
        /// What was found and what was expected.
        problem: String,
    },
    /// The file is well-formed, and its contents do not make a model that this engine runs.
    #[error("model: {0}")]
    Model(String),
    /// The file's tokenizer is missing, contradictory or of a kind that is not supported.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template is missing, does not parse or failed.
    #[error("chat template: {0}")]
    Template(String),
    /// The request cannot be served: a prompt longer than the context, for one.
    #[error("{0}")]
    Request(String),
    /// A step of this backend panicked before, so that its buffers are half written.
    #[error("a step of this model panicked before: load the model again")]
    Poisoned,
    /// A value that is not a number appeared during a step.
    #[error(
        "not a number in {place} at position {position}: the weights or the arithmetic before it are broken"
    )]
    NotFinite {
        /// Where the check stands.
        place: Place,
        /// The position in the context, from 0.
        position: usize,
    },
}

impl Error {
    /// An input or output error at `path`, ready for `map_err`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { action, path, source }
    }

    /// The same error with the file's name before what is wrong in it, unless it is there already.
    pub(crate) fn naming(self, file: &str) -> Error {
        let named = |problem: String| {
            if problem.contains(file) { problem } else { format!("{file}: {problem}") }
        };
        match self {
            Error::Model(problem) => Error::Model(named(problem)),
            Error::Tokenizer(problem) => Error::Tokenizer(named(problem)),
            other => other,
        }
    }
}

/// A checked place in the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The row of the embedding table.
    Embedding,
    /// The residual stream after this layer's attention, from 0.
    Attention(usize),
    /// The residual stream after this layer's feed-forward block, from 0.
    FeedForward(usize),
    /// The logits.
    Logits,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Embedding => write!(f, "the embedding"),
            Place::Attention(layer) => write!(f, "layer {layer}, attention"),
            Place::FeedForward(layer) => write!(f, "layer {layer}, feed-forward"),
            Place::Logits => write!(f, "the logits"),
        }
    }
}
