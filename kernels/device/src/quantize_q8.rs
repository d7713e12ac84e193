//! Quantising activations: one thread a block of 32 values.
//!
//! Buffers, for B blocks: `x` 32 B, `quants` 32 B, `scales` B. Blocks of 256 threads, at least B / 256.

use cuda_core::{CudaStream, DeviceBuffer, LaunchConfig1D};
use cuda_device::{DisjointSlice, cuda_module, kernel, launch_bounds, launch_contract, thread};
use kiln_engine::selftest::RunError;
use kiln_kernels::Q8_BLOCK;

use crate::arith::Device;
use crate::cuda::{THREADS, expect_length};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds] and #[launch_contract]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Block `t` in thread `t`.
    #[kernel]
    #[launch_bounds(256)]
    #[launch_contract(domain = 1, block = (256, 1, 1), dynamic_shared = 0, min_compute_capability = (7, 0))]
    pub fn kiln_quantize_q8(x: &[f32], mut quants: DisjointSlice<i8>, mut scales: DisjointSlice<f32>) {
        let index = thread::index_1d();
        let start = index.get() * Q8_BLOCK;
        if start + Q8_BLOCK > quants.len() {
            return;
        }
        if let Some(scale) = scales.get_mut(index) {
            // SAFETY: inside `quants`, and no other thread has this block.
            let block = unsafe { core::slice::from_raw_parts_mut(quants.as_mut_ptr().add(start), Q8_BLOCK) };
            *scale = kiln_kernels::quantize_q8_block(Device, &x[start..start + Q8_BLOCK], block);
        }
    }
}

/// Enqueues the quantising of `x` into `quants` and `scales`.
///
/// # Errors
/// A buffer of another length than the contract says, or the driver's.
pub fn launch(
    module: &entries::LoadedModule,
    stream: &CudaStream,
    x: &DeviceBuffer<f32>,
    quants: &mut DeviceBuffer<i8>,
    scales: &mut DeviceBuffer<f32>,
) -> Result<(), RunError> {
    expect_length("x", x.len(), scales.len() * Q8_BLOCK)?;
    expect_length("quants", quants.len(), x.len())?;
    let blocks = u32::try_from(scales.len().div_ceil(THREADS))?;
    let launch = module.prepare_kiln_quantize_q8(LaunchConfig1D::new(blocks, THREADS as u32, 0))?;
    module.kiln_quantize_q8(stream, &launch, x, quants, scales)?;
    Ok(())
}
