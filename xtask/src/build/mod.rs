//! Builds of the engine: for the CPU, and with the verified toolchain for a GPU; and its PTX beside the recorded one.

pub mod bless;
pub mod cpu;
pub mod gpu;
pub mod recorded;
