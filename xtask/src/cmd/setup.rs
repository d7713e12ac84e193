//! `setup`: makes what the plan lacks. Everything is keyed by content, so a second run finds it all in place.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::backend;
use crate::backend::checkout::{self, LINK};
use crate::backend::host_config;
use crate::base::checkpoint;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::cmd::cli::Common;
use crate::machine::toolchain::{NO_RUSTC_DEV, Toolchain};
use crate::pins::Pin;
use crate::pins::outputs::{self, Output, Recorded};
use crate::plan::Plan;
use crate::report::decision::{Problem, Thoroughness};
use crate::report::error::{ACCESS, Error, READ_ONLY, Result};
use crate::report::output;
use crate::report::progress::{self, Progress};
use crate::source::bundle::Bundle;
use crate::source::cuda_wheels;
use crate::source::pinned::Pins;
use crate::source::vendor::{self, Locks};
use crate::source::{self, Origin};
use crate::store::inventory;
use crate::store::roots::Root;
use crate::store::selection::Selection;
use crate::store::{Kind, Store};

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
        let offline = self.bundle.is_some() || env.is_offline(self.offline);
        let bundle = self.bundle.as_ref().map(|path| env.absolute(path)).transpose()?;
        let origin = match (&self.source, &bundle) {
            (Some(path), _) => Origin::of(&env.absolute(path)?)?,
            (None, Some(path)) => Origin::Archive(path.clone()),
            (None, None) => Origin::Repository,
        };
        let request = self.common.request(Thoroughness::First);
        let mut plan = Plan::resolve(&request, workspace, env);
        if !self.dry_run && !offline && add_rustc_dev(&plan, env, progress.as_ref())? {
            plan = Plan::resolve(&request, workspace, env);
        }

        // What cannot be made stops here, before any download.
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        let tools = plan.tools()?;
        let flags = plan.host_flags.require()?;

        let mut steps = steps(&plan, &origin);
        if self.accept {
            steps.push("record the digests of the backend in PROVENANCE".to_owned());
        }
        if bundle.is_some() && vendor::find(store, &pins.pin, workspace)?.is_none() {
            steps.push("verify the crates in the bundle and lay them into the store".to_owned());
        }
        if self.cuda.is_some() && cuda_wheels::find(store, &pins.pin).is_none() {
            steps.push(
                "fetch NVIDIA's wheels with pip, verify them and lay the CUDA toolkit parts".to_owned(),
            );
        }
        let root = root(pins, toolchain, workspace)?;
        let report = |backend: Option<&Path>, cuda: Option<&cuda_wheels::Parts>| {
            let cuda = cuda.map(|parts| Cuda { root: &parts.root, licence: &parts.licence });
            let (dry_run, llc) = (self.dry_run, tools.llc.path.as_path());
            let (store, rustc) = (store.root(), toolchain.rustc());
            output::json(&Report {
                schema: "kiln.setup/1",
                dry_run,
                steps: &steps,
                store,
                rustc,
                llc,
                backend,
                cuda,
            })
        };
        let published = plan.backend.value.as_ref().map(|backend| backend.library.as_path());
        if !self.dry_run {
            store.sweep();
        }
        if steps.is_empty() {
            let _lock = checkout::lock(workspace, self.common.lock_limit(), progress.as_ref())?;
            remember(&plan, workspace)?;
            note_root(&root, store, progress.as_ref())?;
            if self.json {
                report(published, cuda_wheels::find(store, &pins.pin).as_ref())?;
            } else {
                output::line("setup: everything is in place, nothing was done")?;
            }
            return Ok(0);
        }
        if self.dry_run && self.json {
            report(published, cuda_wheels::find(store, &pins.pin).as_ref())?;
            return Ok(0);
        }
        if self.dry_run {
            for step in &steps {
                output::line(&format!("would {step}"))?;
            }
            return Ok(0);
        }

        // Until the end nothing of this store is removed, whether or not a checkout is noted for it already.
        let _in_use = store.lock_shared(inventory::GC_LOCK, &|text| progress.note(text))?;
        let parts = match self.cuda {
            Some(CudaParts::Wheels) => {
                let parts = cuda_wheels::make(&pins.pin, store, offline, env, progress.as_ref())?;
                if !self.json {
                    output::line(&format!("cuda      {}", parts.root.display()))?;
                    output::line(&format!("licence   NVIDIA's CUDA Toolkit: {}", parts.licence))?;
                }
                Some(parts)
            }
            None => cuda_wheels::find(store, &pins.pin),
        };
        let bundle = match bundle {
            Some(path) => {
                progress.note(&format!("unpacking {}", path.display()));
                Some(Bundle::open(&path, self.bundle_sha256.as_ref(), &pins.pin, store)?)
            }
            None => None,
        };
        let origin = bundle.as_ref().map_or(origin, Bundle::origin);
        let source = source::make(
            &pins.pin,
            &pins.patches,
            &source::Making { store, origin: &origin, offline, env, progress: progress.as_ref() },
        )?;
        let crates = match &bundle {
            Some(bundle) => {
                let locks = Locks::read(&pins.pin, &pins.pin.source.workspace(&source.tree), workspace)?;
                Some(vendor::install(&locks, bundle.crates(), &pins.pin, store, progress.as_ref())?)
            }
            None => vendor::find(store, &pins.pin, workspace)?,
        };
        let making = backend::Making {
            store,
            pin: &pins.pin,
            patches: &pins.patches,
            source: &source,
            toolchain,
            tools,
            crates: crates.as_ref(),
            offline,
            accept: self.accept,
            env,
            progress: progress.as_ref(),
        };
        let built = bundle.as_ref().and_then(Bundle::backend);
        let backend = match (built, &self.bundle_sha256) {
            (Some(folder), Some(_)) => backend::import(&folder, &making)?,
            (Some(_), None) => {
                progress.note(
                    "the bundle's backend is not used, since only --bundle-sha256 says which bundle is meant",
                );
                backend::make(&making)?
            }
            (None, _) => backend::make(&making)?,
        };
        let built = backend.output(toolchain)?;
        let lock = checkout::lock(workspace, self.common.lock_limit(), progress.as_ref())?;
        if self.accept {
            accept(&pins.pin, &built, workspace, progress.as_ref())?;
        } else if !backend::check_output(&pins.pin, &built)? {
            progress.note(NOT_RECORDED);
        }
        checkpoint::pass("linking", env);
        checkout::write_link(workspace, &pins.pin.source.workspace(&source.tree))?;
        checkpoint::pass("configuring", env);
        let written = host_config::write(
            &checkout::host_config_path(workspace),
            &checkout::host_config_of(&backend, flags, toolchain),
        )?;
        for warning in flags.warnings.iter().chain(&written.warnings) {
            progress.warn(warning);
        }
        checkpoint::pass("selecting", env);
        remember(&plan, workspace)?;
        root.register(store)?;
        drop(lock);

        // The same resolver that `build` and `doctor` use has the last word.
        let plan = Plan::resolve(&request, workspace, env);
        plan.source.require()?;
        plan.backend.require()?;
        plan.checkout.require()?;
        if self.json {
            report(Some(&backend.library), parts.as_ref())?;
            return Ok(0);
        }
        output::line(&format!("backend   {}", backend.library.display()))?;
        output::line(&format!("llc       {} ({})", tools.llc.path.display(), tools.llc.line))?;
        output::line(&format!("rustc     {}", toolchain.rustc().display()))?;
        output::line("next      cargo xtask build --arch sm_NN")?;
        Ok(0)
    }
}

