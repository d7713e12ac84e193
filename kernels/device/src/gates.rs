//! `kiln gate`: the tests that need a card, in the binary that needs no Rust.
//!
//! Each gate compares bits and reports what differs. `--plant NAME` puts a defect on the card, which the gate of that name
//! must find: then the run is red. Exit code 0: nothing red and nothing but skipped; 1: red, or no gate of that name.

mod contracts;
mod fused;
mod selected;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use cuda_core::DeviceBuffer;
use kiln_engine::backend::cpu::{self, Cpu};
use kiln_engine::backend::{Backend, LoadOptions, Wanted};
use kiln_engine::gguf::{Gguf, TensorType};
use kiln_engine::model::{Config, Model};
use kiln_engine::quant;
use kiln_kernels::attention::{self, Rows};
use kiln_kernels::{Arith, Host, HostLanes, Q8Activations, canonical, math, quantize_q8, rms_norm};

use crate::backend::Cuda;
use crate::gpu::{Gpu, Result};
use crate::layout::{
    ActivateArgs, Activations, COLUMNS, EmbedArgs, HeadsArgs, Matrix, NO_FAULT, NormArgs, PART, PartMeta,
    PostArgs, RowsArgs, THREADS, TILE, meta_place, mode, place, quant_place,
};
use crate::upload::{self, Description};
use crate::{argmax, attend, rows, tiles, wide_tiles};

/// A gate: its name, the defect that shows that it works, and the comparison.
struct Gate {
    name: &'static str,
    plant: &'static str,
    run: fn(&Context) -> Result<Tally>,
}

const GATES: [Gate; 8] = [
    Gate { name: "kquant", plant: "scale-bit", run: kquant },
    Gate { name: "kquant-fused", plant: "norm-bit", run: fused::fused_rows },
    Gate { name: "kquant-selected", plant: "slot-order", run: selected::selected },
    Gate { name: "cpu-bits", plant: "epsilon-ulp", run: cpu_bits },
    Gate { name: "contracts", plant: "long-buffer", run: contracts::contracts },
    Gate { name: "graph", plant: "stale-state", run: graph },
    Gate { name: "batch", plant: "cache-bit", run: batch },
    Gate { name: "e2e", plant: "weight-bit", run: end_to_end },
];

/// What the command line asks for.
struct Context {
    device: usize,
    plant: Option<String>,
    models: Vec<PathBuf>,
    positions: usize,
}

impl Context {
    fn planted(&self, name: &str) -> bool {
        self.plant.as_deref() == Some(name)
    }
}

/// What a gate counted.
#[derive(Default)]
struct Tally {
    compared: usize,
    differing: usize,
    first: Option<String>,
}

impl Tally {
    fn floats(&mut self, what: &dyn Fn(usize) -> String, want: &[f32], got: &[f32]) {
        if want.len() != got.len() {
            self.differing += 1;
            self.first
                .get_or_insert_with(|| format!("{}: {} numbers, {} wanted", what(0), got.len(), want.len()));
        }
        for (i, (want, got)) in want.iter().zip(got).enumerate() {
            self.compared += 1;
            if want.to_bits() != got.to_bits() {
                self.differing += 1;
                self.first.get_or_insert_with(|| {
                    let (w, g) = (want.to_bits(), got.to_bits());
                    format!("{}: expected {want:e} ({w:#010x}), got {got:e} ({g:#010x})", what(i))
                });
            }
        }
    }

    fn words<T: PartialEq + std::fmt::Debug>(
        &mut self,
        what: &dyn Fn(usize) -> String,
        want: &[T],
        got: &[T],
    ) {
        self.compared += want.len();
        if want.len() != got.len() {
            self.differing += 1;
        }
        for (i, (want, got)) in want.iter().zip(got).enumerate() {
            if want != got {
                self.differing += 1;
                self.first.get_or_insert_with(|| format!("{}: expected {want:?}, got {got:?}", what(i)));
            }
        }
    }
}

/// Runs `kiln gate ARGUMENTS`.
pub fn main(arguments: &[String]) -> ExitCode {
    match parse(arguments) {
        Ok((filter, context)) => run(filter.as_deref(), &context),
        Err(problem) => {
            eprintln!(
                "error: {problem}\nusage: kiln gate [FILTER] [--device cuda:N] [--plant NAME] [-m FILE|FOLDER]... [-n POSITIONS]"
            );
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: &[String]) -> std::result::Result<(Option<String>, Context), String> {
    let mut filter = None;
    let mut context = Context { device: 0, plant: None, models: Vec::new(), positions: 256 };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--plant" => {
                let name = value()?;
                if !GATES.iter().any(|gate| gate.plant == name) {
                    let names: Vec<_> = GATES.iter().map(|gate| gate.plant).collect();
                    return Err(format!(
                        "there is no defect `{name}` to plant; there are: {}",
                        names.join(", ")
                    ));
                }
                context.plant = Some(name.clone());
            }
            "-m" | "--model" => context.models.extend(model_files(Path::new(value()?))?),
            "-n" => context.positions = value()?.parse().map_err(|_| "-n needs a number")?,
            "--device" => {
                let name: kiln_engine::selftest::DeviceName =
                    value()?.parse().map_err(|error| format!("{error}"))?;
                if name.kind != "cuda" {
                    return Err(format!("gates run on cuda devices, not on {name}"));
                }
                context.device = name.index;
            }
            name if !name.starts_with('-') && filter.is_none() => filter = Some(name.to_owned()),
            other => return Err(format!("unknown argument `{other}`")),
        }
    }
    Ok((filter, context))
}

