//! Rows times columns of activations: `SPAN` threads a row.
//!
//! For C columns: each `out` C times the matrix' rows, `x` C columns of the matrices' width, padded to a multiple of 8 in
//! the batch entries. Grid: x covers the rows (see [`slots`]), y the groups of 8 columns.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};

use kiln_kernels::Arith;

use crate::arith::Device;
use crate::block::check;
use crate::layout::{Matrix, RowsArgs, THREADS, mode};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

/// Row slots of a matrix: its rows, rounded up so that a warp never holds rows of two.
pub const fn slots(rows: usize, span: usize) -> usize {
    rows.next_multiple_of(32 / span)
}

/// Blocks that cover the slots of all three matrices.
pub const fn blocks(rows: [usize; 3], span: usize) -> usize {
    let total = slots(rows[0], span) + slots(rows[1], span) + slots(rows[2], span);
    (total * span).div_ceil(THREADS)
}

/// The matrix, its output and the row of a slot.
#[inline(always)]
pub fn find(args: &RowsArgs, slot: usize, span: usize) -> (Matrix, *mut f32, usize) {
    let first = slots(args.first.rows as usize, span);
    let second = first + slots(args.second.rows as usize, span);
    if slot < first {
        (args.first, args.first_out, slot)
    } else if slot < second {
        (args.second, args.second_out, slot - first)
    } else {
        (args.third, args.third_out, slot - second)
    }
}

#[cuda_module]
pub mod entries {
    use super::*;
    use crate::block::{begin, thread_index};
    use crate::layout::COLUMNS;
    use crate::row::{self, Input};

    /// One column, 32 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_rows_wide(args: RowsArgs) {
        // SAFETY: the host's arguments agree with each other.
        unsafe { rows::<32, 1>(&args) }
    }

    /// One column, 8 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_rows_narrow(args: RowsArgs) {
        // SAFETY: as above.
        unsafe { rows::<8, 1>(&args) }
    }

    /// Eight columns, 32 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_batch_wide(args: RowsArgs) {
        // SAFETY: as above.
        unsafe { rows::<32, COLUMNS>(&args) }
    }

    /// Eight columns, 8 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_batch_narrow(args: RowsArgs) {
        // SAFETY: as above.
        unsafe { rows::<8, COLUMNS>(&args) }
    }

    #[inline(always)]
    unsafe fn rows<const SPAN: usize, const COLS: usize>(args: &RowsArgs) {
        begin();
        let index = thread::blockIdx_x() as usize * THREADS + thread_index();
        let (slot, t) = (index / SPAN, index % SPAN);
        let (matrix, out, row) = find(args, slot, SPAN);
        let rows = matrix.rows as usize;
        // A warp leaves or stays as one: its first row is there or none is.
        if row / (32 / SPAN) * (32 / SPAN) >= rows {
            return;
        }
        let column = thread::blockIdx_y() as usize * COLS;
        let width = matrix.columns as usize;
        // SAFETY: the row is inside the matrix, the columns are padded to COLS.
        unsafe {
            let x = Input {
                values: args.x.values.add(column * width),
                quants: args.x.quants.add(column * width),
                meta: args.x.meta.add(column * width / 32),
                width,
            };
            let clamped = if row < rows { row } else { rows - 1 };
            let sums = row::products::<SPAN, COLS>(&matrix, clamped, t, x);
            if t != 0 || row >= rows {
                return;
            }
            let mut c = 0;
            while c < COLS {
                if column + c < args.columns as usize {
                    finish(args, out, rows, column + c, row, sums[c]);
                }
                c += 1;
            }
        }
    }

    /// One column, two rows a warp: rows of the first matrix alone.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_pairs(args: RowsArgs) {
        let index = thread::blockIdx_x() as usize * THREADS + thread_index();
        let (slot, t) = (index / 32, index % 32);
        let rows = args.first.rows as usize;
        let row = 2 * slot;
        if row >= rows {
            begin();
            return;
        }
        let second = if row + 1 < rows { row + 1 } else { row };
        // SAFETY: the rows are inside the matrix.
        unsafe {
            row::prefetch::<32>(&args.first, row, t);
            row::prefetch::<32>(&args.first, second, t);
            begin();
            let x = Input {
                values: args.x.values,
                quants: args.x.quants,
                meta: args.x.meta,
                width: args.first.columns as usize,
            };
            let [a, b] = row::pair::<32>([&args.first, &args.first], [row, second], t, x);
            if t == 0 {
                finish(&args, args.first_out, rows, 0, row, a);
                if second > row {
                    finish(&args, args.first_out, rows, 0, second, b);
                }
            }
        }
    }
}

/// Stores a product as the mode says.
///
/// # Safety
/// `out` has the row and column.
#[inline(always)]
pub unsafe fn finish(args: &RowsArgs, out: *mut f32, rows: usize, column: usize, row: usize, product: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let at = out.add(column * rows + row);
        let mut value = product;
        if args.mode == mode::ADD {
            value = Device.add(*at, value);
        }
        if args.mode != mode::STORE {
            check(value, args.fault, args.stage, args.first_column + column as u32);
        }
        *at = value;
    }
}
