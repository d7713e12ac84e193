//! Attention of one query head of one column: a block.
//!
//! Grid: `heads` blocks of 256 threads, by columns. Shared memory: see [`shared_bytes`]. Scores: 4 threads a key, each with
//! 8 of the 32 chains. Values: 32 residues of the position, as `kiln_kernels::attention` has them, shared out to threads.

use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, thread, warp};
use kiln_kernels::{Arith, canonical, math};

use crate::arith::Device;
use crate::block::{begin, butterfly, thread_index, write_part};
use crate::heads::{ready_query, store_key, store_value};
use crate::layout::{HeadsArgs, PART, THREADS};
use crate::row::Wide;

const _: () = assert!(THREADS == 256, "the literals in #[launch_bounds]");

/// Bytes of shared memory for heads of `width` elements and `context` positions.
pub const fn shared_bytes(width: usize, context: usize) -> usize {
    4 * (2 * width + 16 + 32 * width + context)
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// Head `x` of column `y`.
    #[kernel]
    #[launch_bounds(256)]
    pub fn kiln_attend(args: HeadsArgs) {
        begin();
        let shared: *mut f32 = DynamicSharedArray::<f32>::get();
        // SAFETY: the grid and the shared memory are what the module says.
        unsafe { attend(&args, shared, thread::blockIdx_x() as usize, thread::blockIdx_y() as usize) }
    }
}

/// Eight halves as f32.
#[inline(always)]
fn halves(wide: Wide) -> [f32; 8] {
    let a = Device;
    let [x, y, z, w] = wide.words();
    [
        a.f16_to_f32(x as u16),
        a.f16_to_f32((x >> 16) as u16),
        a.f16_to_f32(y as u16),
        a.f16_to_f32((y >> 16) as u16),
        a.f16_to_f32(z as u16),
        a.f16_to_f32((z >> 16) as u16),
        a.f16_to_f32(w as u16),
        a.f16_to_f32((w >> 16) as u16),
    ]
}

/// `acc += query * key`, fused, in each of eight chains.
#[inline(always)]
unsafe fn products(acc: &mut [f32; 8], query: *const f32, key: Wide) {
    let k = halves(key);
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller has eight elements there.
        acc[j] = Device.fma(unsafe { *query.add(j) }, k[j], acc[j]);
        j += 1;
    }
}