/// A file, or the models in a folder: GGUF files that name an architecture, by name.
fn model_files(path: &Path) -> std::result::Result<Vec<PathBuf>, String> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let problem = |error: std::io::Error| format!("{} cannot be read: {error}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(problem)? {
        let file = entry.map_err(problem)?.path();
        if file.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        // Vectors for tests, and parts of a split file but the first, are no models by themselves.
        if Gguf::open(&file).and_then(|gguf| Config::from_gguf(&gguf)).is_ok() {
            files.push(file);
        } else {
            eprintln!("note: {} is no model that kiln runs, and is left out", file.display());
        }
    }
    if files.is_empty() {
        return Err(format!("no file in {} is a model", path.display()));
    }
    files.sort();
    Ok(files)
}

fn run(filter: Option<&str>, context: &Context) -> ExitCode {
    let started = Instant::now();
    // A whole name means that gate alone, although other names hold it.
    let whole = GATES.iter().any(|gate| filter == Some(gate.name));
    let matches = |gate: &&Gate| {
        filter.is_none_or(|filter| if whole { gate.name == filter } else { gate.name.contains(filter) })
    };
    let chosen: Vec<&Gate> = GATES.iter().filter(matches).collect();
    if chosen.is_empty() {
        let names: Vec<_> = GATES.iter().map(|gate| gate.name).collect();
        eprintln!("error: no gate matches `{}`; there are: {}", filter.unwrap_or(""), names.join(", "));
        return ExitCode::FAILURE;
    }
    let card = Gpu::open(context.device).map(|gpu| gpu.name());
    let (mut red, mut skipped) = (0, 0);
    for gate in &chosen {
        let began = Instant::now();
        let line = match &card {
            Err(reason) => {
                skipped += 1;
                format!("skipped: {reason}")
            }
            Ok(_) => match (gate.run)(context) {
                Ok(tally) if tally.differing == 0 && tally.compared > 0 => {
                    format!("green  {} compared", tally.compared)
                }
                Ok(tally) => {
                    red += 1;
                    let first = tally.first.unwrap_or_else(|| "nothing was compared".to_owned());
                    format!("RED    {} of {} differ; first: {first}", tally.differing, tally.compared)
                }
                Err(error) => {
                    red += 1;
                    format!("RED    {error}")
                }
            },
        };
        println!("{:<15} {line} ({:.1} s)", gate.name, began.elapsed().as_secs_f64());
        let _ = std::io::stdout().flush();
    }
    let wall = started.elapsed().as_secs_f64();
    println!("DONE total={} red={red} skipped={skipped} wall={wall:.1}", chosen.len());
    if red == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn float(&mut self) -> f32 {
        self.next() as i32 as f32 / 2f32.powi(30)
    }

    /// `count` numbers of one of several kinds: ordinary, over the whole range, tiny, signed zeros among them, special.
    fn floats(&mut self, kind: usize, count: usize) -> Vec<f32> {
        (0..count)
            .map(|i| match kind {
                0 => self.float(),
                1 => f32::from_bits(self.next() & 0x8fff_ffff | (20 + self.next() % 190) << 23 & 0x7f80_0000),
                2 => f32::from_bits(self.next() & 0x81ff_ffff),
                3 if i % 3 == 0 => [0.0, -0.0][i / 3 % 2],
                3 => self.float() * 1e-3,
                _ if i == count / 2 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][self.next() as usize % 3],
                _ => self.float() * 10.0,
            })
            .collect()
    }

    /// Rows of random bytes; `wild` keeps the scales as they come (infinities, NaNs and denormals among them).
    fn rows(&mut self, kind: TensorType, rows: usize, columns: usize, wild: bool) -> Vec<u8> {
        let row_bytes = kind.row_bytes(columns).unwrap_or(0);
        let mut bytes: Vec<u8> = (0..rows * row_bytes).map(|_| self.next() as u8).collect();
        let places: &[usize] = match kind {
            TensorType::Q2K => &[80, 82],
            TensorType::Q3K => &[108],
            TensorType::Q6K => &[208],
            TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
                let size = kind.block_bytes();
                for word in bytes.chunks_exact_mut(size) {
                    // No infinities or NaNs, and halves of moderate size.
                    word[size - 1] = word[size - 1] & 0x83 | 0x38;
                }
                return bytes;
            }
            _ => &[0],
        };
        if !wild {
            for block in bytes.chunks_exact_mut(kind.block_bytes()) {
                for place in places {
                    block[place + 1] = block[place + 1] & 0x83 | 0x14 | (self.next() as u8 & 8);
                }
            }
        }
        bytes
    }
}

/// Columns of activations on the card, and on the host as the CPU makes them.
struct Columns {
    values: Vec<f32>,
    quants: Vec<i8>,
    scales: Vec<f32>,
    on_card: (DeviceBuffer<f32>, DeviceBuffer<i8>, DeviceBuffer<u64>),
}

impl Columns {
    fn new(gpu: &Gpu, values: Vec<f32>, width: usize) -> Result<Columns> {
        let parts = values.len() / PART;
        let (mut quants, mut scales) = (vec![0; parts * PART], vec![0.0; parts]);
        quantize_q8(Host, &values[..parts * PART], &mut quants, &mut scales);
        let meta: Vec<u64> = quants
            .chunks_exact(PART)
            .zip(&scales)
            .map(|(quants, scale)| {
                let sum = |half: &[i8]| half.iter().map(|q| i32::from(*q)).sum::<i32>() as u32;
                let sums = sum(&quants[..16]).wrapping_add(sum(&quants[16..]) << 16);
                u64::from(scale.to_bits()) | u64::from(sums) << 32
            })
            .collect();
        let stream = &gpu.stream;
        let placed = placed(&quants, width);
        let on_card = (
            DeviceBuffer::from_host(stream, &values)?,
            DeviceBuffer::from_host(stream, if placed.is_empty() { &[0] } else { &placed[..] })?,
            DeviceBuffer::from_host(stream, if meta.is_empty() { &[0] } else { &meta[..] })?,
        );
        Ok(Columns { values, quants, scales, on_card })
    }

