//! `setup`: makes what the plan lacks. Everything is keyed by content, so a second run finds it all in place.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use crate::backend;
use crate::checkout::{self, LINK};
use crate::checkpoint;
use crate::cli::Common;
use crate::decision::{Problem, Thoroughness};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::host_config;
use crate::output;
use crate::plan::{self, Plan, Request};
use crate::progress::{self, Progress};
use crate::selection::Selection;
use crate::source::{self, Origin};
use crate::toolchain::NO_RUSTC_DEV;

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

    /// Use no network: the source must be in the store or given, the crates in CARGO_HOME [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
}

impl Setup {
    /// Runs the verb.
    ///
    /// # Errors
    /// Whatever stands in the way; what was published before stays and is used by the next run.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("setup", self.common.quiet);
        let offline = self.offline
            || env.var("KILN_OFFLINE").is_some_and(|value| matches!(value.to_str(), Some("1" | "true")));
        let origin = match &self.source {
            Some(path) => Origin::of(&env.absolute(path)?)?,
            None => Origin::Repository,
        };
        let request = Request::new(&self.common, Thoroughness::First);
        let mut plan = Plan::resolve(&request, workspace, env);
        if !self.dry_run && !offline && add_rustc_dev(&plan, env, progress.as_ref())? {
            plan = Plan::resolve(&request, workspace, env);
        }

        // What cannot be made stops here, before any download.
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        let tools = plan.llc.require()?;
        let flags = plan.host_flags.require()?;

        let steps = steps(&plan, &origin);
        if !self.dry_run {
            store.sweep();
        }
        if steps.is_empty() {
            let _lock = checkout::lock(workspace, progress.as_ref())?;
            remember(&plan, workspace)?;
            output::line("setup: everything is in place, nothing was done")?;
            return Ok(0);
        }
        if self.dry_run {
            for step in steps {
                output::line(&format!("would {step}"))?;
            }
            return Ok(0);
        }

        let source = source::make(
            &pins.pin,
            &pins.patches,
            &source::Making { store, origin: &origin, offline, env, progress: progress.as_ref() },
        )?;
        let backend = backend::make(&backend::Making {
            store,
            pin: &pins.pin,
            patches: &pins.patches,
            source: &source,
            toolchain,
            tools,
            offline,
            env,
            progress: progress.as_ref(),
        })?;
        let lock = checkout::lock(workspace, progress.as_ref())?;
        checkpoint::pass("linking", env);
        checkout::write_link(workspace, &pins.pin.source.workspace(&source.tree))?;
        checkpoint::pass("configuring", env);
        let written = host_config::write(
            &checkout::host_config_path(workspace),
            &plan::host_config(&backend, flags, toolchain),
        )?;
        for warning in flags.warnings.iter().chain(&written.warnings) {
            progress.warn(warning);
        }
        checkpoint::pass("selecting", env);
        remember(&plan, workspace)?;
        drop(lock);

        // The same resolver that `build` and `doctor` use has the last word.
        let plan = Plan::resolve(&request, workspace, env);
        plan.source.require()?;
        plan.backend.require()?;
        plan.checkout.require()?;
        output::line(&format!("backend   {}", backend.library.display()))?;
        output::line(&format!("llc       {} ({})", tools.llc.path.display(), tools.llc.line))?;
        output::line(&format!("rustc     {}", toolchain.rustc().display()))?;
        output::line("next      cargo xtask build --arch sm_NN")?;
        Ok(0)
    }
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
