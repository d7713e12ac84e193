//! The operations that a walk may use, each with exactly one right answer.

/// The one quiet NaN that walks return.
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// Operations on numbers, each rounded once, to nearest, ties to even (IEEE 754-2019), with denormals kept.
///
/// An implementation must not differ from these words in any bit, except in the sign and payload of a NaN.
pub trait Arith: Copy {
    /// `a + b`, rounded.
    fn add(self, a: f32, b: f32) -> f32;
    /// `a - b`, rounded.
    fn sub(self, a: f32, b: f32) -> f32;
    /// `a * b`, rounded.
    fn mul(self, a: f32, b: f32) -> f32;
    /// `a * b + c`, rounded once.
    fn fma(self, a: f32, b: f32, c: f32) -> f32;
    /// `a / b`, rounded.
    fn div(self, a: f32, b: f32) -> f32;
    /// The square root of `a`, rounded.
    fn sqrt(self, a: f32) -> f32;
    /// `acc + a[0] * b[0] + ... + a[3] * b[3]`: exact, wrapping at 32 bits (what `dp4a` does).
    fn dot4(self, a: [i8; 4], b: [i8; 4], acc: i32) -> i32;

    /// The integer `a` as f32. Exact for `|a| <= 2^24`; a walk uses it for nothing larger.
    #[inline(always)]
    fn i32_to_f32(self, a: i32) -> f32 {
        a as f32
    }

    /// The half-precision number whose bits are `h`, as f32: exact, denormals, infinities and NaNs included.
    ///
    /// Moves the half's exponent and fraction into place and multiplies by 2^112, the difference of the two exponent
    /// biases. The product is exact, for a denormal half too (it is then a denormal f32 before the product).
    #[inline(always)]
    fn f16_to_f32(self, h: u16) -> f32 {
        let sign = ((h & 0x8000) as u32) << 16;
        let magnitude = ((h & 0x7fff) as u32) << 13;
        let finite = self.mul(f32::from_bits(magnitude), f32::from_bits(0x7780_0000)).to_bits();
        // An exponent of all ones is infinity or NaN: it stays all ones.
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 | magnitude } else { finite };
        f32::from_bits(sign | special)
    }

    /// `a` rounded to an integer, ties to even. Only for `|a| < 2^22`.
    ///
    /// 1.5 * 2^23 has a unit in the last place of 1, so the rounded sum holds the integer in its low bits.
    #[inline(always)]
    fn round_small(self, a: f32) -> i32 {
        const MAGIC: f32 = 12_582_912.0;
        (self.add(a, MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
    }
}

/// `a`, or [`NAN`] if `a` is any NaN.
#[inline(always)]
pub fn canonical(a: f32) -> f32 {
    // By bits, so that no home is tempted to return its own NaN.
    if a.to_bits() & 0x7fff_ffff > 0x7f80_0000 { NAN } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;

    /// Half to double by the definition of the format.
    fn f16_by_definition(h: u16) -> f64 {
        let sign = if h & 0x8000 != 0 { -1.0 } else { 1.0 };
        let exponent = i32::from(h >> 10 & 0x1f);
        let fraction = f64::from(h & 0x3ff) / 1024.0;
        match exponent {
            0 => sign * fraction * 2f64.powi(-14),
            31 if fraction == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            _ => sign * (1.0 + fraction) * 2f64.powi(exponent - 15),
        }
    }

    #[test]
    fn every_half_converts_exactly() {
        for h in 0..=u16::MAX {
            let (got, want) = (Host.f16_to_f32(h), f16_by_definition(h));
            if want.is_nan() {
                assert!(got.is_nan(), "{h:#06x}");
            } else {
                assert_eq!(f64::from(got), want, "{h:#06x}");
                assert_eq!(got.is_sign_negative(), h & 0x8000 != 0, "{h:#06x}");
            }
        }
    }

    #[test]
    fn round_small_rounds_ties_to_even() {
        for quarter in -600_000i32..=600_000 {
            let a = quarter as f32 / 4.0;
            assert_eq!(Host.round_small(a), a.round_ties_even() as i32, "{a}");
        }
        assert_eq!(Host.round_small(-0.0), 0);
        assert_eq!(Host.round_small(0.499_999_97), 0);
        assert_eq!(Host.round_small(f32::from_bits(1)), 0);
    }

    #[test]
    fn canonical_makes_every_nan_one_and_touches_nothing_else() {
        for bits in [0x7fc0_0001, 0xffc0_0000, 0x7f80_0001, 0x7fff_ffff, 0xff80_0001] {
            assert_eq!(canonical(f32::from_bits(bits)).to_bits(), NAN.to_bits());
        }
        for a in [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::from_bits(0x8000_0001)] {
            assert_eq!(canonical(a).to_bits(), a.to_bits());
        }
    }
}