/// Said where nothing says what must come out.
const NOT_RECORDED: &str = "PROVENANCE does not record what these inputs give with this rustc on this host, so the result is \
                            not compared; cargo xtask setup --accept records it";

/// Records `output`, unless it is recorded.
fn accept(pin: &Pin, output: &Output, workspace: &Path, progress: &dyn Progress) -> Result<()> {
    if pin.recorded(output) != Recorded::Same {
        outputs::record(workspace, output)?;
        progress.note(&format!("PROVENANCE records {} for {}", output.backend_sha256, output.host));
    }
    Ok(())
}

/// What there is to do, in order.
fn steps(plan: &Plan, origin: &Origin) -> Vec<String> {
    let mut steps = Vec::new();
    let because = |problem: &Option<Problem>| {
        problem.as_ref().and_then(|problem| problem.message.lines().next().map(str::to_owned))
    };
    let from = match origin {
        Origin::Repository => "the pinned repository".to_owned(),
        Origin::Archive(path) | Origin::Folder(path) | Origin::Git(path) => path.display().to_string(),
    };
    if let Some(reason) = because(&plan.source.decision.problem) {
        steps.push(format!("take the source from {from}, verify it and apply the patches: {reason}"));
    }
    if let Some(reason) = because(&plan.backend.decision.problem) {
        steps.push(format!("build and check the backend: {reason}"));
    }
    if !steps.is_empty() || !plan.checkout.decision.is_good() {
        let reason =
            because(&plan.checkout.decision.problem).unwrap_or_else(|| "they name the backend".to_owned());
        steps.push(format!("write .cargo/cuda-oxide.toml and {LINK}: {reason}"));
    }
    steps
}

