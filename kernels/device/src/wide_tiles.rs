//! Rows times many columns on the tensor cores, for large products: tiles of 64 rows by 64 columns.
//!
//! The same chains and butterfly as [`crate::tiles`], in another order of work. A warp takes all 32 chains of its outputs,
//! one after the other, in the order of their bit-reversed numbers: then the two chains that the butterfly adds first are
//! neighbours, as are their sums, and so on, and a sum for each of the five rounds is all that has to be kept. So a tile is
//! four times as large with as many registers, and the loads for a product are half as many.
//!
//! What is exact is done the cheap way. Accumulators of the tensor cores start at the bits of 1.5 * 2^23, so that a dot
//! product comes out as the float 1.5 * 2^23 + dot, from which one fused step makes factor * dot: every value here is an
//! integer below 2^24. A fused step with +0 makes a zero positive, as an integer's conversion would.
//!
//! Grid: row tiles of all matrices times column tiles, column tiles first; blocks of 256 threads. Quants are copied to
//! shared memory one unit of four parts ahead of their use.

use cuda_device::wmma::mma_m16n8k32_s32_s8;
use cuda_device::{DynamicSharedArray, cuda_module, kernel, launch_bounds, ptx_asm, thread, warp};
use kiln_kernels::{Arith, canonical};

use crate::arith::Device;
use crate::block::{begin, each_output, thread_index};
use crate::layout::{Matrix, PART, PartMeta, RowsArgs, TILE, class};
use crate::row::{self, Class, Wide, unpack_sums};
use crate::rows::finish;

/// Threads of a block.
pub const CREW: usize = 256;
/// Rows and columns of a tile.
pub const SIDE: usize = 64;
/// Parts of a row, at most.
pub const MAX_PARTS: usize = 2048;
/// Parts that are copied at once.
const UNIT: usize = 4;
/// Bytes of a part of a tile's rows: two planes of 16 bytes a row, the second only for bytes.
const ROW_QUANTS: usize = 32 * SIDE;
/// Bytes of a part of a tile's columns.
const COLUMN_QUANTS: usize = 32 * SIDE;
/// Bytes of what goes with a part of the rows: factors, minimum factors, scale and minimum as floats, for each half.
const ROW_META: usize = 32 * SIDE;
/// Bytes of what goes with a part of the columns: scale and sums as floats.
const COLUMN_META: usize = 16 * SIDE;
/// Where in a stage each begins.
const COLUMN_QUANTS_AT: usize = UNIT * ROW_QUANTS;
const ROW_META_AT: usize = COLUMN_QUANTS_AT + UNIT * COLUMN_QUANTS;
const COLUMN_META_AT: usize = ROW_META_AT + UNIT * ROW_META;
const STAGE: usize = COLUMN_META_AT + UNIT * COLUMN_META;
/// Whether the sums of the third round wait in shared memory too: from Hopper on, where a block may have enough of it.
const ROOMY: bool = cfg!(overlap);
/// Sums of the last rounds that wait for their other half: 16 a thread in each.
const SUMS_AT: usize = 2 * STAGE;
const ORDER_AT: usize = SUMS_AT + (if ROOMY { 3 } else { 2 }) * 16 * CREW * 4;
const ENDS_AT: usize = ORDER_AT + 2 * MAX_PARTS;
/// Bytes of shared memory.
pub const SHARED_BYTES: usize = ENDS_AT + 4 * 32;

const _: () = assert!(CREW == 256 && SIDE == 64 && UNIT * SIDE == CREW, "the literals below");
const _: () =
    assert!(SHARED_BYTES <= if ROOMY { 113 } else { 99 } << 10, "two blocks on Hopper, one on sm_86");
const _: () = assert!(SIDE.is_multiple_of(TILE), "columns are padded to tiles");

/// The float 1.5 * 2^23, whose bits plus an integer below 2^22 are the bits of the sum.
const MAGIC: f32 = 12_582_912.0;
const MAGIC_BITS: i32 = 0x4b40_0000;

