//! kiln's inference engine.

pub mod cli;
pub mod rng;
pub mod selftest;
