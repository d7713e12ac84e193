//! Exponential and what is made of it, as polynomials over [`Arith`]; f16 rounding; frequencies and angles in f64.
//!
//! No platform's math library is used: their last bits differ.

use crate::Arith;

/// `e^x` in f32, within 2 units in the last place; 0 below -87, infinity above 88; a NaN gives a NaN.
///
/// `x = k ln 2 + r` with `k` an integer, `|r| <= ln 2 / 2`; a polynomial of degree 6 in `r`; times 2^k.
#[inline(always)]
pub fn exp<A: Arith>(a: A, x: f32) -> f32 {
    const LOG2_E: f32 = core::f32::consts::LOG2_E;
    // ln 2 in two parts; the first has 9 trailing zero bits, so its product with k is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let k = a.round_small(a.mul(x, LOG2_E));
    let kf = a.i32_to_f32(k);
    let r = a.fma(kf, -LN2_LOW, a.fma(kf, -LN2_HIGH, x));
    let mut p = 1.0 / 720.0;
    p = a.fma(p, r, 1.0 / 120.0);
    p = a.fma(p, r, 1.0 / 24.0);
    p = a.fma(p, r, 1.0 / 6.0);
    p = a.fma(p, r, 0.5);
    p = a.fma(p, r, 1.0);
    p = a.fma(p, r, 1.0);
    let scale = f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let value = a.mul(p, scale);
    // By selection, not branches, so that a host can vectorise it.
    let value = if x < -87.0 { 0.0 } else { value };
    let value = if x > 88.0 { f32::INFINITY } else { value };
    if x.is_nan() { x } else { value }
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu<A: Arith>(a: A, x: f32) -> f32 {
    a.div(x, a.add(1.0, exp(a, -x)))
}

/// The tanh form of GELU, `x / (1 + e^(-2u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
#[inline(always)]
pub fn gelu_tanh<A: Arith>(a: A, x: f32) -> f32 {
    const TWICE_ROOT_TWO_OVER_PI: f32 = 1.595_769_2;
    let cube = a.mul(a.mul(x, x), x);
    let u = a.mul(TWICE_ROOT_TWO_OVER_PI, a.fma(0.044_715, cube, x));
    a.div(x, a.add(1.0, exp(a, -u)))
}

/// The activation of a feed-forward block with its clamp, before it is multiplied: `up` times silu or the tanh form of
/// GELU of `gate`.
///
/// `clamped(gate, -infinity, limit)` is activated, `clamped(up, -limit, limit)` is multiplied by it; with a `limit` of
/// infinity neither is changed, and the bits are those of the formula without a clamp. `limit` is positive. A NaN on
/// either side makes the result a NaN.
///
/// The clamp is the `swiglu_limit` of gpt-oss (`swiglu` in gpt_oss/torch/model.py: the gate from above alone, up on both
/// sides; its factor 1.702 and its `up + 1` are not part of this) and of DeepSeek-V4 (`Expert.forward` in
/// inference/model.py: `silu(gate) * up` after the same clamp).
#[inline(always)]
pub fn gated<A: Arith>(a: A, activation: Gate, gate: f32, up: f32, limit: f32) -> f32 {
    let gate = clamped(gate, f32::NEG_INFINITY, limit);
    let up = clamped(up, -limit, limit);
    let value = match activation {
        Gate::Silu => silu(a, gate),
        Gate::GeluTanh => gelu_tanh(a, gate),
    };
    a.mul(value, up)
}

/// The activation of [`gated`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// [`silu`].
    Silu,
    /// [`gelu_tanh`].
    GeluTanh,
}

/// `x`, or the bound that it is beyond. A NaN stays one: comparisons, because minimum and maximum instructions return
/// the bound for it.
#[inline(always)]
pub fn clamped(x: f32, lowest: f32, largest: f32) -> f32 {
    let x = if x > largest { largest } else { x };
    if x < lowest { lowest } else { x }
}

/// A number whose order as an unsigned integer is the total order of `x` ([`f32::total_cmp`]): -0 below +0, NaNs at the
/// ends. Exact.
#[inline(always)]
pub fn order_key(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

/// Where the largest of `x` is in the total order ([`order_key`]), the first of equals; 0 if there is none.
///
/// Exact, so any order may compute it: the largest of `order_key(x[i]) << 32 | !i`.
pub fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    let mut key = 0;
    for (i, x) in x.iter().enumerate() {
        if order_key(*x) > key {
            (best, key) = (i, order_key(*x));
        }
    }
    best
}

