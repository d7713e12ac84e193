//! `cargo xtask`: the command line of kiln's toolchain manager.

fn main() {}
