//! kiln's inference engine: a GGUF file in, tokens out.

pub mod error;
pub mod gguf;
pub mod tokenizer;