/// Row tiles of a matrix.
pub const fn tiles(rows: usize) -> usize {
    rows.div_ceil(SIDE)
}

#[cuda_module]
pub mod entries {
    use super::*;

    /// A tile a block.
    #[kernel]
    #[launch_bounds(256, 2)]
    pub fn kiln_wide_tiles(args: RowsArgs) {
        let shared = DynamicSharedArray::<Wide>::get() as *mut u8;
        let groups = (args.columns as usize).div_ceil(SIDE);
        let block = thread::blockIdx_x() as usize;
        let (tile, group) = (block / groups, block % groups);
        let first = tiles(args.first.rows as usize);
        let second = first + tiles(args.second.rows as usize);
        let (matrix, out, tile) = if tile < first {
            (args.first, args.first_out, tile)
        } else if tile < second {
            (args.second, args.second_out, tile - first)
        } else {
            (args.third, args.third_out, tile - second)
        };
        let at = [tile * SIDE, group * SIDE];
        // SAFETY: the grid is what the module says, and columns are padded.
        unsafe {
            match matrix.class {
                class::Q4_0 => product::<row::Q4_0>(&args, &matrix, out, at, shared),
                class::Q4_1 => product::<row::Q4_1>(&args, &matrix, out, at, shared),
                class::BYTES => product::<row::Bytes>(&args, &matrix, out, at, shared),
                class::Q5_1 => product::<row::Q5_1>(&args, &matrix, out, at, shared),
                class::Q2K => product::<row::Q2K>(&args, &matrix, out, at, shared),
                class::Q3K => product::<row::Q3K>(&args, &matrix, out, at, shared),
                class::Q4K => product::<row::Q4K>(&args, &matrix, out, at, shared),
                class::Q5K => product::<row::Q5K>(&args, &matrix, out, at, shared),
                _ => product::<row::Q6K>(&args, &matrix, out, at, shared),
            }
        }
    }
}

/// A thread's 16 outputs: of two times two tensor core tiles of 16 rows by 8 columns, four each.
type Outputs = [f32; 16];

/// Classes whose halves have factors of their own.
const fn has_halves<C: Class>() -> bool {
    C::META >= 3
}

const fn has_min<C: Class>() -> bool {
    C::META != 0 && C::META != 3
}

/// What a thread loads of a unit into registers: what goes with one part of one row and of one column.
#[derive(Clone, Copy)]
struct Small {
    factors: u32,
    scales: u32,
    column: PartMeta,
}

/// Where a thread's share of a unit comes from.
#[derive(Clone, Copy)]
struct Source {
    /// Part of the unit.
    item: usize,
    /// Row or column of the tile.
    line: usize,
    /// Row of the matrix.
    row: usize,
    parts: usize,
    /// Groups of 8 columns: this thread's first and second, and the one of its column.
    groups: [usize; 3],
}

/// The word of `shared` memory that a pointer names.
#[inline(always)]
unsafe fn shared_address(pointer: *mut u8) -> u64 {
    let address: u64;
    // SAFETY: converts an address.
    unsafe { ptx_asm!("cvta.to.shared.u64 %0, %1;", out("=l") address, in("l") pointer) };
    address
}

/// Begins to copy 16 bytes from global to shared memory.
#[inline(always)]
unsafe fn copy(to: u64, from: *const u8) {
    // SAFETY: the caller's addresses, both 16 aligned.
    unsafe {
        ptx_asm!("cp.async.cg.shared.global [%0], [%1], 16;", in("l") to, in("l") from, clobber("memory"))
    };
}

/// Waits for this thread's copies.
#[inline(always)]
unsafe fn copied() {
    // SAFETY: orders the thread's own copies.
    unsafe { ptx_asm!("cp.async.wait_all;", clobber("memory")) };
}

