//! 8 bit blocks: q8_0 weights as GGUF files hold them, q8 activations, and the product of the two.

use crate::lanes::sum_canonical;
use crate::{Arith, Lanes, NAN, strided};

/// Values of a block.
pub const Q8_BLOCK: usize = 32;
/// Bytes of a q8_0 weight block: an f16 scale (little endian), then 32 signed bytes. A weight is `scale * byte`.
pub const Q8_0_BYTES: usize = 2 + Q8_BLOCK;

/// A row of q8_0 weights in the layout of GGUF files: blocks of [`Q8_0_BYTES`] bytes, no padding.
#[derive(Debug, Clone, Copy)]
pub struct Q8_0Row<'a> {
    bytes: &'a [u8],
}

impl<'a> Q8_0Row<'a> {
    /// A row of `bytes.len() / 34` blocks; `None` if that is not a whole number.
    #[inline(always)]
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        if bytes.len().is_multiple_of(Q8_0_BYTES) { Some(Self { bytes }) } else { None }
    }

    /// Number of blocks.
    #[inline(always)]
    pub fn blocks(self) -> usize {
        self.bytes.len() / Q8_0_BYTES
    }
}

/// A vector of activations in 8 bit blocks: value `i` is `scales[i / 32] * quants[i]`.
///
/// Quants and scales lie apart, so that the quants are aligned for wide loads. The scale is f32 (q8_0 has f16): it is
/// made anew each step and never stored in a file, so nothing is gained by rounding it once more.
#[derive(Debug, Clone, Copy)]
pub struct Q8Activations<'a> {
    quants: &'a [i8],
    scales: &'a [f32],
}

impl<'a> Q8Activations<'a> {
    /// `scales.len()` blocks; `None` unless there are 32 quants for each scale.
    #[inline(always)]
    pub fn new(quants: &'a [i8], scales: &'a [f32]) -> Option<Self> {
        if quants.len() == scales.len() * Q8_BLOCK { Some(Self { quants, scales }) } else { None }
    }

    /// Number of blocks.
    #[inline(always)]
    pub fn blocks(self) -> usize {
        self.scales.len()
    }

    /// Quants of all blocks, 32 a block.
    #[inline(always)]
    pub fn quants(self) -> &'a [i8] {
        self.quants
    }

    /// Scales, one a block.
    #[inline(always)]
    pub fn scales(self) -> &'a [f32] {
        self.scales
    }
}

/// A q8_0 row times q8 activations.
///
/// Lane `l` takes blocks l, l + 32, ...: `p = fma(weight scale * activation scale, integer dot, p)`, where the scales'
/// product is rounded and the integer dot (at most 32 * 128 * 127 in magnitude) is exact. Then the butterfly.
///
/// A NaN or infinite scale on either side makes the result [`NAN`] or infinite as IEEE arithmetic has it.
///
/// # Panics
/// If `x` has fewer blocks than the row.
#[inline(always)]
pub fn q8_0_row<L: Lanes>(lanes: L, row: Q8_0Row<'_>, x: Q8Activations<'_>) -> f32 {
    let a = lanes.arith();
    let partials = strided(lanes, row.blocks(), 0.0, |block, p| {
        let weights = block * Q8_0_BYTES;
        let scale = u16::from_le_bytes([row.bytes[weights], row.bytes[weights + 1]]);
        let scale = a.mul(a.f16_to_f32(scale), x.scales[block]);
        let dot = dot_block(
            a,
            &row.bytes[weights + 2..weights + Q8_0_BYTES],
            &x.quants[block * Q8_BLOCK..(block + 1) * Q8_BLOCK],
        );
        a.fma(scale, a.i32_to_f32(dot), p)
    });
    sum_canonical(lanes, partials)
}

/// The integer dot of a block: `weights` are 32 signed bytes as a file holds them, `quants` 32 activations. Exact.
///
/// # Panics
/// If either is shorter than 32.
#[inline(always)]
pub fn dot_block<A: Arith>(a: A, weights: &[u8], quants: &[i8]) -> i32 {
    let (weights, quants) = (&weights[..Q8_BLOCK], &quants[..Q8_BLOCK]);
    let mut dot = 0;
    let mut i = 0;
    while i < Q8_BLOCK {
        let w = [weights[i] as i8, weights[i + 1] as i8, weights[i + 2] as i8, weights[i + 3] as i8];
        let q = [quants[i], quants[i + 1], quants[i + 2], quants[i + 3]];
        dot = a.dot4(w, q, dot);
        i += 4;
    }
    dot
}

