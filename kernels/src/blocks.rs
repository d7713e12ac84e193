//! Quantised weight blocks as GGUF files hold them: the walk of a row of each type, and its values one by one.
//!
//! Every type is seen as a sequence of *parts* of 32 weights: a legacy block is one part, a block of 256 is eight. In
//! a part, weight `i` is `scale * factor[i / 16] * quant[i] + min * min_factor[i / 16]`, with small integers for all
//! but `scale` and `min`. The products of integers with 8 bit activations are therefore exact in 32 bits, and a part
//! costs one rounded scale product and one fused step (two with a minimum).

use crate::lanes::sum_canonical;
use crate::{Arith, Lanes, Q8_BLOCK, Q8Activations, canonical, strided};

/// Weights of a part.
pub const PART: usize = Q8_BLOCK;

/// The values of the 16 codes of iq4_nl.
pub const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 32 weights, unpacked.
///
/// In every type `|factors[0] * dot0 + factors[1] * dot1|` with 8 bit activations stays below 2^24, so it is exact as
/// f32; the tightest is q6_k with 32 * 32 * 127 * 128 = 16,646,144.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    /// The signed quants.
    pub quants: [i8; PART],
    /// Integer factor of each half of the quants.
    pub factors: [i32; 2],
    /// Float factor of all.
    pub scale: f32,
    /// Float factor of the minimum; 0 in types without one.
    pub min: f32,
    /// Integer factor of the minimum in each half.
    pub min_factors: [i32; 2],
}

/// A quantised type: how to find and unpack its parts.
pub trait Blocks {
    /// Weights of a block.
    const BLOCK: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Whether a minimum is added to the scaled quants.
    const HAS_MIN: bool;

    /// Part `index` (from 0) of a block of [`Blocks::BYTES`] bytes.
    ///
    /// # Panics
    /// If `block` is shorter or `index` is not below `BLOCK / 32`.
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part;
}

/// A row of quantised weights times q8 activations.
///
/// Lane `l` takes parts l, l + 32, ...: `p = fma(scale * activation scale, integer, p)`, where the integer is the sum
/// over both halves of `factor * dot` and the scales' product is rounded; then, in types with a minimum,
/// `p = fma(min * activation scale, sum over both halves of min factor * sum of activations, p)`. Then the butterfly.
///
/// # Panics
/// If `row` is not `x.blocks()` parts long.
#[inline(always)]
pub fn block_row<B: Blocks, L: Lanes>(lanes: L, row: &[u8], x: Q8Activations<'_>) -> f32 {
    let a = lanes.arith();
    let parts = x.blocks();
    assert!(row.len() / B::BYTES * (B::BLOCK / PART) == parts, "row and activations do not agree");
    let (quants, scales) = (x.quants(), x.scales());
    let partials = strided(lanes, parts, 0.0, |index, p| {
        let per_block = B::BLOCK / PART;
        let start = index / per_block * B::BYTES;
        let part = B::part(a, &row[start..start + B::BYTES], index % per_block);
        let y = &quants[index * PART..(index + 1) * PART];
        let mut integer = 0;
        let mut half = 0;
        while half < 2 {
            let mut dot = 0;
            let mut i = half * PART / 2;
            while i < (half + 1) * PART / 2 {
                let w = [part.quants[i], part.quants[i + 1], part.quants[i + 2], part.quants[i + 3]];
                dot = a.dot4(w, [y[i], y[i + 1], y[i + 2], y[i + 3]], dot);
                i += 4;
            }
            integer += part.factors[half] * dot;
            half += 1;
        }
        let p = a.fma(a.mul(part.scale, scales[index]), a.i32_to_f32(integer), p);
        if !B::HAS_MIN {
            return p;
        }
        let mut integer = 0;
        half = 0;
        while half < 2 {
            let mut sum = 0;
            let mut i = half * PART / 2;
            while i < (half + 1) * PART / 2 {
                sum = a.dot4([1; 4], [y[i], y[i + 1], y[i + 2], y[i + 3]], sum);
                i += 4;
            }
            integer += part.min_factors[half] * sum;
            half += 1;
        }
        a.fma(a.mul(part.min, scales[index]), a.i32_to_f32(integer), p)
    });
    sum_canonical(lanes, partials)
}