/// Begins to copy the quants of unit `unit` to the stage at `to`, and loads what goes with them.
#[inline(always)]
unsafe fn fetch<C: Class>(
    args: &RowsArgs,
    m: &Matrix,
    s: Source,
    order: *const u16,
    unit: usize,
    to: u64,
) -> Small {
    let none = Small { factors: 0, scales: 0, column: PartMeta { scale: 0.0, sums: 0 } };
    let number = unit * UNIT + s.item;
    if number >= s.parts {
        return none;
    }
    // SAFETY: rows and columns are clamped, the part is one of the row's.
    unsafe {
        let part = *order.add(number) as usize;
        let index = s.row * s.parts + part;
        let rows = to + (s.item * ROW_QUANTS + s.line * 16) as u64;
        if C::BYTES {
            copy(rows, m.quants.add(index * 32));
            copy(rows + (16 * SIDE) as u64, m.quants.add(index * 32 + 16));
        } else {
            copy(rows, m.quants.add(index * 16));
        }
        let columns = to + (COLUMN_QUANTS_AT + s.item * COLUMN_QUANTS + s.line * 16) as u64;
        let quants = args.x.quants as *const u8;
        let within = s.line % 16 * 16;
        copy(columns, quants.add((s.groups[0] * s.parts + part) * 256 + within));
        copy(columns + (16 * SIDE) as u64, quants.add((s.groups[1] * s.parts + part) * 256 + within));
        let factors = match C::META {
            2 | 3 => *(m.factors as *const u16).add(index) as u32,
            4 => *(m.factors as *const u32).add(index),
            _ => 0,
        };
        let scales = match C::META {
            0 => *(m.scales as *const u16).add(index) as u32,
            1 => *(m.scales as *const u32).add(index),
            _ => *(m.scales as *const u32).add(index / 8),
        };
        let column = *args.x.meta.add((s.groups[2] * s.parts + part) * 8 + s.line % 8);
        Small { factors, scales, column }
    }
}

/// Four floats of shared memory, stored and loaded at once.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Floats {
    x: f32,
    y: f32,
    z: f32,
    w: f32,
}

/// Two floats.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct TwoFloats {
    x: f32,
    y: f32,
}

/// Two words of quants.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Pair {
    x: u32,
    y: u32,
}

/// Writes what goes with a unit's parts to its stage, as floats.
#[inline(always)]
unsafe fn store<C: Class>(s: Source, small: Small, stage: *mut u8) {
    let a = Device;
    let byte = |word: u32, index: u32| a.i32_to_f32((word << (24 - 8 * index)) as i32 >> 24);
    let (scale, min) = (a.f16_to_f32(small.scales as u16), a.f16_to_f32((small.scales >> 16) as u16));
    let (sum0, sum1) = unpack_sums(small.column.sums);
    // SAFETY: inside the stage.
    unsafe {
        let rows = stage.add(ROW_META_AT + s.item * ROW_META);
        let columns = stage.add(COLUMN_META_AT + s.item * COLUMN_META);
        if has_halves::<C>() {
            let (min0, min1) =
                if C::META == 4 { (byte(small.factors, 2), byte(small.factors, 3)) } else { (0.0, 0.0) };
            let rows = rows as *mut Floats;
            *rows.add(s.line) = Floats { x: byte(small.factors, 0), y: min0, z: scale, w: min };
            *rows.add(SIDE + s.line) = Floats { x: byte(small.factors, 1), y: min1, z: 0.0, w: 0.0 };
            *(columns as *mut Floats).add(s.line) =
                Floats { x: small.column.scale, y: a.i32_to_f32(sum0), z: a.i32_to_f32(sum1), w: 0.0 };
        } else {
            let (factor, min_factor) =
                if C::META == 2 { (byte(small.factors, 0), byte(small.factors, 1)) } else { (1.0, 1.0) };
            *(rows as *mut Floats).add(s.line) = Floats { x: factor, y: min_factor, z: scale, w: min };
            *(columns as *mut TwoFloats).add(s.line) =
                TwoFloats { x: small.column.scale, y: a.i32_to_f32(sum0 + sum1) };
        }
    }
}

/// What goes with a part of a row.
#[derive(Clone, Copy)]
struct RowPart {
    low: Floats,
    high: Floats,
}

