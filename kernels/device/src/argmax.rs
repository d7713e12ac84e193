//! Where the largest logit of each column is: exact in any order, so the reduction is free.
//!
//! For C columns of N logits: `logits` C N floats, `best` C zeros (zero again afterwards), `done` likewise, `tokens` C,
//! `state` 2 words or null, `fault` 1. Grid: any number of blocks of 256 threads (see [`blocks`]), by C; 64 bytes of shared
//! memory.

use cuda_core::{CudaFunction, DeviceBuffer};
use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, ptx_asm, thread};
use kiln_kernels::math;

use crate::block::{begin, count_up, largest_of_warp, raise, thread_fence, thread_index};
use crate::cuda::expect_length;
use crate::gpu::{Gpu, Result};
use crate::layout::{ArgmaxArgs, THREADS};

const _: () = assert!(THREADS == 256, "the literal in #[launch_bounds]");

/// Bytes of shared memory: a candidate of each warp.
pub const SHARED_BYTES: usize = 8 * THREADS / 32;

/// Blocks for a column of `count` logits: eight to a thread, until the atomics at the end would count for more.
pub fn blocks(count: usize) -> usize {
    count.div_ceil(8 * THREADS).clamp(1, 256)
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// Column `y`. The last block to arrive writes the token, and feeds it back if there is a state.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_argmax(args: ArgmaxArgs) {
        begin();
        let shared: *mut u64 = DynamicSharedArray::<u64>::get();
        let column = thread::blockIdx_y() as usize;
        let count = args.count as usize;
        let blocks = thread::gridDim_x();
        // SAFETY: the grid and the buffers are what the module says.
        unsafe {
            let logits = args.logits.add(column * count);
            let (mut key, mut at, mut bad) = (0u32, u32::MAX, false);
            let mut i = thread::blockIdx_x() as usize * THREADS + thread_index();
            while i < count {
                let bits = *(logits as *const u32).add(i);
                bad |= bits & 0x7fff_ffff > 0x7f80_0000;
                let new = math::order_key(f32::from_bits(bits));
                // Upwards, so the first of equals stays.
                if new > key {
                    key = new;
                    at = i as u32;
                }
                i += blocks as usize * THREADS;
            }
            if bad {
                raise(args.fault, args.stage, args.first_column + column as u32);
            }
            let largest = largest_of_warp(key);
            let first = largest_of_warp(if key == largest { !at } else { 0 });
            if thread_index() % 32 == 0 {
                *shared.add(thread_index() / 32) = (largest as u64) << 32 | first as u64;
            }
            thread::sync_threads();
            if thread_index() != 0 {
                return;
            }
            let mut best = 0;
            let mut warp = 0;
            while warp < THREADS / 32 {
                let other = *shared.add(warp);
                best = if other > best { other } else { best };
                warp += 1;
            }
            raise_to(args.best.add(column), best);
            thread_fence();
            if count_up(args.done.add(column), 1) + 1 < blocks {
                return;
            }
            thread_fence();
            let token = !(take(args.best.add(column)) as u32);
            *args.done.add(column) = 0;
            *args.tokens.add(column) = token;
            if !args.state.is_null() && column == 0 {
                *args.state += 1;
                *args.state.add(1) = token;
            }
        }
    }
}

/// The larger of what is there and `value`, there.
#[inline(always)]
unsafe fn raise_to(word: *mut u64, value: u64) {
    // SAFETY: an atomic on the caller's word.
    unsafe {
        ptx_asm!("red.global.max.u64 [%0], %1;", in("l") word, in("l") value, clobber("memory"));
    }
}

/// What is there, leaving zero.
#[inline(always)]
unsafe fn take(word: *mut u64) -> u64 {
    let value: u64;
    // SAFETY: an atomic on the caller's word.
    unsafe {
        ptx_asm!("atom.global.exch.b64 %0, [%1], %2;", out("=l") value, in("l") word, in("l") 0u64, clobber("memory"));
    }
    value
}

/// What the entry works on.
pub struct Buffers<'a> {
    /// Logits: columns times their number.
    pub logits: &'a DeviceBuffer<f32>,
    /// Zeros, one for each column.
    pub best: &'a DeviceBuffer<u64>,
    /// Zeros, one for each column.
    pub done: &'a DeviceBuffer<u32>,
    /// Results, one for each column.
    pub tokens: &'a DeviceBuffer<u32>,
    /// Position and token of a decode step, if the next one is to follow: the position is counted up.
    pub state: Option<&'a DeviceBuffer<u32>>,
    /// The fault word: a NaN raises it.
    pub fault: &'a DeviceBuffer<u32>,
}

/// Enqueues the search of the first `columns` columns of `count` logits; `stage` is what a fault names.
///
/// # Errors
/// A buffer that is shorter than the module says, or the driver's.
pub fn launch(
    gpu: &Gpu,
    entry: &CudaFunction,
    buffers: &Buffers<'_>,
    count: usize,
    columns: usize,
    stage: u32,
) -> Result<()> {
    crate::cuda::expect_room("logits", buffers.logits.len(), columns * count)?;
    crate::cuda::expect_room("best", buffers.best.len(), columns)?;
    crate::cuda::expect_room("done", buffers.done.len(), columns)?;
    crate::cuda::expect_room("tokens", buffers.tokens.len(), columns)?;
    expect_length("fault", buffers.fault.len(), 1)?;
    if let Some(state) = buffers.state {
        crate::cuda::expect_room("state", state.len(), 2)?;
    }
    let args = ArgmaxArgs {
        logits: buffers.logits.cu_deviceptr() as *const f32,
        best: buffers.best.cu_deviceptr() as *mut u64,
        done: buffers.done.cu_deviceptr() as *mut u32,
        tokens: buffers.tokens.cu_deviceptr() as *mut u32,
        state: buffers.state.map_or(std::ptr::null_mut(), |state| state.cu_deviceptr() as *mut u32),
        fault: buffers.fault.cu_deviceptr() as *mut u32,
        count: u32::try_from(count)?,
        stage,
        first_column: 0,
        reserved: 0,
    };
    // SAFETY: the lengths were checked, and any grid covers the logits.
    unsafe { gpu.launch(entry, (blocks(count), columns), THREADS, SHARED_BYTES, &args) }
}
