//! `kiln bench`: prompt and generation speed, as `llama-bench` measures them.

use std::io::Write;
use std::time::Instant;

use serde::Serialize;

use super::load::LoadArguments;
use super::{Failure, proceed};
use crate::backend::{Backend, Wanted};
use crate::rng::SplitMix64;
use crate::selftest::DeviceKind;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    load: LoadArguments,
    /// Tokens of the prompt; 0: no prompt is measured.
    #[arg(short = 'p', long, default_value_t = 512)]
    n_prompt: usize,
    /// Tokens to make; 0: generation is not measured.
    #[arg(short = 'n', long, default_value_t = 128)]
    n_gen: usize,
    /// Times that each is measured, after one that is not.
    #[arg(short, long, default_value_t = 5)]
    repetitions: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    model: String,
    size_bytes: u64,
    parameters: u64,
    backend: String,
    test: String,
    tokens: usize,
    /// Tokens a second, mean over the repetitions.
    tokens_per_second: f64,
    /// Their standard deviation.
    deviation: f64,
    repetitions: Vec<f64>,
    weight_bytes_per_token: u64,
}

pub(super) fn bench(
    arguments: &Arguments,
    kinds: &[&dyn DeviceKind],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let model = arguments.load.open()?;
    let name = model.file.string("general.name")?.unwrap_or("a model").to_string();
    let size: u64 = model.file.tensors().values().map(|tensor| tensor.byte_len() as u64).sum();
    let count = |tensor: &crate::gguf::Tensor| tensor.rows() as u64 * tensor.columns() as u64;
    let parameters: u64 = model.file.tensors().values().map(count).sum();
    let context = arguments.n_prompt.max(arguments.n_gen).max(1);
    let mut backend = arguments.load.load_with(model, kinds, context)?;

    let tests = [("pp", arguments.n_prompt, true), ("tg", arguments.n_gen, false)];
    let mut rows = Vec::new();
    for (kind, tokens, at_once) in tests.into_iter().filter(|(_, tokens, _)| *tokens > 0) {
        let mut speeds = Vec::new();
        for repetition in 0..=arguments.repetitions.max(1) {
            let speed = measure(&mut *backend, tokens, at_once)?;
            if proceed().is_break() {
                return Ok(());
            }
            if repetition > 0 {
                speeds.push(speed);
            }
        }
        let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
        let square = speeds.iter().map(|speed| (speed - mean).powi(2)).sum::<f64>();
        rows.push(Row {
            model: name.clone(),
            size_bytes: size,
            parameters,
            backend: backend.description(),
            test: format!("{kind}{tokens}"),
            tokens,
            tokens_per_second: mean,
            deviation: (square / (speeds.len().max(2) - 1) as f64).sqrt(),
            repetitions: speeds,
            weight_bytes_per_token: backend.weight_bytes(),
        });
    }
    if arguments.json {
        let text = serde_json::to_string_pretty(&rows).map_err(std::io::Error::from)?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    writeln!(
        out,
        "| {:<32} | {:>9} | {:>9} | {:<24} | {:>7} | {:>18} |",
        "model", "size", "params", "backend", "test", "t/s"
    )?;
    writeln!(out, "| {:-<32} | {:->8}: | {:->8}: | {:-<24} | {:->6}: | {:->17}: |", "", "", "", "", "", "")?;
    for row in rows {
        writeln!(
            out,
            "| {:<32} | {:>5.0} MiB | {:>7.2} M | {:<24} | {:>7} | {:>9.2} ± {:>6.2} |",
            row.model,
            row.size_bytes as f64 / f64::from(1 << 20),
            row.parameters as f64 / 1e6,
            row.backend,
            row.test,
            row.tokens_per_second,
            row.deviation
        )?;
    }
    Ok(())
}

/// Tokens a second of one pass from an empty context, over tokens that do not matter.
fn measure(backend: &mut dyn Backend, count: usize, at_once: bool) -> Result<f64, Failure> {
    let vocabulary = u32::try_from(backend.vocabulary()).unwrap_or(u32::MAX);
    let mut rng = SplitMix64::new(1);
    let tokens: Vec<u32> = (0..count).map(|_| rng.below(vocabulary)).collect();
    let started = Instant::now();
    if at_once {
        backend.run(&tokens, 0, Wanted::Last)?;
    } else {
        for (position, token) in tokens.iter().enumerate() {
            backend.run(&[*token], position, Wanted::Last)?;
        }
    }
    Ok(count as f64 / started.elapsed().as_secs_f64())
}
