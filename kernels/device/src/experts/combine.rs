//! What a token's experts made, combined in the order of its selections: a thread an element.
//!
//! Buffers: see [`ExpertsArgs`]; `products` S columns of `rows`, `out` T columns. Grid: at least `rows / 256` blocks of 256
//! threads, by T.

use cuda_device::{cuda_module, kernel, launch_bounds, thread};
use kiln_kernels::experts;

use super::finish;
use crate::arith::Device;
use crate::block::{begin, thread_index};
use crate::layout::{ExpertsArgs, THREADS};

const _: () = assert!(THREADS == 256, "the literal in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// Element `256 x + t` of token `y`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_combine(args: ExpertsArgs) {
        begin();
        let (rows, used) = (args.rows as usize, args.used as usize);
        let (row, token) =
            (thread::blockIdx_x() as usize * THREADS + thread_index(), thread::blockIdx_y() as usize);
        if row >= rows {
            return;
        }
        // SAFETY: the row and the token's selections are there.
        unsafe {
            let sum = experts::combine(Device, used, |slot| {
                let selection = token * used + slot;
                (*args.weights.add(selection), *args.products.add(selection * rows + row))
            });
            finish(&args, token, row, sum);
        }
    }
}