/// Quantises `x` into 8 bit blocks: `quants` gets a byte a value, `scales` one f32 for each 32 values.
///
/// # Panics
/// If the lengths are not `32 n`, `32 n` and `n`.
#[inline(always)]
pub fn quantize_q8<A: Arith>(a: A, x: &[f32], quants: &mut [i8], scales: &mut [f32]) {
    assert!(x.len() == quants.len() && x.len() == scales.len() * Q8_BLOCK, "q8 lengths do not agree");
    let mut block = 0;
    while block < scales.len() {
        let values = block * Q8_BLOCK..(block + 1) * Q8_BLOCK;
        scales[block] = quantize_q8_block(a, &x[values.clone()], &mut quants[values]);
        block += 1;
    }
}

/// Quantises one block of 32 values and returns its scale.
///
/// `scale = max|x| / 127`; `quant = x * (1 / scale)` rounded to nearest, ties to even, all in -127..=127.
/// A block whose scale would be below the smallest normal number (2^-126) is all zeros with scale 0, so that
/// `1 / scale` is finite. A block that holds a NaN or an infinity has scale [`NAN`] and quants 0: whatever is
/// multiplied by it is a NaN, and the step that made it can be named.
///
/// # Panics
/// If either is shorter than 32.
#[inline(always)]
pub fn quantize_q8_block<A: Arith>(a: A, x: &[f32], quants: &mut [i8]) -> f32 {
    let (x, quants) = (&x[..Q8_BLOCK], &mut quants[..Q8_BLOCK]);
    // The bits of magnitudes sort as the magnitudes do, with infinity and NaN on top: exact in any order.
    let mut largest = 0u32;
    let mut i = 0;
    while i < Q8_BLOCK {
        let magnitude = x[i].to_bits() & 0x7fff_ffff;
        largest = if magnitude > largest { magnitude } else { largest };
        i += 1;
    }
    let mut scale = a.div(f32::from_bits(largest), 127.0);
    let mut inverse = a.div(1.0, scale);
    if largest >= 0x7f80_0000 {
        (scale, inverse) = (NAN, 0.0);
    } else if scale.to_bits() < 0x0080_0000 {
        (scale, inverse) = (0.0, 0.0);
    }
    i = 0;
    while i < Q8_BLOCK {
        // x may be infinite, and infinity * 0 has no small integer.
        quants[i] = if inverse == 0.0 { 0 } else { a.round_small(a.mul(x[i], inverse)) as i8 };
        i += 1;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, HostLanes, LANES};
    use std::vec::Vec;

    struct Rng(u64);

    impl Rng {
        fn next(&mut self) -> u32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 32) as u32
        }
    }

    fn row_bytes(rng: &mut Rng, blocks: usize, scale: impl Fn(&mut Rng) -> u16) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..blocks {
            bytes.extend(scale(rng).to_le_bytes());
            bytes.extend((0..Q8_BLOCK).map(|_| rng.next() as u8));
        }
        bytes
    }

    /// Block products in double precision and the sum of their magnitudes.
    fn in_double(bytes: &[u8], quants: &[i8], scales: &[f32]) -> (f64, f64) {
        let (mut sum, mut magnitude) = (0.0, 0.0);
        for (b, block) in bytes.chunks(Q8_0_BYTES).enumerate() {
            let dot: i64 = (0..Q8_BLOCK)
                .rev() // another order than the walk's
                .map(|i| i64::from(block[2 + i] as i8) * i64::from(quants[b * Q8_BLOCK + i]))
                .sum();
            let scale = f64::from(Host.f16_to_f32(u16::from_le_bytes([block[0], block[1]])));
            let product = scale * f64::from(scales[b]) * dot as f64;
            sum += product;
            magnitude += product.abs();
        }
        (sum, magnitude)
    }

    #[test]
    fn a_row_is_within_its_rounding_bound_of_double_precision() {
        let mut rng = Rng(1);
        for blocks in [0, 1, 2, 8, 31, 32, 33, 72, 128, 256] {
            let bytes = row_bytes(&mut rng, blocks, |rng| 0x1c00 + (rng.next() % 0x2000) as u16);
            let quants: Vec<i8> = (0..blocks * Q8_BLOCK).map(|_| rng.next() as i8).collect();
            let scales: Vec<f32> = (0..blocks).map(|_| rng.next() as f32 / 1e10).collect();
            let (Some(row), Some(x)) = (Q8_0Row::new(&bytes), Q8Activations::new(&quants, &scales)) else {
                panic!("lengths agree")
            };
            let got = f64::from(q8_0_row(HostLanes, row, x));
            let (want, magnitude) = in_double(&bytes, &quants, &scales);
            let roundings = (blocks.div_ceil(LANES) + 5 + 1) as f64;
            assert!(
                (got - want).abs() <= magnitude * roundings * 2f64.powi(-24),
                "{blocks} blocks: {got} {want}"
            );
        }
    }

    #[test]
    fn the_integer_dot_is_exact_at_its_extremes() {
        let extremes = [(-128i8, -128i8), (-128, 127), (127, -128), (127, 127), (-1, 1), (0, -128)];
        for (w, q) in extremes {
            let dot = dot_block(Host, &[w as u8; 32], &[q; 32]);
            assert_eq!(dot, 32 * i32::from(w) * i32::from(q));
            assert_eq!(Host.i32_to_f32(dot) as i32, dot);
        }
    }

    #[test]
    fn lengths_that_do_not_agree_make_no_value() {
        assert!(Q8_0Row::new(&[0; 33]).is_none());
        assert!(Q8_0Row::new(&[0; 68]).is_some_and(|row| row.blocks() == 2));
        assert!(Q8Activations::new(&[0; 32], &[]).is_none());
        assert!(Q8Activations::new(&[0; 33], &[0.0]).is_none());
    }

    #[test]
    fn quantising_is_within_half_a_step_and_uses_the_whole_range() {
        let mut rng = Rng(3);
        for exponent in (1..=0x7f7 >> 3).step_by(5) {
            let x: Vec<f32> = (0..Q8_BLOCK)
                .map(|_| f32::from_bits((rng.next() & 0x807f_ffff) | (exponent as u32).min(0xfe) << 23))
                .collect();
            let mut quants = [99i8; Q8_BLOCK];
            let scale = quantize_q8_block(Host, &x, &mut quants);
            let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            if largest / 127.0 < f32::MIN_POSITIVE {
                assert_eq!((scale, quants), (0.0, [0; Q8_BLOCK]));
                continue;
            }
            assert!(quants.iter().any(|q| q.unsigned_abs() == 127));
            for (q, v) in quants.iter().zip(&x) {
                let error = (f64::from(*q) * f64::from(scale) - f64::from(*v)).abs();
                assert!(error <= f64::from(scale) * 0.5001, "{v} {q} {scale}");
            }
        }
    }

    #[test]
    fn ties_go_to_even() {
        let mut x = [0f32; Q8_BLOCK];
        x[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
        let mut quants = [0i8; Q8_BLOCK];
        assert_eq!(quantize_q8_block(Host, &x, &mut quants), 1.0);
        assert_eq!(quants[..6], [127, 0, 2, 2, 0, -2]);
    }

    #[test]
    fn nans_and_infinities_mark_the_block_and_reach_the_result() {
        for bad in [f32::NAN, f32::from_bits(0xff80_0001), f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1f32; 2 * Q8_BLOCK];
            x[40] = bad;
            let (mut quants, mut scales) = ([99i8; 2 * Q8_BLOCK], [9f32; 2]);
            quantize_q8(Host, &x, &mut quants, &mut scales);
            assert_eq!(scales[0], 1.0 / 127.0);
            assert_eq!(scales[1].to_bits(), NAN.to_bits());
            assert_eq!(quants[32..], [0; Q8_BLOCK]);
            let bytes = row_bytes(&mut Rng(1), 2, |_| 0x3c00);
            let (Some(row), Some(x)) = (Q8_0Row::new(&bytes), Q8Activations::new(&quants, &scales)) else {
                panic!("lengths agree")
            };
            assert_eq!(q8_0_row(HostLanes, row, x).to_bits(), NAN.to_bits());
        }
    }

    #[test]
    fn tiny_and_huge_scales_keep_denormals_and_overflow_to_infinity() {
        let product = |weight_scale: u16, scale: f32, w: i8, q: i8| {
            let mut bytes = [0u8; Q8_0_BYTES];
            bytes[..2].copy_from_slice(&weight_scale.to_le_bytes());
            bytes[2] = w as u8;
            let mut quants = [0i8; Q8_BLOCK];
            quants[0] = q;
            match (Q8_0Row::new(&bytes), Q8Activations::new(&quants, &[scale])) {
                (Some(row), Some(x)) => q8_0_row(HostLanes, row, x),
                _ => panic!("lengths agree"),
            }
        };
        // 2^-24 (the smallest half) * 2^-125 * 3 = 3 * 2^-149
        assert_eq!(product(1, f32::from_bits(0x0100_0000), 3, 1).to_bits(), 3);
        assert_eq!(product(0x7bff, f32::MAX, 1, 1), f32::INFINITY);
        // An infinite scale times an integer of 0 is not a number.
        assert_eq!(product(0x7c00, 1.0, 0, 1).to_bits(), NAN.to_bits());
        assert_eq!(product(0xfc00, 1.0, 1, 1), f32::NEG_INFINITY);
    }
}
