//! kiln's inference engine: a GGUF file in, tokens out.
//!
//! [`gguf`] reads files, [`model`] checks that one is a model, [`tokenizer`] turns text into tokens, a [`backend`] turns
//! tokens into logits. [`cli`] is the `kiln` command line; [`selftest`] compares the homes of the kernels.

pub mod backend;
pub mod cli;
pub mod error;
pub mod gguf;
pub mod model;
pub mod quant;
pub mod rng;
pub mod selftest;
pub mod tokenizer;

pub use error::{Error, Result};
