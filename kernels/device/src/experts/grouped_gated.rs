//! Gate and up rows times the columns of a tile on the tensor cores, and the gated products, quantised: 32 rows by 32
//! columns of one expert a block.
//!
//! Buffers: see [`ExpertsArgs`]; `sorted` and `made` 32 `tiles` columns of the gate's width and of `inner`. Grid:
//! `inner / 32 * tiles` blocks of 512 threads, tiles first; 32 KiB of shared memory.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread};

use super::tile_products;
use crate::block::{begin, gated, thread_index, write_part};
use crate::layout::{ExpertsArgs, NO_SELECTION, TILE};
use crate::tiles::CREW;

const _: () = assert!(CREW == 512, "the literal in #[launch_bounds]");

#[cuda_module]
pub mod entries {
    use super::*;

    /// A tile of gated products.
    #[kernel]
    #[launch_bounds(512)]
    pub fn kiln_grouped_gated(args: ExpertsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        let (block, tiles) = (thread::blockIdx_x() as usize, args.tiles as usize);
        let (part, tile) = (block / tiles, block % tiles);
        let inner = args.inner as usize;
        // SAFETY: the grid covers the parts and tiles; rows are in the matrices because the expert is.
        unsafe {
            let expert = *args.tile_expert.add(tile);
            if expert == NO_SELECTION {
                return;
            }
            let first = expert as usize * inner + part * TILE;
            let gates = tile_products(&args.gate, first, args.sorted, tile * TILE, shared);
            let ups = tile_products(&args.up, first, args.sorted, tile * TILE, shared);
            let index = thread_index();
            let i = part * TILE + index % TILE;
            // A warp has all rows of a column: a part.
            let (low, high) = (tile * TILE + index / TILE, tile * TILE + (index + CREW) / TILE);
            let value = gated(args.activation, gates[0], ups[0], args.limit);
            write_part(args.made, true, low, inner, i, value, index % 32);
            let value = gated(args.activation, gates[1], ups[1], args.limit);
            write_part(args.made, true, high, inner, i, value, index % 32);
        }
    }
}
