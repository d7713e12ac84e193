//! What makes the plan good: each thing that it lacks is made, in the order in which they need each other. Everything is keyed by
//! content, so a second run finds it all in place.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::backend::checkout::{self, LINK};
use crate::backend::host_config;
use crate::backend::{self, Backend};
use crate::base::checkpoint;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::machine::toolchain::{NO_RUSTC_DEV, Toolchain};
use crate::pins::Pin;
use crate::pins::outputs::{self, Output, Recorded};
use crate::plan::{Plan, Request};
use crate::report::decision::Problem;
use crate::report::error::{ACCESS, Error, READ_ONLY, Result};
use crate::report::progress::Progress;
use crate::source::bundle::Bundle;
use crate::source::cuda_wheels::{self, Parts};
use crate::source::pinned::Pins;
use crate::source::vendor::{self, Locks};
use crate::source::{self, Origin};
use crate::store::inventory;
use crate::store::roots::Root;
use crate::store::selection::Selection;
use crate::store::{self, Kind, Store};

/// What a setup is asked for.
pub struct Wanted<'a> {
    /// What the plan is asked for.
    pub request: &'a Request,
    /// Where the source comes from, unless a bundle has it.
    pub origin: Origin,
    /// The bundle to take everything from.
    pub bundle: Option<PathBuf>,
    /// The hash that it must have for its backend to be used.
    pub bundle_sha256: Option<Sha256>,
    /// Lay CUDA toolkit parts from NVIDIA's wheels.
    pub wheels: bool,
    /// Record what was built.
    pub accept: bool,
    /// Use no network.
    pub offline: bool,
    /// Ask nothing of the system and remove nothing.
    pub dry_run: bool,
    /// The workspace.
    pub workspace: &'a Path,
    /// The environment.
    pub env: &'a Env,
    /// Where notes go.
    pub progress: &'a dyn Progress,
}

/// A plan of which everything that is missing can be made.
pub struct Prepared<'a> {
    wanted: Wanted<'a>,
    /// The plan as it was found.
    pub plan: Plan,
    /// What there is to do, in order; nothing when all is in place.
    pub steps: Vec<String>,
    root: Root,
}

impl<'a> Prepared<'a> {
    /// Resolves the plan, adding rustc-dev where that is all that the toolchain lacks.
    ///
    /// # Errors
    /// The plan lacks something that setup does not make: so it stops before any download.
    pub fn new(wanted: Wanted<'a>) -> Result<Self> {
        let Wanted { request, workspace, env, progress, .. } = wanted;
        let mut plan = Plan::resolve(request, workspace, env);
        if !wanted.dry_run && !wanted.offline && add_rustc_dev(&plan, env, progress)? {
            plan = Plan::resolve(request, workspace, env);
        }
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        plan.tools()?;
        plan.host_flags.require()?;

        let mut steps = steps(&plan, &wanted.origin);
        if wanted.accept {
            steps.push("record the digests of the backend in PROVENANCE".to_owned());
        }
        if wanted.bundle.is_some() && vendor::find(store, &pins.pin, workspace)?.is_none() {
            steps.push("verify the crates in the bundle and lay them into the store".to_owned());
        }
        if wanted.wheels && cuda_wheels::find(store, &pins.pin).is_none() {
            steps.push(
                "fetch NVIDIA's wheels with pip, verify them and lay the CUDA toolkit parts".to_owned(),
            );
        }
        let root = root(pins, toolchain, workspace)?;
        if !wanted.dry_run {
            store.sweep();
        }
        Ok(Prepared { wanted, plan, steps, root })
    }

    /// The CUDA toolkit parts in the store.
    ///
    /// # Errors
    /// None, once it is prepared.
    pub fn cuda(&self) -> Result<Option<Parts>> {
        Ok(cuda_wheels::find(self.plan.store.require()?, &self.plan.pins.require()?.pin))
    }