    /// The same columns as the tensor cores take them.
    fn tiled(mut self, gpu: &Gpu, width: usize) -> Result<Columns> {
        let (parts, meta) = (width / PART, meta_of(&self.quants, &self.scales));
        let (mut quants, mut metas) = (self.quants.clone(), meta.clone());
        for (at, quant) in self.quants.iter().enumerate() {
            quants[quant_place(true, at / width, at % width, width)] = *quant;
        }
        for (at, meta) in meta.iter().enumerate() {
            metas[meta_place(true, at / parts, at % parts, parts)] = *meta;
        }
        self.on_card.1 = DeviceBuffer::from_host(&gpu.stream, &quants)?;
        self.on_card.2 = DeviceBuffer::from_host(&gpu.stream, &metas)?;
        Ok(self)
    }

    fn on_card(&self) -> Activations {
        Activations {
            values: self.on_card.0.cu_deviceptr() as *mut f32,
            quants: self.on_card.1.cu_deviceptr() as *mut i8,
            meta: self.on_card.2.cu_deviceptr() as *mut PartMeta,
        }
    }
}

/// A product of one matrix.
fn row_args(
    matrix: Matrix,
    out: &DeviceBuffer<f32>,
    x: Activations,
    columns: usize,
    fault: &DeviceBuffer<u32>,
) -> RowsArgs {
    RowsArgs {
        first: matrix,
        second: Matrix::NONE,
        third: Matrix::NONE,
        first_out: out.cu_deviceptr() as *mut f32,
        second_out: std::ptr::null_mut(),
        third_out: std::ptr::null_mut(),
        x,
        norm: std::ptr::null(),
        residual: std::ptr::null(),
        fault: fault.cu_deviceptr() as *mut u32,
        columns: columns as u32,
        mode: mode::STORE,
        stage: 0,
        first_column: 0,
        epsilon: 0.0,
        activation: 0,
        limit: f32::INFINITY,
        reserved: 0,
    }
}

/// Rows of every type, one column and up to eight, 8 and 32 threads a row, against the plain walk on the host.
fn kquant(context: &Context) -> Result<Tally> {
    let gpu = Gpu::open(context.device)?;
    let mut tally = Tally::default();
    kquant_of(&gpu, &TensorType::ALL, context.planted("scale-bit"), &mut tally)?;
    Ok(tally)
}

fn kquant_of(gpu: &Gpu, kinds: &[TensorType], mut planted: bool, tally: &mut Tally) -> Result<()> {
    let mut rng = Rng(1);
    let entries = [
        [gpu.entry("kiln_rows_wide")?, gpu.entry("kiln_rows_narrow")?],
        [gpu.entry("kiln_batch_wide")?, gpu.entry("kiln_batch_narrow")?],
    ];
    let tile_entry = gpu.entry("kiln_tiles")?;
    let wide_entry = gpu.entry("kiln_wide_tiles")?;
    gpu.allow_shared(&wide_entry, wide_tiles::SHARED_BYTES)?;
    let fault = DeviceBuffer::from_host(&gpu.stream, &[NO_FAULT])?;
    for kind in kinds.iter().copied() {
        for (columns, wild) in
            [(256, false), (256, true), (576, false), (2304, false), (4096, false), (8192, false)]
        {
            if kind.row_bytes(columns).is_none() {
                continue;
            }
            // More than a large tile, and no whole number of tiles.
            let count = 69;
            let bytes = rng.rows(kind, count, columns, wild);
            let description = Description { kind, rows: count, columns };
            let mut packed = upload::pack(&description, &bytes, 1);
            if planted && !packed.scales.is_empty() {
                packed.scales[0] ^= 1;
                planted = false;
            }
            let uploaded = upload::copy(&gpu.stream, &description, packed)?;
            let mut values = Vec::new();
            for column in 0..COLUMNS {
                values.extend(rng.floats([0, 0, 1, 0, 3, 0, 0, 2][column], columns));
            }
            let x = Columns::new(gpu, values, columns)?;
            let want: Vec<f32> = (0..COLUMNS)
                .flat_map(|column| {
                    let parts = columns / PART;
                    let (x, bytes) = (&x, &bytes);
                    (0..count).map(move |row| {
                        let quants = &x.quants[column * parts * PART..(column + 1) * parts * PART];
                        let scales = &x.scales[column * parts..(column + 1) * parts];
                        let Some(quantised) = Q8Activations::new(quants, scales) else { return f32::NAN };
                        let row_bytes = bytes.len() / count;
                        let values = &x.values[column * columns..(column + 1) * columns];
                        quant::row_dot(
                            kind,
                            &bytes[row * row_bytes..(row + 1) * row_bytes],
                            values,
                            quantised,
                        )
                    })
                })
                .collect();
            if upload::is_quantised(kind) {
                // The same columns many times over, so that whole tiles are there; some are left out of the last one.
                for (entry, side, crew, shared, most, all) in [
                    (&tile_entry, TILE, tiles::CREW, tiles::SHARED_BYTES, TILE, [2, COLUMNS, TILE - 1, TILE]),
                    (
                        &wide_entry,
                        wide_tiles::SIDE,
                        wide_tiles::CREW,
                        wide_tiles::SHARED_BYTES,
                        3 * TILE,
                        [2, TILE + 1, wide_tiles::SIDE, 3 * TILE],
                    ),
                ] {
                    let given =
                        Columns::new(gpu, x.values.repeat(most / COLUMNS), columns)?.tiled(gpu, columns)?;
                    for m in all {
                        let out = DeviceBuffer::from_host(&gpu.stream, &vec![9f32; m * count])?;
                        let args = row_args(uploaded.matrix, &out, given.on_card(), m, &fault);
                        let grid = (count.div_ceil(side) * m.div_ceil(side), 1);
                        // SAFETY: the buffers are as long as the module says.
                        unsafe { gpu.launch(entry, grid, crew, shared, &args)? };
                        let got = out.to_host_vec(&gpu.stream)?;
                        let what = |i: usize| {
                            let (column, row) = (i / count, i % count);
                            format!("{kind} K {columns} tile of {side} m {m} column {column} row {row}")
                        };
                        tally.floats(&what, &want.repeat(most / COLUMNS)[..m * count], &got);
                    }
                }
            }
            for m in 1..=COLUMNS {
                for narrow in [false, true] {
                    let out = DeviceBuffer::from_host(&gpu.stream, &vec![9f32; m * count])?;
                    let span = if narrow { 8 } else { 32 };
                    let args = row_args(uploaded.matrix, &out, x.on_card(), m, &fault);
                    let entry = &entries[usize::from(m > 1)][usize::from(narrow)];
                    let grid = (rows::blocks([count, 0, 0], span), 1);
                    // SAFETY: the buffers are as long as the module says.
                    unsafe { gpu.launch(entry, grid, THREADS, 0, &args)? };
                    let got = out.to_host_vec(&gpu.stream)?;
                    let what = |i: usize| {
                        format!("{kind} K {columns} m {m} span {span} column {} row {}", i / count, i % count)
                    };
                    tally.floats(&what, &want[..m * count], &got);
                }
            }
        }
    }
    Ok(())
}

