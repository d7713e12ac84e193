//! Gate and up rows of one selection, the gated products of a part of them, quantised: a block.
//!
//! Buffers: see [`ExpertsArgs`]; `x` T columns, `made` S columns of `inner`. Grid: `inner / 32` blocks of 256 threads, by S;
//! 128 bytes of shared memory.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread};

use crate::block::{begin, gated, raise, thread_index, write_part};
use crate::layout::{ExpertsArgs, PART, STAGE_RANGE, THREADS};
use crate::row::{self, Input};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

/// Bytes of shared memory: the gated products of a part.
pub const SHARED_BYTES: usize = 4 * PART;

#[cuda_module]
pub mod entries {
    use super::*;

    /// Part `x` of selection `y`, 32 threads a row.
    #[kernel]
    #[launch_bounds(256, 2)]
    pub fn kiln_selected_gated_wide(args: ExpertsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: the grid and the buffers are what the module says.
        unsafe { selected_gated::<32>(&args, shared) }
    }

    /// The same with 8 threads a row.
    #[kernel]
    #[launch_bounds(256, 2)]
    pub fn kiln_selected_gated_narrow(args: ExpertsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: as above.
        unsafe { selected_gated::<8>(&args, shared) }
    }
}

#[inline(always)]
unsafe fn selected_gated<const SPAN: usize>(args: &ExpertsArgs, shared: *mut f32) {
    let (part, selection) = (thread::blockIdx_x() as usize, thread::blockIdx_y() as usize);
    let (index, inner, width) = (thread_index(), args.inner as usize, args.gate.columns as usize);
    let token = selection / args.used as usize;
    // SAFETY: the grid covers the parts and selections; rows are in the matrices because the expert is.
    unsafe {
        let expert = *args.chosen.add(selection);
        if expert >= args.experts {
            if index == 0 {
                raise(args.fault, STAGE_RANGE, token as u32);
            }
            return;
        }
        let x = Input {
            values: args.x.values.add(token * width),
            quants: args.x.quants.add(token * width),
            meta: args.x.meta.add(token * (width / PART)),
            width,
        };
        let first = expert as usize * inner + part * PART;
        let t = index % SPAN;
        let mut r = index / SPAN;
        while r < PART {
            let [gate, up] = row::pair::<SPAN>([&args.gate, &args.up], [first + r, first + r], t, x);
            if t == 0 {
                *shared.add(r) = gated(args.activation, gate, up, args.limit);
            }
            r += THREADS / SPAN;
        }
        thread::sync_threads();
        if index < PART {
            let (i, value) = (part * PART + index, *shared.add(index));
            *args.made.values.add(selection * inner + i) = value;
            write_part(args.made, false, selection, inner, i, value, index);
        }
    }
}
