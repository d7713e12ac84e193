//! Attention on vectors: the query heads that share keys and values, done together.
//!
//! The walk is `kiln_kernels::attention`'s, bit for bit; what differs is that a key or value is widened from halves once
//! for several queries, and that the partial sums of a residue stay in registers.

use kiln_kernels::{LANES, canonical};

use super::vector::Vector;

/// Query heads of a call at most.
pub const QUERIES: usize = 4;

/// What a call reads; lengths are in elements.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// The queries, `width` floats each, one after the other; up to [`QUERIES`].
    pub queries: &'a [f32],
    /// Keys of all positions, `width` halves each.
    pub keys: &'a [u16],
    /// Values of all positions, `width` halves each.
    pub values: &'a [u16],
    /// Elements of a head, a multiple of 32.
    pub width: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
}

/// Attention of `COUNT` query heads over `positions` positions.
///
/// `scores` holds `COUNT * positions` floats, `partials` `COUNT * 32 * width`; both are scratch.
///
/// # Safety
/// The caller must enable the features of `V`; `width` must be a multiple of 32 and of `4 * V::N`.
#[inline(always)]
pub unsafe fn attend<V: Vector, const COUNT: usize>(
    heads: Heads<'_>,
    positions: usize,
    scores: &mut [f32],
    partials: &mut [f32],
    out: &mut [f32],
) {
    let Heads { queries, keys, values, width, scale } = heads;
    assert!(queries.len() == COUNT * width && out.len() == COUNT * width, "queries of {width}");
    assert!(keys.len() == positions * width && values.len() == positions * width, "rows of {width}");
    assert!(scores.len() == COUNT * positions && partials.len() == COUNT * LANES * width, "scratch");
    assert!(width.is_multiple_of(LANES), "whole lanes");
    // SAFETY (of the whole body): all offsets stay inside the lengths that are checked above.
    unsafe {
        for position in 0..positions {
            let key = keys.as_ptr().add(position * width);
            // Vectors of lanes 0.., N.., ... of 32.
            let per_lanes = LANES / V::N;
            let mut sums = [[V::splat(0.0); 4]; COUNT];
            for chunk in 0..width / V::N {
                let k = V::load_halves(key.add(chunk * V::N));
                for (query, sums) in sums.iter_mut().enumerate() {
                    let q = V::load(queries.as_ptr().add(query * width + chunk * V::N));
                    sums[chunk % per_lanes] = q.fma(k, sums[chunk % per_lanes]);
                }
            }
            for (query, sums) in sums.into_iter().enumerate() {
                let folded = if per_lanes == 2 {
                    sums[0].add(sums[1])
                } else {
                    sums[0].add(sums[2]).add(sums[1].add(sums[3]))
                };
                *scores.get_unchecked_mut(query * positions + position) = canonical(folded.fold()) * scale;
            }
        }
        let mut inverses = [0.0; COUNT];
        for (scores, inverse) in scores.chunks_exact_mut(positions).zip(&mut inverses) {
            *inverse = softmax::<V>(scores);
        }
        let tile = 4 * V::N;
        for residue in 0..LANES {
            for start in (0..width).step_by(tile) {
                let mut sums = [[V::splat(0.0); 4]; COUNT];
                let mut position = residue;
                while position < positions {
                    let value = values.as_ptr().add(position * width + start);
                    let v: [V; 4] = std::array::from_fn(|i| V::load_halves(value.add(i * V::N)));
                    for (query, sums) in sums.iter_mut().enumerate() {
                        let weight = V::splat(*scores.get_unchecked(query * positions + position));
                        for i in 0..4 {
                            sums[i] = weight.fma(v[i], sums[i]);
                        }
                    }
                    position += LANES;
                }
                for (query, sums) in sums.iter().enumerate() {
                    let partial = partials.as_mut_ptr().add((query * LANES + residue) * width + start);
                    for (i, sum) in sums.iter().enumerate() {
                        sum.store(partial.add(i * V::N));
                    }
                }
            }
        }
        for (query, inverse) in inverses.into_iter().enumerate() {
            let partials = partials.as_ptr().add(query * LANES * width);
            for start in (0..width).step_by(V::N) {
                let at = |residue: usize| V::load(partials.add(residue * width + start));
                let mut sums: [V; LANES / 2] = std::array::from_fn(|i| at(i).add(at(i + LANES / 2)));
                let mut distance = LANES / 4;
                while distance > 0 {
                    for i in 0..distance {
                        sums[i] = sums[i].add(sums[i + distance]);
                    }
                    distance /= 2;
                }
                let out = out.as_mut_ptr().add(query * width + start);
                sums[0].mul(V::splat(inverse)).store(out);
            }
        }
    }
    for value in out {
        *value = canonical(*value);
    }
}

/// `kiln_kernels::attention::softmax` on vectors.
///
/// # Safety
/// The caller must enable the features of `V`.
#[inline(always)]
unsafe fn softmax<V: Vector>(scores: &mut [f32]) -> f32 {
    let count = scores.len();
    let mut lanes = [0.0f32; LANES];
    // SAFETY: whole vectors inside the slice; the rest goes through a padded copy.
    unsafe {
        let whole = count - count % LANES;
        let mut largest = V::splat(f32::NEG_INFINITY);
        for at in (0..whole).step_by(V::N) {
            largest = V::load(scores.as_ptr().add(at)).max(largest);
        }
        let mut largest = largest.largest();
        for score in &scores[whole..] {
            largest = if *score > largest { *score } else { largest };
        }
        let largest = V::splat(largest);
        let mut sums = [V::splat(0.0); 4];
        for at in (0..whole).step_by(LANES) {
            for (i, sum) in sums.iter_mut().enumerate().take(LANES / V::N) {
                let score = scores.as_mut_ptr().add(at + i * V::N);
                let weight = V::load(score).sub(largest).exp();
                weight.store(score);
                *sum = sum.add(weight);
            }
        }
        for (i, sum) in sums.iter().enumerate().take(LANES / V::N) {
            sum.store(lanes.as_mut_ptr().add(i * V::N));
        }
        let rest = &mut scores[whole..];
        if !rest.is_empty() {
            let mut padded = [0.0f32; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            for at in (0..LANES).step_by(V::N) {
                let weight = V::load(padded.as_ptr().add(at)).sub(largest).exp();
                weight.store(padded.as_mut_ptr().add(at));
            }
            rest.copy_from_slice(&padded[..rest.len()]);
            for (lane, weight) in lanes.iter_mut().zip(&*rest) {
                *lane += *weight;
            }
        }
    }
    let mut distance = LANES / 2;
    while distance > 0 {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
        distance /= 2;
    }
    1.0 / canonical(lanes[0])
}
