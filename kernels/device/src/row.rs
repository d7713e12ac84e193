//! The walk of a row over repacked parts: 32 chains of rounded operations, as `kiln_kernels::blocks::block_row` has them.
//!
//! `SPAN` threads (32, 16 or 8) share a row. Thread `t` takes parts t, t + SPAN, t + 2 SPAN, ...: its k-th part belongs to
//! chain `t + SPAN * (k % (32 / SPAN))`, so with fewer than 32 threads each runs several chains, and the first rounds of
//! the butterfly are in the thread. Every chain's order, and the butterfly, are those of one warp with a chain a lane.

use cuda_device::{dotprod, ptx_asm, warp};
use kiln_kernels::{Arith, canonical};

use crate::arith::Device;
use crate::layout::{Matrix, PART, PartMeta, class};

/// 16 bytes that are loaded at once.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct Wide {
    x: u32,
    y: u32,
    z: u32,
    w: u32,
}

impl Wide {
    /// The words.
    #[inline(always)]
    pub fn words(self) -> [u32; 4] {
        [self.x, self.y, self.z, self.w]
    }
}

/// Columns of activations as a row reads them: from global or shared memory.
#[derive(Clone, Copy)]
pub struct Input {
    /// Floats.
    pub values: *const f32,
    /// Bytes, 16 aligned: first halves of all parts of a column, then second halves.
    pub quants: *const i8,
    /// A part's scale and sums.
    pub meta: *const PartMeta,
    /// Elements of a column.
    pub width: usize,
}

/// A class of packing, at compile time.
pub trait Class {
    /// Bytes instead of nibbles.
    const BYTES: bool;
    /// 0: scale; 1: scale and minimum; 2: a factor and a minimum factor; 3: factors of halves; 4: both of both.
    const META: u32;
    /// The stored quants are too large by this.
    const BIAS: i32;
}

macro_rules! classes {
    ($($name:ident $bytes:literal $meta:literal $bias:literal)*) => { $(
        /// A class of [`crate::layout::class`].
        pub struct $name;
        impl Class for $name {
            const BYTES: bool = $bytes;
            const META: u32 = $meta;
            const BIAS: i32 = $bias;
        }
    )* };
}
classes! {
    Q4_0 false 0 8
    Q4_1 false 1 0
    Bytes true 0 0
    Q5_1 true 1 0
    Q2K false 4 0
    Q3K false 3 4
    Q4K false 2 0
    Q5K true 2 0
    Q6K true 3 0
}

/// A part as it was loaded.
#[derive(Clone, Copy)]
struct Loaded {
    low: Wide,
    high: Wide,
    factors: u32,
    scales: u32,
}

#[inline(always)]
unsafe fn load<C: Class>(m: &Matrix, index: usize) -> Loaded {
    // SAFETY: the caller's `index` is a part of the matrix.
    unsafe {
        let quants = m.quants as *const Wide;
        let (low, high) = if C::BYTES {
            (*quants.add(2 * index), *quants.add(2 * index + 1))
        } else {
            let low = *quants.add(index);
            (low, low)
        };
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
        Loaded { low, high, factors, scales }
    }
}

/// Four signed bytes times four.
#[inline(always)]
fn dot(a: u32, b: u32, sum: i32) -> i32 {
    dotprod::dp4a_s32(a, b, sum)
}

/// Byte `index` of a word, signed.
#[inline(always)]
fn byte(word: u32, index: u32) -> i32 {
    (word << (24 - 8 * index)) as i32 >> 24
}

/// The two sums of a part's halves.
#[inline(always)]
pub fn unpack_sums(sums: u32) -> (i32, i32) {
    let low = (sums << 16) as i32 >> 16;
    (low, sums.wrapping_sub(low as u32) as i32 >> 16)
}

/// A part of activations as it was loaded.
#[derive(Clone, Copy)]
struct Given {
    low: Wide,
    high: Wide,
    meta: PartMeta,
}

