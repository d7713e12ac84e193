//! Root mean square normalisation: `out[i] = x[i] * (1 / sqrt(mean(x^2) + eps)) * weight[i]`.

use crate::lanes::sum_canonical;
use crate::{Arith, Lanes, canonical, strided, strided_for_each};

/// Normalises `x` and hands each result to `write(i, value)`, item `i` in lane `i % LANES`.
///
/// The order, all rounded: lanes sum `p = fma(x, x, p)`, butterfly; `mean = sum / n`; `scale = 1 / sqrt(mean + eps)`;
/// `value = (x * scale) * weight`. `n = x.len()` must be at most 2^24, so that it is exact as f32.
///
/// Squares may overflow: then the scale is 0 and so are the results. A NaN in `x` makes every result [`crate::NAN`].
///
/// # Panics
/// If `weight` is shorter than `x`.
#[inline(always)]
pub fn rms_norm<L: Lanes>(lanes: L, x: &[f32], weight: &[f32], eps: f32, mut write: impl FnMut(usize, f32)) {
    let a = lanes.arith();
    let count = x.len();
    let squares = strided(lanes, count, 0.0, |i, p| a.fma(x[i], x[i], p));
    let mean = a.div(sum_canonical(lanes, squares), a.i32_to_f32(count as i32));
    let scale = a.div(1.0, a.sqrt(a.add(mean, eps)));
    strided_for_each(lanes, count, |i| {
        write(i, canonical(a.mul(a.mul(x[i], scale), weight[i])));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostLanes;
    use std::vec::Vec;

    fn run(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
        let mut out = std::vec![f32::NAN; x.len()];
        rms_norm(HostLanes, x, weight, eps, |i, value| out[i] = value);
        out
    }

    #[test]
    fn is_within_a_few_ulps_of_double_precision() {
        for count in [1usize, 31, 32, 33, 256, 2304, 4096] {
            let x: Vec<f32> = (0..count).map(|i| ((i * 7919 % 1013) as f32 - 500.0) / 97.0).collect();
            let weight: Vec<f32> = (0..count).map(|i| 0.5 + (i % 13) as f32 / 10.0).collect();
            let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / count as f64;
            let scale = 1.0 / (mean + 1e-5f32 as f64).sqrt();
            for (i, got) in run(&x, &weight, 1e-5).into_iter().enumerate() {
                let want = f64::from(x[i]) * scale * f64::from(weight[i]);
                // The sum has at most count/32 + 5 roundings of relative size 2^-24, halved by the root.
                let bound = want.abs() * (count as f64 / 32.0 + 16.0) * 2f64.powi(-24) + 1e-45;
                assert!((f64::from(got) - want).abs() <= bound, "{count} {i}: {got} {want}");
            }
        }
    }

    #[test]
    fn zeros_stay_signed_zeros_and_denormals_are_kept() {
        let out = run(&[0.0, -0.0, f32::from_bits(1)], &[1.0; 3], 1e-6);
        assert_eq!(out[0].to_bits(), 0);
        assert_eq!(out[1].to_bits(), 0x8000_0000);
        assert_eq!(out[2].to_bits(), 1000, "2^-149 * 1000");
    }

    #[test]
    fn squares_that_overflow_give_zeros_and_a_nan_makes_all_nan() {
        assert_eq!(run(&[f32::MAX, 1.0], &[1.0; 2], 1e-5), [0.0, 0.0]);
        let out = run(&[f32::from_bits(0xffc0_1234), 1.0], &[1.0; 2], 1e-5);
        assert!(out.iter().all(|v| v.to_bits() == crate::NAN.to_bits()));
    }
}
