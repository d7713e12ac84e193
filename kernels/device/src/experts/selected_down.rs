//! Down rows of a token's selections and their combination: a thread or a few for each row, which takes the selections in
//! order.
//!
//! Buffers: see [`ExpertsArgs`]; `made` S columns of `inner`, `out` T columns of `rows`. Grid: as for plain rows
//! ([`crate::rows::blocks`]), by T; blocks of 256 threads.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};
use kiln_kernels::{canonical, experts};

use super::finish;
use crate::arith::Device;
use crate::block::{begin, raise, thread_index};
use crate::layout::{ExpertsArgs, PART, STAGE_RANGE, THREADS};
use crate::row::{self, Input};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Token `y`, 32 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_selected_down_wide(args: ExpertsArgs) {
        begin();
        // SAFETY: the grid and the buffers are what the module says.
        unsafe { selected_down::<32>(&args) }
    }

    /// The same with 8 threads a row.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_selected_down_narrow(args: ExpertsArgs) {
        begin();
        // SAFETY: as above.
        unsafe { selected_down::<8>(&args) }
    }
}

#[inline(always)]
unsafe fn selected_down<const SPAN: usize>(args: &ExpertsArgs) {
    let index = thread::blockIdx_x() as usize * THREADS + thread_index();
    let (row, t, rows) = (index / SPAN, index % SPAN, args.rows as usize);
    // Rows are whole parts, so a warp's rows are all there or none is.
    if row >= rows {
        return;
    }
    let (token, used, inner) = (thread::blockIdx_y() as usize, args.used as usize, args.inner as usize);
    // SAFETY: the row is below `rows`, the selections are the token's, and an expert that there is not is replaced.
    unsafe {
        // As `experts::combine`, whose closure the compiler would leave a call of.
        let mut sum = 0.0;
        let mut selection = token * used;
        while selection < (token + 1) * used {
            let mut expert = *args.chosen.add(selection) as usize;
            if expert >= args.experts as usize {
                expert = 0;
                if t == 0 {
                    raise(args.fault, STAGE_RANGE, token as u32);
                }
            }
            let x = Input {
                values: args.made.values.add(selection * inner),
                quants: args.made.quants.add(selection * inner),
                meta: args.made.meta.add(selection * (inner / PART)),
                width: inner,
            };
            let [product] = row::products::<SPAN, 1>(&args.down, expert * rows + row, t, x);
            sum = experts::combine_step(Device, sum, *args.weights.add(selection), product);
            selection += 1;
        }
        if t == 0 {
            finish(args, token, row, canonical(sum));
        }
    }
}