/// `x` rounded to half precision, ties to even, as its bits. Overflow gives infinity, a NaN gives 0x7e00.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        return 0x7e00;
    } else if magnitude >= 0x4780_0000 {
        0x7c00
    } else if magnitude >= 0x3880_0000 {
        // Normal: rebias by 112 and round the 13 dropped bits; a carry into the exponent is right, to infinity too.
        let rebiased = magnitude - 0x3800_0000;
        (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13
    } else if magnitude >= 0x3300_0000 {
        // Denormal: the fraction with its leading one, shifted to units of 2^-24.
        let shift = 126 - (magnitude >> 23);
        let fraction = magnitude & 0x7f_ffff | 0x80_0000;
        let kept = fraction >> shift;
        let dropped = fraction & ((1 << shift) - 1);
        let tie = 1 << (shift - 1);
        kept + u32::from(dropped > tie || (dropped == tie && kept & 1 == 1))
    } else {
        0
    };
    sign | half as u16
}

/// `base^exponent` for `base > 0`, in f64 by series: for tables made at load, not for steps.
pub fn powf(base: f64, exponent: f64) -> f64 {
    exp_f64(exponent * ln_f64(base))
}

/// Sine and cosine of `x` radians, `|x| < 2^31`, in f64 by series: for tables made at load, not for steps.
pub fn sin_cos(x: f64) -> (f64, f64) {
    // pi / 2 in three parts of 33 bits: the products with k < 2^20 are exact.
    const PARTS: [f64; 3] = [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_951e-21];
    let k = round(x * core::f64::consts::FRAC_2_PI);
    let r = ((x - k * PARTS[0]) - k * PARTS[1]) - k * PARTS[2];
    let square = r * r;
    let (mut sin, mut cos) = (0.0, 0.0);
    let mut n = 10;
    while n > 0 {
        let even = (2 * n) as f64;
        sin = (1.0 + sin) * -square / (even * (even + 1.0));
        cos = (1.0 + cos) * -square / (even * (even - 1.0));
        n -= 1;
    }
    let (sin, cos) = (r * (1.0 + sin), 1.0 + cos);
    match (k as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

fn round(x: f64) -> f64 {
    let half = if x < 0.0 { -0.5 } else { 0.5 };
    (x + half) as i64 as f64
}

fn ln_f64(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000);
    if mantissa > core::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)), whose argument is at most 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    let mut n = 14;
    while n >= 0 {
        sum = sum * square + 1.0 / (2 * n + 1) as f64;
        n -= 1;
    }
    exponent as f64 * core::f64::consts::LN_2 + 2.0 * s * sum
}

