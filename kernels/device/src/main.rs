//! `kiln` with CUDA: the same command line as the CPU binary, with one more kind of device.

mod arith;
mod cuda;
mod driver;
mod q8_0_row;
mod quantize_q8;
mod rms_norm;

use std::process::ExitCode;

fn main() -> ExitCode {
    kiln_engine::cli::main(&[&cuda::Kind])
}
