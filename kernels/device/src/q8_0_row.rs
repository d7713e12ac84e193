//! A q8_0 matrix times q8 activations: one warp a row.
//!
//! Buffers, for R rows of B blocks: `weights` 34 R B bytes, `quants` 32 B, `scales` B, `out` R. Blocks of 256 threads (8
//! warps), at least R / 8 of them.

use cuda_core::{CudaStream, DeviceBuffer, LaunchConfig1D};
use cuda_device::{DisjointSlice, cuda_module, kernel, launch_bounds, launch_contract, thread};
use kiln_engine::selftest::RunError;
use kiln_kernels::{LANES, Q8_0_BYTES, Q8_0Row, Q8_BLOCK, Q8Activations};

use crate::arith::Warp;
use crate::cuda::{THREADS, expect_length};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds] and #[launch_contract]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Row `w` in warp `w`; lane 0 writes.
    #[kernel]
    #[launch_bounds(256)]
    #[launch_contract(domain = 1, block = (256, 1, 1), dynamic_shared = 0, min_compute_capability = (7, 0))]
    pub fn kiln_q8_0_row(weights: &[u8], quants: &[i8], scales: &[f32], mut out: DisjointSlice<f32>) {
        let row = thread::index_1d().get() / LANES;
        // The whole warp leaves or stays: shuffles need all its lanes.
        if row >= out.len() {
            return;
        }
        let warp = Warp::here();
        let bytes = scales.len() * Q8_0_BYTES;
        let (Some(weights), Some(x)) =
            (Q8_0Row::new(&weights[row * bytes..(row + 1) * bytes]), Q8Activations::new(quants, scales))
        else {
            return;
        };
        let sum = kiln_kernels::q8_0_row(warp, weights, x);
        if warp.lane() == 0 {
            // SAFETY: `row < out.len()`, and no other warp has this row.
            unsafe { *out.get_unchecked_mut(row) = sum };
        }
    }
}

/// Enqueues `out` = rows times activations.
///
/// # Errors
/// A buffer of another length than the contract says, or the driver's.
pub fn launch(
    module: &entries::LoadedModule,
    stream: &CudaStream,
    weights: &DeviceBuffer<u8>,
    quants: &DeviceBuffer<i8>,
    scales: &DeviceBuffer<f32>,
    out: &mut DeviceBuffer<f32>,
) -> Result<(), RunError> {
    expect_length("weights", weights.len(), out.len() * scales.len() * Q8_0_BYTES)?;
    expect_length("quants", quants.len(), scales.len() * Q8_BLOCK)?;
    let blocks = u32::try_from(out.len().div_ceil(THREADS / LANES))?;
    let launch = module.prepare_kiln_q8_0_row(LaunchConfig1D::new(blocks, THREADS as u32, 0))?;
    module.kiln_q8_0_row(stream, &launch, weights, quants, scales, out)?;
    Ok(())
}