/// What goes with a part of a column: scale, sums of the halves (or of both, and nothing).
type ColumnPart = [f32; 3];

/// A step of a chain, as `row::accumulate` makes it. `low` and `high` are dot products plus [`MAGIC`].
#[inline(always)]
fn accumulate<C: Class>(r: RowPart, c: ColumnPart, low: i32, high: i32, p: f32) -> f32 {
    let a = Device;
    let bias = -(C::BIAS as f32);
    let dot = |bits: i32, factor: f32| a.fma(f32::from_bits(bits as u32), factor, a.mul(factor, -MAGIC));
    let integer = if has_halves::<C>() {
        if C::BIAS == 0 {
            a.add(dot(low, r.low.x), dot(high, r.high.x))
        } else {
            let less = |bits: i32, sum: f32| a.fma(bias, sum, a.add(f32::from_bits(bits as u32), -MAGIC));
            a.fma(less(low, c[1]), r.low.x, a.fma(less(high, c[2]), r.high.x, 0.0))
        }
    } else if C::META == 2 {
        dot(low, r.low.x)
    } else {
        let exact = a.add(f32::from_bits(low as u32), -MAGIC);
        if C::BIAS == 0 { exact } else { a.fma(bias, c[1], exact) }
    };
    let p = a.fma(a.mul(r.low.z, c[0]), integer, p);
    if !has_min::<C>() {
        return p;
    }
    let integer = match C::META {
        1 => c[1],
        2 => a.fma(c[1], r.low.y, 0.0),
        _ => a.fma(c[1], r.low.y, a.fma(c[2], r.high.y, 0.0)),
    };
    a.fma(a.mul(r.low.w, c[0]), integer, p)
}

/// One part: a step of each of a thread's 16 chains.
#[inline(always)]
unsafe fn step<C: Class>(
    stage: *const u8,
    item: usize,
    warp: [usize; 2],
    lane: usize,
    p: Outputs,
) -> Outputs {
    let (g, t) = (lane / 4, lane % 4);
    // SAFETY: inside the stage.
    unsafe {
        let quants = stage.add(item * ROW_QUANTS);
        let columns = stage.add(COLUMN_QUANTS_AT + item * COLUMN_QUANTS + warp[1] * 512 + lane * 8);
        let row_meta = stage.add(ROW_META_AT + item * ROW_META) as *const Floats;
        let column_meta = stage.add(COLUMN_META_AT + item * COLUMN_META);
        let y0 = *(columns as *const Pair);
        let y1 = *(columns.add(256) as *const Pair);
        let c0 = given::<C>(column_meta, warp[1] * 16 + 2 * t);
        let c1 = given::<C>(column_meta, warp[1] * 16 + 8 + 2 * t);
        let row = warp[0] * 32 + g;
        let low = rows_of::<C>(quants, row_meta, row, t);
        let a = four::<C>(low, y0, c0, [p[0], p[1], p[2], p[3]]);
        let b = four::<C>(low, y1, c1, [p[4], p[5], p[6], p[7]]);
        let high = rows_of::<C>(quants, row_meta, row + 16, t);
        let c = four::<C>(high, y0, c0, [p[8], p[9], p[10], p[11]]);
        let d = four::<C>(high, y1, c1, [p[12], p[13], p[14], p[15]]);
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]]
    }
}

/// What goes with a part of columns `first` and `first + 1`.
#[inline(always)]
unsafe fn given<C: Class>(meta: *const u8, first: usize) -> [ColumnPart; 2] {
    // SAFETY: inside the stage.
    unsafe {
        if has_halves::<C>() {
            let one = *(meta as *const Floats).add(first);
            let two = *(meta as *const Floats).add(first + 1);
            [[one.x, one.y, one.z], [two.x, two.y, two.z]]
        } else {
            let both = *((meta as *const TwoFloats).add(first) as *const Floats);
            [[both.x, both.y, 0.0], [both.z, both.w, 0.0]]
        }
    }
}

