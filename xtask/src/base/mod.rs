//! What every room stands on and that knows nothing of toolchains: files that are replaced in one step, locks, hashes,
//! child processes, the environment, interrupts.

pub mod atomic;
pub mod binary_diff;
pub mod checkpoint;
pub mod env;
pub mod hash;
pub mod interrupt;
pub mod lock;
pub mod process;
pub mod toml_context;
pub mod version;
