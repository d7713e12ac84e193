//! The entries of a decode step that do several operations at once: norm, quantising and rows; and the gated pair of a
//! feed-forward block.
//!
//! Blocks of 512 threads, as many as the card holds at once. Each makes the activations for itself in shared memory (see
//! [`shared_bytes`]) and then takes rows in turn, so that no launch and no trip through memory lies between.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, ptx_asm, thread, warp};

use crate::block::{
    begin, count_up, gated, norm_scale, normalised, quantise, thread_fence, thread_index, write_part,
};
use crate::layout::{Matrix, PART, PartMeta, RowsArgs, place};
use crate::row::{self, Input};
use crate::rows::{find, finish, slots};

/// Threads of a block here.
pub const TEAM: usize = 512;
/// Elements that a thread keeps in registers while a column is normalised.
const KEPT: usize = 8;

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
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: the host's arguments agree with each other.
        unsafe { normed_rows::<32>(&args, shared) }
    }

    /// Norm and rows, 8 threads a row.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_normed_rows_narrow(args: RowsArgs) {
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { normed_rows::<8>(&args, shared) }
    }

    /// Norm, gate rows and up rows, 32 threads a row; products of both are gated and quantised.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_gated_rows_wide(args: RowsArgs) {
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { gated_rows::<32>(&args, shared) }
    }

    /// The same with 8 threads a row.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_gated_rows_narrow(args: RowsArgs) {
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { gated_rows::<8>(&args, shared) }
    }
}

/// For each number below [`KEPT`], unrolled: an array that is indexed by it stays in registers.
macro_rules! each_kept {
    ($k:ident => $body:expr) => {{
        each_kept!(@ $k 0 $body);
        each_kept!(@ $k 1 $body);
        each_kept!(@ $k 2 $body);
        each_kept!(@ $k 3 $body);
        each_kept!(@ $k 4 $body);
        each_kept!(@ $k 5 $body);
        each_kept!(@ $k 6 $body);
        each_kept!(@ $k 7 $body);
    }};
    (@ $k:ident $n:literal $body:expr) => {{
        const $k: usize = $n;
        $body
    }};
}

/// `residual`, normalised if there is a norm and quantised, in shared memory. Waits for the launches before.
#[inline(always)]
unsafe fn prepared(args: &RowsArgs, shared: *mut f32) -> Input {
    let width = args.first.columns as usize;
    let parts = width.div_ceil(PART);
    let (index, lane) = (thread_index(), thread_index() % 32);
    let has_norm = !args.norm.is_null();
    // SAFETY: the shared memory is what `shared_bytes` says.
    unsafe {
        let meta = shared as *mut PartMeta;
        let quants = meta.add(parts) as *mut i8;
        let values = quants.add(parts * PART) as *mut f32;
        if width <= KEPT * TEAM && width % PART == 0 {
            // What does not depend on the launch before, then everything else in flight at once.
            let mut weights = [0f32; KEPT];
            each_kept!(K => if has_norm && index + K * TEAM < width {
                weights[K] = *args.norm.add(index + K * TEAM);
            });
            begin();
            let mut x = [0f32; KEPT];
            each_kept!(K => if index + K * TEAM < width {
                x[K] = *args.residual.add(index + K * TEAM);
            });
            each_kept!(K => if index + K * TEAM < width {
                *values.add(index + K * TEAM) = x[K];
            });
            thread::sync_threads();
            if has_norm {
                let scale = norm_scale(values, width, args.epsilon, lane);
                each_kept!(K => x[K] = normalised(x[K], scale, weights[K]));
                // Every warp has read the sums' numbers before they are replaced.
                thread::sync_threads();
            }
            // A part is a warp's: a warp stays or leaves as one.
            each_kept!(K => if index + K * TEAM < width {
                let i = index + K * TEAM;
                let (quant, part) = quantise(x[K], lane);
                *values.add(i) = x[K];
                *quants.add(place(i, width)) = quant;
                if lane == 0 {
                    *meta.add(i / PART) = part;
                }
            });
        } else {
            begin();
            let scale = if has_norm { norm_scale(args.residual, width, args.epsilon, lane) } else { 0.0 };
            let mut i = index;
            while i < width {
                let mut value = *args.residual.add(i);
                if has_norm {
                    value = normalised(value, scale, *args.norm.add(i));
                }
                *values.add(i) = value;
                if width % PART == 0 {
                    let (quant, part) = quantise(value, lane);
                    *quants.add(place(i, width)) = quant;
                    if lane == 0 {
                        *meta.add(i / PART) = part;
                    }
                }
                i += TEAM;
            }
        }
        thread::sync_threads();
        Input { values, quants, meta, width }
    }
}

