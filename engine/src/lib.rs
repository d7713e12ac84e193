//! kiln's inference engine: a GGUF file in, tokens out.
//!
//! [`gguf`] reads files, [`model`] checks that one is a model, [`tokenizer`] turns text into tokens, a [`backend`] turns
//! tokens into logits.

pub mod backend;
pub mod error;
pub mod gguf;
pub mod model;
pub mod quant;
pub mod tokenizer;

pub use error::{Error, Result};
