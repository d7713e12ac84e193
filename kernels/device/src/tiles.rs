//! Rows times many columns on the tensor cores: tiles of 32 rows by 32 columns.
//!
//! The 8 bit products of a part are exact in any order, so a tensor core makes them. What rounds is done in the chains of
//! the one-column walk: of the 8 warps that share 16 rows, warp `w` takes parts w, w + 8, ..., so that its k-th part belongs
//! to chain `w + 8 * (k % 4)`; four chains a thread, then the butterfly: 16 and 8 in the thread, 4, 2 and 1 among warps.
//!
//! For C columns: as in [`crate::rows`], with columns padded to a multiple of 32. Grid: row tiles of all matrices times
//! column tiles, column tiles first; blocks of 512 threads; 32 KiB of shared memory.

use cuda_device::wmma::mma_m16n8k32_s32_s8;
use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread};
use kiln_kernels::{Arith, canonical};

use crate::arith::Device;
use crate::block::{begin, each_output, thread_index};
use crate::layout::{Matrix, PART, PartMeta, RowsArgs, TILE, class};
use crate::row::{self, Class, Fragment, Wide};
use crate::rows::finish;

/// Threads of a block.
pub const CREW: usize = 512;
/// Bytes of shared memory: a partial of each of 8 warps for each element of the tile.
pub const SHARED_BYTES: usize = 4 * 8 * TILE * TILE;

const _: () = assert!(CREW == 512 && TILE == 32, "the literals in #[launch_bounds] and below");

/// Row tiles of a matrix.
pub const fn tiles(rows: usize) -> usize {
    rows.div_ceil(TILE)
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// A tile a block.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_tiles(args: RowsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        let groups = (args.columns as usize).div_ceil(TILE);
        let block = thread::blockIdx_x() as usize;
        let (tile, group) = (block / groups, block % groups);
        let first = tiles(args.first.rows as usize);
        let second = first + tiles(args.second.rows as usize);
        let (matrix, out, tile) = if tile < first {
            (args.first, args.first_out, tile)
        } else if tile < second {
            (args.second, args.second_out, tile - first)
        } else {
            (args.third, args.third_out, tile - second)
        };
        let base = tile * TILE + thread_index() / 256 * 16;
        let column = group * TILE;
        // SAFETY: the grid is what the module says, and columns are padded.
        unsafe {
            match matrix.class {
                class::Q4_0 => partials::<row::Q4_0>(&args, &matrix, base, column, shared),
                class::Q4_1 => partials::<row::Q4_1>(&args, &matrix, base, column, shared),
                class::BYTES => partials::<row::Bytes>(&args, &matrix, base, column, shared),
                class::Q5_1 => partials::<row::Q5_1>(&args, &matrix, base, column, shared),
                class::Q2K => partials::<row::Q2K>(&args, &matrix, base, column, shared),
                class::Q3K => partials::<row::Q3K>(&args, &matrix, base, column, shared),
                class::Q4K => partials::<row::Q4K>(&args, &matrix, base, column, shared),
                class::Q5K => partials::<row::Q5K>(&args, &matrix, base, column, shared),
                _ => partials::<row::Q6K>(&args, &matrix, base, column, shared),
            }
            thread::sync_threads();
            let a = Device;
            let rows = matrix.rows as usize;
            let mut item = thread_index();
            while item < TILE * TILE {
                let (r, c) = (item % TILE, item / TILE);
                let p = shared.add(r * TILE + c);
                let part = |w: usize| *p.add(w * TILE * TILE);
                let four = |w: usize| a.add(part(w), part(w + 4));
                let two = |w: usize| a.add(four(w), four(w + 2));
                let sum = canonical(a.add(two(0), two(1)));
                let (row, column) = (tile * TILE + r, column + c);
                if row < rows && column < args.columns as usize {
                    finish(&args, out, rows, column, row, sum);
                }
                item += CREW;
            }
        }
    }
}

/// A lane's quants of a part.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Pair {
    x: u32,
    y: u32,
}

/// A chain of each of a thread's 16 outputs: of four groups of 8 columns, rows g and g + 8, two columns each.
type Chains = [f32; 16];

