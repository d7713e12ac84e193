//! Every level against the plain walk, bit for bit.

use kiln_kernels::{Host, Q8Activations, quantize_q8};

use super::attend::Heads;
use super::kernel::{self, Level};
use super::panel::{self, COLUMNS, Column, Format, Partials, ROWS};
use crate::gguf::TensorType;
use crate::quant;

fn quantised_types() -> impl Iterator<Item = TensorType> {
    TensorType::ALL.into_iter().filter(|kind| kind.is_quantised())
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }
}

/// Rows of random bytes; `wild` keeps the scales as they come (infinities, NaNs and denormals among them).
fn random_rows(rng: &mut Rng, kind: TensorType, rows: usize, columns: usize, wild: bool) -> Vec<u8> {
    let row_bytes = kind.row_bytes(columns).unwrap_or(0);
    let mut bytes: Vec<u8> = (0..rows * row_bytes).map(|_| rng.next() as u8).collect();
    let (scale, min) = kind.half_places().expect("quantised");
    let places = [scale].into_iter().chain(min);
    if !wild {
        for block in bytes.chunks_exact_mut(kind.block_bytes()) {
            for place in places.clone() {
                block[place + 1] = block[place + 1] & 0x83 | 0x14 | (rng.next() as u8 & 8);
            }
        }
    }
    bytes
}

