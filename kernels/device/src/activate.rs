//! Floats to quantised activations, through the gate of a feed-forward block if there is one: a warp a part.
//!
//! For C columns of width W: `gate` and `up` C W floats, `out` C columns. Grid: at least W / 256 blocks of 256 threads, by C.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};

use crate::layout::{ActivateArgs, THREADS};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;
    use crate::block::{begin, gated, thread_index, write_part};
    use crate::layout::PART;

    /// Element `256 x + t` of column `y`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_activate(args: ActivateArgs) {
        begin();
        let width = args.width as usize;
        let i = thread::blockIdx_x() as usize * THREADS + thread_index();
        if i >= width {
            return;
        }
        let column = thread::blockIdx_y() as usize;
        let at = column * width + i;
        // SAFETY: inside the column. A part is a warp's, and leaves or stays as one where there are parts.
        unsafe {
            let mut value = *args.gate.add(at);
            if !args.up.is_null() {
                value = gated(args.activation, value, *args.up.add(at), args.limit);
            }
            *args.out.values.add(at) = value;
            if width % PART == 0 {
                write_part(args.out, args.tiled != 0, column, width, i, value, thread_index() % 32);
            }
        }
    }
}
