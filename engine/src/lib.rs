//! kiln's inference engine: a GGUF file in, tokens out.
//!
//! [`gguf`] reads files, [`model`] checks that one is a model, [`tokenizer`] turns text into tokens, a [`backend`] turns
//! tokens into logits. [`cli`] is the `kiln` command line; [`selftest`] compares the homes of the kernels.

pub mod backend;
pub mod chat;
pub mod cli;
pub mod error;
pub mod experts;
pub mod fuzz;
pub mod gguf;
pub mod memory;
pub mod model;
pub mod quant;
pub mod rng;
pub mod sample;
pub mod selftest;
pub mod session;
pub mod tokenizer;

pub use error::{Error, Result};

/// The model that is part of this crate: it writes little English stories. See `engine/builtin`.
///
/// # Errors
/// None, unless the crate was built from a damaged file.
pub fn builtin() -> Result<gguf::Gguf> {
    gguf::Gguf::from_static("the built-in model", include_bytes!("../builtin/stories.gguf"))
}
