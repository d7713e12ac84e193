//! The tokens' columns in the order of the tiles, quantised for the tensor cores; zeros where a tile is not full.
//!
//! Buffers: see [`ExpertsArgs`]; `x` T columns, `sorted` 32 `tiles` columns of the gate's width. Grid: 32 `tiles` blocks of
//! 256 threads.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};

use crate::block::{begin, thread_index, write_part};
use crate::layout::{ExpertsArgs, NO_SELECTION, THREADS, TILE};

const _: () = assert!(THREADS == 256, "the literal in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Column `b` in block `b`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_gather(args: ExpertsArgs) {
        begin();
        let column = thread::blockIdx_x() as usize;
        let width = args.gate.columns as usize;
        // SAFETY: the grid is as many blocks as columns; a width is whole parts, so a warp goes on or leaves as one.
        unsafe {
            if *args.tile_expert.add(column / TILE) == NO_SELECTION {
                return;
            }
            let selection = *args.order.add(column);
            let mut i = thread_index();
            while i < width {
                let mut value = 0.0;
                if selection != NO_SELECTION {
                    value = *args.x.values.add((selection / args.used) as usize * width + i);
                }
                write_part(args.sorted, true, column, width, i, value, thread_index() % 32);
                i += THREADS;
            }
        }
    }
}
