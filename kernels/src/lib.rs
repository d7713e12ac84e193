//! The arithmetic of kiln's kernels: one walk, two homes.
//!
//! Each walk (a q8_0 row times a q8 activation, an rms norm, ...) is written once, generic over [`Lanes`]. A device
//! instantiates it with one lane a thread and spelled `.rn` instructions; the host runs all [`LANES`] lanes in a loop
//! that LLVM vectorises. Both do the same rounding operations in the same order, so both give the same bits:
//!
//! - **Every operation that rounds is spelled**, as a method of [`Arith`]. Nothing is left for a compiler to contract
//!   (`a * b + c` is a product and a sum; a fused one is written [`Arith::fma`]).
//! - **The reduction order is part of the walk**: lane `l` takes items `l`, `l + 32`, `l + 64`, ... in that order,
//!   then the lanes are added in a fixed butterfly (see [`Lanes::sum`]).
//! - **Integer inner products are exact**, so their order is free: a vector instruction, `dp4a` or a tensor core may
//!   do them.
//! - **A result that is not a number is always [`NAN`]**: payloads and signs of NaNs differ between processors, so each
//!   walk ends by making them one ([`canonical`]).
//!
//! Denormals are kept (no flush to zero) and ±0 keep their sign. Launchers, threads and dispatch between instruction
//! sets are not here.
#![no_std]

#[cfg(any(feature = "std", test))]
extern crate std;

mod arith;
pub mod attention;
pub mod blocks;
pub mod experts;
pub mod float_rows;
#[cfg(any(feature = "std", test))]
mod host;
mod lanes;
pub mod math;
mod q8;
mod rms_norm;

pub use arith::{Arith, NAN, canonical};
#[cfg(any(feature = "std", test))]
pub use host::{Host, HostLanes};
pub use lanes::{LANES, Lanes, strided, strided_for_each};
pub use q8::{
    Q8_0_BYTES, Q8_0Row, Q8_BLOCK, Q8Activations, dot_block, q8_0_row, quantize_q8, quantize_q8_block,
};
pub use rms_norm::rms_norm;
