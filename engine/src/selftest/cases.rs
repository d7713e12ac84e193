//! What the self-test computes: shapes, and data sets chosen to make mistakes visible.

use super::{RunError, Runner, Tally, reference};
use crate::rng::SplitMix64;

/// Lengths of a row: one block, less and more than a warp of blocks, lengths of real models, and one that leaves some
/// lanes a block more than others.
const LENGTHS: [usize; 6] = [32, 256, 1056, 2304, 4096, 8192];
/// Rows of a q8_0 matrix.
const ROWS: [usize; 3] = [1, 5, 64];
/// Rows of an rms norm.
const NORM_ROWS: usize = 3;
/// Lengths that are no multiple of 32, for operations on plain numbers.
const ODD_LENGTHS: [usize; 3] = [1, 33, 1000];
const SEEDS: [u64; 2] = [1, 2];
const EPS: f32 = 1e-5;
/// What outputs hold before a run, so that an element that is not written shows. No operation returns this NaN.
const POISON: f32 = f32::from_bits(0x7fa5_a5a5);

/// One row of the table: an operation and a shape.
#[derive(Debug, Clone, Copy)]
pub enum Group {
    /// A q8_0 matrix times q8 activations.
    Q8_0Rows { rows: usize, length: usize },
    /// An rms norm of [`NORM_ROWS`] rows.
    RmsNorm { length: usize },
    /// Quantising a vector.
    QuantizeQ8 { length: usize },
}

/// All rows of the table.
pub fn all() -> Vec<Group> {
    let mut groups = Vec::new();
    for length in LENGTHS {
        groups.extend(ROWS.map(|rows| Group::Q8_0Rows { rows, length }));
    }
    groups.extend(LENGTHS.into_iter().chain(ODD_LENGTHS).map(|length| Group::RmsNorm { length }));
    groups.extend(LENGTHS.map(|length| Group::QuantizeQ8 { length }));
    groups
}

impl Group {
    /// The operation's name.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Q8_0Rows { .. } => "q8_0_row",
            Self::RmsNorm { .. } => "rms_norm",
            Self::QuantizeQ8 { .. } => "quantize_q8",
        }
    }

    /// Rows times length.
    pub fn shape(self) -> String {
        match self {
            Self::Q8_0Rows { rows, length } => format!("{rows} x {length}"),
            Self::RmsNorm { length } => format!("{NORM_ROWS} x {length}"),
            Self::QuantizeQ8 { length } => format!("1 x {length}"),
        }
    }

    /// All cases of the group, with what the reference says.
    pub fn cases(self) -> impl Iterator<Item = Case> {
        Data::ALL.into_iter().flat_map(move |data| SEEDS.map(|seed| Case::new(self, data, seed)))
    }
}

/// A kind of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    /// Magnitudes as in a model.
    Plain,
    /// Exponents over the whole range: denormals, overflow.
    Wide,
    /// Large terms that cancel, and ties: the order of sums and the way of rounding show.
    Cancelling,
    /// Zeros of both signs, denormals, the largest numbers, infinities and NaNs among plain ones.
    Special,
}

impl Data {
    const ALL: [Self; 4] = [Self::Plain, Self::Wide, Self::Cancelling, Self::Special];
    const SPECIALS: [u32; 10] = [
        0x0000_0000,
        0x8000_0000,
        0x0000_0001,
        0x807f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0xffc1_2345,
    ];

    /// A number; `i` is its place.
    fn number(self, rng: &mut SplitMix64, i: usize) -> f32 {
        match self {
            Self::Plain => rng.signed_unit() * 3.0,
            Self::Wide => rng.finite(0..=190),
            // Ties in quantising: halves, with 127 once in each block of 32.
            Self::Cancelling if i.is_multiple_of(32) => 127.0,
            Self::Cancelling => (rng.below(507) as f32 - 253.0) / 2.0,
            Self::Special if rng.below(64) == 0 => f32::from_bits(Self::SPECIALS[rng.below(10) as usize]),
            Self::Special => rng.signed_unit(),
        }
    }

    /// The scale of activation block `i`.
    fn scale(self, rng: &mut SplitMix64, i: usize) -> f32 {
        match self {
            Self::Plain => (rng.signed_unit() + 1.5) * 0.01,
            // With the largest half and dot, the top of this range overflows.
            Self::Wide => rng.finite(0..=222).abs(),
            Self::Cancelling => {
                if i.is_multiple_of(2) {
                    1e6
                } else {
                    -1e6
                }
            }
            // Rarely, so that most rows stay numbers.
            Self::Special if rng.below(256) == 0 => f32::from_bits(Self::SPECIALS[rng.below(10) as usize]),
            Self::Special => rng.finite(0..=60).abs(),
        }
    }