/// Every other entry against the walks on the host, over shapes and data.
fn cpu_bits(context: &Context) -> Result<Tally> {
    let gpu = Gpu::open(context.device)?;
    let mut tally = Tally::default();
    let mut rng = Rng(2);
    let ulp = u32::from(context.planted("epsilon-ulp"));
    operations(&gpu, &mut rng, ulp, &mut tally)?;
    Ok(tally)
}

fn operations(gpu: &Gpu, rng: &mut Rng, ulp: u32, tally: &mut Tally) -> Result<()> {
    norms(gpu, rng, ulp, tally)?;
    gates(gpu, rng, tally)?;
    argmax_of_columns(gpu, rng, tally)?;
    embeddings(gpu, rng, tally)?;
    heads(gpu, rng, tally)
}

/// Quants of columns of `width`, where the card has them.
fn placed(quants: &[i8], width: usize) -> Vec<i8> {
    let mut out = quants.to_vec();
    if width.is_multiple_of(PART) {
        for (from, to) in quants.chunks(width).zip(out.chunks_mut(width)) {
            for (i, quant) in from.iter().enumerate() {
                to[place(i, width)] = *quant;
            }
        }
    }
    out
}

fn meta_of(quants: &[i8], scales: &[f32]) -> Vec<u64> {
    let parts = quants.chunks_exact(PART).zip(scales);
    parts
        .map(|(quants, scale)| {
            let sum = |half: &[i8]| half.iter().map(|q| i32::from(*q)).sum::<i32>() as u32;
            u64::from(scale.to_bits())
                | u64::from(sum(&quants[..16]).wrapping_add(sum(&quants[16..]) << 16)) << 32
        })
        .collect()
}

/// What an entry wrote of activations, compared.
fn compare_activations(
    gpu: &Gpu,
    tally: &mut Tally,
    name: &str,
    want: &[f32],
    width: usize,
    got: &Columns,
) -> Result<()> {
    let values = got.on_card.0.to_host_vec(&gpu.stream)?;
    let by_bits = |v: &f32| if v.is_nan() { kiln_kernels::NAN } else { *v };
    let values: Vec<f32> = values[..want.len()].iter().map(by_bits).collect();
    let want: Vec<f32> = want.iter().map(by_bits).collect();
    tally.floats(&|i| format!("{name} value {i}"), &want, &values);
    if width.is_multiple_of(PART) {
        let parts = want.len() / PART;
        let (mut quants, mut scales) = (vec![0; want.len()], vec![0.0; parts]);
        quantize_q8(Host, &want, &mut quants, &mut scales);
        let card = got.on_card.1.to_host_vec(&gpu.stream)?;
        tally.words(&|i| format!("{name} quant at {i}"), &placed(&quants, width), &card[..want.len()]);
        let card = got.on_card.2.to_host_vec(&gpu.stream)?;
        tally.words(&|i| format!("{name} part {i}"), &meta_of(&quants, &scales), &card[..parts]);
    }
    Ok(())
}