/// Part `index` of a column of `parts` parts.
#[inline(always)]
unsafe fn given(quants: *const i8, meta: *const PartMeta, parts: usize, index: usize) -> Given {
    // SAFETY: the caller's activations have this part.
    unsafe {
        let quants = quants as *const Wide;
        Given { low: *quants.add(index), high: *quants.add(parts + index), meta: *meta.add(index) }
    }
}

/// One step of a chain.
#[inline(always)]
fn step<C: Class>(w: Loaded, y: Given, p: f32) -> f32 {
    let a = Device;
    let (y0, y1, meta) = (y.low, y.high, y.meta);
    let (dot0, dot1) = if C::BYTES {
        (
            dot(w.low.w, y0.w, dot(w.low.z, y0.z, dot(w.low.y, y0.y, dot(w.low.x, y0.x, 0)))),
            dot(w.high.w, y1.w, dot(w.high.z, y1.z, dot(w.high.y, y1.y, dot(w.high.x, y1.x, 0)))),
        )
    } else {
        const LOW: u32 = 0x0f0f_0f0f;
        let v = w.low;
        (
            dot(v.w & LOW, y0.w, dot(v.z & LOW, y0.z, dot(v.y & LOW, y0.y, dot(v.x & LOW, y0.x, 0)))),
            dot(
                v.w >> 4 & LOW,
                y1.w,
                dot(v.z >> 4 & LOW, y1.z, dot(v.y >> 4 & LOW, y1.y, dot(v.x >> 4 & LOW, y1.x, 0))),
            ),
        )
    };
    let (scale, min) = (a.f16_to_f32(w.scales as u16), a.f16_to_f32((w.scales >> 16) as u16));
    accumulate::<C>(w.factors, scale, min, meta, dot0, dot1, p)
}

/// What a chain does with the exact products of a part's halves (in classes with one factor `dot0` may hold both).
#[inline(always)]
pub fn accumulate<C: Class>(
    factors: u32,
    scale: f32,
    min: f32,
    meta: PartMeta,
    dot0: i32,
    dot1: i32,
    p: f32,
) -> f32 {
    let a = Device;
    let (sum0, sum1) = unpack_sums(meta.sums);
    let integer = match C::META {
        0 | 1 => dot0 + dot1 - C::BIAS * (sum0 + sum1),
        2 => byte(factors, 0) * (dot0 + dot1),
        _ => byte(factors, 0) * (dot0 - C::BIAS * sum0) + byte(factors, 1) * (dot1 - C::BIAS * sum1),
    };
    let p = a.fma(a.mul(scale, meta.scale), a.i32_to_f32(integer), p);
    if C::META == 0 || C::META == 3 {
        return p;
    }
    let integer = match C::META {
        1 => sum0 + sum1,
        2 => byte(factors, 1) * (sum0 + sum1),
        _ => byte(factors, 2) * sum0 + byte(factors, 3) * sum1,
    };
    a.fma(a.mul(min, meta.scale), a.i32_to_f32(integer), p)
}

/// A thread's share of a part for the tensor cores: words `t` of both halves, and what goes with the part.
#[derive(Clone, Copy)]
pub struct Fragment {
    /// Quants 4 t to 4 t + 3.
    pub low: u32,
    /// Quants 16 + 4 t to 16 + 4 t + 3.
    pub high: u32,
    /// Integer factors.
    pub factors: u32,
    /// The scale.
    pub scale: f32,
    /// The minimum.
    pub min: f32,
}

/// Loads a [`Fragment`].
///
/// # Safety
/// `index` is a part of the matrix, `t < 4`.
#[inline(always)]
pub unsafe fn fragment<C: Class>(m: &Matrix, index: usize, t: usize) -> Fragment {
    // SAFETY: the caller's promise.
    unsafe {
        let words = m.quants as *const u32;
        let (low, high) = if C::BYTES {
            (*words.add(8 * index + t), *words.add(8 * index + 4 + t))
        } else {
            let word = *words.add(4 * index + t);
            (word & 0x0f0f_0f0f, word >> 4 & 0x0f0f_0f0f)
        };
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
        let (scale, min) = (Device.f16_to_f32(scales as u16), Device.f16_to_f32((scales >> 16) as u16));
        Fragment { low, high, factors, scale, min }
    }
}