/// Decodes a row: hands `write(i, value)` each weight in order. A value is rounded at most once.
///
/// # Panics
/// If `row` is not a whole number of blocks.
#[inline]
pub fn decode_row<B: Blocks, A: Arith>(a: A, row: &[u8], mut write: impl FnMut(usize, f32)) {
    assert!(row.len().is_multiple_of(B::BYTES), "a row is whole blocks");
    for (number, block) in row.chunks_exact(B::BYTES).enumerate() {
        for index in 0..B::BLOCK / PART {
            let part = B::part(a, block, index);
            for i in 0..PART {
                let half = i / (PART / 2);
                // Exact: at most 11 + 7 + 6 bits.
                let integer = part.factors[half] * i32::from(part.quants[i]);
                let value = a.mul(part.scale, a.i32_to_f32(integer));
                // Also exact, so that the sum is the only rounding.
                let min = a.mul(part.min, a.i32_to_f32(part.min_factors[half]));
                let value = if B::HAS_MIN { a.add(value, min) } else { value };
                write(number * B::BLOCK + index * PART + i, canonical(value));
            }
        }
    }
}

#[inline(always)]
fn half_at<A: Arith>(a: A, block: &[u8], at: usize) -> f32 {
    a.f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
fn legacy<A: Arith>(a: A, block: &[u8], quants: [i8; PART]) -> Part {
    Part { quants, factors: [1; 2], scale: half_at(a, block, 0), min: 0.0, min_factors: [0; 2] }
}

#[inline(always)]
fn legacy_with_min<A: Arith>(a: A, block: &[u8], quants: [i8; PART]) -> Part {
    Part { min: half_at(a, block, 2), min_factors: [1; 2], ..legacy(a, block, quants) }
}

/// The nibbles of 16 bytes: all low ones, then all high ones.
#[inline(always)]
fn nibbles(bytes: &[u8], each: impl Fn(usize, u8) -> i8) -> [i8; PART] {
    let mut out = [0; PART];
    let mut i = 0;
    while i < PART / 2 {
        out[i] = each(i, bytes[i] & 15);
        out[i + 16] = each(i + 16, bytes[i] >> 4);
        i += 1;
    }
    out
}

/// q4_0: an f16 scale, then 16 bytes of nibbles less 8.
#[derive(Debug, Clone, Copy)]
pub struct Q4_0;

impl Blocks for Q4_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        legacy(a, block, nibbles(&block[2..18], |_, q| q as i8 - 8))
    }
}

/// q4_1: f16 scale and minimum, then 16 bytes of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q4_1;

impl Blocks for Q4_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 20;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        legacy_with_min(a, block, nibbles(&block[4..20], |_, q| q as i8))
    }
}

/// q5_0: an f16 scale, 32 fifth bits, then 16 bytes of nibbles; less 16.
#[derive(Debug, Clone, Copy)]
pub struct Q5_0;

impl Blocks for Q5_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 22;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        legacy(a, block, nibbles(&block[6..22], |i, q| (q | ((fifth >> i) as u8 & 1) << 4) as i8 - 16))
    }
}

/// q5_1: f16 scale and minimum, 32 fifth bits, then 16 bytes of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q5_1;

impl Blocks for Q5_1 {
    const BLOCK: usize = 32;
    const BYTES: usize = 24;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        legacy_with_min(a, block, nibbles(&block[8..24], |i, q| (q | ((fifth >> i) as u8 & 1) << 4) as i8))
    }
}

/// q8_0: an f16 scale, then 32 signed bytes. The same bits as [`crate::q8_0_row`].
#[derive(Debug, Clone, Copy)]
pub struct Q8_0;

impl Blocks for Q8_0 {
    const BLOCK: usize = 32;
    const BYTES: usize = 34;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            quants[i] = block[2 + i] as i8;
            i += 1;
        }
        legacy(a, block, quants)
    }
}

/// iq4_nl: an f16 scale, then 16 bytes of nibbles that index [`IQ4_NL_VALUES`].
#[derive(Debug, Clone, Copy)]
pub struct Iq4Nl;

