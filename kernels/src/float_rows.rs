//! Rows of unquantised weights times f32 activations.

use crate::lanes::sum_canonical;
use crate::{Arith, Lanes, strided};

/// A row of f32 weights (little endian) times f32 activations: lane `l` takes l, l + 32, ...: `p = fma(w, x, p)`.
///
/// # Panics
/// If `row` is not `4 * x.len()` bytes.
#[inline(always)]
pub fn f32_row<L: Lanes>(lanes: L, row: &[u8], x: &[f32]) -> f32 {
    let a = lanes.arith();
    assert!(row.len() == 4 * x.len(), "row and activations do not agree");
    let (words, _) = row.as_chunks::<4>();
    let words = &words[..x.len()];
    sum_canonical(lanes, strided(lanes, x.len(), 0.0, |i, p| a.fma(f32::from_le_bytes(words[i]), x[i], p)))
}

/// A row of f16 weights (little endian) times f32 activations, in the order of [`f32_row`].
///
/// # Panics
/// If `row` is not `2 * x.len()` bytes.
#[inline(always)]
pub fn f16_row<L: Lanes>(lanes: L, row: &[u8], x: &[f32]) -> f32 {
    let a = lanes.arith();
    assert!(row.len() == 2 * x.len(), "row and activations do not agree");
    let (words, _) = row.as_chunks::<2>();
    let words = &words[..x.len()];
    sum_canonical(
        lanes,
        strided(lanes, x.len(), 0.0, |i, p| a.fma(a.f16_to_f32(u16::from_le_bytes(words[i])), x[i], p)),
    )
}

/// A row of bf16 weights (little endian) times f32 activations, in the order of [`f32_row`].
///
/// # Panics
/// If `row` is not `2 * x.len()` bytes.
#[inline(always)]
pub fn bf16_row<L: Lanes>(lanes: L, row: &[u8], x: &[f32]) -> f32 {
    let a = lanes.arith();
    assert!(row.len() == 2 * x.len(), "row and activations do not agree");
    let (words, _) = row.as_chunks::<2>();
    let words = &words[..x.len()];
    sum_canonical(
        lanes,
        strided(lanes, x.len(), 0.0, |i, p| a.fma(bf16_to_f32(u16::from_le_bytes(words[i])), x[i], p)),
    )
}

/// The bf16 number whose bits are `h`, as f32: its upper half.
#[inline(always)]
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostLanes, math::to_f16};
    use std::vec::Vec;

    #[test]
    fn the_three_rows_agree_where_the_weights_are_the_same_numbers() {
        for count in [1, 32, 33, 576] {
            let weights: Vec<f32> = (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
            let x: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin()).collect();
            let wide: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
            let half: Vec<u8> = weights.iter().flat_map(|w| to_f16(*w).to_le_bytes()).collect();
            let brain: Vec<u8> =
                weights.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes()).collect();
            let sum = f32_row(HostLanes, &wide, &x);
            let want: f64 = weights.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            assert!((f64::from(sum) - want).abs() < 1e-4, "{count}: {sum} {want}");
            assert_eq!(f16_row(HostLanes, &half, &x).to_bits(), sum.to_bits());
            assert_eq!(bf16_row(HostLanes, &brain, &x).to_bits(), sum.to_bits());
        }
    }
}