/// The chains of thread `t` of a row, of `COLS` columns.
#[inline(always)]
unsafe fn chains<C: Class, const SPAN: usize, const COLS: usize>(
    m: &Matrix,
    row: usize,
    t: usize,
    x: Input,
) -> [[f32; 4]; COLS] {
    let parts = m.columns / PART as u32;
    let start = row * parts as usize;
    let (last, span) = (parts - 1, SPAN as u32);
    let mut acc = [[0f32; 4]; COLS];
    let mut part = t as u32;
    while part < parts {
        // Four parts in flight. Beyond the end the last one is taken and the result not used: a branch would let the
        // compiler move each load behind the step before it.
        // SAFETY: clamped to the row; columns are padded to COLS.
        unsafe {
            let (p0, p1, p2, p3) = (part, part + span, part + 2 * span, part + 3 * span);
            let (c1, c2, c3) = (smaller(p1, last), smaller(p2, last), smaller(p3, last));
            let w0 = load::<C>(m, start + p0 as usize);
            let w1 = load::<C>(m, start + c1 as usize);
            let w2 = load::<C>(m, start + c2 as usize);
            let w3 = load::<C>(m, start + c3 as usize);
            let (k1, k2, k3) = (1 % (32 / SPAN), 2 % (32 / SPAN), 3 % (32 / SPAN));
            let mut c = 0;
            while c < COLS {
                let quants = x.quants.add(c * x.width);
                let meta = x.meta.add(c * parts as usize);
                let mut own = acc[c];
                own[0] = step::<C>(w0, given(quants, meta, parts as usize, p0 as usize), own[0]);
                let new = step::<C>(w1, given(quants, meta, parts as usize, c1 as usize), own[k1]);
                own[k1] = if p1 < parts { new } else { own[k1] };
                let new = step::<C>(w2, given(quants, meta, parts as usize, c2 as usize), own[k2]);
                own[k2] = if p2 < parts { new } else { own[k2] };
                let new = step::<C>(w3, given(quants, meta, parts as usize, c3 as usize), own[k3]);
                own[k3] = if p3 < parts { new } else { own[k3] };
                acc[c] = own;
                c += 1;
            }
        }
        part += 4 * span;
    }
    acc
}

