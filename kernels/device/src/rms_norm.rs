//! The rms norm of each row of a matrix: one warp a row.
//!
//! Buffers, for R rows of N numbers: `x` R N, `weight` N, `out` R N. Blocks of 256 threads (8 warps), at least R / 8.

use cuda_core::{CudaStream, DeviceBuffer, LaunchConfig1D};
use cuda_device::{DisjointSlice, cuda_module, kernel, launch_bounds, launch_contract, thread};
use kiln_engine::selftest::RunError;
use kiln_kernels::LANES;

use crate::arith::Warp;
use crate::cuda::{THREADS, expect_length};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds] and #[launch_contract]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Row `w` in warp `w`; lane `l` writes items l, l + 32, ...
    #[kernel]
    #[launch_bounds(256)]
    #[launch_contract(domain = 1, block = (256, 1, 1), dynamic_shared = 0, min_compute_capability = (7, 0))]
    pub fn kiln_rms_norm(x: &[f32], weight: &[f32], eps: f32, mut out: DisjointSlice<f32>) {
        let start = thread::index_1d().get() / LANES * weight.len();
        // The whole warp leaves or stays: shuffles need all its lanes.
        if start + weight.len() > out.len() {
            return;
        }
        kiln_kernels::rms_norm(Warp::here(), &x[start..start + weight.len()], weight, eps, |i, value| {
            // SAFETY: `i < weight.len()`, so this is inside the row, which no other warp has, and no other lane has `i`.
            unsafe { *out.get_unchecked_mut(start + i) = value };
        });
    }
}

/// Enqueues `out` = the norm of each row of `x`.
///
/// # Errors
/// A buffer of another length than the contract says, or the driver's.
pub fn launch(
    module: &entries::LoadedModule,
    stream: &CudaStream,
    x: &DeviceBuffer<f32>,
    weight: &DeviceBuffer<f32>,
    eps: f32,
    out: &mut DeviceBuffer<f32>,
) -> Result<(), RunError> {
    if weight.is_empty() {
        return Err("a row of no numbers has no norm".into());
    }
    let rows = x.len() / weight.len();
    expect_length("x", x.len(), rows * weight.len())?;
    expect_length("out", out.len(), x.len())?;
    let blocks = u32::try_from(rows.div_ceil(THREADS / LANES))?;
    let launch = module.prepare_kiln_rms_norm(LaunchConfig1D::new(blocks, THREADS as u32, 0))?;
    module.kiln_rms_norm(stream, &launch, x, weight, eps, out)?;
    Ok(())
}