    /// Where there is nothing to do: remembers the choices, and that this checkout uses them.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn keep(&self) -> Result<()> {
        let Wanted { request, workspace, progress, .. } = self.wanted;
        let _lock = checkout::lock(workspace, request.lock_limit, progress)?;
        remember(&self.plan, workspace)?;
        note_root(&self.root, self.plan.store.require()?, progress)
    }

    /// Begins to make what is missing. Until the end nothing of this store is removed, whether or not a checkout is noted
    /// for it already.
    ///
    /// # Errors
    /// The store cannot be locked.
    pub fn start(&self) -> Result<Started<'_>> {
        let note = |text: &str| self.wanted.progress.note(text);
        let in_use = self.plan.store.require()?.lock_shared(inventory::GC_LOCK, &note)?;
        Ok(Started { prepared: self, _in_use: in_use })
    }
}

/// A setup that holds the store.
pub struct Started<'a> {
    prepared: &'a Prepared<'a>,
    _in_use: store::Lock,
}

impl Started<'_> {
    /// Lays the CUDA toolkit parts, where they are wanted; else those that are there.
    ///
    /// # Errors
    /// They cannot be fetched, or are not the pinned ones.
    pub fn cuda(&self) -> Result<Option<Parts>> {
        let Prepared { plan, wanted: Wanted { wheels, offline, env, progress, .. }, .. } = self.prepared;
        if !wheels {
            return self.prepared.cuda();
        }
        let (pins, store) = (plan.pins.require()?, plan.store.require()?);
        cuda_wheels::make(&pins.pin, store, *offline, env, *progress).map(Some)
    }

    /// Makes source, crates and backend, and configures the checkout for them.
    ///
    /// # Errors
    /// Whatever stands in the way; what was published before stays and is used by the next run.
    pub fn finish(self) -> Result<Backend> {
        let Prepared { plan, wanted, root, .. } = self.prepared;
        let Wanted { request, workspace, env, progress, .. } = *wanted;
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        let flags = plan.host_flags.require()?;
        let (source, backend) = self.make_backend()?;
        let built = backend.output(toolchain)?;
        let lock = checkout::lock(workspace, request.lock_limit, progress)?;
        if wanted.accept {
            accept(&pins.pin, &built, workspace, progress)?;
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
        remember(plan, workspace)?;
        root.register(store)?;
        drop(lock);

        // The same resolver that `build` and `doctor` use has the last word.
        let plan = Plan::resolve(request, workspace, env);
        plan.source.require()?;
        plan.backend.require()?;
        plan.checkout.require()?;
        Ok(backend)
    }

    /// The patched source and the backend of it.
    fn make_backend(&self) -> Result<(source::Patched, Backend)> {
        let Prepared { plan, wanted, .. } = self.prepared;
        let Wanted { offline, accept, workspace, env, progress, .. } = *wanted;
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        let bundle = match &wanted.bundle {
            Some(path) => {
                progress.note(&format!("unpacking {}", path.display()));
                Some(Bundle::open(path, wanted.bundle_sha256.as_ref(), &pins.pin, store)?)
            }
            None => None,
        };
        let origin = bundle.as_ref().map(Bundle::origin);
        let origin = origin.as_ref().unwrap_or(&wanted.origin);
        let source = source::make(
            &pins.pin,
            &pins.patches,
            &source::Making { store, origin, offline, env, progress },
        )?;
        let crates = match &bundle {
            Some(bundle) => {
                let locks = Locks::read(&pins.pin, &pins.pin.source.workspace(&source.tree), workspace)?;
                Some(vendor::install(&locks, bundle.crates(), &pins.pin, store, progress)?)
            }
            None => vendor::find(store, &pins.pin, workspace)?,
        };
        let making = backend::Making {
            store,
            pin: &pins.pin,
            patches: &pins.patches,
            source: &source,
            toolchain,
            tools: plan.tools()?,
            crates: crates.as_ref(),
            offline,
            accept,
            env,
            progress,
        };
        let built = bundle.as_ref().and_then(Bundle::backend);
        let backend = match (built, &wanted.bundle_sha256) {
            (Some(folder), Some(_)) => backend::import(&folder, &making)?,
            (Some(_), None) => {
                progress.note(
                    "the bundle's backend is not used, since only --bundle-sha256 says which bundle is meant",
                );
                backend::make(&making)?
            }
            (None, _) => backend::make(&making)?,
        };
        Ok((source, backend))
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