fn norms(gpu: &Gpu, rng: &mut Rng, ulp: u32, tally: &mut Tally) -> Result<()> {
    let (norm, post) = (gpu.entry("kiln_norm")?, gpu.entry("kiln_post_norm")?);
    for width in [32, 96, 256, 288, 576, 2304, 4096, 40] {
        for kind in 0..5 {
            let columns = 3;
            let x = rng.floats(kind, columns * width);
            let weight = rng.floats(0, width);
            let epsilon = 1e-5f32;
            let mut want = vec![0.0; x.len()];
            for (x, out) in x.chunks(width).zip(want.chunks_mut(width)) {
                rms_norm(HostLanes, x, &weight, epsilon, |i, value| out[i] = value);
            }
            let (dx, dw) =
                (DeviceBuffer::from_host(&gpu.stream, &x)?, DeviceBuffer::from_host(&gpu.stream, &weight)?);
            let out = Columns::new(gpu, vec![7.0; x.len()], width)?;
            let args = NormArgs {
                x: dx.cu_deviceptr() as *const f32,
                weight: dw.cu_deviceptr() as *const f32,
                out: out.on_card(),
                width: width as u32,
                epsilon: f32::from_bits(epsilon.to_bits() + ulp),
                tiled: 0,
                reserved: 0,
            };
            // SAFETY: the buffers are as long as the module says.
            unsafe { gpu.launch(&norm, (columns, 1), THREADS, 0, &args)? };
            compare_activations(gpu, tally, &format!("norm {width} data {kind}"), &want, width, &out)?;

            let base = rng.floats(0, x.len());
            let residual = DeviceBuffer::from_host(&gpu.stream, &base)?;
            let fault = DeviceBuffer::from_host(&gpu.stream, &[NO_FAULT])?;
            let args = PostArgs {
                added: dx.cu_deviceptr() as *const f32,
                weight: dw.cu_deviceptr() as *const f32,
                residual: residual.cu_deviceptr() as *mut f32,
                fault: fault.cu_deviceptr() as *mut u32,
                width: width as u32,
                epsilon,
                stage: 77,
                reserved: 0,
            };
            // SAFETY: as above.
            unsafe { gpu.launch(&post, (columns, 1), THREADS, 0, &args)? };
            let sums: Vec<f32> = base.iter().zip(&want).map(|(a, b)| canonical(Host.add(*a, *b))).collect();
            let got: Vec<f32> = residual.to_host_vec(&gpu.stream)?.into_iter().map(canonical).collect();
            tally.floats(&|i| format!("post norm {width} data {kind} element {i}"), &sums, &got);
            let bad = sums.iter().position(|v| !v.is_finite());
            let fault_wanted = bad.map_or(NO_FAULT, |i| 77 << 16 | (i / width) as u32);
            tally.words(&|_| "post norm fault".to_owned(), &[fault_wanted], &fault.to_host_vec(&gpu.stream)?);
        }
    }
    Ok(())
}

fn gates(gpu: &Gpu, rng: &mut Rng, tally: &mut Tally) -> Result<()> {
    let entry = gpu.entry("kiln_activate")?;
    for width in [32, 576, 1536, 100] {
        for kind in 0..5 {
            for (activation, limit) in
                [(0, f32::INFINITY), (1, f32::INFINITY), (2, f32::INFINITY), (0, 10.0), (0, 0.5), (1, 0.5)]
            {
                let columns = 2;
                let gate: Vec<f32> = rng.floats(kind, columns * width).iter().map(|v| v * 8.0).collect();
                let up = rng.floats(kind, columns * width);
                let want: Vec<f32> = gate
                    .iter()
                    .zip(&up)
                    .map(|(g, u)| match activation {
                        0 if limit == f32::INFINITY => Host.mul(math::silu(Host, *g), *u),
                        0 => math::gated(Host, math::Gate::Silu, *g, *u, limit),
                        1 => math::gated(Host, math::Gate::GeluTanh, *g, *u, limit),
                        _ => *g,
                    })
                    .collect();
                let (dg, du) = (
                    DeviceBuffer::from_host(&gpu.stream, &gate)?,
                    DeviceBuffer::from_host(&gpu.stream, &up)?,
                );
                let out = Columns::new(gpu, vec![7.0; gate.len()], width)?;
                let args = ActivateArgs {
                    gate: dg.cu_deviceptr() as *const f32,
                    up: if activation == 2 { std::ptr::null() } else { du.cu_deviceptr() as *const f32 },
                    out: out.on_card(),
                    width: width as u32,
                    activation,
                    tiled: 0,
                    limit,
                };
                // SAFETY: the buffers are as long as the module says.
                unsafe { gpu.launch(&entry, (width.div_ceil(THREADS), columns), THREADS, 0, &args)? };
                let name = format!("activate {width} data {kind} activation {activation} clamp {limit}");
                compare_activations(gpu, tally, &name, &want, width, &out)?;
            }
        }
    }
    Ok(())
}

/// Where the largest logit is: ties, zeros of both signs, denormals, infinities; a NaN raises the fault word.
fn argmax_of_columns(gpu: &Gpu, rng: &mut Rng, tally: &mut Tally) -> Result<()> {
    let entry = gpu.entry("kiln_argmax")?;
    let stream = &gpu.stream;
    for count in [1, 2, 31, 32, 33, 255, 257, 1000, 4097, 49_152, 151_936, 1_000_003] {
        let columns = 9;
        let mut logits = Vec::new();
        for column in 0..columns {
            let mut x = rng.floats([0, 1, 2, 3, 0, 0, 0, 4, 0][column], count);
            match column {
                // All equal; ties of the largest at both ends and in one thread's hands; below every finite number.
                4 => x.fill(-1.5),
                5 => [0, count - 1, count / 2, count.min(513) - 1].into_iter().for_each(|i| x[i] = 9.0),
                6 => {
                    x.fill(f32::NEG_INFINITY);
                    x[count - 1] = f32::MIN;
                }
                8 => x.iter_mut().for_each(|x| *x = [0.0, -0.0, -1.0][(x.to_bits() % 3) as usize]),
                _ => {}
            }
            logits.extend(x);
        }
        let nans: Vec<bool> = logits.chunks(count).map(|x| x.iter().any(|x| x.is_nan())).collect();
        let want: Vec<u32> = logits.chunks(count).map(kiln_engine::sample::best).collect();
        let logits = DeviceBuffer::from_host(stream, &logits)?;
        let best = DeviceBuffer::from_host(stream, &vec![0u64; columns])?;
        let done = DeviceBuffer::from_host(stream, &vec![0u32; columns])?;
        let tokens = DeviceBuffer::from_host(stream, &vec![7u32; columns])?;
        let state = DeviceBuffer::from_host(stream, &[40u32, 7])?;
        // Twice, so that what must be zero again is seen to be.
        for round in 0..2 {
            let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
            let buffers = argmax::Buffers {
                logits: &logits,
                best: &best,
                done: &done,
                tokens: &tokens,
                state: (round == 1).then_some(&state),
                fault: &fault,
            };
            argmax::launch(gpu, &entry, &buffers, count, columns, 66)?;
            let got = tokens.to_host_vec(stream)?;
            for column in (0..columns).filter(|column| !nans[*column]) {
                let what = |_| format!("argmax of {count}, column {column}, round {round}");
                tally.words(&what, &want[column..=column], &got[column..=column]);
            }
            let bad = nans.iter().position(|nan| *nan).map_or(NO_FAULT, |column| 66 << 16 | column as u32);
            tally.words(&|_| format!("argmax of {count}: fault"), &[bad], &fault.to_host_vec(stream)?);
        }
        let state = state.to_host_vec(stream)?;
        tally.words(&|i| format!("argmax of {count}: state {i}"), &[41, want[0]], &state);
        let short = argmax::Buffers {
            logits: &logits,
            best: &best,
            done: &done,
            tokens: &tokens,
            state: None,
            fault: &done,
        };
        let refused = [
            argmax::launch(gpu, &entry, &short, count, columns, 66).is_err(),
            argmax::launch(gpu, &entry, &short, count + 1, columns, 66).is_err(),
        ];
        tally.words(&|i| format!("argmax of {count}: refusal {i}"), &[true; 2], &refused);
    }
    Ok(())
}