/// The chains of thread `t` of two rows of one class, which share the loads of the activations.
#[inline(always)]
unsafe fn pair_chains<C: Class, const SPAN: usize>(
    m: [&Matrix; 2],
    row: [usize; 2],
    t: usize,
    x: Input,
) -> [[f32; 4]; 2] {
    let parts = m[0].columns / PART as u32;
    let (start_a, start_b) = (row[0] * parts as usize, row[1] * parts as usize);
    let (last, span) = (parts - 1, SPAN as u32);
    let (mut a, mut b) = ([0f32; 4], [0f32; 4]);
    let mut part = t as u32;
    while part < parts {
        // SAFETY: clamped to the rows.
        unsafe {
            let (p0, p1, p2, p3) = (part, part + span, part + 2 * span, part + 3 * span);
            let (c1, c2, c3) = (smaller(p1, last), smaller(p2, last), smaller(p3, last));
            let a0 = load::<C>(m[0], start_a + p0 as usize);
            let b0 = load::<C>(m[1], start_b + p0 as usize);
            let a1 = load::<C>(m[0], start_a + c1 as usize);
            let b1 = load::<C>(m[1], start_b + c1 as usize);
            let a2 = load::<C>(m[0], start_a + c2 as usize);
            let b2 = load::<C>(m[1], start_b + c2 as usize);
            let a3 = load::<C>(m[0], start_a + c3 as usize);
            let b3 = load::<C>(m[1], start_b + c3 as usize);
            let (k1, k2, k3) = (1 % (32 / SPAN), 2 % (32 / SPAN), 3 % (32 / SPAN));
            let y = given(x.quants, x.meta, parts as usize, p0 as usize);
            a[0] = step::<C>(a0, y, a[0]);
            b[0] = step::<C>(b0, y, b[0]);
            let y = given(x.quants, x.meta, parts as usize, c1 as usize);
            let (new_a, new_b) = (step::<C>(a1, y, a[k1]), step::<C>(b1, y, b[k1]));
            a[k1] = if p1 < parts { new_a } else { a[k1] };
            b[k1] = if p1 < parts { new_b } else { b[k1] };
            let y = given(x.quants, x.meta, parts as usize, c2 as usize);
            let (new_a, new_b) = (step::<C>(a2, y, a[k2]), step::<C>(b2, y, b[k2]));
            a[k2] = if p2 < parts { new_a } else { a[k2] };
            b[k2] = if p2 < parts { new_b } else { b[k2] };
            let y = given(x.quants, x.meta, parts as usize, c3 as usize);
            let (new_a, new_b) = (step::<C>(a3, y, a[k3]), step::<C>(b3, y, b[k3]));
            a[k3] = if p3 < parts { new_a } else { a[k3] };
            b[k3] = if p3 < parts { new_b } else { b[k3] };
        }
        part += 4 * span;
    }
    [a, b]
}

