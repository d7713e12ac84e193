//! A feed-forward block of which each token takes a few of many experts, by the plain walks: the definition that every
//! other path must equal bit for bit.
//!
//! Slow: one row after another, on one thread. Nothing of the forward pass uses it.

use kiln_kernels::{Host, Q8_BLOCK, Q8Activations, experts, math, quantize_q8};

use crate::gguf::TensorType;
use crate::quant;

/// As many matrices as there are experts, one after another, as a file holds them.
#[derive(Clone, Copy, Debug)]
pub struct Stack<'a> {
    kind: TensorType,
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
}

impl<'a> Stack<'a> {
    /// Matrices of `rows` rows of `columns` elements; `None` unless `bytes` is a whole number of them.
    pub fn new(kind: TensorType, rows: usize, columns: usize, bytes: &'a [u8]) -> Option<Stack<'a>> {
        let each = kind.row_bytes(columns)?.checked_mul(rows)?;
        (each > 0 && bytes.len().is_multiple_of(each)).then_some(Stack { kind, rows, columns, bytes })
    }

    /// The products of an expert's rows with one column.
    fn products(&self, expert: usize, x: &[f32]) -> Vec<f32> {
        assert_eq!(x.len(), self.columns, "a column for these matrices");
        let (mut quants, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / Q8_BLOCK]);
        let whole = scales.len() * Q8_BLOCK;
        quantize_q8(Host, &x[..whole], &mut quants[..whole], &mut scales);
        let Some(quantised) = Q8Activations::new(&quants[..whole], &scales) else {
            unreachable!("a scale for each block")
        };
        let row_bytes = self.kind.row_bytes(self.columns).unwrap_or(0);
        let start = expert * self.rows * row_bytes;
        self.bytes[start..start + self.rows * row_bytes]
            .chunks_exact(row_bytes)
            .map(|row| quant::row_dot(self.kind, row, x, quantised))
            .collect()
    }
}

/// A feed-forward block: gate and up matrices of I rows of W elements, down matrices of N rows of I elements.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Gate matrices.
    pub gate: Stack<'a>,
    /// Up matrices.
    pub up: Stack<'a>,
    /// Down matrices.
    pub down: Stack<'a>,
    /// What the gate goes through.
    pub activation: math::Gate,
    /// The clamp of [`math::gated`]; infinity: none.
    pub limit: f32,
}

/// What a block makes of some tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// The gated products: I numbers for each selection.
    pub gated: Vec<f32>,
    /// The down products: N numbers for each selection.
    pub products: Vec<f32>,
    /// Their combinations: N numbers for each token.
    pub out: Vec<f32>,
}

