//! `setup`: makes what the plan lacks. Everything is keyed by content, so a second run finds it all in place.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::cmd::cli::Common;
use crate::report::decision::Thoroughness;
use crate::report::error::Result;
use crate::report::output;
use crate::report::progress;
use crate::setup::{Prepared, Wanted};
use crate::source::Origin;
use crate::source::cuda_wheels::Parts;

/// Fetch, verify, patch and build the pinned backend, and configure this checkout for it
///
/// Reads PROVENANCE, backend-patches/, Cargo's configuration and the store. Writes the store,
/// .cargo/cuda-oxide.toml, .cargo/kiln.toml and the link upstream. Asks rustup for rustc-dev when the
/// pinned toolchain lacks it. Does nothing when all is in place.
#[derive(Debug, Args)]
pub struct Setup {
    #[command(flatten)]
    common: Common,

    /// Take the pinned revision from here instead of the network: a .tar.gz or .tar archive, a folder, or a git
    /// repository (bare or not) that has it
    #[arg(long, value_name = "ARCHIVE|DIR|GIT-REPO")]
    source: Option<PathBuf>,

    /// Take source and crates from a file that `bundle` wrote, and use no network
    #[arg(long, value_name = "FILE", conflicts_with = "source")]
    bundle: Option<PathBuf>,

    /// The sha256 that the bundle must have; then a built backend in it is used instead of building one
    #[arg(long, value_name = "HASH", requires = "bundle")]
    bundle_sha256: Option<Sha256>,

    /// Also lay a CUDA toolkit's parts into the store, from NVIDIA's Python wheels through pip: for machines without a
    /// toolkit. They are NVIDIA's, under NVIDIA's licence
    #[arg(long, value_name = "wheels")]
    cuda: Option<CudaParts>,

    /// Record what was built in PROVENANCE, beside the recorded results: for another host or build of rustc
    #[arg(long)]
    accept: bool,

    /// Use no network: the source must be in the store or given, the crates in CARGO_HOME [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// Print one JSON document (schema kiln.setup/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

/// What was done, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    dry_run: bool,
    /// What was done, or with `dry_run` what would be; nothing when all is in place.
    steps: &'a [String],
    store: &'a Path,
    rustc: PathBuf,
    llc: &'a Path,
    /// The backend's library, if it is there now.
    backend: Option<&'a Path>,
    cuda: Option<Cuda<'a>>,
}

/// Laid CUDA parts.
#[derive(Serialize)]
struct Cuda<'a> {
    root: &'a Path,
    licence: &'a str,
}

/// Where CUDA toolkit parts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CudaParts {
    /// NVIDIA's Python wheels that PROVENANCE pins
    Wheels,
}

impl Setup {
    /// Runs the verb.
    ///
    /// # Errors
    /// Whatever stands in the way; what was published before stays and is used by the next run.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("setup", self.common.quiet);
        let bundle = self.bundle.as_ref().map(|path| env.absolute(path)).transpose()?;
        let origin = match (&self.source, &bundle) {
            (Some(path), _) => Origin::of(&env.absolute(path)?)?,
            (None, Some(path)) => Origin::Archive(path.clone()),
            (None, None) => Origin::Repository,
        };
        let request = self.common.request(Thoroughness::First);
        let prepared = Prepared::new(Wanted {
            request: &request,
            origin,
            offline: bundle.is_some() || env.is_offline(self.offline),
            bundle,
            bundle_sha256: self.bundle_sha256,
            wheels: matches!(self.cuda, Some(CudaParts::Wheels)),
            accept: self.accept,
            dry_run: self.dry_run,
            workspace,
            env,
            progress: progress.as_ref(),
        })?;
        let steps = &prepared.steps;
        if steps.is_empty() {
            prepared.keep()?;
        }
        if self.json && (steps.is_empty() || self.dry_run) {
            let published = prepared.plan.backend.value.as_ref();
            let library = published.map(|backend| backend.library.as_path());
            self.report(&prepared, library, prepared.cuda()?.as_ref())?;
            return Ok(0);
        }
        if steps.is_empty() {
            output::line("setup: everything is in place, nothing was done")?;
            return Ok(0);
        }
        if self.dry_run {
            for step in steps {
                output::line(&format!("would {step}"))?;
            }
            return Ok(0);
        }

        let started = prepared.start()?;
        let parts = started.cuda()?;
        if let Some(parts) = parts.as_ref().filter(|_| self.cuda.is_some() && !self.json) {
            output::line(&format!("cuda      {}", parts.root.display()))?;
            output::line(&format!("licence   NVIDIA's CUDA Toolkit: {}", parts.licence))?;
        }
        let backend = started.finish()?;
        if self.json {
            self.report(&prepared, Some(&backend.library), parts.as_ref())?;
            return Ok(0);
        }
        let (llc, rustc) = (&prepared.plan.tools()?.llc, prepared.plan.rustc.require()?.rustc());
        output::line(&format!("backend   {}", backend.library.display()))?;
        output::line(&format!("llc       {} ({})", llc.path.display(), llc.line))?;
        output::line(&format!("rustc     {}", rustc.display()))?;
        output::line("next      cargo xtask build --arch sm_NN")?;
        Ok(0)
    }

    fn report(&self, prepared: &Prepared<'_>, backend: Option<&Path>, cuda: Option<&Parts>) -> Result<()> {
        let plan = &prepared.plan;
        output::json(&Report {
            schema: "kiln.setup/1",
            dry_run: self.dry_run,
            steps: &prepared.steps,
            store: plan.store.require()?.root(),
            rustc: plan.rustc.require()?.rustc(),
            llc: &plan.tools()?.llc.path,
            backend,
            cuda: cuda.map(|parts| Cuda { root: &parts.root, licence: &parts.licence }),
        })
    }
}
