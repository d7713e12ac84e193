//! Heads made ready for attention: biases, norms, rotation; keys and values go into the cache. A warp a head.
//!
//! For C columns: see [`HeadsArgs`]. Grid: `heads + kv_heads` blocks of 32 threads, by C; shared memory 2 `width` floats.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread, warp};
use kiln_kernels::{Arith, LANES, attention, canonical, math};

use crate::arith::Device;
use crate::block::{begin, norm_scale, normalised, raise};
use crate::layout::{HeadsArgs, STAGE_RANGE};

/// Threads of a block: a warp.
pub const HEAD_THREADS: usize = 32;

const _: () =
    assert!(HEAD_THREADS == 32 && HEAD_THREADS == LANES, "the literal in #[launch_bounds], and below");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Query head `x`, or key and value head `x - heads`, of column `y`.
    #[kernel]
    #[launch_bounds(32)]
    pub fn kiln_heads(args: HeadsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        let column = thread::blockIdx_y() as usize;
        let head = thread::blockIdx_x() as usize;
        let lane = thread::threadIdx_x() as usize;
        let (heads, width) = (args.heads as usize, args.width as usize);
        // SAFETY: the grid is what the module says.
        unsafe {
            if head < heads {
                let query = args.query.add((column * heads + head) * width);
                ready_query(&args, column, head, shared, lane);
                let mut i = lane;
                while i < width {
                    *query.add(i) = *shared.add(i);
                    i += 32;
                }
            } else {
                store_key(&args, column, head - heads, shared, lane);
                store_value(&args, column, head - heads, lane);
            }
        }
    }
}

/// A vector plus its bias.
#[inline(always)]
unsafe fn with_bias(x: *const f32, bias: *const f32, i: usize) -> f32 {
    // SAFETY: the caller's element.
    unsafe { if bias.is_null() { *x.add(i) } else { canonical(Device.add(*x.add(i), *bias.add(i))) } }
}

/// Bias, norm and rotation of a head into `shared[..width]`; `shared[width..2 * width]` is scratch.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn ready(
    args: &HeadsArgs,
    column: usize,
    x: *const f32,
    bias: *const f32,
    norm: *const f32,
    shared: *mut f32,
    lane: usize,
) {
    let (width, pairs) = (args.width as usize, args.pairs as usize);
    // SAFETY: the caller's head; each element has one lane, and lanes meet between writing and reading.
    unsafe {
        let position = *args.state as usize + column;
        let scratch = shared.add(width);
        let mut i = lane;
        while i < width {
            *scratch.add(i) = with_bias(x, bias, i);
            i += 32;
        }
        warp::sync_mask(u32::MAX);
        if !norm.is_null() {
            let scale = norm_scale(scratch, width, args.epsilon, lane);
            i = lane;
            while i < width {
                *scratch.add(i) = normalised(*scratch.add(i), scale, *norm.add(i));
                i += 32;
            }
            warp::sync_mask(u32::MAX);
        }
        i = lane;
        while i < width {
            // Each element of a pair is made by its own lane.
            let (low, high, pair) = if args.halves != 0 {
                let pair = if i < pairs { i } else { i - pairs };
                (pair, pair + pairs, pair)
            } else {
                (i / 2 * 2, i / 2 * 2 + 1, i / 2)
            };
            let mut value = *scratch.add(i);
            if i < 2 * pairs {
                let angles = args.angles.add(2 * (position * pairs + pair));
                let (x, y) =
                    attention::rotate(Device, *scratch.add(low), *scratch.add(high), *angles, *angles.add(1));
                value = if i == low { x } else { y };
            }
            *shared.add(i) = value;
            i += 32;
        }
        warp::sync_mask(u32::MAX);
    }
}

/// A query head into `shared[..width]`. All lanes of a warp must call it together, as the others here.
///
/// # Safety
/// The head and column exist; `shared` has `2 * width` floats that only this warp uses.
#[inline(always)]
pub unsafe fn ready_query(args: &HeadsArgs, column: usize, head: usize, shared: *mut f32, lane: usize) {
    let width = args.width as usize;
    // SAFETY: the caller's promise.
    unsafe {
        let x = (args.query as *const f32).add((column * args.heads as usize + head) * width);
        let bias = offset(args.query_bias, head * width);
        ready(args, column, x, bias, args.query_norm, shared, lane);
    }
}

/// A key head into the cache.
///
/// # Safety
/// As for [`ready_query`].
#[inline(always)]
pub unsafe fn store_key(args: &HeadsArgs, column: usize, head: usize, shared: *mut f32, lane: usize) {
    let width = args.width as usize;
    // SAFETY: the caller's promise; the position is checked.
    unsafe {
        let x = args.key.add((column * args.kv_heads as usize + head) * width);
        let bias = offset(args.key_bias, head * width);
        let position = *args.state as usize + column;
        if position >= args.context as usize {
            raise(args.fault, STAGE_RANGE, column as u32);
            return;
        }
        ready(args, column, x, bias, args.key_norm, shared, lane);
        let row = args.keys.add((head * args.context as usize + position) * width);
        let mut i = lane;
        while i < width {
            *row.add(i) = math::to_f16(*shared.add(i));
            i += 32;
        }
    }
}

/// A value head into the cache.
///
/// # Safety
/// As for [`ready_query`].
#[inline(always)]
pub unsafe fn store_value(args: &HeadsArgs, column: usize, head: usize, lane: usize) {
    let width = args.width as usize;
    // SAFETY: the caller's promise; the position is checked.
    unsafe {
        let x = args.value.add((column * args.kv_heads as usize + head) * width);
        let bias = offset(args.value_bias, head * width);
        let position = *args.state as usize + column;
        if position >= args.context as usize {
            return;
        }
        let row = args.values.add((head * args.context as usize + position) * width);
        let mut i = lane;
        while i < width {
            *row.add(i) = math::to_f16(with_bias(x, bias, i));
            i += 32;
        }
    }
}

#[inline(always)]
unsafe fn offset(p: *const f32, by: usize) -> *const f32 {
    // SAFETY: the caller's array, if there is one.
    unsafe { if p.is_null() { p } else { p.add(by) } }
}