/// A warp's sums of its parts, into `shared[w][row][column]`.
///
/// # Safety
/// Half of the block has rows from `base`, a multiple of 16; there are 32 columns from `column`; see the module.
#[inline(always)]
pub(crate) unsafe fn partials<C: Class>(
    args: &RowsArgs,
    m: &Matrix,
    base: usize,
    column: usize,
    shared: *mut f32,
) {
    let index = thread_index();
    let (w, lane) = (index / 32 % 8, index % 32);
    let (g, t) = (lane / 4, lane % 4);
    let width = m.columns as usize;
    let parts = width / PART;
    let last = m.rows as usize - 1;
    let row_a = if base + g < last { base + g } else { last };
    let row_b = if base + g + 8 < last { base + g + 8 } else { last };
    let a = Device;
    let zero: Chains = [0f32; 16];
    let (mut c0, mut c1, mut c2, mut c3) = (zero, zero, zero, zero);
    let mut part = w;
    // SAFETY: rows are clamped, columns padded, parts below their number.
    unsafe {
        while part < parts {
            c0 = step::<C>(args, m, [row_a, row_b], column, part, [g, t], c0);
            if part + 8 < parts {
                c1 = step::<C>(args, m, [row_a, row_b], column, part + 8, [g, t], c1);
            }
            if part + 16 < parts {
                c2 = step::<C>(args, m, [row_a, row_b], column, part + 16, [g, t], c2);
            }
            if part + 24 < parts {
                c3 = step::<C>(args, m, [row_a, row_b], column, part + 24, [g, t], c3);
            }
            part += 32;
        }
        let local = base % TILE;
        let out = shared.add(w * TILE * TILE);
        each_output!(N => {
            let sum = a.add(a.add(c0[N], c2[N]), a.add(c1[N], c3[N]));
            let (r, c) = (local + g + N % 4 / 2 * 8, N / 4 * 8 + 2 * t + N % 2);
            *out.add(r * TILE + c) = sum;
        });
    }
}

/// One part of 16 rows and 32 columns: a step of each of a thread's 16 chains.
#[inline(always)]
unsafe fn step<C: Class>(
    args: &RowsArgs,
    m: &Matrix,
    rows: [usize; 2],
    column: usize,
    part: usize,
    [g, t]: [usize; 2],
    p: Chains,
) -> Chains {
    let parts = m.columns as usize / PART;
    // SAFETY: the caller's rows, columns and part.
    unsafe {
        let (a, b) = (
            row::fragment::<C>(m, rows[0] * parts + part, t),
            row::fragment::<C>(m, rows[1] * parts + part, t),
        );
        let at = column / 8 * parts + part;
        let v = group::<C>(args, a, b, at, [g, t], [p[0], p[1], p[2], p[3]]);
        let w = group::<C>(args, a, b, at + parts, [g, t], [p[4], p[5], p[6], p[7]]);
        let x = group::<C>(args, a, b, at + 2 * parts, [g, t], [p[8], p[9], p[10], p[11]]);
        let y = group::<C>(args, a, b, at + 3 * parts, [g, t], [p[12], p[13], p[14], p[15]]);
        [v[0], v[1], v[2], v[3], w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]]
    }
}

/// The same for one group of 8 columns, whose part is number `at` of all groups' parts.
#[inline(always)]
unsafe fn group<C: Class>(
    args: &RowsArgs,
    a: Fragment,
    b: Fragment,
    at: usize,
    [g, t]: [usize; 2],
    p: [f32; 4],
) -> [f32; 4] {
    // SAFETY: the caller's part.
    unsafe {
        let Pair { x, y } = *(args.x.quants as *const Pair).add(at * 32 + 4 * g + t);
        let y = [x, y];
        let (low, high) = if C::META == 3 || C::META == 4 {
            (
                mma_m16n8k32_s32_s8([0; 4], [a.low, b.low, 0, 0], y),
                mma_m16n8k32_s32_s8([0; 4], [0, 0, a.high, b.high], y),
            )
        } else {
            (mma_m16n8k32_s32_s8([0; 4], [a.low, b.low, a.high, b.high], y), [0; 4])
        };
        let [scale0, sums0, scale1, sums1] = (*(args.x.meta as *const Wide).add(at * 4 + t)).words();
        let left = PartMeta { scale: f32::from_bits(scale0), sums: sums0 };
        let right = PartMeta { scale: f32::from_bits(scale1), sums: sums1 };
        [
            row::accumulate::<C>(a.factors, a.scale, a.min, left, low[0], high[0], p[0]),
            row::accumulate::<C>(a.factors, a.scale, a.min, right, low[1], high[1], p[1]),
            row::accumulate::<C>(b.factors, b.scale, b.min, left, low[2], high[2], p[2]),
            row::accumulate::<C>(b.factors, b.scale, b.min, right, low[3], high[3], p[3]),
        ]
    }
}