impl Blocks for Iq4Nl {
    const BLOCK: usize = 32;
    const BYTES: usize = 18;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], _index: usize) -> Part {
        legacy(a, block, nibbles(&block[2..18], |_, q| IQ4_NL_VALUES[q as usize & 15]))
    }
}

/// q2_k: 16 bytes of factor and minimum factor nibbles, 64 bytes of 2 bit quants, f16 scale and minimum.
#[derive(Debug, Clone, Copy)]
pub struct Q2K;

impl Blocks for Q2K {
    const BLOCK: usize = 256;
    const BYTES: usize = 84;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part {
        let (base, shift) = (16 + index / 4 * 32, index % 4 * 2);
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            quants[i] = (block[base + i] >> shift & 3) as i8;
            i += 1;
        }
        let pair = [block[2 * index], block[2 * index + 1]];
        Part {
            quants,
            factors: [i32::from(pair[0] & 15), i32::from(pair[1] & 15)],
            scale: half_at(a, block, 80),
            min: -half_at(a, block, 82),
            min_factors: [i32::from(pair[0] >> 4), i32::from(pair[1] >> 4)],
        }
    }
}

/// q3_k: 32 bytes of third bits, 64 bytes of 2 bit quants, 12 bytes of 6 bit factors less 32, an f16 scale; less 4.
#[derive(Debug, Clone, Copy)]
pub struct Q3K;

impl Blocks for Q3K {
    const BLOCK: usize = 256;
    const BYTES: usize = 110;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part {
        let (base, shift) = (32 + index / 4 * 32, index % 4 * 2);
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            let third = block[i] >> index & 1;
            quants[i] = (block[base + i] >> shift & 3 | third << 2) as i8 - 4;
            i += 1;
        }
        let factor = |j: usize| {
            let low = block[96 + j % 8] >> (j / 8 * 4) & 15;
            let high = block[104 + j % 4] >> (j / 4 * 2) & 3;
            i32::from(low | high << 4) - 32
        };
        Part {
            quants,
            factors: [factor(2 * index), factor(2 * index + 1)],
            scale: half_at(a, block, 108),
            min: 0.0,
            min_factors: [0; 2],
        }
    }
}

/// Factor and minimum factor of a part of q4_k and q5_k, from their 12 packed bytes of 6 bit numbers.
#[inline(always)]
fn six_bit_pair(packed: &[u8], index: usize) -> (i32, i32) {
    let (factor, min) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        (
            packed[index + 4] & 15 | packed[index - 4] >> 6 << 4,
            packed[index + 4] >> 4 | packed[index] >> 6 << 4,
        )
    };
    (i32::from(factor), i32::from(min))
}

/// q4_k: f16 scale and minimum, 12 bytes of 6 bit factors, 128 bytes of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q4K;

impl Blocks for Q4K {
    const BLOCK: usize = 256;
    const BYTES: usize = 144;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part {
        let (base, shift) = (16 + index / 2 * 32, index % 2 * 4);
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            quants[i] = (block[base + i] >> shift & 15) as i8;
            i += 1;
        }
        let (factor, min) = six_bit_pair(&block[4..16], index);
        Part {
            quants,
            factors: [factor; 2],
            scale: half_at(a, block, 0),
            min: -half_at(a, block, 2),
            min_factors: [min; 2],
        }
    }
}

/// q5_k: f16 scale and minimum, 12 bytes of 6 bit factors, 32 bytes of fifth bits, 128 bytes of nibbles.
#[derive(Debug, Clone, Copy)]
pub struct Q5K;

impl Blocks for Q5K {
    const BLOCK: usize = 256;
    const BYTES: usize = 176;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part {
        let (base, shift) = (48 + index / 2 * 32, index % 2 * 4);
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            quants[i] = (block[base + i] >> shift & 15 | (block[16 + i] >> index & 1) << 4) as i8;
            i += 1;
        }
        let (factor, min) = six_bit_pair(&block[4..16], index);
        Part {
            quants,
            factors: [factor; 2],
            scale: half_at(a, block, 0),
            min: -half_at(a, block, 2),
            min_factors: [min; 2],
        }
    }
}

/// q6_k: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed byte factors, an f16 scale; less 32.
#[derive(Debug, Clone, Copy)]
pub struct Q6K;

