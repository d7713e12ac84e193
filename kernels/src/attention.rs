//! Attention of one query head over a cache of half-precision keys and values, and rotary positions.

use crate::lanes::sum_canonical;
use crate::math::exp;
use crate::{Arith, LANES, Lanes, canonical, strided};

/// One key or value vector of `query.len()` halves: where position `first + i` of a head lies.
pub trait Rows: Copy {
    /// The vector of item `index`, counted from the first position that the query sees.
    fn row(&self, index: usize) -> &[u16];
}

/// The score of a key: lanes sum `p = fma(query, key, p)`, butterfly, then times `scale`.
///
/// # Panics
/// If `key` is shorter than `query`.
#[inline(always)]
pub fn score<L: Lanes>(lanes: L, query: &[f32], key: &[u16], scale: f32) -> f32 {
    let a = lanes.arith();
    let key = &key[..query.len()];
    let partials = strided(lanes, query.len(), 0.0, |i, p| a.fma(query[i], a.f16_to_f32(key[i]), p));
    a.mul(sum_canonical(lanes, partials), scale)
}

/// Turns scores into weights `exp(score - largest)` in place and returns `1 / sum`: item `i` in lane `i % LANES`.
///
/// The largest is exact in any order. A NaN among the scores makes the result [`crate::NAN`].
#[inline(always)]
pub fn softmax<L: Lanes>(lanes: L, scores: &mut [f32]) -> f32 {
    let a = lanes.arith();
    let mut largest = f32::NEG_INFINITY;
    let mut i = 0;
    while i < scores.len() {
        largest = if scores[i] > largest { scores[i] } else { largest };
        i += 1;
    }
    let partials = strided(lanes, scores.len(), 0.0, |i, p| {
        let weight = exp(a, a.sub(scores[i], largest));
        scores[i] = weight;
        a.add(p, weight)
    });
    a.div(1.0, sum_canonical(lanes, partials))
}

/// Partial sums of weighted values: one for each dimension in each of [`LANES`] residues of the item number.
///
/// Dimension `d` of an item `i` adds `fma(weight, value, p)` to the partial of residue `i % LANES`; the residues are
/// then added in the butterfly's order. So a device may give the residues to different warps or blocks.
#[inline(always)]
pub fn add_value<A: Arith>(a: A, partial: &mut [f32], weight: f32, value: &[u16]) {
    let value = &value[..partial.len()];
    let mut d = 0;
    while d < partial.len() {
        partial[d] = a.fma(weight, a.f16_to_f32(value[d]), partial[d]);
        d += 1;
    }
}

/// Folds the `LANES * out.len()` partials (residue-major) and writes `out[d] = sum * inverse`. Destroys the partials.
///
/// # Panics
/// If the lengths do not agree.
#[inline(always)]
pub fn fold_values<A: Arith>(a: A, partials: &mut [f32], inverse: f32, out: &mut [f32]) {
    let width = out.len();
    assert!(partials.len() == LANES * width, "a partial for each residue and dimension");
    let mut distance = LANES / 2;
    while distance > 0 {
        let (lower, upper) = partials.split_at_mut(distance * width);
        let upper = &upper[..distance * width];
        for (p, q) in lower.iter_mut().zip(upper) {
            *p = a.add(*p, *q);
        }
        distance /= 2;
    }
    for (out, p) in out.iter_mut().zip(&partials[..width]) {
        *out = canonical(a.mul(*p, inverse));
    }
}

/// Attention of one query head over `count` positions.
///
/// `scores` holds `count` numbers and `partials` `LANES * query.len()`; both are scratch. `out` may be `query.len()`.
///
/// # Panics
/// If a length does not agree.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub fn attend<L: Lanes, K: Rows, V: Rows>(
    lanes: L,
    query: &[f32],
    keys: K,
    values: V,
    scale: f32,
    scores: &mut [f32],
    partials: &mut [f32],
    out: &mut [f32],
) {
    let a = lanes.arith();
    let count = scores.len();
    let mut i = 0;
    while i < count {
        scores[i] = score(lanes, query, keys.row(i), scale);
        i += 1;
    }
    let inverse = softmax(lanes, scores);
    partials.fill(0.0);
    let width = query.len();
    i = 0;
    while i < count {
        let start = i % LANES * width;
        add_value(a, &mut partials[start..start + width], scores[i], values.row(i));
        i += 1;
    }
    fold_values(a, partials, inverse, out);
}

/// Rotates a pair by an angle: `(x cos - y sin, x sin + y cos)`, each as a rounded product and a fused step.
#[inline(always)]
pub fn rotate<A: Arith>(a: A, x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (canonical(a.fma(x, cos, -a.mul(y, sin))), canonical(a.fma(x, sin, a.mul(y, cos))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::to_f16;
    use crate::{Host, HostLanes};
    use std::vec::Vec;

    #[derive(Clone, Copy)]
    struct Plain<'a>(&'a [u16], usize);

    impl Rows for Plain<'_> {
        fn row(&self, index: usize) -> &[u16] {
            &self.0[index * self.1..(index + 1) * self.1]
        }
    }

    #[test]
    fn attention_is_close_to_double_precision() {
        for (count, width) in [(1, 64), (31, 64), (33, 80), (300, 128)] {
            let wave = |i: usize, f: f32| (i as f32 * f).sin();
            let query: Vec<f32> = (0..width).map(|i| wave(i, 0.7)).collect();
            let keys: Vec<u16> = (0..count * width).map(|i| to_f16(wave(i, 0.013))).collect();
            let values: Vec<u16> = (0..count * width).map(|i| to_f16(wave(i, 0.029))).collect();
            let mut scores = std::vec![0.0; count];
            let mut partials = std::vec![0.0; LANES * width];
            let mut out = std::vec![0.0; width];
            let (k, v) = (Plain(&keys, width), Plain(&values, width));
            attend(HostLanes, &query, k, v, 0.25, &mut scores, &mut partials, &mut out);
            let wide = |h: u16| f64::from(Host.f16_to_f32(h));
            let weights: Vec<f64> = (0..count)
                .map(|p| {
                    let dot: f64 = (0..width).map(|i| f64::from(query[i]) * wide(keys[p * width + i])).sum();
                    (dot * 0.25).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            for (d, got) in out.iter().enumerate() {
                let want: f64 = (0..count).map(|p| weights[p] / total * wide(values[p * width + d])).sum();
                assert!((f64::from(*got) - want).abs() < 2e-6, "{count} {d}: {got} {want}");
            }
        }
    }

    #[test]
    fn a_nan_score_reaches_every_output() {
        let keys = [0x7e00u16; 64];
        let values = [0x3c00u16; 64];
        let (mut scores, mut partials, mut out) = ([0.0; 2], std::vec![0.0; LANES * 32], [0.0; 32]);
        let (k, v) = (Plain(&keys, 32), Plain(&values, 32));
        attend(HostLanes, &[1.0; 32], k, v, 1.0, &mut scores, &mut partials, &mut out);
        assert!(out.iter().all(|x| x.to_bits() == crate::NAN.to_bits()));
    }

    #[test]
    fn rotation_keeps_the_length() {
        let (x, y) = rotate(Host, 3.0, 4.0, 0.6, 0.8);
        assert!((x - (3.0 * 0.6 - 4.0 * 0.8)).abs() < 1e-6 && (y - (3.0 * 0.8 + 4.0 * 0.6)).abs() < 1e-6);
    }
}
