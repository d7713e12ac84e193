//! Selections sorted by expert: each expert gets whole tiles of 32 columns, in which its selections keep their order.
//!
//! Buffers: see [`ExpertsArgs`]; `chosen` S, `order` 32 `tiles`, `tile_expert` `tiles`. One block of 256 threads; shared
//! memory: a word for each expert.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread};

use crate::block::{begin, raise, thread_index};
use crate::layout::{ExpertsArgs, NO_SELECTION, STAGE_RANGE, THREADS, TILE};

const _: () = assert!(THREADS == 256, "the literal in #[launch_bounds]");

/// Bytes of shared memory.
pub const fn shared_bytes(experts: usize) -> usize {
    4 * experts
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// Experts t, t + 256, ... in thread `t`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_group(args: ExpertsArgs) {
        begin();
        let counts: *mut u32 = DynamicSharedArray::<u32>::get();
        let (experts, used) = (args.experts as usize, args.used as usize);
        let (selections, tiles) = (args.tokens as usize * used, args.tiles as usize);
        // SAFETY: the buffers are what the module says; a barrier stands between writing and reading the counts.
        unsafe {
            let mut s = thread_index();
            while s < selections {
                if *args.chosen.add(s) as usize >= experts {
                    raise(args.fault, STAGE_RANGE, (s / used) as u32);
                }
                s += THREADS;
            }
            let mut expert = thread_index();
            while expert < experts {
                let (mut count, mut s) = (0, 0);
                while s < selections {
                    count += (*args.chosen.add(s) as usize == expert) as u32;
                    s += 1;
                }
                *counts.add(expert) = count;
                expert += THREADS;
            }
            thread::sync_threads();
            let tiles_before = |expert: usize| {
                let (mut tiles, mut other) = (0, 0);
                while other < expert {
                    tiles += (*counts.add(other) as usize).div_ceil(TILE);
                    other += 1;
                }
                tiles
            };
            expert = thread_index();
            while expert < experts {
                let mut tile = tiles_before(expert);
                let (mut at, mut s) = (tile * TILE, 0);
                while s < selections {
                    if *args.chosen.add(s) as usize == expert {
                        *args.order.add(at) = s as u32;
                        at += 1;
                    }
                    s += 1;
                }
                while at % TILE != 0 {
                    *args.order.add(at) = NO_SELECTION;
                    at += 1;
                }
                while tile < at / TILE {
                    *args.tile_expert.add(tile) = expert as u32;
                    tile += 1;
                }
                expert += THREADS;
            }
            let mut tile = tiles_before(experts) + thread_index();
            while tile < tiles {
                *args.tile_expert.add(tile) = NO_SELECTION;
                tile += THREADS;
            }
        }
    }
}