/// What this checkout uses of the store.
fn root(pins: &Pins, toolchain: &Toolchain, workspace: &Path) -> Result<Root> {
    let source = pins.source_key();
    let mut entries = vec![
        (Kind::Pristine, source::pristine_key(&pins.pin.source)),
        (Kind::Backend, backend::key(&pins.pin, &source, toolchain)),
        (Kind::Source, source),
        (Kind::Vendor, vendor::key(&pins.pin, workspace)?),
    ];
    entries.extend(cuda_wheels::key(&pins.pin).map(|key| (Kind::Cuda, key)));
    Ok(Root::new(workspace, pins.pin.source.revision.as_str(), &entries))
}

/// Notes the checkout where nothing else was to be done; a store that cannot be written serves all the same.
fn note_root(root: &Root, store: &Store, progress: &dyn Progress) -> Result<()> {
    match root.register(store) {
        Err(error) if [&READ_ONLY, &ACCESS].iter().any(|code| std::ptr::eq(error.code(), *code)) => {
            progress.note(&format!(
                "this checkout is not noted in the store, whose gc will not know of it: {error}"
            ));
            Ok(())
        }
        result => result,
    }
}

/// Remembers the store and the toolchain for the other verbs.
fn remember(plan: &Plan, workspace: &Path) -> Result<()> {
    let selection = Selection {
        store: plan.store.require()?.root().to_owned(),
        toolchain: plan.rustc.require()?.sysroot.clone(),
    };
    if Selection::load(workspace).is_ok_and(|present| present.as_ref() == Some(&selection)) {
        return Ok(());
    }
    selection.save(workspace)
}

/// Asks rustup to add rustc-dev to the pinned toolchain when that is all that is missing; says whether it did.
fn add_rustc_dev(plan: &Plan, env: &Env, progress: &dyn Progress) -> Result<bool> {
    let Some(problem) = &plan.rustc.decision.problem else { return Ok(false) };
    if !std::ptr::eq(problem.code, &NO_RUSTC_DEV) {
        return Ok(false);
    }
    let pins = plan.pins.require()?;
    let channel = pins.pin.toolchain.channel.as_str();
    progress.note(&format!("adding rustc-dev to {channel} with rustup"));
    let failed = |cause: String| {
        let error: Error = problem.clone().into();
        error.cause(format!("rustup did not add it: {cause}"))
    };
    let mut command = Command::new("rustup");
    command.env_clear().envs(env.vars().filter(|(name, _)| *name != "RUSTUP_TOOLCHAIN"));
    command.args(["component", "add", "rustc-dev", "--toolchain", channel]);
    let status = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .map_err(|error| failed(format!("cannot start rustup: {error}")))?;
    if status.success() { Ok(true) } else { Err(failed(format!("it ended with {status}"))) }
}