impl Block<'_> {
    /// Runs the tokens whose columns of W elements are `x`. Each takes `used` experts: selection `s`, of the expert
    /// `experts[s]` with `weights[s]`, is number `s % used` of token `s / used`.
    ///
    /// # Panics
    /// If a length does not agree or there is no such expert.
    pub fn run(&self, x: &[f32], used: usize, experts: &[u32], weights: &[f32]) -> Made {
        let tokens = x.len() / self.gate.columns;
        assert_eq!(
            (experts.len(), weights.len()),
            (tokens * used, tokens * used),
            "a selection for each slot"
        );
        let mut made = Made { gated: Vec::new(), products: Vec::new(), out: Vec::new() };
        for (token, x) in x.chunks_exact(self.gate.columns).enumerate() {
            for expert in &experts[token * used..(token + 1) * used] {
                let (gate, up) =
                    (self.gate.products(*expert as usize, x), self.up.products(*expert as usize, x));
                let pairs = gate.into_iter().zip(up);
                let gated: Vec<f32> =
                    pairs.map(|(g, u)| math::gated(Host, self.activation, g, u, self.limit)).collect();
                made.products.extend(self.down.products(*expert as usize, &gated));
                made.gated.extend(gated);
            }
            let rows = self.down.rows;
            made.out.extend((0..rows).map(|row| {
                experts::combine(Host, used, |slot| {
                    let selection = token * used + slot;
                    (weights[selection], made.products[selection * rows + row])
                })
            }));
        }
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of random blocks with small scales, and what they are in double precision.
    fn stack(kind: TensorType, seed: u64, rows: usize, columns: usize) -> (Vec<u8>, Vec<f64>) {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u8
        };
        let row_bytes = kind.row_bytes(columns).expect("whole blocks");
        let mut bytes: Vec<u8> = (0..rows * row_bytes).map(|_| next()).collect();
        for block in bytes.chunks_exact_mut(kind.block_bytes()) {
            if kind == TensorType::F32 {
                let value = f32::from(block[0]) / 1024.0 - 0.125;
                block.copy_from_slice(&value.to_le_bytes());
            } else {
                block[1] = block[1] & 3 | if kind == TensorType::Q4_0 { 0x24 } else { 0x14 };
            }
        }
        let mut values = vec![0.0; rows * columns];
        for (row, out) in bytes.chunks_exact(row_bytes).zip(values.chunks_exact_mut(columns)) {
            quant::decode(kind, row, out);
        }
        (bytes, values.into_iter().map(f64::from).collect())
    }

    fn product(values: &[f64], x: &[f64]) -> Vec<f64> {
        values.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }

    fn check(kind: TensorType, down_kind: TensorType, limit: f32, tolerance: f64) {
        let (experts, width, inner, rows, used) = (5, 64, 96, 32, 3);
        let (gate, wide_gate) = stack(kind, 1, experts * inner, width);
        let (up, wide_up) = stack(kind, 2, experts * inner, width);
        let (down, wide_down) = stack(down_kind, 3, experts * rows, inner);
        let block = Block {
            gate: Stack::new(kind, inner, width, &gate).expect("whole"),
            up: Stack::new(kind, inner, width, &up).expect("whole"),
            down: Stack::new(down_kind, rows, inner, &down).expect("whole"),
            activation: math::Gate::Silu,
            limit,
        };
        let x: Vec<f32> = (0..2 * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 10.0).collect();
        let (chosen, weights) = ([4, 0, 2, 1, 4, 3], [0.5f32, 0.3, 0.2, 0.9, -0.4, 0.1]);
        let made = block.run(&x, used, &chosen, &weights);
        let bound = f64::from(limit);
        let mut clamps = 0;
        for (token, x) in x.chunks_exact(width).enumerate() {
            let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let mut want = vec![0.0; rows];
            for slot in 0..used {
                let expert = chosen[token * used + slot] as usize;
                let of = |values: &[f64], rows: usize, x: &[f64]| {
                    let each = rows * x.len();
                    product(&values[expert * each..(expert + 1) * each], x)
                };
                let (gate, up) = (of(&wide_gate, inner, &x), of(&wide_up, inner, &x));
                let gated: Vec<f64> = gate
                    .iter()
                    .zip(&up)
                    .map(|(g, u)| {
                        clamps += usize::from(*g > bound) + usize::from(u.abs() > bound);
                        let g = g.min(bound);
                        g / (1.0 + (-g).exp()) * u.clamp(-bound, bound)
                    })
                    .collect();
                for (want, product) in want.iter_mut().zip(of(&wide_down, rows, &gated)) {
                    *want += f64::from(weights[token * used + slot]) * product;
                }
            }
            let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
            for (got, want) in made.out[token * rows..].iter().zip(&want) {
                assert!(
                    (f64::from(*got) - want).abs() <= tolerance * largest,
                    "{kind} {limit}: {got} {want}"
                );
            }
        }
        assert_eq!(clamps > 0, limit.is_finite(), "the clamp is tested only if it acts");
    }

    #[test]
    fn a_block_is_close_to_double_precision_with_and_without_a_clamp() {
        for limit in [f32::INFINITY, 10.0, 0.5] {
            check(TensorType::F32, TensorType::F32, limit / 8.0, 1e-5);
            // The activations are rounded to 8 bits twice.
            check(TensorType::Q8_0, TensorType::Q8_0, limit / 8.0, 5e-2);
            check(TensorType::Q4_0, TensorType::F32, limit / 8.0, 5e-2);
        }
    }

    #[test]
    fn the_order_of_slots_decides_the_bits_and_that_of_tokens_does_not() {
        let kind = TensorType::Q8_0;
        let (gate, _) = stack(kind, 1, 3 * 32, 64);
        let (down, _) = stack(kind, 2, 3 * 64, 32);
        let matrices = Stack::new(kind, 32, 64, &gate).expect("whole");
        let block = Block {
            gate: matrices,
            up: matrices,
            down: Stack::new(kind, 64, 32, &down).expect("whole"),
            activation: math::Gate::GeluTanh,
            limit: 10.0,
        };
        let x: Vec<f32> = (0..128).map(|i| (i as f32).sin()).collect();
        let one = block.run(&x, 3, &[0, 1, 2, 2, 0, 1], &[0.3, 0.7, 0.1, 0.2, 0.9, 0.4]);
        let swapped = block.run(&x, 3, &[2, 1, 0, 2, 0, 1], &[0.1, 0.7, 0.3, 0.2, 0.9, 0.4]);
        assert_ne!(one.out[..64], swapped.out[..64]);
        assert_eq!(one.out[64..], swapped.out[64..]);
        let turned: Vec<f32> = [&x[64..], &x[..64]].concat();
        let other = block.run(&turned, 3, &[2, 0, 1, 0, 1, 2], &[0.2, 0.9, 0.4, 0.3, 0.7, 0.1]);
        assert_eq!([&other.out[64..], &other.out[..64]].concat(), one.out);
    }

    #[test]
    fn stacks_are_whole_matrices() {
        assert!(Stack::new(TensorType::Q8_0, 2, 32, &[0; 3 * 2 * 34]).is_some());
        assert!(Stack::new(TensorType::Q8_0, 2, 32, &[0; 3 * 34]).is_none());
        assert!(Stack::new(TensorType::Q4K, 2, 32, &[0; 144]).is_none());
    }
}
