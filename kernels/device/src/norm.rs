//! The rms norm of each column, quantised; and the norm of what a block made, added to the residual stream.
//!
//! For C columns of width W: `x`, `added` and `residual` C W floats, `weight` W, `out` C columns. The grid is C blocks of
//! 256 threads.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};

use crate::layout::{NormArgs, PostArgs, THREADS};

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;
    use crate::arith::Device;
    use crate::block::{begin, check, norm_scale, normalised, thread_index, write_part};
    use crate::layout::PART;
    use kiln_kernels::Arith;

    /// Column `b` in block `b`. Every warp makes the scale for itself.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_norm(args: NormArgs) {
        begin();
        let width = args.width as usize;
        let column = thread::blockIdx_x() as usize;
        let (index, lane) = (thread_index(), thread_index() % 32);
        // SAFETY: the host gives as many blocks as columns.
        unsafe {
            let x = args.x.add(column * width);
            let scale = norm_scale(x, width, args.epsilon, lane);
            if width % PART != 0 {
                let mut i = index;
                while i < width {
                    *args.out.values.add(column * width + i) =
                        normalised(*x.add(i), scale, *args.weight.add(i));
                    i += THREADS;
                }
                return;
            }
            let mut i = index;
            // Whole warps go on or leave: a part is a warp's.
            while i < width {
                let value = normalised(*x.add(i), scale, *args.weight.add(i));
                *args.out.values.add(column * width + i) = value;
                write_part(args.out, args.tiled != 0, column, width, i, value, lane);
                i += THREADS;
            }
        }
    }

    /// Column `b` in block `b`: `residual += norm(added)`, checked.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_post_norm(args: PostArgs) {
        begin();
        let width = args.width as usize;
        let column = thread::blockIdx_x() as usize;
        // SAFETY: the host gives as many blocks as columns.
        unsafe {
            let x = args.added.add(column * width);
            let scale = norm_scale(x, width, args.epsilon, thread_index() % 32);
            let residual = args.residual.add(column * width);
            let mut i = thread_index();
            while i < width {
                let value = normalised(*x.add(i), scale, *args.weight.add(i));
                let sum = Device.add(*residual.add(i), value);
                check(sum, args.fault, args.stage, column as u32);
                *residual.add(i) = sum;
                i += THREADS;
            }
        }
    }
}
