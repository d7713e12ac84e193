//! The flags that say which model runs where, and how they become one that is loaded.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use clap::Args;

use super::Failure;
use crate::backend::cpu::{Cpu, Level, Options};
use crate::backend::{Backend, LoadOptions};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::memory;
use crate::model::Model;
use crate::selftest::{DeviceKind, DeviceName, SelftestError};
use crate::tokenizer::Tokenizer;

/// Positions, unless more are asked for: the memory of the cache is taken whether it is used or not.
const USUAL_CONTEXT: usize = 4096;

/// Which model.
#[derive(Debug, Args)]
pub(super) struct FileArguments {
    /// The model, a GGUF file; of a split one the first part. Without it: the built-in model.
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
}

impl FileArguments {
    pub fn open(&self) -> Result<Gguf> {
        match &self.model {
            Some(path) => Gguf::open(path),
            None => crate::builtin(),
        }
    }
}

/// Where it runs.
#[derive(Debug, Args)]
pub(super) struct LoadArguments {
    #[command(flatten)]
    pub file: FileArguments,
    /// Positions of the context; 0: as many as the model was trained for. Default: those, up to 4096.
    #[arg(short = 'c', long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Threads. Default: one for each processor. The result does not depend on it.
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// Tokens that are evaluated at once. The result does not depend on it.
    #[arg(short, long, value_name = "N", default_value_t = 64)]
    batch_size: usize,
    /// Where the model runs: cpu, cuda, cuda:N, or auto, which is cuda if this kiln and this machine have it.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceName,
    /// Instructions of the CPU: portable, avx2 or avx512. Default: the best. The result does not depend on it.
    #[arg(long, value_name = "NAME")]
    level: Option<String>,
}

impl LoadArguments {
    /// Opens the file and says which it is.
    pub fn open(&self) -> Result<Model> {
        if self.file.model.is_none() {
            eprintln!("model: the built-in one, which writes little stories (-m FILE for another)");
        }
        Model::from_gguf(self.file.open()?)
    }

    /// Loads the model, with the context as the flags have it.
    pub fn load(
        &self,
        model: Model,
        kinds: &[&dyn DeviceKind],
    ) -> std::result::Result<Box<dyn Backend>, Failure> {
        let trained = model.config.trained_context;
        let context = match self.ctx_size {
            Some(0) => trained,
            Some(context) => context,
            None => trained.min(USUAL_CONTEXT),
        };
        if context > trained {
            eprintln!("note: the model was trained for {trained} positions; beyond them, expect nonsense");
        }
        self.load_with(model, kinds, context)
    }

    /// Loads the model with this context.
    pub fn load_with(
        &self,
        model: Model,
        kinds: &[&dyn DeviceKind],
        context: usize,
    ) -> std::result::Result<Box<dyn Backend>, Failure> {
        let started = Instant::now();
        let options = LoadOptions {
            context,
            sequences: 1,
            threads: self.thread_count(),
            batch: self.batch_size,
            memory: memory::available(),
        };
        let backend = self.load_on(model, kinds, options)?;
        eprintln!(
            "loaded in {:.1} s: {}, context {context}",
            started.elapsed().as_secs_f64(),
            backend.description()
        );
        Ok(backend)
    }

    fn load_on(
        &self,
        model: Model,
        kinds: &[&dyn DeviceKind],
        options: LoadOptions,
    ) -> std::result::Result<Box<dyn Backend>, Failure> {
        let device = &self.device;
        if device.kind == "auto" {
            for kind in kinds {
                match kind.load(0, model.clone(), &options) {
                    Ok(backend) => return Ok(backend),
                    Err(reason) => eprintln!("note: not on {}: {reason}", kind.name()),
                }
            }
        } else if device.kind != "cpu" || device.index != 0 {
            let Some(kind) = kinds.iter().find(|kind| kind.name() == device.kind) else {
                let known = std::iter::once("cpu").chain(kinds.iter().map(|kind| kind.name()));
                let (asked, known) = (device.kind.clone(), known.map(str::to_owned).collect());
                return Err(SelftestError::UnknownKind { asked, known }.into());
            };
            return kind
                .load(device.index, model, &options)
                .map_err(|reason| SelftestError::Device { device: device.clone(), reason }.into());
        }
        let level = match &self.level {
            Some(name) => Level::from_name(name)?,
            None => Level::fastest(),
        };
        let options = Options {
            context: options.context,
            sequences: options.sequences,
            threads: options.threads,
            batch: options.batch,
            memory: options.memory,
            level,
        };
        Ok(Box::new(Cpu::load(model, options)?))
    }

    fn thread_count(&self) -> usize {
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        match self.threads {
            None => processors,
            Some(threads) if threads > processors.max(8) => {
                eprintln!(
                    "note: {threads} threads asked for, {processors} used: this machine has {processors} processors"
                );
                processors
            }
            Some(threads) => threads,
        }
    }
}

/// The tokenizer of a model's file, which must know the same tokens.
pub(super) fn tokenizer_of(model: &Model) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::from_gguf(&model.file)?;
    warn(&tokenizer);
    if tokenizer.len() != model.vocabulary() {
        let problem = format!("{} tokens, and the model has {}", tokenizer.len(), model.vocabulary());
        return Err(Error::Tokenizer(problem));
    }
    Ok(tokenizer)
}

/// Says what the file left open.
pub(super) fn warn(tokenizer: &Tokenizer) {
    for warning in tokenizer.warnings() {
        eprintln!("warning: {warning}");
    }
}

/// A prompt from `-p` or `-f`.
#[derive(Debug, Args)]
pub(super) struct PromptArguments {
    /// The text to begin with.
    #[arg(short, long, conflicts_with = "file")]
    prompt: Option<String>,
    /// The file that holds the text to begin with, in UTF-8.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

impl PromptArguments {
    pub fn text(&self) -> Result<Option<String>> {
        match (&self.prompt, &self.file) {
            (Some(text), _) => Ok(Some(text.clone())),
            (None, Some(path)) => read_text(path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// Reads a UTF-8 file.
pub(super) fn read_text(path: &std::path::Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::Request(format!("{} is not UTF-8 at byte {at}", path.display()))
    })
}
