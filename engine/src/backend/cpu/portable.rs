//! The panel kernel in plain Rust: 16 rows in an array, which compilers vectorise (on AArch64 into NEON).

use kiln_kernels::blocks::PART;
use kiln_kernels::{Arith, Host, LANES, canonical};

use super::kernel::Packing;
use super::panel::{BIASED_TABLE, Column, Partials, ROWS};

/// The products of a panel's rows with each column.
#[inline(always)]
pub fn panel<P: Packing>(
    panel: &[u8],
    parts: usize,
    columns: &[Column<'_>],
    partials: &mut Partials,
    results: &mut [[f32; ROWS]],
) {
    let f = P::FORMAT;
    let (quants, meta) = panel.split_at(parts * f.quant_bytes());
    for partial in &mut partials.0[..columns.len()] {
        *partial = [[0.0; ROWS]; LANES];
    }
    for index in 0..parts {
        let meta = &meta[index / f.shared * f.meta_bytes()..][..f.meta_bytes()];
        let halves = |at: usize| -> [f32; ROWS] {
            std::array::from_fn(|row| {
                Host.f16_to_f32(u16::from_le_bytes([meta[at + 2 * row], meta[at + 2 * row + 1]]))
            })
        };
        let scale = halves(0);
        let min = if f.min { halves(2 * ROWS) } else { [0.0; ROWS] };
        let factors = &meta[f.scale_bytes() + index % f.shared * f.factor_bytes()..][..f.factor_bytes()];
        let factor = |line: usize, row: usize| {
            if f.factors { i32::from(factors[line * ROWS + row] as i8) } else { 1 }
        };
        let second = usize::from(f.halves);
        let bytes = &quants[index * f.quant_bytes()..][..f.quant_bytes()];
        // Unpacked as signed: [group][row][byte].
        let mut weights = [[[0i8; 4]; ROWS]; PART / 4];
        for group in 0..PART / 4 {
            for row in 0..ROWS {
                for k in 0..4 {
                    let stored = if !f.nibble {
                        bytes[(group * ROWS + row) * 4 + k]
                    } else {
                        let code = bytes[(group % 4 * ROWS + row) * 4 + k] >> (group / 4 * 4) & 15;
                        if f.table { BIASED_TABLE[usize::from(code)] } else { code }
                    };
                    weights[group][row][k] = (i32::from(stored) - f.bias) as i8;
                }
            }
        }
        for (column, partial) in columns.iter().zip(&mut partials.0) {
            let y = &column.quants[index * PART..(index + 1) * PART];
            let y_scale = column.scales[index];
            let sums = column.sums[index];
            let mut dots = [[0i32; ROWS]; 2];
            for group in 0..PART / 4 {
                for row in 0..ROWS {
                    let mut dot = 0;
                    for k in 0..4 {
                        dot += i32::from(weights[group][row][k]) * i32::from(y[4 * group + k]);
                    }
                    dots[group / 4][row] += dot;
                }
            }
            let lane = &mut partial[index % LANES];
            for row in 0..ROWS {
                let integer = factor(0, row) * dots[0][row] + factor(second, row) * dots[1][row];
                let p = Host.fma(Host.mul(scale[row], y_scale), Host.i32_to_f32(integer), lane[row]);
                lane[row] = if f.min {
                    let first = second + 1;
                    let integer = factor(first, row) * sums[0] + factor(first + second, row) * sums[1];
                    Host.fma(Host.mul(min[row], y_scale), Host.i32_to_f32(integer), p)
                } else {
                    p
                };
            }
        }
    }
    for (partial, result) in partials.0.iter_mut().zip(results.iter_mut()).take(columns.len()) {
        let mut distance = LANES / 2;
        while distance > 0 {
            for lane in 0..distance {
                let upper = partial[lane + distance];
                for (p, q) in partial[lane].iter_mut().zip(upper) {
                    *p = Host.add(*p, q);
                }
            }
            distance /= 2;
        }
        *result = partial[0].map(canonical);
    }
}