impl Blocks for Q6K {
    const BLOCK: usize = 256;
    const BYTES: usize = 210;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn part<A: Arith>(a: A, block: &[u8], index: usize) -> Part {
        let (group, j) = (index / 4, index % 4);
        let (low, high) = (group * 64 + j % 2 * 32, 128 + group * 32);
        let mut quants = [0; PART];
        let mut i = 0;
        while i < PART {
            let nibble = block[low + i] >> (j / 2 * 4) & 15;
            quants[i] = (nibble | (block[high + i] >> (2 * j) & 3) << 4) as i8 - 32;
            i += 1;
        }
        let factor = |half: usize| i32::from(block[192 + 2 * index + half] as i8);
        Part {
            quants,
            factors: [factor(0), factor(1)],
            scale: half_at(a, block, 208),
            min: 0.0,
            min_factors: [0; 2],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, HostLanes, Q8_0Row, q8_0_row};
    use std::vec::Vec;

    fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as u8
            })
            .collect()
    }

    /// Random bytes with the given f16 fields made small positive numbers.
    fn row<B: Blocks>(seed: u64, parts: usize, halves: &[usize]) -> Vec<u8> {
        let mut row = bytes(seed, parts * PART / B::BLOCK * B::BYTES);
        for block in row.chunks_exact_mut(B::BYTES) {
            for &at in halves {
                block[at + 1] = 0x20 | block[at + 1] & 7;
            }
        }
        row
    }

    fn agrees_with_its_values<B: Blocks>(halves: &[usize]) {
        for parts in [8, 72, 256] {
            let row = row::<B>(parts as u64, parts, halves);
            let quants: Vec<i8> = bytes(9, parts * PART).into_iter().map(|q| (q as i8).max(-127)).collect();
            let scales: Vec<f32> = (0..parts).map(|i| 0.01 + i as f32 * 1e-4).collect();
            let mut values = std::vec![0f32; parts * PART];
            decode_row::<B, _>(Host, &row, |i, value| values[i] = value);
            let (mut want, mut magnitude) = (0.0, 0.0);
            for (i, value) in values.iter().enumerate() {
                let product = f64::from(*value) * f64::from(quants[i]) * f64::from(scales[i / PART]);
                want += product;
                magnitude += product.abs();
            }
            let Some(x) = Q8Activations::new(&quants, &scales) else { panic!("lengths agree") };
            let got = f64::from(block_row::<B, _>(HostLanes, &row, x));
            assert!((got - want).abs() <= magnitude * 2e-6 + 1e-9, "{parts}: {got} {want}");
        }
    }

    #[test]
    fn each_row_walk_agrees_with_the_values_of_its_type() {
        agrees_with_its_values::<Q4_0>(&[0]);
        agrees_with_its_values::<Q4_1>(&[0, 2]);
        agrees_with_its_values::<Q5_0>(&[0]);
        agrees_with_its_values::<Q5_1>(&[0, 2]);
        agrees_with_its_values::<Q8_0>(&[0]);
        agrees_with_its_values::<Iq4Nl>(&[0]);
        agrees_with_its_values::<Q2K>(&[80, 82]);
        agrees_with_its_values::<Q3K>(&[108]);
        agrees_with_its_values::<Q4K>(&[0, 2]);
        agrees_with_its_values::<Q5K>(&[0, 2]);
        agrees_with_its_values::<Q6K>(&[208]);
    }

    #[test]
    fn the_q8_0_walks_give_the_same_bits() {
        let row = row::<Q8_0>(3, 72, &[0]);
        let quants: Vec<i8> = bytes(4, 72 * PART).into_iter().map(|q| q as i8).collect();
        let scales: Vec<f32> = (0..72).map(|i| 1.0 / (i as f32 + 3.0)).collect();
        let (Some(x), Some(typed)) = (Q8Activations::new(&quants, &scales), Q8_0Row::new(&row)) else {
            panic!("lengths agree")
        };
        assert_eq!(
            block_row::<Q8_0, _>(HostLanes, &row, x).to_bits(),
            q8_0_row(HostLanes, typed, x).to_bits()
        );
    }
}
