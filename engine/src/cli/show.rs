//! `kiln inspect` and `kiln tokenize`: what a file holds and how it cuts text.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use super::Failure;
use super::load::{FileArguments, PromptArguments, warn};
use super::template::read_stdin;
use crate::error::Error;
use crate::gguf::Gguf;
use crate::model::Model;
use crate::tokenizer::Tokenizer;

#[derive(Debug, clap::Args)]
pub(super) struct InspectArguments {
    #[command(flatten)]
    file: FileArguments,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct TokenizeArguments {
    #[command(flatten)]
    file: FileArguments,
    #[command(flatten)]
    text: PromptArguments,
    /// Read the text from standard input; so it is too without -p and -f.
    #[arg(long, conflicts_with_all = ["prompt", "file"])]
    stdin: bool,
    /// Print only the numbers, on one line.
    #[arg(long)]
    ids: bool,
    /// Leave out the begin and end tokens that the file asks for.
    #[arg(long)]
    no_bos: bool,
    /// Do not take names of control tokens for what they name.
    #[arg(long)]
    no_parse_special: bool,
}

pub(super) fn inspect(arguments: &InspectArguments, out: &mut dyn Write) -> Result<(), Failure> {
    let file = arguments.file.open()?;
    writeln!(out, "{}: GGUF version {}", file.name(), file.version())?;
    for (key, value) in file.metadata() {
        writeln!(out, "{key} = {}", shortened(&value.to_string()))?;
    }
    summary(&file, out)?;
    if arguments.tensors {
        for tensor in file.tensors().values() {
            writeln!(out, "{:<40} {:<6} {:?}", tensor.name, tensor.kind, tensor.shape)?;
        }
    }
    match Model::from_gguf(file) {
        Ok(model) => writeln!(out, "runs here as {}", model.config.spec)?,
        Err(error) => writeln!(out, "does not run here: {error}")?,
    }
    Ok(())
}

fn summary(file: &Gguf, out: &mut dyn Write) -> Result<(), Failure> {
    let mut kinds: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    for tensor in file.tensors().values() {
        let entry = kinds.entry(tensor.kind).or_default();
        entry.0 += 1;
        entry.1 += tensor.byte_len() as u64;
    }
    writeln!(out, "{} tensors", file.tensors().len())?;
    for (kind, (count, bytes)) in kinds {
        writeln!(out, "  {kind:<6} {count:>5} {:>10.2} MiB", bytes as f64 / f64::from(1 << 20))?;
    }
    Ok(())
}

fn shortened(text: &str) -> String {
    const LONGEST: usize = 200;
    if text.chars().count() <= LONGEST {
        return text.to_string();
    }
    text.chars().take(LONGEST).chain("...".chars()).collect()
}

pub(super) fn tokenize(arguments: &TokenizeArguments, out: &mut dyn Write) -> Result<(), Failure> {
    let tokenizer = Tokenizer::from_gguf(&arguments.file.open()?)?;
    warn(&tokenizer);
    let given = if arguments.stdin { None } else { arguments.text.text()? };
    let text = match given {
        Some(text) => text,
        None if arguments.stdin || !io::stdin().is_terminal() => read_stdin()?,
        None => {
            return Err(Error::Request("no text: give one with -p TEXT, -f FILE or --stdin".into()).into());
        }
    };
    let tokens = tokenizer.encode(&text, !arguments.no_bos, !arguments.no_parse_special);
    if arguments.ids {
        let numbers: Vec<String> = tokens.iter().map(u32::to_string).collect();
        writeln!(out, "[{}]", numbers.join(", "))?;
        return Ok(());
    }
    for token in tokens {
        let bytes = tokenizer.bytes(token);
        let shown =
            if bytes.is_empty() { tokenizer.text(token).into() } else { String::from_utf8_lossy(bytes) };
        writeln!(out, "{token:>6} -> {shown:?}")?;
    }
    Ok(())
}
