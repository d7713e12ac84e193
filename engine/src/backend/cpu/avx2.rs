//! The panel kernel on AVX2 with FMA and F16C: two vectors of eight rows.

use std::arch::x86_64::*;

use kiln_kernels::LANES;
use kiln_kernels::blocks::PART;

use super::kernel::Packing;
use super::panel::{BIASED_TABLE, Column, Partials, ROWS};

/// The products of a panel's rows with each column.
///
/// # Safety
/// `panel` must be `P::FORMAT.panel_bytes(parts)` long and each column `parts` parts; there must be as many results and
/// partials as columns. The processor must have the features.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn panel<P: Packing>(
    panel: &[u8],
    parts: usize,
    columns: &[Column<'_>],
    partials: &mut Partials,
    results: &mut [[f32; ROWS]],
) {
    let f = P::FORMAT;
    // Nibbles without a table are small enough for 16-bit sums of four products of pairs: 8 * 15 * 127 < 2^15. Others
    // are made signed, and their sign moved to the activations: a pair is then at most 2 * 128 * 127 < 2^15.
    let small = f.nibble && !f.table;
    let quants = panel.as_ptr();
    // SAFETY (of all pointers below): inside the panel or the column by the contract on their lengths.
    let meta = unsafe { quants.add(parts * f.quant_bytes()) };
    let low = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let sign = _mm256_set1_epi8(-128);
    // SAFETY: 16 bytes are there.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(BIASED_TABLE.as_ptr().cast()) });
    for index in 0..parts {
        for eight in 0..2 {
            // SAFETY: see above.
            unsafe {
                let meta = meta.add(index / f.shared * f.meta_bytes());
                let scale = _mm256_cvtph_ps(_mm_loadu_si128(meta.add(16 * eight).cast()));
                let min = if f.min {
                    _mm256_cvtph_ps(_mm_loadu_si128(meta.add(2 * ROWS + 16 * eight).cast()))
                } else {
                    _mm256_setzero_ps()
                };
                let factors = meta.add(f.scale_bytes() + index % f.shared * f.factor_bytes() + 8 * eight);
                let factor =
                    |line: usize| _mm256_cvtepi8_epi32(_mm_loadl_epi64(factors.add(line * ROWS).cast()));
                let second = f.halves as usize;
                let bytes = quants.add(index * f.quant_bytes() + 32 * eight);
                let mut w = [_mm256_setzero_si256(); 8];
                for (group, w) in w.iter_mut().enumerate() {
                    *w = if f.nibble {
                        let both = _mm256_loadu_si256(bytes.add(group % 4 * 64).cast());
                        let code = if group < 4 { both } else { _mm256_srli_epi16::<4>(both) };
                        let code = _mm256_and_si256(code, low);
                        if f.table { _mm256_xor_si256(_mm256_shuffle_epi8(table, code), sign) } else { code }
                    } else {
                        _mm256_xor_si256(_mm256_loadu_si256(bytes.add(group * 64).cast()), sign)
                    };
                }
                for (column, partial) in columns.iter().zip(&mut partials.0) {
                    let y = column.quants.as_ptr().add(index * PART);
                    let word =
                        |group: usize| _mm256_set1_epi32(y.add(4 * group).cast::<i32>().read_unaligned());
                    let y_scale = _mm256_set1_ps(*column.scales.get_unchecked(index));
                    let sums = *column.sums.get_unchecked(index);
                    let mut dots = [_mm256_setzero_si256(); 2];
                    for half in 0..2 {
                        let mut dot = _mm256_setzero_si256();
                        for (k, w) in w.iter().enumerate().skip(4 * half).take(4) {
                            if small {
                                dot = _mm256_add_epi16(dot, _mm256_maddubs_epi16(*w, word(k)));
                            } else {
                                let signed = _mm256_sign_epi8(word(k), *w);
                                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(*w), signed);
                                dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, ones));
                            }
                        }
                        if small {
                            dot = _mm256_madd_epi16(dot, ones);
                            if f.bias != 0 {
                                dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(f.bias * sums[half]));
                            }
                        }
                        dots[half] = dot;
                    }
                    let integer = if f.halves {
                        _mm256_add_epi32(
                            _mm256_mullo_epi32(factor(0), dots[0]),
                            _mm256_mullo_epi32(factor(1), dots[1]),
                        )
                    } else {
                        let dot = _mm256_add_epi32(dots[0], dots[1]);
                        if f.factors { _mm256_mullo_epi32(factor(0), dot) } else { dot }
                    };
                    let lane = partial.get_unchecked_mut(index % LANES).as_mut_ptr().add(8 * eight);
                    let p = if index < LANES { _mm256_setzero_ps() } else { _mm256_load_ps(lane) };
                    let mut p =
                        _mm256_fmadd_ps(_mm256_mul_ps(scale, y_scale), _mm256_cvtepi32_ps(integer), p);
                    if f.min {
                        let first = second + 1;
                        let integer = if f.halves {
                            _mm256_add_epi32(
                                _mm256_mullo_epi32(factor(first), _mm256_set1_epi32(sums[0])),
                                _mm256_mullo_epi32(factor(first + 1), _mm256_set1_epi32(sums[1])),
                            )
                        } else {
                            let sum = _mm256_set1_epi32(sums[0] + sums[1]);
                            if f.factors { _mm256_mullo_epi32(factor(first), sum) } else { sum }
                        };
                        p = _mm256_fmadd_ps(_mm256_mul_ps(min, y_scale), _mm256_cvtepi32_ps(integer), p);
                    }
                    _mm256_store_ps(lane, p);
                }
            }
        }
    }
    for (partial, result) in partials.0.iter().zip(results).take(columns.len()) {
        for eight in 0..2 {
            // Lanes without a part are +0, and were not written. SAFETY: a lane is 16 aligned floats.
            let lane = |lane: usize| {
                if lane < parts {
                    unsafe { _mm256_load_ps(partial[lane].as_ptr().add(8 * eight)) }
                } else {
                    _mm256_setzero_ps()
                }
            };
            let mut sums = [_mm256_setzero_ps(); LANES / 2];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm256_add_ps(lane(i), lane(i + LANES / 2));
            }
            let mut distance = LANES / 4;
            while distance > 0 {
                for i in 0..distance {
                    sums[i] = _mm256_add_ps(sums[i], sums[i + distance]);
                }
                distance /= 2;
            }
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(sums[0], sums[0]);
            let canonical = _mm256_blendv_ps(sums[0], _mm256_set1_ps(kiln_kernels::NAN), nan);
            // SAFETY: 8 of 16 floats.
            unsafe { _mm256_storeu_ps(result.as_mut_ptr().add(8 * eight), canonical) };
        }
    }
}