fn embeddings(gpu: &Gpu, rng: &mut Rng, tally: &mut Tally) -> Result<()> {
    let entry = gpu.entry("kiln_embed")?;
    for kind in TensorType::ALL {
        for (columns, wild) in [(256, false), (768, true)] {
            if kind.row_bytes(columns).is_none() {
                continue;
            }
            let rows = 9;
            let bytes = rng.rows(kind, rows, columns, wild);
            let description = Description { kind, rows, columns };
            let uploaded = upload::copy(&gpu.stream, &description, upload::pack(&description, &bytes, 2))?;
            let tokens = [8u32, 0, 5, 3];
            let state = DeviceBuffer::from_host(&gpu.stream, &[&[0u32][..], &tokens].concat())?;
            let out = DeviceBuffer::from_host(&gpu.stream, &vec![7f32; tokens.len() * columns])?;
            let fault = DeviceBuffer::from_host(&gpu.stream, &[NO_FAULT])?;
            let args = EmbedArgs {
                table: uploaded.matrix,
                state: state.cu_deviceptr() as *const u32,
                out: out.cu_deviceptr() as *mut f32,
                fault: fault.cu_deviceptr() as *mut u32,
                scale: 33.94,
                context: 100,
            };
            // SAFETY: the buffers are as long as the module says.
            unsafe { gpu.launch(&entry, (tokens.len(), 1), THREADS, 0, &args)? };
            let row_bytes = bytes.len() / rows;
            let mut want = Vec::new();
            for token in tokens {
                let mut row = vec![0.0; columns];
                quant::decode(kind, &bytes[token as usize * row_bytes..][..row_bytes], &mut row);
                want.extend(row.into_iter().map(|v| canonical(Host.mul(v, 33.94))));
            }
            let got: Vec<f32> = out.to_host_vec(&gpu.stream)?.into_iter().map(canonical).collect();
            tally.floats(
                &|i| format!("embedding {kind} column {} element {}", i / columns, i % columns),
                &want,
                &got,
            );
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct HeadRows<'a> {
    halves: &'a [u16],
    width: usize,
}

impl Rows for HeadRows<'_> {
    fn row(&self, index: usize) -> &[u16] {
        &self.halves[index * self.width..(index + 1) * self.width]
    }
}

/// Heads and attention, fused and not, over widths, positions and windows.
fn heads(gpu: &Gpu, rng: &mut Rng, tally: &mut Tally) -> Result<()> {
    let (ready, attention_entry) = (gpu.entry("kiln_heads")?, gpu.entry("kiln_attend")?);
    for (width, heads, kv_heads, dimensions) in
        [(64, 9, 3, 64), (128, 4, 2, 128), (80, 2, 1, 40), (256, 2, 2, 256), (8, 2, 1, 8), (48, 4, 4, 48)]
    {
        for (position, columns, window, kind) in [
            (0, 1, usize::MAX, 0),
            (0, 5, usize::MAX, 0),
            (37, 1, usize::MAX, 1),
            (300, 3, 64, 0),
            (95, 4, usize::MAX, 4),
        ] {
            let context = 320;
            gpu.allow_shared(&attention_entry, attend::shared_bytes(width, context))?;
            let halves = width != 64;
            let extras = width == 128 || width == 80;
            let norms = width == 128 || width == 256;
            let (queries, keys) = (heads * width, kv_heads * width);
            let pairs = dimensions / 2;
            let (query, key, value) = (
                rng.floats(kind, columns * queries),
                rng.floats(0, columns * keys),
                rng.floats(kind.min(3), columns * keys),
            );
            let biases = [rng.floats(0, queries), rng.floats(0, keys), rng.floats(0, keys)];
            let head_norms = [rng.floats(0, width), rng.floats(0, width)];
            let angles = rng.floats(0, context * 2 * pairs);
            let old = |rng: &mut Rng| -> Vec<u16> {
                (0..kv_heads * context * width).map(|_| math::to_f16(rng.float())).collect()
            };
            let (mut cache_keys, mut cache_values) = (old(rng), old(rng));
            let stream = &gpu.stream;
            let card = |values: &[f32]| DeviceBuffer::from_host(stream, values);
            let (dq, dk, dv) = (card(&query)?, card(&key)?, card(&value)?);
            let dbias = [card(&biases[0])?, card(&biases[1])?, card(&biases[2])?];
            let dnorm = [card(&head_norms[0])?, card(&head_norms[1])?];
            let dangles = card(&angles)?;
            let (dkeys, dvalues) = (
                DeviceBuffer::from_host(stream, &cache_keys)?,
                DeviceBuffer::from_host(stream, &cache_values)?,
            );
            let state = DeviceBuffer::from_host(stream, &[position as u32])?;
            let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
            let out = Columns::new(gpu, vec![7.0; columns * queries], queries)?;
            let address = |buffer: &DeviceBuffer<f32>, given: bool| {
                if given { buffer.cu_deviceptr() as *const f32 } else { std::ptr::null() }
            };
            let args = HeadsArgs {
                query: dq.cu_deviceptr() as *mut f32,
                key: address(&dk, true),
                value: address(&dv, true),
                query_bias: address(&dbias[0], extras),
                key_bias: address(&dbias[1], extras),
                value_bias: address(&dbias[2], extras),
                query_norm: address(&dnorm[0], norms),
                key_norm: address(&dnorm[1], norms),
                angles: address(&dangles, true),
                keys: dkeys.cu_deviceptr() as *mut u16,
                values: dvalues.cu_deviceptr() as *mut u16,
                state: state.cu_deviceptr() as *const u32,
                fault: fault.cu_deviceptr() as *mut u32,
                out: out.on_card(),
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                width: width as u32,
                context: context as u32,
                pairs: pairs as u32,
                halves: u32::from(halves),
                window: u32::try_from(window).unwrap_or(u32::MAX),
                epsilon: 1e-6,
                scale: 0.125,
                fused: u32::from(columns == 1),
                tiled: 0,
                reserved: 0,
            };
            let shared = attend::shared_bytes(width, context);
            // SAFETY: the grids and buffers are what the modules say.
            unsafe {
                if columns > 1 {
                    gpu.launch(&ready, (heads + kv_heads, columns), 32, 8 * width, &args)?;
                }
                gpu.launch(&attention_entry, (heads, columns), THREADS, shared, &args)?;
            }
            // The same on the host.
            let ready = |x: &[f32], bias: &[f32], norm: &[f32], at: usize, rotated: bool| -> Vec<f32> {
                let mut x: Vec<f32> = x.to_vec();
                if extras {
                    x.iter_mut().zip(bias).for_each(|(x, b)| *x = canonical(Host.add(*x, *b)));
                }
                if !rotated {
                    return x;
                }
                if norms {
                    let copy = x.clone();
                    rms_norm(HostLanes, &copy, norm, 1e-6, |i, value| x[i] = value);
                }
                for pair in 0..pairs {
                    let (i, j) = if halves { (pair, pair + pairs) } else { (2 * pair, 2 * pair + 1) };
                    let angle = &angles[2 * (at * pairs + pair)..];
                    (x[i], x[j]) = attention::rotate(Host, x[i], x[j], angle[0], angle[1]);
                }
                x
            };
            let mut want = vec![0.0; columns * queries];
            for column in 0..columns {
                let at = position + column;
                for head in 0..kv_heads {
                    let from = column * keys + head * width;
                    let part = head * width..(head + 1) * width;
                    let k =
                        ready(&key[from..from + width], &biases[1][part.clone()], &head_norms[1], at, true);
                    let v = ready(&value[from..from + width], &biases[2][part], &[], at, false);
                    for i in 0..width {
                        cache_keys[(head * context + at) * width + i] = math::to_f16(k[i]);
                        cache_values[(head * context + at) * width + i] = math::to_f16(v[i]);
                    }
                }
            }
            for column in 0..columns {
                let at = position + column;
                let first = (at + 1).saturating_sub(window);
                for head in 0..heads {
                    let from = column * queries + head * width;
                    let part = head * width..(head + 1) * width;
                    let q = ready(&query[from..from + width], &biases[0][part], &head_norms[0], at, true);
                    let kv = head / (heads / kv_heads) * context;
                    let rows = (kv + first) * width..(kv + at + 1) * width;
                    let (k, v) = (
                        HeadRows { halves: &cache_keys[rows.clone()], width },
                        HeadRows { halves: &cache_values[rows], width },
                    );
                    let (mut scores, mut partials) = (vec![0.0; at + 1 - first], vec![0.0; 32 * width]);
                    let out = &mut want[from..from + width];
                    attention::attend(HostLanes, &q, k, v, 0.125, &mut scores, &mut partials, out);
                }
            }
            let name = format!(
                "attention width {width} position {position} columns {columns} window {window} data {kind}"
            );
            if width.is_multiple_of(PART) {
                compare_activations(gpu, tally, &name, &want, queries, &out)?;
            } else {
                let got = out.on_card.0.to_host_vec(stream)?;
                tally.floats(&|i| format!("{name} element {i}"), &want, &got);
            }
            tally.words(&|i| format!("{name} key {i}"), &cache_keys, &dkeys.to_host_vec(stream)?);
            tally.words(&|i| format!("{name} value {i}"), &cache_values, &dvalues.to_host_vec(stream)?);
        }
    }
    Ok(())
}

/// The models that a gate runs: the built-in one, and those that were given.
fn models(context: &Context) -> Result<Vec<(String, Model)>> {
    let mut models = vec![("built-in".to_owned(), Model::from_gguf(kiln_engine::builtin()?)?)];
    for path in &context.models {
        models.push((path.display().to_string(), Model::from_gguf(Gguf::open(path)?)?));
    }
    Ok(models)
}

fn options(context: usize) -> LoadOptions {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    LoadOptions { context, sequences: 1, threads, batch: 64, memory: None }
}

/// Tokens that a model knows, the same each time.
fn tokens(model: &Model, count: usize) -> Vec<u32> {
    let mut rng = Rng(3);
    (0..count).map(|_| rng.next() % model.vocabulary() as u32).collect()
}

/// Replayed steps against launched ones, fused entries against single ones.
fn graph(context: &Context) -> Result<Tally> {
    let mut tally = Tally::default();
    for (name, model) in models(context)? {
        let count = context.positions.min(model.config.trained_context).min(48);
        let tokens = tokens(&model, count);
        let mut runs = Vec::new();
        for run in 0..3 {
            let mut cuda = Cuda::load(context.device, model.clone(), &options(count))?;
            cuda.set_eager(run == 1);
            cuda.set_unfused(run == 2);
            cuda.set_stale(run == 0 && context.planted("stale-state"));
            let mut logits = Vec::new();
            for (position, token) in tokens.iter().enumerate() {
                cuda.run(&[*token], position, Wanted::Last)?;
                logits.extend_from_slice(cuda.logits());
            }
            runs.push((logits, cuda.cache()?));
        }
        let vocabulary = model.vocabulary();
        for (other, run) in [("eager", 1), ("unfused", 2)] {
            let what = |i: usize| {
                format!(
                    "{name}: replay against {other}, position {} logit {}",
                    i / vocabulary,
                    i % vocabulary
                )
            };
            tally.floats(&what, &runs[run].0, &runs[0].0);
            tally.words(&|i| format!("{name}: {other} key {i}"), &runs[run].1.0, &runs[0].1.0);
            tally.words(&|i| format!("{name}: {other} value {i}"), &runs[run].1.1, &runs[0].1.1);
        }
    }
    Ok(tally)
}

/// Steps that choose the next token themselves against logits that the host looks at: replayed and launched, continued and
/// begun anew.
fn best_tokens(
    tally: &mut Tally,
    name: &str,
    host: &mut dyn Backend,
    cuda: &mut Cuda,
    count: usize,
) -> Result<()> {
    let mut token = 1 % host.vocabulary() as u32;
    for position in 0..count {
        host.run(&[token], position, Wanted::Last)?;
        let want = kiln_engine::sample::best(host.logits());
        // Every fourth step is repeated and the one after it begins with logits, so that the state on the card is not
        // what the next step needs.
        cuda.set_eager(position % 3 == 2);
        let mut got = vec![cuda.run_greedy(token, position)?];
        if position % 4 == 1 {
            got.push(cuda.run_greedy(token, position)?);
            cuda.run(&[token], position, Wanted::Last)?;
            got.push(kiln_engine::sample::best(cuda.logits()));
        }
        tally.words(
            &|_| format!("{name}: best token after position {position}"),
            &vec![want; got.len()],
            &got,
        );
        token = want;
    }
    cuda.set_eager(false);
    Ok(())
}

/// Batches of several sizes against one token at a time.
fn batch(context: &Context) -> Result<Tally> {
    let mut tally = Tally::default();
    for (name, model) in models(context)? {
        let count = context.positions.min(model.config.trained_context);
        let tokens = tokens(&model, count);
        let mut single = Cuda::load(context.device, model.clone(), &options(count))?;
        let mut want = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            single.run(&[*token], position, Wanted::Last)?;
            want.extend_from_slice(single.logits());
        }
        let (keys, values) = single.cache()?;
        // All positions at once too: the large tiles are for large batches.
        for size in [64, 7, count] {
            let options = LoadOptions { batch: size, ..options(count) };
            let mut cuda = Cuda::load(context.device, model.clone(), &options)?;
            let mut got = Vec::new();
            for (number, part) in tokens.chunks(size).enumerate() {
                cuda.run(part, number * size, Wanted::All)?;
                got.extend_from_slice(cuda.logits());
            }
            if context.planted("cache-bit") {
                cuda.flip_cache_bit()?;
            }
            let vocabulary = model.vocabulary();
            let what = |i: usize| {
                format!("{name}: batch {size}, position {} logit {}", i / vocabulary, i % vocabulary)
            };
            tally.floats(&what, &want, &got);
            let cache = cuda.cache()?;
            tally.words(&|i| format!("{name}: batch {size}, key {i}"), &keys, &cache.0);
            tally.words(&|i| format!("{name}: batch {size}, value {i}"), &values, &cache.1);
        }
    }
    Ok(tally)
}

