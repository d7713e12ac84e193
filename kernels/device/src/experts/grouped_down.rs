//! Down rows times the gated products of a tile on the tensor cores; each column goes to its selection.
//!
//! Buffers: see [`ExpertsArgs`]; `made` 32 `tiles` columns of `inner`, `products` S columns of `rows`. Grid:
//! `rows / 32 * tiles` blocks of 512 threads, tiles first; 32 KiB of shared memory.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread};

use super::tile_products;
use crate::block::{begin, thread_index};
use crate::layout::{ExpertsArgs, NO_SELECTION, TILE};
use crate::tiles::CREW;

const _: () = assert!(CREW == 512, "the literal in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// A tile of down products.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_grouped_down(args: ExpertsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        let (block, tiles) = (thread::blockIdx_x() as usize, args.tiles as usize);
        let (group, tile) = (block / tiles, block % tiles);
        let rows = args.rows as usize;
        // SAFETY: the grid covers the rows and tiles; rows are in the matrix because the expert is.
        unsafe {
            let expert = *args.tile_expert.add(tile);
            if expert == NO_SELECTION {
                return;
            }
            let first = expert as usize * rows + group * TILE;
            let sums = tile_products(&args.down, first, args.made, tile * TILE, shared);
            let index = thread_index();
            let row = group * TILE + index % TILE;
            let low = *args.order.add(tile * TILE + index / TILE);
            if low != NO_SELECTION {
                *args.products.add(low as usize * rows + row) = sums[0];
            }
            let high = *args.order.add(tile * TILE + (index + CREW) / TILE);
            if high != NO_SELECTION {
                *args.products.add(high as usize * rows + row) = sums[1];
            }
        }
    }
}
