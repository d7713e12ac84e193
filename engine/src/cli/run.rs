//! `kiln run`: a prompt and what follows it.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use super::load::{LoadArguments, PromptArguments, tokenizer_of};
use super::{Failure, SamplingArguments, proceed};
use crate::error::Error;
use crate::sample::Sampler;
use crate::selftest::DeviceKind;
use crate::session::{Limits, Session, Stop};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    load: LoadArguments,
    #[command(flatten)]
    prompt: PromptArguments,
    /// Tokens to make; -1: until the model ends the text or the context is full.
    #[arg(short = 'n', long = "predict", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Go on after the model has ended the text.
    #[arg(long)]
    ignore_eos: bool,
    /// Do not repeat the prompt before the text.
    #[arg(long)]
    no_display_prompt: bool,
    /// Take names of control tokens in the prompt, such as <|im_start|>, for what they name.
    #[arg(long)]
    special: bool,
}

/// What the built-in model continues if it is told nothing.
const USUAL_PROMPT: &str = "Once upon a time";

pub(super) fn run(
    arguments: &Arguments,
    kinds: &[&dyn DeviceKind],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let settings = arguments.sampling.settings()?;
    let text = match arguments.prompt.text()? {
        Some(text) => text,
        None if arguments.load.file.model.is_none() => USUAL_PROMPT.to_string(),
        None => return Err(Error::Request("no prompt: give one with -p TEXT or -f FILE".into()).into()),
    };
    let model = arguments.load.open()?;
    let tokenizer = tokenizer_of(&model)?;
    let mut tokens = tokenizer.encode(&text, true, arguments.special);
    if tokens.is_empty() {
        // An empty prompt: begin as a text begins.
        tokens.extend(tokenizer.bos().or(tokenizer.eos()));
    }
    let backend = arguments.load.load(model, kinds)?;
    let mut session = Session::new(backend);

    if !arguments.no_display_prompt {
        write!(out, "{text}")?;
        out.flush()?;
    }
    let started = Instant::now();
    let evaluated = session.set(&tokens, |_| proceed())?;
    let prompt_time = started.elapsed().as_secs_f64();

    let started = Instant::now();
    let mut written = Ok(());
    let limits = Limits { tokens: usize::try_from(arguments.predict).ok(), ignore_end: arguments.ignore_eos };
    let mut sampler = Sampler::new(settings);
    let result = session.generate(&tokenizer, &mut sampler, limits, |text| {
        written = write!(out, "{text}").and_then(|()| out.flush());
        if written.is_err() { ControlFlow::Break(()) } else { proceed() }
    });
    let time = started.elapsed().as_secs_f64();
    // The text so far ends in a line end, whatever happened.
    written?;
    writeln!(out)?;
    out.flush()?;
    let outcome = result?;
    let note = match outcome.stop {
        Stop::Context => " (the context is full)",
        Stop::Asked => " (stopped)",
        Stop::End | Stop::Limit => "",
    };
    eprintln!(
        "prompt {evaluated} tokens, {:.1}/s; text {} tokens, {:.1}/s{note}; seed {}",
        evaluated as f64 / prompt_time,
        outcome.tokens,
        outcome.tokens as f64 / time,
        settings.seed
    );
    Ok(())
}