#[inline(always)]
fn smaller(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

#[inline(always)]
unsafe fn float_at<const CLASS: u32>(m: &Matrix, at: usize) -> f32 {
    // SAFETY: the caller's element of the matrix.
    unsafe {
        match CLASS {
            class::F32 => *(m.quants as *const f32).add(at),
            class::F16 => Device.f16_to_f32(*(m.quants as *const u16).add(at)),
            _ => f32::from_bits((*(m.quants as *const u16).add(at) as u32) << 16),
        }
    }
}

/// The chains of thread `t` of a row of floats: an item is a number there.
#[inline(always)]
unsafe fn float_chains<const CLASS: u32, const SPAN: usize, const COLS: usize>(
    m: &Matrix,
    row: usize,
    t: usize,
    x: Input,
) -> [[f32; 4]; COLS] {
    let a = Device;
    let count = m.columns as usize;
    let start = row * count;
    let last = start + count - 1;
    let mut acc = [[0f32; 4]; COLS];
    let mut item = t;
    while item < count {
        // SAFETY: clamped to the row; columns are padded to COLS.
        unsafe {
            let at = start + item;
            let clamp = |at: usize| if at < last { at } else { last };
            let w0 = float_at::<CLASS>(m, at);
            let w1 = float_at::<CLASS>(m, clamp(at + SPAN));
            let w2 = float_at::<CLASS>(m, clamp(at + 2 * SPAN));
            let w3 = float_at::<CLASS>(m, clamp(at + 3 * SPAN));
            let mut c = 0;
            while c < COLS {
                let values = x.values.add(c * x.width + item);
                let mut own = acc[c];
                own[0] = a.fma(w0, *values, own[0]);
                if item + SPAN < count {
                    let k = 1 % (32 / SPAN);
                    own[k] = a.fma(w1, *values.add(SPAN), own[k]);
                }
                if item + 2 * SPAN < count {
                    let k = 2 % (32 / SPAN);
                    own[k] = a.fma(w2, *values.add(2 * SPAN), own[k]);
                }
                if item + 3 * SPAN < count {
                    let k = 3 % (32 / SPAN);
                    own[k] = a.fma(w3, *values.add(3 * SPAN), own[k]);
                }
                acc[c] = own;
                c += 1;
            }
        }
        item += 4 * SPAN;
    }
    acc
}

/// The butterfly over the chains of `SPAN` threads.
#[inline(always)]
fn fold<const SPAN: usize>(acc: [f32; 4]) -> f32 {
    let a = Device;
    let mut p;
    if SPAN == 32 {
        p = acc[0];
        p = a.add(p, warp::shuffle_xor_f32(p, 16));
        p = a.add(p, warp::shuffle_xor_f32(p, 8));
    } else if SPAN == 16 {
        p = a.add(acc[0], acc[1]);
        p = a.add(p, warp::shuffle_xor_f32(p, 8));
    } else {
        p = a.add(a.add(acc[0], acc[2]), a.add(acc[1], acc[3]));
    }
    p = a.add(p, warp::shuffle_xor_f32(p, 4));
    p = a.add(p, warp::shuffle_xor_f32(p, 2));
    canonical(a.add(p, warp::shuffle_xor_f32(p, 1)))
}

/// The products of a row with `COLS` columns, in each of its `SPAN` threads. All lanes of the warp must call it together.
///
/// # Safety
/// `row` is a row of `m`, `t < SPAN`, and `x` has `COLS` columns of `m.columns` elements.
#[inline(always)]
pub unsafe fn products<const SPAN: usize, const COLS: usize>(
    m: &Matrix,
    row: usize,
    t: usize,
    x: Input,
) -> [f32; COLS] {
    // SAFETY: the caller's promise.
    let acc = unsafe {
        match m.class {
            class::Q4_0 => chains::<Q4_0, SPAN, COLS>(m, row, t, x),
            class::Q4_1 => chains::<Q4_1, SPAN, COLS>(m, row, t, x),
            class::BYTES => chains::<Bytes, SPAN, COLS>(m, row, t, x),
            class::Q5_1 => chains::<Q5_1, SPAN, COLS>(m, row, t, x),
            class::Q2K => chains::<Q2K, SPAN, COLS>(m, row, t, x),
            class::Q3K => chains::<Q3K, SPAN, COLS>(m, row, t, x),
            class::Q4K => chains::<Q4K, SPAN, COLS>(m, row, t, x),
            class::Q5K => chains::<Q5K, SPAN, COLS>(m, row, t, x),
            class::Q6K => chains::<Q6K, SPAN, COLS>(m, row, t, x),
            class::F32 => float_chains::<{ class::F32 }, SPAN, COLS>(m, row, t, x),
            class::F16 => float_chains::<{ class::F16 }, SPAN, COLS>(m, row, t, x),
            _ => float_chains::<{ class::BF16 }, SPAN, COLS>(m, row, t, x),
        }
    };
    let mut out = [0f32; COLS];
    let mut c = 0;
    while c < COLS {
        out[c] = fold::<SPAN>(acc[c]);
        c += 1;
    }
    out
}

/// The products of two rows with one column: `row[0]` of `m[0]` and `row[1]` of `m[1]`, which have as many columns.
///
/// # Safety
/// As for [`products`].
#[inline(always)]
pub unsafe fn pair<const SPAN: usize>(m: [&Matrix; 2], row: [usize; 2], t: usize, x: Input) -> [f32; 2] {
    if m[0].class != m[1].class || m[0].class >= class::F32 {
        // SAFETY: the caller's promise.
        unsafe {
            let [a] = products::<SPAN, 1>(m[0], row[0], t, x);
            let [b] = products::<SPAN, 1>(m[1], row[1], t, x);
            return [a, b];
        }
    }
    // SAFETY: the caller's promise.
    let [a, b] = unsafe {
        match m[0].class {
            class::Q4_0 => pair_chains::<Q4_0, SPAN>(m, row, t, x),
            class::Q4_1 => pair_chains::<Q4_1, SPAN>(m, row, t, x),
            class::BYTES => pair_chains::<Bytes, SPAN>(m, row, t, x),
            class::Q5_1 => pair_chains::<Q5_1, SPAN>(m, row, t, x),
            class::Q2K => pair_chains::<Q2K, SPAN>(m, row, t, x),
            class::Q3K => pair_chains::<Q3K, SPAN>(m, row, t, x),
            class::Q4K => pair_chains::<Q4K, SPAN>(m, row, t, x),
            class::Q5K => pair_chains::<Q5K, SPAN>(m, row, t, x),
            _ => pair_chains::<Q6K, SPAN>(m, row, t, x),
        }
    };
    [fold::<SPAN>(a), fold::<SPAN>(b)]
}

/// Asks for the first parts of a row to be brought near, before anything that it waits for is ready.
///
/// # Safety
/// `row` is a row of `m`.
#[inline(always)]
pub unsafe fn prefetch<const SPAN: usize>(m: &Matrix, row: usize, t: usize) {
    if m.class >= class::F32 {
        return;
    }
    let parts = m.columns as usize / PART;
    let bytes = match m.class {
        class::Q4_0 | class::Q4_1 | class::Q2K | class::Q3K | class::Q4K => 16,
        _ => 32,
    };
    let row_bytes = parts * bytes;
    // A line of 128 bytes each.
    let mut at = t * 128;
    while at < row_bytes && at < SPAN * 4 * bytes {
        // SAFETY: inside the row; a prefetch writes no register.
        unsafe {
            let address = m.quants.add(row * row_bytes + at);
            ptx_asm!("prefetch.global.L2 [%0];", in("l") address, clobber("memory"));
        }
        at += SPAN * 128;
    }
}

#[inline(always)]
unsafe fn value_of<C: Class>(m: &Matrix, index: usize, i: usize) -> f32 {
    let a = Device;
    // SAFETY: the caller's part of the matrix.
    let (quant, w) = unsafe {
        let w = load::<C>(m, index);
        let quant = if C::BYTES {
            *(m.quants as *const i8).add(index * PART + i) as i32
        } else {
            let pair = *m.quants.add(index * PART / 2 + i % 16) as i32;
            (if i < 16 { pair & 15 } else { pair >> 4 }) - C::BIAS
        };
        (quant, w)
    };
    let half = (i / 16) as u32;
    let (factor, min_factor) = match C::META {
        0 | 1 => (1, 1),
        2 => (byte(w.factors, 0), byte(w.factors, 1)),
        3 => (byte(w.factors, half), 0),
        _ => (byte(w.factors, half), byte(w.factors, 2 + half)),
    };
    let value = a.mul(a.f16_to_f32(w.scales as u16), a.i32_to_f32(factor * quant));
    if C::META == 0 || C::META == 3 {
        return canonical(value);
    }
    let min = a.mul(a.f16_to_f32((w.scales >> 16) as u16), a.i32_to_f32(min_factor));
    canonical(a.add(value, min))
}

/// Element `i` of a row, as `kiln_kernels::blocks::decode_row` has it.
///
/// # Safety
/// `row` and `i` are inside `m`.
#[inline(always)]
pub unsafe fn element(m: &Matrix, row: usize, i: usize) -> f32 {
    let part = row * (m.columns as usize / PART) + i / PART;
    let at = row * m.columns as usize + i;
    let i = i % PART;
    // SAFETY: the caller's promise.
    unsafe {
        match m.class {
            class::Q4_0 => value_of::<Q4_0>(m, part, i),
            class::Q4_1 => value_of::<Q4_1>(m, part, i),
            class::BYTES => value_of::<Bytes>(m, part, i),
            class::Q5_1 => value_of::<Q5_1>(m, part, i),
            class::Q2K => value_of::<Q2K>(m, part, i),
            class::Q3K => value_of::<Q3K>(m, part, i),
            class::Q4K => value_of::<Q4K>(m, part, i),
            class::Q5K => value_of::<Q5K>(m, part, i),
            class::Q6K => value_of::<Q6K>(m, part, i),
            class::F32 => float_at::<{ class::F32 }>(m, at),
            class::F16 => float_at::<{ class::F16 }>(m, at),
            _ => float_at::<{ class::BF16 }>(m, at),
        }
    }
}
