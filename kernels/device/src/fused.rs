//! The entries of a decode step that do several operations at once: norm, quantising and rows; and the gated pair of a
//! feed-forward block.
//!
//! Blocks of 512 threads, as many as the card holds at once. Each makes the activations for itself in shared memory (see
//! [`shared_bytes`]) and then takes rows in turn, so that no launch and no trip through memory lies between.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, ptx_asm, thread, warp};
use crate::block::{begin, check, gated, norm_scale, normalised, quantise, thread_index, write_part};
use crate::layout::{PART, PartMeta, RowsArgs, mode};
use crate::row::{self, Input};
use crate::rows::{find, slots};

/// Threads of a block here.
pub const TEAM: usize = 512;

const _: () = assert!(TEAM == 512, "the literals in #[launch_bounds]");

/// Bytes of shared memory for activations of `width` elements: parts, quants, floats.
pub const fn shared_bytes(width: usize) -> usize {
    width.div_ceil(PART) * (8 + PART) + 4 * width
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// Norm and rows, 32 threads a row.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_normed_rows_wide(args: RowsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: the host's arguments agree with each other.
        unsafe { normed_rows::<32>(&args, shared) }
    }

    /// Norm and rows, 8 threads a row.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_normed_rows_narrow(args: RowsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { normed_rows::<8>(&args, shared) }
    }

    /// Norm, gate rows and up rows, 32 threads a row; products of both are gated and quantised.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_gated_rows_wide(args: RowsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { gated_rows::<32>(&args, shared) }
    }

    /// The same with 8 threads a row.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_gated_rows_narrow(args: RowsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { gated_rows::<8>(&args, shared) }
    }
}

/// The norm of `residual`, quantised into shared memory.
#[inline(always)]
unsafe fn normed(args: &RowsArgs, shared: *mut f32) -> Input {
    let width = args.first.columns as usize;
    let parts = width.div_ceil(PART);
    let (index, lane) = (thread_index(), thread_index() % 32);
    // SAFETY: the shared memory is what `shared_bytes` says.
    unsafe {
        let meta = shared as *mut PartMeta;
        let quants = meta.add(parts) as *mut i8;
        let values = quants.add(parts * PART) as *mut f32;
        let scale = norm_scale(args.residual, width, args.epsilon, lane);
        let mut i = index;
        while i < width {
            let value = normalised(*args.residual.add(i), scale, *args.norm.add(i));
            *values.add(i) = value;
            if width % PART == 0 {
                // A part is a warp's.
                let (quant, part) = quantise(value, lane);
                *quants.add(i) = quant;
                if lane == 0 {
                    *meta.add(i / PART) = part;
                }
            }
            i += TEAM;
        }
        thread::sync_threads();
        Input { values, quants, meta, width }
    }
}

#[inline(always)]
unsafe fn normed_rows<const SPAN: usize>(args: &RowsArgs, shared: *mut f32) {
    // SAFETY: rows are inside their matrices.
    unsafe {
        let x = normed(args, shared);
        let total = slots(args.first.rows as usize, SPAN)
            + slots(args.second.rows as usize, SPAN)
            + slots(args.third.rows as usize, SPAN);
        let stride = thread::gridDim_x() as usize * TEAM / SPAN;
        let index = thread::blockIdx_x() as usize * TEAM + thread_index();
        let t = index % SPAN;
        let mut slot = index / SPAN;
        // The slots of a warp begin at a multiple of how many they are, and so do the matrices': a warp goes as one.
        while slot < total {
            let (matrix, out, row) = find(args, slot, SPAN);
            let rows = matrix.rows as usize;
            let clamped = if row < rows { row } else { rows - 1 };
            let [value] = row::products::<SPAN, 1>(&matrix, clamped, t, x);
            if t == 0 && row < rows {
                if args.mode != mode::STORE {
                    check(value, args.fault, args.stage, args.first_column);
                }
                *out.add(row) = value;
            }
            slot += stride;
        }
    }
}

/// `first` is the gate, `second` the up matrix; `first_out` takes the products, `x` the activations, `third_out` counts
/// what is ready of each part and is zero before and after.
#[inline(always)]
unsafe fn gated_rows<const SPAN: usize>(args: &RowsArgs, shared: *mut f32) {
    let lane = thread_index() % 32;
    // SAFETY: rows are inside their matrices, whose rows are whole parts.
    unsafe {
        let x = normed(args, shared);
        let rows = args.first.rows as usize;
        let stride = thread::gridDim_x() as usize * TEAM / SPAN;
        let index = thread::blockIdx_x() as usize * TEAM + thread_index();
        let t = index % SPAN;
        let mut row = index / SPAN;
        while row < rows {
            let [gate] = row::products::<SPAN, 1>(&args.first, row, t, x);
            let [up] = row::products::<SPAN, 1>(&args.second, row, t, x);
            if t == 0 {
                *args.x.values.add(row) = gated(args.activation, gate, up);
            }
            // The warp that completes a part quantises it.
            let part = row / PART;
            let counter = (args.third_out as *mut u32).add(part);
            thread_fence();
            warp::sync_mask(u32::MAX);
            let mut before = 0;
            if lane == 0 {
                before = count_up(counter, (32 / SPAN) as u32);
            }
            before = warp::shuffle(before, 0);
            if before as usize + 32 / SPAN == PART {
                thread_fence();
                let value = read_shared_by_all(args.x.values.add(part * PART + lane));
                write_part(args.x, part, value, lane);
                if lane == 0 {
                    *counter = 0;
                }
            }
            row += stride;
        }
    }
}

#[inline(always)]
unsafe fn count_up(counter: *mut u32, by: u32) -> u32 {
    let before: u32;
    // SAFETY: an atomic on the caller's counter.
    unsafe {
        ptx_asm!("atom.global.add.u32 %0, [%1], %2;", out("=r") before, in("l") counter, in("r") by, clobber("memory"));
    }
    before
}

#[inline(always)]
unsafe fn thread_fence() {
    // SAFETY: orders the thread's own accesses.
    unsafe { ptx_asm!("fence.acq_rel.gpu;", clobber("memory")) }
}

/// A load that does not take an older copy from this multiprocessor's cache.
#[inline(always)]
unsafe fn read_shared_by_all(p: *const f32) -> f32 {
    let value: f32;
    // SAFETY: the caller's address.
    unsafe {
        ptx_asm!("ld.global.cg.f32 %0, [%1];", out("=f") value, in("l") p, clobber("memory"));
    }
    value
}
