//! The host's home for walks: plain operators, all lanes in a loop.

use crate::{Arith, LANES, Lanes};

/// Plain operators. Rust neither contracts nor reorders them, and the default rounding mode is the one [`Arith`] asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Host;

impl Arith for Host {
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        // One instruction where the function that this is inlined into has FMA; elsewhere the C library's fmaf, which
        // is correctly rounded too.
        a.mul_add(b, c)
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn sqrt(self, a: f32) -> f32 {
        a.sqrt()
    }
    #[inline(always)]
    fn dot4(self, a: [i8; 4], b: [i8; 4], acc: i32) -> i32 {
        let mut acc = acc;
        for i in 0..4 {
            acc = acc.wrapping_add(i32::from(a[i]) * i32::from(b[i]));
        }
        acc
    }
}

/// All [`LANES`] lanes, in an array.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostLanes;

impl Lanes for HostLanes {
    type Arith = Host;
    type Partials = [f32; LANES];

    #[inline(always)]
    fn arith(self) -> Host {
        Host
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn update(self, partials: &mut [f32; LANES], mut step: impl FnMut(usize, f32) -> f32) {
        for (lane, p) in partials.iter_mut().enumerate() {
            *p = step(lane, *p);
        }
    }

    #[inline(always)]
    fn for_each(self, mut step: impl FnMut(usize)) {
        for lane in 0..LANES {
            step(lane);
        }
    }

    #[inline(always)]
    fn sum(self, mut partials: [f32; LANES]) -> f32 {
        // After a round with distance d, lanes l and l ^ d are equal, so the lower d lanes say everything.
        let mut distance = LANES / 2;
        while distance > 0 {
            for lane in 0..distance {
                partials[lane] += partials[lane + distance];
            }
            distance /= 2;
        }
        partials[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// The butterfly as a device does it: every lane, every round.
    fn butterfly(mut p: [f32; LANES]) -> [f32; LANES] {
        for distance in [16, 8, 4, 2, 1] {
            let before = p;
            for lane in 0..LANES {
                p[lane] = before[lane] + before[lane ^ distance];
            }
        }
        p
    }

    #[test]
    fn the_folded_sum_has_the_bits_of_the_full_butterfly_in_every_lane() {
        let mut state = 7u64;
        for _ in 0..1000 {
            let p: [f32; LANES] = core::array::from_fn(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let exponent = 100 + (state >> 40) as u32 % 60;
                f32::from_bits((state >> 8) as u32 & 0x807f_ffff | exponent << 23)
            });
            let sum = HostLanes.sum(p).to_bits();
            assert!(butterfly(p).iter().all(|s| s.to_bits() == sum));
        }
    }

    #[test]
    fn strided_gives_each_lane_its_items_in_order() {
        for count in [0, 1, 31, 32, 33, 64, 100] {
            let mut seen = std::vec![Vec::new(); LANES];
            crate::strided(HostLanes, count, 0.0, |i, p| {
                seen[i % LANES].push(i);
                p
            });
            for (lane, items) in seen.iter().enumerate() {
                assert_eq!(*items, (lane..count).step_by(LANES).collect::<Vec<_>>());
            }
            let mut all = Vec::new();
            crate::strided_for_each(HostLanes, count, |i| all.push(i));
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
    }
}
