//! SplitMix64: the small random number generator of tests, self-tests and sampling, whose numbers never change.
//!
//! Not for secrets.

/// A generator, defined by its seed alone.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The generator that starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An integer below `bound` (which must not be 0). Slightly uneven for bounds that are no power of two.
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A number in `[-1, 1)`, a multiple of 2^-23.
    pub fn signed_unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// A finite f32 of random sign and fraction whose biased exponent is in `exponents` (0 makes denormals).
    pub fn finite(&mut self, exponents: core::ops::RangeInclusive<u32>) -> f32 {
        let exponent = exponents.start() + self.below(exponents.end() - exponents.start() + 1);
        f32::from_bits(self.bits() as u32 & 0x807f_ffff | exponent.min(0xfe) << 23)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut rng = SplitMix64::new(1_234_567);
        assert_eq!(
            [rng.bits(), rng.bits(), rng.bits()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn numbers_stay_in_their_ranges() {
        let mut rng = SplitMix64::new(1);
        for _ in 0..10_000 {
            assert!(rng.below(7) < 7);
            assert!((-1.0..1.0).contains(&rng.signed_unit()));
            assert!(rng.finite(0..=300).is_finite());
        }
    }
}