#[test]
fn every_level_has_the_bits_of_the_plain_walk() {
    let mut rng = Rng(11);
    let mut partials = Partials::boxed();
    for kind in quantised_types() {
        for (parts, wild) in [(8, false), (8, true), (16, false), (24, true), (72, false), (256, false)] {
            if kind.row_bytes(parts * 32).is_none() {
                continue;
            }
            let rows = if parts == 16 { 5 } else { ROWS };
            let bytes = random_rows(&mut rng, kind, rows, parts * 32, wild);
            let Some(format) = Format::of(kind) else { continue };
            let Ok(mut packed) = panel::Arena::new(format.panel_bytes(parts)) else { panic!("memory") };
            panel::pack(kind, &bytes, parts, packed.bytes_mut());
            let columns: Vec<_> = (0..COLUMNS)
                .map(|column| {
                    let spread = if column == 1 { 1e30 } else { 1.0 };
                    let x: Vec<f32> =
                        (0..parts * 32).map(|_| (rng.next() as i32 as f32) * 1e-9 * spread).collect();
                    let (mut quants, mut scales) = (vec![0; parts * 32], vec![0.0; parts]);
                    let mut sums = vec![[0; 2]; parts];
                    let mut totals = vec![0; parts];
                    kernel::quantise(Level::PORTABLE, &x, &mut quants, &mut scales, &mut sums, &mut totals);
                    (quants, scales, sums, totals)
                })
                .collect();
            for count in [1, 3, COLUMNS] {
                let views: Vec<Column<'_>> = columns[..count]
                    .iter()
                    .map(|(quants, scales, sums, totals)| Column { quants, scales, sums, totals })
                    .collect();
                for level in Level::detected() {
                    let mut results = [[9.0; ROWS]; COLUMNS];
                    kernel::panel(level, kind, packed.bytes(), parts, &views, &mut partials, &mut results);
                    for (column, view) in views.iter().enumerate() {
                        let Some(x) = Q8Activations::new(view.quants, view.scales) else { panic!("lengths") };
                        for (row, bytes) in bytes.chunks_exact(bytes.len() / rows).enumerate() {
                            let want = quant::row_dot(kind, bytes, &[], x);
                            let got = results[column][row];
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{level} {kind} parts {parts} column {column} of {count} row {row}: {got} {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn float_walks_have_the_same_bits_on_every_level() {
    let mut rng = Rng(5);
    let x: Vec<f32> = (0..777).map(|_| rng.next() as i32 as f32 * 1e-9).collect();
    let up: Vec<f32> = (0..777).map(|_| rng.next() as i32 as f32 * 1e-8).collect();
    let row: Vec<u8> = (0..777 * 4).map(|_| (rng.next() as u8) & 0xbf).collect();
    let halves: Vec<u16> = (0..128 * 300).map(|_| rng.next() as u16 & 0xbbff).collect();
    let all = |level: Level| {
        let mut out = vec![0.0; 777];
        kernel::rms_norm(level, &x, &up, 1e-5, &mut out);
        let mut gate = x.clone();
        kernel::silu_times(level, &mut gate, &up);
        out.extend(gate);
        let mut gate = x.clone();
        kernel::gelu_times(level, &mut gate, &up);
        out.extend(gate);
        out.push(kernel::float_row(level, TensorType::F32, &row, &x));
        out.push(kernel::float_row(level, TensorType::F16, &row[..777 * 2], &x));
        out.push(kernel::float_row(level, TensorType::Bf16, &row[..777 * 2], &x));
        for (width, positions, heads) in
            [(64, 50, 1), (64, 33, 3), (128, 7, 4), (128, 300, 2), (32, 65, 2), (96, 9, 1)]
        {
            let mut scores = vec![0.0; heads * positions];
            let mut partials = vec![0.0; heads * 32 * width];
            let mut attended = vec![0.0; heads * width];
            let view = Heads {
                queries: &x[..heads * width],
                keys: &halves[..positions * width],
                values: &halves[..positions * width],
                width,
                scale: 0.125,
            };
            kernel::attend(level, view, positions, &mut scores, &mut partials, &mut attended);
            out.extend(attended);
        }
        let (mut quants, mut scales, mut sums) = (vec![0; 768], vec![0.0; 24], vec![[0; 2]; 24]);
        let mut totals = vec![0; 24];
        kernel::quantise(level, &x[..768], &mut quants, &mut scales, &mut sums, &mut totals);
        out.extend(scales);
        out.extend(quants.iter().map(|q| f32::from(*q)));
        out.extend(sums.iter().map(|s| (s[0] * 7 + s[1]) as f32));
        out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    let want = all(Level::PORTABLE);
    for level in Level::detected() {
        assert!(all(level) == want, "{level}");
    }
    let (mut quants, mut scales) = (vec![0; 768], vec![0.0; 24]);
    quantize_q8(Host, &x[..768], &mut quants, &mut scales);
    let tail = &want[want.len() - 24 - 768 - 24..];
    assert!(scales.iter().zip(tail).all(|(scale, bits)| scale.to_bits() == *bits));
}

#[test]
fn after_a_panic_in_a_job_a_step_is_refused() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::{Cpu, Options};
    use crate::Error;
    use crate::backend::{Backend as _, Wanted};
    use crate::model::Model;

    let model = Model::from_gguf(crate::builtin().expect("built in")).expect("a model");
    let mut cpu = Cpu::load(model, Options::new(8, 2)).expect("it loads");
    cpu.run(&[1], 0, Wanted::Last).expect("a step");
    let caught = catch_unwind(AssertUnwindSafe(|| cpu.pool.for_each(8, 1, |_, _| panic!("seeded"))));
    assert!(caught.is_err());
    let error = cpu.run(&[1], 1, Wanted::Last).expect_err("refused");
    assert!(matches!(error, Error::Poisoned), "{error}");
}

#[test]
fn a_panel_of_half_a_super_block_is_refused_on_every_level() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    for kind in quantised_types() {
        let Some(format) = Format::of(kind) else { continue };
        let parts = format.shared / 2;
        if parts == 0 {
            continue;
        }
        let bytes = vec![1; format.panel_bytes(parts)];
        let (quants, scales) = (vec![1; parts * 32], vec![1.0; parts]);
        let (sums, totals) = (vec![[16; 2]; parts], vec![32; parts]);
        let column = Column { quants: &quants, scales: &scales, sums: &sums, totals: &totals };
        for level in Level::detected() {
            let (mut partials, mut results) = (Partials::boxed(), [[0.0; ROWS]; 1]);
            let refused = catch_unwind(AssertUnwindSafe(|| {
                kernel::panel(level, kind, &bytes, parts, &[column], &mut partials, &mut results);
            }));
            let message = refused.expect_err("refused");
            let text = message.downcast_ref::<String>().map_or("", String::as_str);
            assert!(text.contains("whole super-blocks"), "{level} {kind}: {text}");
        }
    }
}
