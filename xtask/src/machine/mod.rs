//! What this machine has: compilers, LLVM, CUDA, cards, and Cargo's configuration. Everything is found by asking; nothing
//! is made.

pub mod arch;
pub mod cargo_config;
pub mod child;
pub mod cuda;
pub mod gpu;
pub mod llc;
pub mod nvvm;
pub mod probe;
pub mod toolchain;