/// A thread's share of a part of two rows, 8 apart: quants of the first row's halves, of the second's, and what goes with them.
#[derive(Clone, Copy)]
struct TwoRows {
    a0: u32,
    a1: u32,
    b0: u32,
    b1: u32,
    a: RowPart,
    b: RowPart,
}

#[inline(always)]
unsafe fn rows_of<C: Class>(quants: *const u8, meta: *const Floats, row: usize, t: usize) -> TwoRows {
    // SAFETY: inside the stage.
    unsafe {
        let at = quants.add(row * 16 + 4 * t) as *const u32;
        let (a0, a1, b0, b1) = if C::BYTES {
            (*at, *at.add(4 * SIDE), *at.add(32), *at.add(4 * SIDE + 32))
        } else {
            const LOW: u32 = 0x0f0f_0f0f;
            let (a, b) = (*at, *at.add(32));
            (a & LOW, a >> 4 & LOW, b & LOW, b >> 4 & LOW)
        };
        let part = |row: usize| {
            let low = *meta.add(row);
            RowPart { low, high: if has_halves::<C>() { *meta.add(SIDE + row) } else { low } }
        };
        TwoRows { a0, a1, b0, b1, a: part(row), b: part(row + 8) }
    }
}

/// One tensor core tile: four chains' steps.
#[inline(always)]
unsafe fn four<C: Class>(r: TwoRows, y: Pair, c: [ColumnPart; 2], p: [f32; 4]) -> [f32; 4] {
    let (y, start) = ([y.x, y.y], [MAGIC_BITS; 4]);
    // SAFETY: all lanes are here.
    let (low, high) = unsafe {
        if has_halves::<C>() {
            (
                mma_m16n8k32_s32_s8(start, [r.a0, r.b0, 0, 0], y),
                mma_m16n8k32_s32_s8(start, [0, 0, r.a1, r.b1], y),
            )
        } else {
            (mma_m16n8k32_s32_s8(start, [r.a0, r.b0, r.a1, r.b1], y), start)
        }
    };
    [
        accumulate::<C>(r.a, c[0], low[0], high[0], p[0]),
        accumulate::<C>(r.a, c[1], low[1], high[1], p[1]),
        accumulate::<C>(r.b, c[0], low[2], high[2], p[2]),
        accumulate::<C>(r.b, c[1], low[3], high[3], p[3]),
    ]
}

/// `v + w` of each output.
#[inline(always)]
fn sums(v: &Outputs, w: &Outputs) -> Outputs {
    let mut out = [0f32; 16];
    each_output!(N => out[N] = Device.add(v[N], w[N]));
    out
}

/// Outputs in shared memory, a thread's own.
#[inline(always)]
unsafe fn keep(at: *mut f32, v: &Outputs) {
    // SAFETY: 16 numbers for each thread.
    unsafe { each_output!(N => *at.add(N * CREW) = v[N]) };
}

#[inline(always)]
unsafe fn kept(at: *const f32) -> Outputs {
    let mut out = [0f32; 16];
    // SAFETY: as above.
    unsafe { each_output!(N => out[N] = *at.add(N * CREW)) };
    out
}

/// The parts in the order of their work, and after how many of them each chain ends. A warp makes it.
#[inline(always)]
unsafe fn arrange(parts: usize, order: *mut u16, ends: *mut u32, lane: usize) {
    let chain = (lane as u32).reverse_bits() as usize >> 27;
    let count = if chain < parts { (parts - chain).div_ceil(32) } else { 0 };
    let mut end = count as u32;
    let mut distance = 1;
    while distance < 32 {
        let before = warp::shuffle(end, (lane as u32).wrapping_sub(distance) % 32);
        if lane as u32 >= distance {
            end += before;
        }
        distance *= 2;
    }
    // SAFETY: the numbers below `end` of the last lane are those of the parts.
    unsafe {
        *ends.add(lane) = end;
        let start = end as usize - count;
        let mut k = 0;
        while k < count {
            *order.add(start + k) = (chain + 32 * k) as u16;
            k += 1;
        }
    }
}

