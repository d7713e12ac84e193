//! `kiln perplexity`: as `llama-perplexity` computes it.

use std::io::Write;
use std::path::PathBuf;

use super::load::{LoadArguments, read_text, tokenizer_of};
use super::{Failure, proceed};
use crate::backend::Wanted;
use crate::error::Error;
use crate::selftest::DeviceKind;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    load: LoadArguments,
    /// The text, a file in UTF-8.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk; the second half of each is scored.
    #[arg(long, default_value_t = 512, value_name = "N")]
    chunk: usize,
    /// Chunks to score at most; -1: all.
    #[arg(long, default_value_t = -1, allow_negative_numbers = true)]
    chunks: i64,
}

pub(super) fn perplexity(
    arguments: &Arguments,
    kinds: &[&dyn DeviceKind],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let chunk = arguments.chunk;
    if chunk < 4 {
        return Err(Error::Request(format!("--chunk is {chunk}, expected at least 4")).into());
    }
    let model = arguments.load.open()?;
    let tokenizer = tokenizer_of(&model)?;
    let tokens = tokenizer.encode(&read_text(&arguments.file)?, true, false);
    if tokens.len() < 2 * chunk {
        let problem =
            format!("the text has {} tokens, at least two chunks of {chunk} are needed", tokens.len());
        return Err(Error::Request(problem).into());
    }
    let bos = tokenizer.bos().filter(|bos| tokens[0] == *bos);
    let mut backend = arguments.load.load_with(model, kinds, chunk)?;
    let limit = usize::try_from(arguments.chunks).unwrap_or(usize::MAX);
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0usize);
    let vocabulary = backend.vocabulary();
    for (number, tokens) in tokens.chunks_exact(chunk).take(limit).enumerate() {
        let mut input = tokens.to_vec();
        if let Some(bos) = bos {
            input[0] = bos;
        }
        let first = chunk / 2;
        backend.run(&input[..first], 0, Wanted::Nothing)?;
        let batch = backend.batch_size();
        for start in (first..chunk - 1).step_by(batch) {
            let end = (start + batch).min(chunk - 1);
            backend.run(&input[start..end], start, Wanted::All)?;
            for (logits, next) in backend.logits().chunks_exact(vocabulary).zip(&tokens[start + 1..=end]) {
                let loss = -log_probability(logits, *next as usize);
                sum += loss;
                squares += loss * loss;
                count += 1;
            }
        }
        eprint!("[{}]{:.4} ", number + 1, (sum / count as f64).exp());
        if proceed().is_break() {
            break;
        }
    }
    eprintln!();
    let mean = sum / count as f64;
    let deviation = ((squares / count as f64 - mean * mean).max(0.0) / (count.max(2) - 1) as f64).sqrt();
    writeln!(out, "perplexity {:.4} +/- {:.4} over {count} tokens", mean.exp(), deviation * mean.exp())?;
    Ok(())
}

fn log_probability(logits: &[f32], token: usize) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    f64::from(logits[token]) - largest - sum.ln()
}
