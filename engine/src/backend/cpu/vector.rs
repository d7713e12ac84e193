//! Vectors of floats, of 8 or 16, behind one trait: what attention needs of a level of instructions.
//!
//! Every method is one correctly rounded operation in each lane, as `kiln_kernels::Arith` has it.

/// A vector of [`Vector::N`] floats.
///
/// # Safety
/// Implementors' methods may only be called, inlined, from functions that enable the level's features.
#[allow(clippy::missing_safety_doc)]
pub unsafe trait Vector: Copy {
    /// Lanes; divides 32.
    const N: usize;
    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self;
    /// Loads floats.
    unsafe fn load(from: *const f32) -> Self;
    /// Loads halves.
    unsafe fn load_halves(from: *const u16) -> Self;
    /// Stores floats.
    unsafe fn store(self, to: *mut f32);
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// Product.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// `if self > other { self } else { other }`.
    unsafe fn max(self, other: Self) -> Self;
    /// The largest of `self`'s lanes; no lane may be a NaN.
    unsafe fn largest(self) -> f32;
    /// [`kiln_kernels::math::exp`] in each lane.
    unsafe fn exp(self) -> Self;
    /// From sums of lanes l, l + N, ... of 32 (already added in the butterfly's order down to distance N): the rest of
    /// the butterfly.
    unsafe fn fold(self) -> f32;
}

#[cfg(target_arch = "x86_64")]
pub use x86::{F32x8, F32x16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Vector;

    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const MAGIC: f32 = 12_582_912.0;
    const COEFFICIENTS: [f32; 6] = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

    /// 16 floats of AVX-512.
    #[derive(Clone, Copy)]
    pub struct F32x16(__m512);

    // SAFETY: see the trait.
    #[allow(unsafe_op_in_unsafe_fn)]
    unsafe impl Vector for F32x16 {
        const N: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            F32x16(_mm512_set1_ps(value))
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            F32x16(_mm512_loadu_ps(from))
        }
        #[inline(always)]
        unsafe fn load_halves(from: *const u16) -> Self {
            F32x16(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            _mm512_storeu_ps(to, self.0);
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            F32x16(_mm512_add_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            F32x16(_mm512_sub_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            F32x16(_mm512_mul_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            F32x16(_mm512_fmadd_ps(self.0, b.0, c.0))
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            F32x16(_mm512_max_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn largest(self) -> f32 {
            _mm512_reduce_max_ps(self.0)
        }
        #[inline(always)]
        unsafe fn exp(self) -> Self {
            let x = self.0;
            let k = _mm512_sub_epi32(
                _mm512_castps_si512(_mm512_add_ps(
                    _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)),
                    _mm512_set1_ps(MAGIC),
                )),
                _mm512_castps_si512(_mm512_set1_ps(MAGIC)),
            );
            let kf = _mm512_cvtepi32_ps(k);
            let r = _mm512_fmadd_ps(kf, _mm512_set1_ps(-LN2_HIGH), x);
            let r = _mm512_fmadd_ps(kf, _mm512_set1_ps(-LN2_LOW), r);
            let mut p = _mm512_set1_ps(1.0 / 720.0);
            for coefficient in COEFFICIENTS {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
            }
            let scale = _mm512_slli_epi32::<23>(_mm512_add_epi32(k, _mm512_set1_epi32(127)));
            let value = _mm512_mul_ps(p, _mm512_castsi512_ps(scale));
            let low = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(-87.0));
            let value = _mm512_mask_blend_ps(low, value, _mm512_setzero_ps());
            let high = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_set1_ps(88.0));
            let value = _mm512_mask_blend_ps(high, value, _mm512_set1_ps(f32::INFINITY));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            F32x16(_mm512_mask_blend_ps(nan, value, x))
        }
        #[inline(always)]
        unsafe fn fold(self) -> f32 {
            let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            F32x8(_mm256_add_ps(_mm512_castps512_ps256(self.0), upper)).fold()
        }
    }

    /// 8 floats of AVX2.
    #[derive(Clone, Copy)]
    pub struct F32x8(__m256);

    // SAFETY: see the trait.
    #[allow(unsafe_op_in_unsafe_fn)]
    unsafe impl Vector for F32x8 {
        const N: usize = 8;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            F32x8(_mm256_set1_ps(value))
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            F32x8(_mm256_loadu_ps(from))
        }
        #[inline(always)]
        unsafe fn load_halves(from: *const u16) -> Self {
            F32x8(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            _mm256_storeu_ps(to, self.0);
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            F32x8(_mm256_add_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            F32x8(_mm256_sub_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            F32x8(_mm256_mul_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            F32x8(_mm256_fmadd_ps(self.0, b.0, c.0))
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            F32x8(_mm256_max_ps(self.0, other.0))
        }
        #[inline(always)]
        unsafe fn largest(self) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
        #[inline(always)]
        unsafe fn exp(self) -> Self {
            let x = self.0;
            let k = _mm256_sub_epi32(
                _mm256_castps_si256(_mm256_add_ps(
                    _mm256_mul_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E)),
                    _mm256_set1_ps(MAGIC),
                )),
                _mm256_castps_si256(_mm256_set1_ps(MAGIC)),
            );
            let kf = _mm256_cvtepi32_ps(k);
            let r = _mm256_fmadd_ps(kf, _mm256_set1_ps(-LN2_HIGH), x);
            let r = _mm256_fmadd_ps(kf, _mm256_set1_ps(-LN2_LOW), r);
            let mut p = _mm256_set1_ps(1.0 / 720.0);
            for coefficient in COEFFICIENTS {
                p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(coefficient));
            }
            let scale = _mm256_slli_epi32::<23>(_mm256_add_epi32(k, _mm256_set1_epi32(127)));
            let value = _mm256_mul_ps(p, _mm256_castsi256_ps(scale));
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(-87.0));
            let value = _mm256_andnot_ps(low, value);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_set1_ps(88.0));
            let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::INFINITY), high);
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
            F32x8(_mm256_blendv_ps(value, x, nan))
        }
        #[inline(always)]
        unsafe fn fold(self) -> f32 {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
