//! A build of the GPU engine with the verified toolchain, and its PTX beside the recorded one.

pub mod gpu;
pub mod recorded;
