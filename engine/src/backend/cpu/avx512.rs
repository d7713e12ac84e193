//! The panel kernel on AVX-512 with VNNI: a vector holds a number of each of 16 rows.

use std::arch::x86_64::*;

use kiln_kernels::LANES;
use kiln_kernels::blocks::PART;

use super::kernel::Packing;
use super::panel::{BIASED_TABLE, Column, Partials, ROWS};

/// How far ahead of the quants in use to prefetch, in bytes.
const AHEAD: usize = 2048;

/// The products of a panel's rows with each column.
///
/// # Safety
/// `panel` must be `P::FORMAT.panel_bytes(parts)` long and each column `parts` parts; there must be as many results and
/// partials as columns. The processor must have the features.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn panel<P: Packing>(
    panel: &[u8],
    parts: usize,
    columns: &[Column<'_>],
    partials: &mut Partials,
    results: &mut [[f32; ROWS]],
) {
    let f = P::FORMAT;
    let quants = panel.as_ptr();
    // SAFETY (of all pointers below): inside the panel or the column by the contract on their lengths.
    let meta = unsafe { quants.add(parts * f.quant_bytes()) };
    let low = _mm512_set1_epi8(15);
    // SAFETY: 16 bytes are there.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(BIASED_TABLE.as_ptr().cast()) });
    for index in 0..parts {
        // SAFETY: see above.
        unsafe {
            let meta = meta.add(index / f.shared * f.meta_bytes());
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(meta.cast()));
            let min = if f.min {
                _mm512_cvtph_ps(_mm256_loadu_si256(meta.add(2 * ROWS).cast()))
            } else {
                _mm512_setzero_ps()
            };
            let factors = meta.add(f.scale_bytes() + index % f.shared * f.factor_bytes());
            let factor = |line: usize| _mm512_cvtepi8_epi32(_mm_loadu_si128(factors.add(line * ROWS).cast()));
            let second = f.halves as usize;
            let bytes = quants.add(index * f.quant_bytes());
            // What is read in a moment, beyond the end of this panel that of the next: the processor's own prefetching
            // stops at pages of 4 KiB. An address that is not mapped is ignored.
            for line in 0..f.quant_bytes() / 64 {
                _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(AHEAD + 64 * line).cast());
            }
            let mut w = [_mm512_setzero_si512(); 8];
            for (group, w) in w.iter_mut().enumerate() {
                *w = if f.nibble {
                    let both = _mm512_loadu_si512(bytes.add(group % 4 * 64).cast());
                    let code =
                        _mm512_and_si512(if group < 4 { both } else { _mm512_srli_epi16::<4>(both) }, low);
                    if f.table { _mm512_shuffle_epi8(table, code) } else { code }
                } else {
                    _mm512_loadu_si512(bytes.add(group * 64).cast())
                };
            }
            for (column, partial) in columns.iter().zip(&mut partials.0) {
                let y = column.quants.as_ptr().add(index * PART);
                let word = |group: usize| _mm512_set1_epi32(y.add(4 * group).cast::<i32>().read_unaligned());
                let y_scale = _mm512_set1_ps(*column.scales.get_unchecked(index));
                let sums = *column.sums.get_unchecked(index);
                let total = || _mm512_set1_epi32(*column.totals.get_unchecked(index));
                // The dots of the stored quants, less the bias times the sum, are the dots of the quants.
                let mut dots = if f.halves && f.bias != 0 {
                    sums.map(|sum| _mm512_set1_epi32(-f.bias * sum))
                } else {
                    [_mm512_setzero_si512(); 2]
                };
                for k in 0..4 {
                    dots[0] = _mm512_dpbusd_epi32(dots[0], w[k], word(k));
                    dots[1] = _mm512_dpbusd_epi32(dots[1], w[k + 4], word(k + 4));
                }
                let integer = if f.halves {
                    _mm512_add_epi32(
                        _mm512_mullo_epi32(factor(0), dots[0]),
                        _mm512_mullo_epi32(factor(1), dots[1]),
                    )
                } else {
                    let mut dot = _mm512_add_epi32(dots[0], dots[1]);
                    if f.bias != 0 {
                        dot = _mm512_sub_epi32(dot, _mm512_mullo_epi32(total(), _mm512_set1_epi32(f.bias)));
                    }
                    if f.factors { _mm512_mullo_epi32(factor(0), dot) } else { dot }
                };
                let lane = partial.get_unchecked_mut(index % LANES).as_mut_ptr();
                let p = if index < LANES { _mm512_setzero_ps() } else { _mm512_load_ps(lane) };
                let mut p = _mm512_fmadd_ps(_mm512_mul_ps(scale, y_scale), _mm512_cvtepi32_ps(integer), p);
                if f.min {
                    let first = second + 1;
                    let integer = if f.halves {
                        _mm512_add_epi32(
                            _mm512_mullo_epi32(factor(first), _mm512_set1_epi32(sums[0])),
                            _mm512_mullo_epi32(factor(first + 1), _mm512_set1_epi32(sums[1])),
                        )
                    } else {
                        let sum = total();
                        if f.factors { _mm512_mullo_epi32(factor(first), sum) } else { sum }
                    };
                    p = _mm512_fmadd_ps(_mm512_mul_ps(min, y_scale), _mm512_cvtepi32_ps(integer), p);
                }
                _mm512_store_ps(lane, p);
            }
        }
    }
    for (partial, result) in partials.0.iter().zip(results).take(columns.len()) {
        // Lanes without a part are +0, and were not written. SAFETY: a lane is 16 aligned floats.
        let lane = |lane: usize| {
            if lane < parts { unsafe { _mm512_load_ps(partial[lane].as_ptr()) } } else { _mm512_setzero_ps() }
        };
        let mut sums = [_mm512_setzero_ps(); LANES / 2];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = _mm512_add_ps(lane(i), lane(i + LANES / 2));
        }
        let mut distance = LANES / 4;
        while distance > 0 {
            for i in 0..distance {
                sums[i] = _mm512_add_ps(sums[i], sums[i + distance]);
            }
            distance /= 2;
        }
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums[0], sums[0]);
        let canonical = _mm512_mask_blend_ps(nan, sums[0], _mm512_set1_ps(kiln_kernels::NAN));
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(result.as_mut_ptr(), canonical) };
    }
}
