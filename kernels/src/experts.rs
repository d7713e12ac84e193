//! Feed-forward blocks of which each token takes a few of many (mixtures of experts).
//!
//! For each of a token's selections, in their order: gate and up rows of the expert, [`crate::math::gated`], quantised as
//! [`crate::quantize_q8`] does, down rows. Each product is the one-column walk of its row, so it does not matter whether
//! selections are taken one by one or sorted by expert. What a token's experts made is then combined by [`combine`], in the
//! order of the token's selections, never in that of the experts.

use crate::{Arith, canonical};

/// One step of the combination: `weight * product + sum`, rounded once.
#[inline(always)]
pub fn combine_step<A: Arith>(a: A, sum: f32, weight: f32, product: f32) -> f32 {
    a.fma(weight, product, sum)
}

/// An element of a token's result: from 0, a [`combine_step`] for each of its selections in order.
///
/// `part(slot)` gives the weight and the down product of selection `slot`, below `used`.
#[inline(always)]
pub fn combine<A: Arith>(a: A, used: usize, mut part: impl FnMut(usize) -> (f32, f32)) -> f32 {
    let mut sum = 0.0;
    let mut slot = 0;
    while slot < used {
        let (weight, product) = part(slot);
        sum = combine_step(a, sum, weight, product);
        slot += 1;
    }
    canonical(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, NAN};

    #[test]
    fn a_combination_is_close_to_double_precision_and_keeps_its_order() {
        let mut state = 3u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as i32 as f32 / 2f32.powi(31)
        };
        let mut differ = false;
        for used in 1..9 {
            for _ in 0..100 {
                let parts: [(f32, f32); 8] = core::array::from_fn(|_| (next(), next() * 30.0));
                let want: f64 = parts[..used].iter().map(|(w, p)| f64::from(*w) * f64::from(*p)).sum();
                let got = combine(Host, used, |slot| parts[slot]);
                assert!((f64::from(got) - want).abs() < 1e-4, "{used}: {got} {want}");
                let backwards = combine(Host, used, |slot| parts[used - 1 - slot]);
                differ |= used > 1 && backwards.to_bits() != got.to_bits();
            }
        }
        assert!(differ, "an order that no bit depends on is none");
        assert_eq!(combine(Host, 0, |_| (1.0, 1.0)).to_bits(), 0);
        assert_eq!(
            combine(Host, 2, |slot| (1.0, [f32::INFINITY, f32::NEG_INFINITY][slot])).to_bits(),
            NAN.to_bits()
        );
    }
}
