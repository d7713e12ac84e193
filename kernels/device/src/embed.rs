//! Embedding rows: a block a column.
//!
//! For C columns of width W: `state` 1 + C words, `out` C W floats. The grid is C blocks of 256 threads.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};

use crate::layout::{EmbedArgs, THREADS};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;
    use crate::arith::Device;
    use crate::block::{begin, check, raise, thread_index};
    use crate::layout::{STAGE_EMBEDDING, STAGE_RANGE};
    use crate::row;
    use kiln_kernels::Arith;

    /// Column `b` in block `b`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_embed(args: EmbedArgs) {
        begin();
        let column = thread::blockIdx_x() as usize;
        let width = args.table.columns as usize;
        // SAFETY: the host gives a token for each block and room for its column; the row is checked here.
        unsafe {
            let token = *args.state.add(1 + column);
            if token >= args.table.rows || *args.state as usize + column >= args.context as usize {
                raise(args.fault, STAGE_RANGE, column as u32);
                return;
            }
            let mut i = thread_index();
            while i < width {
                let mut value = row::element(&args.table, token as usize, i);
                if args.scale != 1.0 {
                    value = Device.mul(value, args.scale);
                }
                check(value, args.fault, STAGE_EMBEDDING, column as u32);
                *args.out.add(column * width + i) = value;
                i += THREADS;
            }
        }
    }
}