/// `acc += weight * value`, fused, in each of eight chains.
#[inline(always)]
fn weighted(acc: &mut [f32; 8], weight: f32, value: Wide) {
    let v = halves(value);
    let mut j = 0;
    while j < 8 {
        acc[j] = Device.fma(weight, v[j], acc[j]);
        j += 1;
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn exchange8(acc: &mut [f32; 8], distance: u32) {
    let mut j = 0;
    while j < 8 {
        acc[j] = Device.add(acc[j], warp::shuffle_xor_f32(acc[j], distance));
        j += 1;
    }
}

#[inline(always)]
unsafe fn attend(args: &HeadsArgs, shared: *mut f32, head: usize, column: usize) {
    let a = Device;
    let (index, lane) = (thread_index(), thread_index() % 32);
    let width = args.width as usize;
    let heads = args.heads as usize;
    let kv_head = head / (heads / args.kv_heads as usize);
    // SAFETY: all addresses are inside what the host laid out; barriers stand between writing and reading shared memory.
    unsafe {
        let query = shared;
        let few = shared.add(2 * width);
        let partials = few.add(16);
        let scores = partials.add(32 * width);
        let position = *args.state as usize + column;
        if position >= args.context as usize {
            return;
        }
        let window = args.window as usize;
        let first = if position + 1 > window { position + 1 - window } else { 0 };
        let count = position + 1 - first;
        if args.fused != 0 {
            // All blocks of a group write the same bytes to the cache.
            if index < 32 {
                ready_query(args, column, head, query, lane);
            } else if index < 64 {
                store_key(args, column, kv_head, partials, lane);
            } else if index < 96 {
                store_value(args, column, kv_head, lane);
            }
        } else {
            let mut i = index;
            while i < width {
                *query.add(i) = *args.query.add((column * heads + head) * width + i);
                i += THREADS;
            }
        }
        thread::sync_threads();

        let start = (kv_head * args.context as usize + first) * width;
        let keys = (args.keys as *const u16).add(start);
        let values = (args.values as *const u16).add(start);
        let t = index % 4;
        let mut base = 0;
        while base < count {
            let key = base + index / 4;
            let clamped = if key < count { key } else { count - 1 };
            let row = keys.add(clamped * width);
            let mut acc = [0f32; 8];
            let mut e = 8 * t;
            // Four loads in flight where a head has them.
            while e + 96 < width {
                let k0 = *(row.add(e) as *const Wide);
                let k1 = *(row.add(e + 32) as *const Wide);
                let k2 = *(row.add(e + 64) as *const Wide);
                let k3 = *(row.add(e + 96) as *const Wide);
                products(&mut acc, query.add(e), k0);
                products(&mut acc, query.add(e + 32), k1);
                products(&mut acc, query.add(e + 64), k2);
                products(&mut acc, query.add(e + 96), k3);
                e += 128;
            }
            while e + 32 < width {
                let k0 = *(row.add(e) as *const Wide);
                let k1 = *(row.add(e + 32) as *const Wide);
                products(&mut acc, query.add(e), k0);
                products(&mut acc, query.add(e + 32), k1);
                e += 64;
            }
            if e < width {
                products(&mut acc, query.add(e), *(row.add(e) as *const Wide));
            }
            exchange8(&mut acc, 2);
            exchange8(&mut acc, 1);
            let (s0, s1) = (a.add(acc[0], acc[4]), a.add(acc[1], acc[5]));
            let (s2, s3) = (a.add(acc[2], acc[6]), a.add(acc[3], acc[7]));
            let sum = canonical(a.add(a.add(s0, s2), a.add(s1, s3)));
            if t == 0 && key < count {
                *scores.add(key) = a.mul(sum, args.scale);
            }
            base += THREADS / 4;
        }
        thread::sync_threads();

        // The largest is exact in any order.
        let mut largest = f32::NEG_INFINITY;
        let mut i = index;
        while i < count {
            largest = larger(largest, *scores.add(i));
            i += THREADS;
        }
        largest = larger(largest, warp::shuffle_xor_f32(largest, 16));
        largest = larger(largest, warp::shuffle_xor_f32(largest, 8));
        largest = larger(largest, warp::shuffle_xor_f32(largest, 4));
        largest = larger(largest, warp::shuffle_xor_f32(largest, 2));
        largest = larger(largest, warp::shuffle_xor_f32(largest, 1));
        if lane == 0 {
            *few.add(index / 32) = largest;
        }
        thread::sync_threads();
        let mut other = 0;
        while other < THREADS / 32 {
            largest = larger(largest, *few.add(other));
            other += 1;
        }
        i = index;
        while i < count {
            let weight = math::exp(a, a.sub(*scores.add(i), largest));
            *scores.add(i) = weight;
            i += THREADS;
        }
        thread::sync_threads();

        if index < 32 {
            let mut p = 0.0;
            i = lane;
            while i < count {
                p = a.add(p, *scores.add(i));
                i += 32;
            }
            let inverse = a.div(1.0, butterfly(p));
            if lane == 0 {
                *few.add(8) = inverse;
            }
        }
        let groups = width / 8;
        let mut task = index;
        while task < 32 * groups {
            let (residue, group) = (task / groups, task % groups);
            let mut acc = [0f32; 8];
            i = residue;
            let values = values.add(8 * group);
            // Four loads in flight.
            while i + 96 < count {
                let v0 = *(values.add(i * width) as *const Wide);
                let v1 = *(values.add((i + 32) * width) as *const Wide);
                let v2 = *(values.add((i + 64) * width) as *const Wide);
                let v3 = *(values.add((i + 96) * width) as *const Wide);
                weighted(&mut acc, *scores.add(i), v0);
                weighted(&mut acc, *scores.add(i + 32), v1);
                weighted(&mut acc, *scores.add(i + 64), v2);
                weighted(&mut acc, *scores.add(i + 96), v3);
                i += 128;
            }
            while i < count {
                weighted(&mut acc, *scores.add(i), *(values.add(i * width) as *const Wide));
                i += 32;
            }
            let out = partials.add(residue * width + 8 * group);
            let mut j = 0;
            while j < 8 {
                *out.add(j) = acc[j];
                j += 1;
            }
            task += THREADS;
        }
        thread::sync_threads();

        let inverse = *few.add(8);
        let at = (column * heads + head) * width;
        let mut d = index;
        while d < width {
            let p = partials.add(d);
            // Residues in the butterfly's order: 16 apart, then 8, 4, 2, 1.
            let two = |r: usize| a.add(*p.add(r * width), *p.add((r + 16) * width));
            let four = |r: usize| a.add(two(r), two(r + 8));
            let eight = |r: usize| a.add(four(r), four(r + 4));
            let half = |r: usize| a.add(eight(r), eight(r + 2));
            let sum = a.add(half(0), half(1));
            let value = canonical(a.mul(sum, inverse));
            *args.out.values.add(at + d) = value;
            if width % PART == 0 {
                write_part(args.out, args.tiled != 0, column, heads * width, head * width + d, value, lane);
            }
            d += THREADS;
        }
    }
}