    /// The f16 scale of a weight block.
    fn half(self, rng: &mut SplitMix64) -> u16 {
        match self {
            Self::Plain => 0x1400 + rng.below(0x1000) as u16,
            // Any finite half of either sign, denormals too.
            Self::Wide => rng.below(0x7c00) as u16 | (rng.below(2) as u16) << 15,
            Self::Cancelling => 0x3c00 + rng.below(8) as u16,
            Self::Special if rng.below(512) == 0 => [0x7c00, 0xfc00, 0x7e01, 0x8000][rng.below(4) as usize],
            Self::Special => rng.below(0x0800) as u16,
        }
    }

    fn byte(self, rng: &mut SplitMix64) -> i8 {
        match self {
            Self::Special if rng.below(4) == 0 => [-128, 127, 0, -1][rng.below(4) as usize],
            _ => rng.bits() as i8,
        }
    }
}

/// One computation and its right result.
pub struct Case {
    name: String,
    inputs: Inputs,
}

enum Inputs {
    Q8_0Rows { weights: Vec<u8>, quants: Vec<i8>, scales: Vec<f32>, want: Vec<f32> },
    RmsNorm { x: Vec<f32>, weight: Vec<f32>, want: Vec<f32> },
    QuantizeQ8 { x: Vec<f32>, want: (Vec<i8>, Vec<f32>) },
}

impl Case {
    fn new(group: Group, data: Data, seed: u64) -> Self {
        let name = format!("data {data:?}, seed {seed}").to_lowercase();
        // Another stream for each shape and data set.
        let mut rng = SplitMix64::new(seed ^ (data as u64) << 8 ^ (group.shape().len() as u64) << 16);
        let rng = &mut rng;
        let inputs = match group {
            Group::Q8_0Rows { rows, length } => {
                let blocks = length / 32;
                let mut weights = Vec::with_capacity(rows * blocks * 34);
                for _ in 0..rows * blocks {
                    weights.extend(data.half(rng).to_le_bytes());
                    weights.extend((0..32).map(|_| data.byte(rng) as u8));
                }
                let quants: Vec<i8> = (0..length).map(|_| data.byte(rng)).collect();
                let scales: Vec<f32> = (0..blocks).map(|i| data.scale(rng, i)).collect();
                let want = weights
                    .chunks(blocks * 34)
                    .map(|row| reference::q8_0_row(row, &quants, &scales))
                    .collect();
                Inputs::Q8_0Rows { weights, quants, scales, want }
            }
            Group::RmsNorm { length } => {
                let mut x: Vec<f32> = (0..NORM_ROWS * length).map(|i| data.number(rng, i)).collect();
                if data == Data::Special {
                    // A row of denormals, whose squares are zero.
                    x[..length].fill_with(|| rng.finite(0..=0));
                }
                let weight: Vec<f32> = (0..length).map(|_| rng.signed_unit() + 1.0).collect();
                let want = x.chunks(length).flat_map(|x| reference::rms_norm(x, &weight, EPS)).collect();
                Inputs::RmsNorm { x, weight, want }
            }
            Group::QuantizeQ8 { length } => {
                let x: Vec<f32> = (0..length).map(|i| data.number(rng, i)).collect();
                let want = reference::quantize_q8(&x);
                Inputs::QuantizeQ8 { x, want }
            }
        };
        Self { name, inputs }
    }

    /// Lets `runner` compute the case and counts the differences.
    pub fn compare(&self, runner: &mut dyn Runner, tally: &mut Tally) {
        if let Err(error) = self.try_compare(runner, tally) {
            tally.error(&self.name, &error);
        }
    }

    fn try_compare(&self, runner: &mut dyn Runner, tally: &mut Tally) -> Result<(), RunError> {
        match &self.inputs {
            Inputs::Q8_0Rows { weights, quants, scales, want } => {
                let mut got = vec![POISON; want.len()];
                runner.q8_0_rows(weights, quants, scales, &mut got)?;
                tally.floats(&self.name, want, &got);
            }
            Inputs::RmsNorm { x, weight, want } => {
                let mut got = vec![POISON; want.len()];
                runner.rms_norm(x, weight, EPS, &mut got)?;
                tally.floats(&self.name, want, &got);
            }
            Inputs::QuantizeQ8 { x, want } => {
                let (mut quants, mut scales) = (vec![-128; x.len()], vec![POISON; x.len() / 32]);
                runner.quantize_q8(x, &mut quants, &mut scales)?;
                tally.bytes(&self.name, &want.0, &quants);
                tally.floats(&self.name, &want.1, &scales);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data that makes every result infinite or NaN would hide mistakes.
    #[test]
    fn most_results_of_each_data_set_are_ordinary_numbers_that_differ() {
        for data in Data::ALL {
            for length in LENGTHS {
                let Inputs::Q8_0Rows { want, .. } =
                    Case::new(Group::Q8_0Rows { rows: 64, length }, data, 1).inputs
                else {
                    unreachable!()
                };
                let mut bits: Vec<u32> =
                    want.iter().filter(|v| v.is_finite() && **v != 0.0).map(|v| v.to_bits()).collect();
                bits.sort_unstable();
                bits.dedup();
                assert!(bits.len() >= 32, "{data:?} {length}: {} of 64", bits.len());
            }
        }
    }
}