/// A tile whose first row and column are `at`.
#[inline(always)]
unsafe fn product<C: Class>(args: &RowsArgs, m: &Matrix, out: *mut f32, at: [usize; 2], shared: *mut u8) {
    let index = thread_index();
    let (warp, lane) = ([index / 128, index / 32 % 4], index % 32);
    let parts = m.columns as usize / PART;
    let rows = m.rows as usize;
    // SAFETY: shared memory is what the module says; rows and columns are clamped to what is there.
    unsafe {
        let own_sums = (shared.add(SUMS_AT) as *mut f32).add(index);
        let order = shared.add(ORDER_AT) as *mut u16;
        let ends = shared.add(ENDS_AT) as *mut u32;
        if index < 32 {
            arrange(parts, order, ends, lane);
        }
        begin();
        thread::sync_threads();

        let line = index % SIDE;
        let last_group = (args.columns as usize).div_ceil(TILE) * (TILE / 8) - 1;
        let group = |number: usize| {
            let group = at[1] / 8 + number;
            if group < last_group { group } else { last_group }
        };
        let source = Source {
            item: index / SIDE,
            line,
            row: if at[0] + line < rows { at[0] + line } else { rows - 1 },
            parts,
            groups: [group(line / 16), group(line / 16 + 4), group(line / 8)],
        };
        let base = shared_address(shared);
        let small = fetch::<C>(args, m, source, order, 0, base);
        store::<C>(source, small, shared);
        copied();
        thread::sync_threads();

        let zero = [0f32; 16];
        let (mut p, mut s0, mut s1, mut s2) = (zero, zero, zero, zero);
        let (mut chain, mut end) = (0usize, *ends as usize);
        let units = parts.div_ceil(UNIT);
        let mut unit = 0;
        while unit < units {
            let (here, there) = (unit % 2 * STAGE, (unit + 1) % 2 * STAGE);
            let small = fetch::<C>(args, m, source, order, unit + 1, base + there as u64);
            let mut item = 0;
            while item < UNIT && unit * UNIT + item < parts {
                p = step::<C>(shared.add(here), item, warp, lane, p);
                item += 1;
                // A chain's sum, and those of the empty ones after it, go into the tree of the butterfly.
                while chain < 32 && end == unit * UNIT + item {
                    let mut v = p;
                    if chain % 2 == 0 {
                        s0 = v;
                    } else {
                        v = sums(&s0, &v);
                        if chain / 2 % 2 == 0 {
                            s1 = v;
                        } else {
                            v = sums(&s1, &v);
                            let third = own_sums.add(32 * CREW);
                            if chain / 4 % 2 == 0 {
                                if ROOMY {
                                    keep(third, &v);
                                } else {
                                    s2 = v;
                                }
                            } else {
                                v = if ROOMY { sums(&kept(third), &v) } else { sums(&s2, &v) };
                                if chain / 8 % 2 == 0 {
                                    keep(own_sums, &v);
                                } else {
                                    v = sums(&kept(own_sums), &v);
                                    if chain / 16 == 0 {
                                        keep(own_sums.add(16 * CREW), &v);
                                    } else {
                                        v = sums(&kept(own_sums.add(16 * CREW)), &v);
                                    }
                                }
                            }
                        }
                    }
                    chain += 1;
                    if chain < 32 {
                        p = zero;
                        end = *ends.add(chain) as usize;
                    } else {
                        p = v;
                    }
                }
            }
            store::<C>(source, small, shared.add(there));
            copied();
            thread::sync_threads();
            unit += 1;
        }

        let (g, t) = (lane / 4, lane % 4);
        each_output!(N => {
            let row = at[0] + warp[0] * 32 + N / 8 * 16 + N % 4 / 2 * 8 + g;
            let column = at[1] + warp[1] * 16 + N / 4 % 2 * 8 + 2 * t + N % 2;
            if row < rows && column < args.columns as usize {
                finish(args, out, rows, column, row, canonical(p[N]));
            }
        });
    }
}