#[inline(always)]
unsafe fn normed_rows<const SPAN: usize>(args: &RowsArgs, shared: *mut f32) {
    // SAFETY: rows are inside their matrices.
    unsafe {
        let total = slots(args.first.rows as usize, SPAN)
            + slots(args.second.rows as usize, SPAN)
            + slots(args.third.rows as usize, SPAN);
        let stride = thread::gridDim_x() as usize * TEAM / SPAN;
        let index = thread::blockIdx_x() as usize * TEAM + thread_index();
        let t = index % SPAN;
        let mut slot = index / SPAN;
        if slot < total {
            let (matrix, _, row) = find(args, slot, SPAN);
            row::prefetch::<SPAN>(&matrix, inside(row, &matrix), t);
        }
        let x = prepared(args, shared);
        // The slots of a warp begin at a multiple of how many they are, and so do the matrices': a warp goes as one.
        while slot + stride < total {
            let (matrix_a, out_a, row_a) = find(args, slot, SPAN);
            let (matrix_b, out_b, row_b) = find(args, slot + stride, SPAN);
            let rows = [inside(row_a, &matrix_a), inside(row_b, &matrix_b)];
            let [a, b] = row::pair::<SPAN>([&matrix_a, &matrix_b], rows, t, x);
            if t == 0 && row_a < matrix_a.rows as usize {
                finish(args, out_a, 0, 0, row_a, a);
            }
            if t == 0 && row_b < matrix_b.rows as usize {
                finish(args, out_b, 0, 0, row_b, b);
            }
            slot += 2 * stride;
        }
        if slot < total {
            let (matrix, out, row) = find(args, slot, SPAN);
            let [value] = row::products::<SPAN, 1>(&matrix, inside(row, &matrix), t, x);
            if t == 0 && row < matrix.rows as usize {
                finish(args, out, 0, 0, row, value);
            }
        }
    }
}

/// A row, or the last one.
#[inline(always)]
fn inside(row: usize, matrix: &Matrix) -> usize {
    let rows = matrix.rows as usize;
    if row < rows { row } else { rows - 1 }
}

/// `first` is the gate, `second` the up matrix; `x` takes the gated products. `third_out` counts what is ready of each part
/// and is zero before and after; without it the products are not quantised.
#[inline(always)]
unsafe fn gated_rows<const SPAN: usize>(args: &RowsArgs, shared: *mut f32) {
    let lane = thread_index() % 32;
    // SAFETY: rows are inside their matrices, whose rows are whole parts.
    unsafe {
        let rows = args.first.rows as usize;
        let stride = thread::gridDim_x() as usize * TEAM / SPAN;
        let index = thread::blockIdx_x() as usize * TEAM + thread_index();
        let t = index % SPAN;
        let mut row = index / SPAN;
        if row < rows {
            row::prefetch::<SPAN>(&args.first, row, t);
            row::prefetch::<SPAN>(&args.second, row, t);
        }
        let x = prepared(args, shared);
        let first = row;
        while row < rows {
            let [gate, up] = row::pair::<SPAN>([&args.first, &args.second], [row, row], t, x);
            if t == 0 {
                *args.x.values.add(row) = gated(args.activation, gate, up, args.limit);
            }
            row += stride;
        }
        if args.third_out.is_null() {
            return;
        }
        // The warp that completes a part quantises it. Lane `k` counts what the warp did in its k-th round.
        thread_fence();
        warp::sync_mask(u32::MAX);
        let lead = first - t_row::<SPAN>(first);
        let mut round = lane;
        let mut more = true;
        while more {
            let mine = lead + round * stride;
            let counts = mine < rows;
            let part = mine / PART;
            let mut complete = false;
            if counts {
                let by = (32 / SPAN) as u32;
                complete = count_up((args.third_out as *mut u32).add(part), by) + by == PART as u32;
            }
            let mut waiting = warp::ballot(complete);
            while waiting != 0 {
                let part = warp::shuffle(part as u32, waiting.trailing_zeros()) as usize;
                thread_fence();
                let value = read_through(args.x.values.add(part * PART + lane));
                write_part(args.x, false, 0, rows, part * PART + lane, value, lane);
                if lane == 0 {
                    *(args.third_out as *mut u32).add(part) = 0;
                }
                waiting &= waiting - 1;
            }
            more = warp::any(counts);
            round += 32;
        }
    }
}

/// How far a row is from the first one of its warp.
#[inline(always)]
fn t_row<const SPAN: usize>(row: usize) -> usize {
    row % (32 / SPAN)
}

/// A load that does not take an older copy from this multiprocessor's cache.
#[inline(always)]
unsafe fn read_through(p: *const f32) -> f32 {
    let value: f32;
    // SAFETY: the caller's address.
    unsafe {
        ptx_asm!("ld.global.cg.f32 %0, [%1];", out("=f") value, in("l") p, clobber("memory"));
    }
    value
}
