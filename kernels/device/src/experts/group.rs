//! Selections sorted by expert: each expert gets whole tiles of 32 columns, in which its selections keep their order.
//!
//! Buffers: see [`ExpertsArgs`]; `chosen` S, `order` 32 `tiles`, `tile_expert` `tiles`. One block of 256 threads; shared
//! memory: two words for each expert.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread, warp};

use crate::block::{begin, raise, thread_index};
use crate::layout::{ExpertsArgs, NO_SELECTION, STAGE_RANGE, THREADS, TILE};

const _: () = assert!(THREADS == 256, "the literal in #[launch_bounds]");

/// Bytes of shared memory: how many selections an expert has, and where its next one goes.
pub const fn shared_bytes(experts: usize) -> usize {
    8 * experts
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// The first warp takes 32 selections at a time, so that their order stays; all threads do the rest.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_group(args: ExpertsArgs) {
        begin();
        let counts: *mut u32 = DynamicSharedArray::<u32>::get();
        let (experts, tiles) = (args.experts as usize, args.tiles as usize);
        let selections = (args.tokens * args.used) as usize;
        let index = thread_index();
        // SAFETY: the buffers are what the module says; barriers stand between writing and reading shared memory.
        unsafe {
            let next = counts.add(experts);
            let mut expert = index;
            while expert < experts {
                *counts.add(expert) = 0;
                expert += THREADS;
            }
            thread::sync_threads();
            if index < 32 {
                let mut base = 0;
                while base < selections {
                    let peer = peers(&args, base + index);
                    if peer.last {
                        *counts.add(peer.expert) += peer.before + 1;
                    }
                    warp::sync_mask(u32::MAX);
                    base += 32;
                }
            }
            thread::sync_threads();
            expert = index;
            while expert < experts {
                let mut tile = tiles_before(counts, expert);
                *next.add(expert) = (tile * TILE) as u32;
                let count = *counts.add(expert) as usize;
                let mut at = tile * TILE + count;
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
            let mut tile = tiles_before(counts, experts) + index;
            while tile < tiles {
                *args.tile_expert.add(tile) = NO_SELECTION;
                tile += THREADS;
            }
            thread::sync_threads();
            if index < 32 {
                let mut base = 0;
                while base < selections {
                    let peer = peers(&args, base + index);
                    let mut at = 0;
                    if peer.valid {
                        at = *next.add(peer.expert) + peer.before;
                        *args.order.add(at as usize) = (base + index) as u32;
                    }
                    warp::sync_mask(u32::MAX);
                    if peer.last {
                        *next.add(peer.expert) = at + 1;
                    }
                    warp::sync_mask(u32::MAX);
                    base += 32;
                }
            }
        }
    }
}

/// A selection among the 32 that a warp looks at.
struct Peer {
    expert: usize,
    /// There is such a selection, of an expert that there is.
    valid: bool,
    /// How many before it are of the same expert.
    before: u32,
    /// It is the last one of its expert.
    last: bool,
}

/// The lane's selection. All lanes of the warp must call it together.
#[inline(always)]
unsafe fn peers(args: &ExpertsArgs, selection: usize) -> Peer {
    let mut expert = NO_SELECTION;
    if selection < (args.tokens * args.used) as usize {
        // SAFETY: the selection is there.
        unsafe {
            expert = *args.chosen.add(selection);
            if expert >= args.experts {
                expert = NO_SELECTION;
                raise(args.fault, STAGE_RANGE, selection as u32 / args.used);
            }
        }
    }
    let lane = thread_index() as u32 % 32;
    let same = warp::match_any_sync(u32::MAX, expert);
    let valid = expert != NO_SELECTION;
    Peer {
        expert: expert as usize,
        valid,
        before: (same & ((1 << lane) - 1)).count_ones(),
        last: valid && same >> lane == 1,
    }
}

/// Tiles of the experts before this one.
#[inline(always)]
unsafe fn tiles_before(counts: *const u32, expert: usize) -> usize {
    let (mut tiles, mut other) = (0, 0);
    while other < expert {
        // SAFETY: a count for each expert.
        tiles += (unsafe { *counts.add(other) } as usize).div_ceil(TILE);
        other += 1;
    }
    tiles
}