/// Logits and cache of all positions, CPU against card: the first half as batches, the rest one by one.
fn end_to_end(context: &Context) -> Result<Tally> {
    let mut tally = Tally::default();
    for (name, model) in models(context)? {
        let count = context.positions.min(model.config.trained_context);
        let tokens = tokens(&model, count);
        let options = options(count);
        let mut host = Cpu::load(model.clone(), cpu::Options::new(count, options.threads))?;
        let mut cuda = Cuda::load(context.device, model.clone(), &options)?;
        if context.planted("weight-bit") {
            cuda.flip_weight_bit()?;
        }
        let vocabulary = model.vocabulary();
        let mut at = 0;
        while at < count {
            let size = if at < count / 2 { options.batch.min(count / 2 - at) } else { 1 };
            let part = &tokens[at..at + size];
            cuda.run(part, at, Wanted::All)?;
            host.run(part, at, Wanted::All)?;
            let what =
                |i: usize| format!("{name}: position {} logit {}", at + i / vocabulary, i % vocabulary);
            tally.floats(&what, host.logits(), cuda.logits());
            at += size;
        }
        let (keys, values) = cuda.cache()?;
        tally.words(&|i| format!("{name}: key {i}"), host.cache().0, &keys);
        tally.words(&|i| format!("{name}: value {i}"), host.cache().1, &values);
        best_tokens(&mut tally, &name, &mut host, &mut cuda, count.min(48))?;
        let (keys, values) = cuda.cache()?;
        tally.words(&|i| format!("{name}: key {i} of the best tokens"), host.cache().0, &keys);
        tally.words(&|i| format!("{name}: value {i} of the best tokens"), host.cache().1, &values);
    }
    Ok(tally)
}