fn exp_f64(x: f64) -> f64 {
    let k = round(x * core::f64::consts::LOG2_E);
    let r = x - k * core::f64::consts::LN_2;
    let mut sum = 1.0;
    let mut n = 18;
    while n > 0 {
        sum = 1.0 + sum * r / n as f64;
        n -= 1;
    }
    let k = k.clamp(-1022.0, 1023.0) as i64;
    sum * f64::from_bits(((k + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0 + 0.001;
            if x > 88.0 {
                continue;
            }
            let (got, want) = (f64::from(exp(Host, x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 2.0 * 2f64.powi(-23), "{x}: {got} {want}");
        }
        assert_eq!(exp(Host, 0.0), 1.0);
        assert_eq!(exp(Host, -0.0), 1.0);
        assert_eq!(exp(Host, f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(Host, -1e30), 0.0);
        assert_eq!(exp(Host, 1e30), f32::INFINITY);
        assert!(exp(Host, f32::NAN).is_nan());
    }

    #[test]
    fn silu_and_gelu_are_close_to_double_precision_and_hold_at_the_ends() {
        for i in -2000..2000 {
            let x = i as f32 / 50.0;
            let wide = f64::from(x);
            let want = wide / (1.0 + (-wide).exp());
            assert!((f64::from(silu(Host, x)) - want).abs() <= want.abs() * 1e-6 + 1e-37, "{x}");
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let want = 0.5 * wide * (1.0 + u.tanh());
            assert!((f64::from(gelu_tanh(Host, x)) - want).abs() <= want.abs() * 3e-5 + 2e-7, "{x}");
        }
        assert_eq!(silu(Host, -1e30), -0.0);
        assert_eq!(silu(Host, 1e30), 1e30);
        assert_eq!(gelu_tanh(Host, -100.0), -0.0);
    }

    #[test]
    fn a_clamp_holds_the_gate_from_above_and_up_on_both_sides() {
        for limit in [10.0f32, 0.5, 7.0, f32::INFINITY] {
            for i in -90..=90 {
                for j in -90..=90 {
                    let (gate, up) = (i as f32 / 3.0, j as f32 / 3.0);
                    let wide = f64::from(limit);
                    let (g, u) = (f64::from(gate).min(wide), f64::from(up).clamp(-wide, wide));
                    let want = g / (1.0 + (-g).exp()) * u;
                    let got = gated(Host, Gate::Silu, gate, up, limit);
                    assert!(
                        (f64::from(got) - want).abs() <= want.abs() * 2e-6 + 1e-36,
                        "{gate} {up} {limit}: {got} {want}"
                    );
                    let tanh = g
                        * 0.5
                        * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh());
                    let got = gated(Host, Gate::GeluTanh, gate, up, limit);
                    assert!(
                        (f64::from(got) - tanh * u).abs() <= (tanh * u).abs() * 3e-5 + 2e-5,
                        "{gate} {up}"
                    );
                }
            }
        }
        // The gate has no lower bound: far below, silu is -0, not that of -limit.
        assert_eq!(gated(Host, Gate::Silu, -200.0, 1.0, 0.5).to_bits(), (-0.0f32).to_bits());
        assert_eq!(gated(Host, Gate::Silu, f32::INFINITY, f32::NEG_INFINITY, 0.5), -0.5 * silu(Host, 0.5));
    }

    #[test]
    fn without_a_limit_the_bits_are_those_of_the_product() {
        let mut state = 5u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(state)
        };
        for _ in 0..100_000 {
            let (gate, up) = (next(), next());
            let (got, want) =
                (gated(Host, Gate::Silu, gate, up, f32::INFINITY), Host.mul(silu(Host, gate), up));
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{gate} {up}");
        }
    }

    #[test]
    fn a_clamp_swallows_no_nan_and_keeps_the_sign_of_zero() {
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xff80_0001)] {
            for limit in [0.5, 10.0, f32::INFINITY] {
                assert!(gated(Host, Gate::Silu, nan, 1.0, limit).is_nan());
                assert!(gated(Host, Gate::Silu, 1.0, nan, limit).is_nan());
                assert!(clamped(nan, -limit, limit).is_nan());
            }
        }
        assert_eq!(clamped(-0.0, -1.0, 1.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(clamped(f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY), f32::INFINITY);
        assert_eq!(clamped(f32::NEG_INFINITY, -2.0, 2.0), -2.0);
    }

    #[test]
    fn keys_sort_as_the_total_order_and_the_first_of_equals_wins() {
        let mut state = 9u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(state)
        };
        for _ in 0..100_000 {
            let (a, b) = (next(), next());
            assert_eq!(order_key(a).cmp(&order_key(b)), a.total_cmp(&b), "{a} {b}");
        }
        assert_eq!(argmax(&[]), 0);
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[-0.0, 0.0, 0.0]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY, f32::MIN]), 1);
        assert_eq!(argmax(&[-1.0; 5]), 0);
    }

    #[test]
    fn halves_survive_a_round_trip_and_ties_go_to_even() {
        for h in 0..=u16::MAX {
            let x = Host.f16_to_f32(h);
            if x.is_nan() {
                assert_eq!(to_f16(x), 0x7e00);
            } else {
                assert_eq!(to_f16(x), h, "{h:#06x}");
                if h & 0x7fff < 0x7bff {
                    // Halfway to the next: to even; a little beyond: away.
                    let middle = (f64::from(x) + f64::from(Host.f16_to_f32(h + 1))) / 2.0;
                    assert_eq!(to_f16(middle as f32), h + (h & 1));
                    let beyond = f32::from_bits((middle as f32).to_bits() + 1);
                    assert_eq!(to_f16(beyond), h + 1);
                }
            }
        }
        assert_eq!(to_f16(65_519.0), 0x7bff);
        assert_eq!(to_f16(65_520.0), 0x7c00);
        assert_eq!(to_f16(1e-10), 0);
    }

    #[test]
    fn the_series_agree_with_the_platform_to_thirteen_digits() {
        for i in 0..4000 {
            let x = i as f64 * 32.771 + 1e-3;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-11 && (cos - x.cos()).abs() < 1e-11, "{x}");
            let exponent = -(i as f64) / 4000.0;
            for base in [10_000.0, 100_000.0, 1_000_000.0, 0.5] {
                let want = f64::powf(base, exponent);
                assert!((powf(base, exponent) / want - 1.0).abs() < 1e-13, "{base} {exponent}");
            }
        }
    }
}
