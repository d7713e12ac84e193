//! `kiln` with CUDA: the same command line as the CPU binary, with one more kind of device.

mod activate;
mod argmax;
mod arith;
mod attend;
mod backend;
mod block;
mod contract;
mod cuda;
mod driver;
mod embed;
mod experts;
mod fused;
mod gates;
mod gpu;
mod heads;
mod layout;
mod norm;
mod q8_0_row;
mod quantize_q8;
mod rms_norm;
mod row;
mod rows;
mod tiles;
mod upload;
mod wide_tiles;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // A verb of this binary alone: the gates need the entries.
    if let Some((verb, rest)) = arguments.split_first()
        && verb == "gate"
    {
        return gates::main(rest);
    }
    kiln_engine::cli::main(&[&cuda::Kind])
}
