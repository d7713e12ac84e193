//! The `kiln` command line on the CPU alone.

use std::process::ExitCode;

fn main() -> ExitCode {
    kiln_engine::cli::main(&[])
}
