//! The panel kernel on NEON: four vectors of four rows.

use std::arch::aarch64::*;

use kiln_kernels::LANES;
use kiln_kernels::blocks::PART;

use super::kernel::Packing;
use super::panel::{BIASED_TABLE, Column, Partials, ROWS};

/// The products of a panel's rows with each column.
///
/// # Safety
/// `panel` must be `P::FORMAT.panel_bytes(parts)` long and each column `parts` parts; there must be as many results and
/// partials as columns.
#[target_feature(enable = "neon")]
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
    let low = vdupq_n_u8(15);
    // Signed: what the table's codes stand for, or the difference to the stored number.
    let bias = vdupq_n_u8(f.bias as u8);
    // SAFETY: 16 bytes are there.
    let table = unsafe { vld1q_u8(BIASED_TABLE.as_ptr()) };
    for index in 0..parts {
        for four in 0..4 {
            // SAFETY: see above.
            unsafe {
                let meta = meta.add(index / f.shared * f.meta_bytes());
                let scale = halves(meta.add(8 * four));
                let min = if f.min { halves(meta.add(2 * ROWS + 8 * four)) } else { vdupq_n_f32(0.0) };
                let factors = meta.add(f.scale_bytes() + index % f.shared * f.factor_bytes() + 4 * four);
                let factor = |line: usize| {
                    let bytes = factors.add(line * ROWS).cast::<u32>().read_unaligned();
                    vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)))))
                };
                let second = f.halves as usize;
                let bytes = quants.add(index * f.quant_bytes() + 16 * four);
                let mut w = [vdupq_n_s8(0); 8];
                for (group, w) in w.iter_mut().enumerate() {
                    let stored = if f.nibble {
                        let both = vld1q_u8(bytes.add(group % 4 * 64));
                        let code = if group < 4 { vandq_u8(both, low) } else { vshrq_n_u8::<4>(both) };
                        if f.table { vqtbl1q_u8(table, code) } else { code }
                    } else {
                        vld1q_u8(bytes.add(group * 64))
                    };
                    *w = vreinterpretq_s8_u8(vsubq_u8(stored, bias));
                }
                for (column, partial) in columns.iter().zip(&mut partials.0) {
                    let y = column.quants.as_ptr().add(index * PART);
                    let y_scale = vdupq_n_f32(*column.scales.get_unchecked(index));
                    let sums = *column.sums.get_unchecked(index);
                    let mut dots = [vdupq_n_s32(0); 2];
                    for (group, w) in w.iter().enumerate() {
                        let word = y.add(4 * group).cast::<u32>().read_unaligned();
                        let y = vreinterpretq_s8_u32(vdupq_n_u32(word));
                        // Four products a row: widened, and added in pairs twice.
                        let first = vmull_s8(vget_low_s8(*w), vget_low_s8(y));
                        let last = vmull_s8(vget_high_s8(*w), vget_high_s8(y));
                        let pairs = vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(last));
                        dots[group / 4] = vaddq_s32(dots[group / 4], pairs);
                    }
                    let integer = if f.halves {
                        vaddq_s32(vmulq_s32(factor(0), dots[0]), vmulq_s32(factor(1), dots[1]))
                    } else {
                        let dot = vaddq_s32(dots[0], dots[1]);
                        if f.factors { vmulq_s32(factor(0), dot) } else { dot }
                    };
                    let lane = partial.get_unchecked_mut(index % LANES).as_mut_ptr().add(4 * four);
                    let p = if index < LANES { vdupq_n_f32(0.0) } else { vld1q_f32(lane) };
                    let mut p = vfmaq_f32(p, vmulq_f32(scale, y_scale), vcvtq_f32_s32(integer));
                    if f.min {
                        let first = second + 1;
                        let integer = if f.halves {
                            vaddq_s32(
                                vmulq_s32(factor(first), vdupq_n_s32(sums[0])),
                                vmulq_s32(factor(first + 1), vdupq_n_s32(sums[1])),
                            )
                        } else {
                            let sum = vdupq_n_s32(sums[0] + sums[1]);
                            if f.factors { vmulq_s32(factor(first), sum) } else { sum }
                        };
                        p = vfmaq_f32(p, vmulq_f32(min, y_scale), vcvtq_f32_s32(integer));
                    }
                    vst1q_f32(lane, p);
                }
            }
        }
    }
    for (partial, result) in partials.0.iter().zip(results).take(columns.len()) {
        for four in 0..4 {
            // Lanes without a part are +0, and were not written. SAFETY: a lane is 16 floats.
            let lane = |lane: usize| {
                if lane < parts {
                    unsafe { vld1q_f32(partial[lane].as_ptr().add(4 * four)) }
                } else {
                    vdupq_n_f32(0.0)
                }
            };
            let mut sums = [vdupq_n_f32(0.0); LANES / 2];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = vaddq_f32(lane(i), lane(i + LANES / 2));
            }
            let mut distance = LANES / 4;
            while distance > 0 {
                for i in 0..distance {
                    sums[i] = vaddq_f32(sums[i], sums[i + distance]);
                }
                distance /= 2;
            }
            let number = vceqq_f32(sums[0], sums[0]);
            let canonical = vbslq_f32(number, sums[0], vdupq_n_f32(kiln_kernels::NAN));
            // SAFETY: 4 of 16 floats.
            unsafe { vst1q_f32(result.as_mut_ptr().add(4 * four), canonical) };
        }
    }
}

/// Four halves as floats.
///
/// # Safety
/// 8 bytes must be there.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn halves(from: *const u8) -> float32x4_t {
    use kiln_kernels::{Arith, Host};
    // SAFETY: by the contract.
    let bits: [u16; 4] = unsafe { from.cast::<[u16; 4]>().read_unaligned() };
    let floats = bits.map(|half| Host.f16_to_f32(u16::from_le(half)));
    // SAFETY: four floats.
    unsafe { vld1q_f32(floats.as_ptr()) }
}
