//! `verify`: hashes everything again that the installed record names, and with `--rebuild` builds it again elsewhere.

use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;
use serde::Serialize;

use crate::backend::{self, Backend, Place};
use crate::base::binary_diff;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::base::interrupt::Folder;
use crate::build::gpu::GpuBuild;
use crate::cmd::cli::Common;
use crate::machine::arch::Arch;
use crate::pins::PATCH_FOLDER;
use crate::plan::Plan;
use crate::ptx::build_record::PtxRecord;
use crate::report::decision::{Decision, Thoroughness};
use crate::report::error::{Error, Exit, Result};
use crate::report::output;
use crate::report::progress::{self, Progress};
use crate::source;
use crate::source::cuda_wheels;
use crate::source::vendor::{self, Collecting, Locks};
use crate::store::inventory;

crate::codes! {
    NO_PTX = "KILN-0240", Machine, "no recorded PTX for an architecture",
        "`verify --arch` compares the PTX files of an architecture with the digests that `build --arch` recorded after \
         checking them, and there is no such record in target/device/ARCH.";
}

/// Hash everything again that the installed record names; with --rebuild, build it again elsewhere and compare
///
/// Compares the source tree, the patches, the lock file, the backend, cargo-oxide, the host config and the PTX of every
/// architecture that was built. Writes nothing; --rebuild works in a folder of the store that it removes afterwards.
#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    common: Common,

    /// Build the backend again from a copy of the source, with another target folder, HOME and CARGO_HOME, and compare
    /// byte for byte; with --arch, also the kernels
    #[arg(long)]
    rebuild: bool,

    /// Require and compare the PTX of this architecture; may be given several times [default: all that were built]
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Use no network: with --rebuild, the crates must be in the store or in CARGO_HOME [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// With --rebuild, keep the folder in which it was built
    #[arg(long)]
    keep: bool,

    /// Print one JSON document (schema kiln.verify/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    ok: bool,
    exit: u8,
    checks: Vec<Check>,
}

/// One comparison.
#[derive(Debug, Serialize)]
struct Check {
    ok: bool,
    what: String,
    path: Option<PathBuf>,
    expected: Option<String>,
    found: Option<String>,
    /// Where it differs, or what stands in the way.
    details: Vec<String>,
    #[serde(skip)]
    exit: u8,
}

impl Check {
    fn same(what: &str, path: &Path, expected: &impl ToString, found: Option<&impl ToString>) -> Self {
        let (expected, found) = (expected.to_string(), found.map(ToString::to_string));
        let ok = found.as_ref() == Some(&expected);
        Check {
            ok,
            what: what.to_owned(),
            path: Some(path.to_owned()),
            expected: Some(expected),
            found,
            details: Vec::new(),
            exit: if ok { 0 } else { Exit::Refusal.status() },
        }
    }

    fn decision(decision: &Decision) -> Self {
        let problem = decision.problem.as_ref();
        let mut details: Vec<String> = Vec::new();
        if let Some(problem) = problem {
            details.extend(format!("[{}] {}", problem.code.id, problem.message).lines().map(str::to_owned));
            details.extend(problem.hint.iter().map(|hint| format!("mend: {hint}")));
        } else if decision.chosen.is_none() {
            details.push(decision.why.clone());
        }
        Check {
            ok: problem.is_none(),
            what: decision.subject.to_owned(),
            path: None,
            expected: None,
            found: decision.chosen.clone(),
            details,
            exit: problem.map_or(0, |problem| problem.exit.status()),
        }
    }

    fn error(what: &str, error: &Error) -> Self {
        let mut details: Vec<String> =
            format!("[{}] {error}", error.code().id).lines().map(str::to_owned).collect();
        details.extend(error.hint_text().map(|hint| format!("mend: {hint}")));
        let exit = error.exit().status();
        Check { ok: false, what: what.to_owned(), path: None, expected: None, found: None, details, exit }
    }
}

impl Verify {
    /// Runs the verb; the status is that of the first difference.
    ///
    /// # Errors
    /// Something stands in the way of comparing. A difference is not an error of verify.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("verify", self.common.quiet);
        let archs: Vec<Arch> = self.arch.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let mut checks = recorded(&plan, workspace)?;
        checks.extend(ptx(workspace, &archs)?);
        if self.rebuild && checks.iter().all(|check| check.ok) {
            checks.extend(self.rebuild(&plan, &archs, workspace, env, progress.as_ref())?);
        } else if self.rebuild {
            progress.note("not built again: mend the differences first");
        }
        let exit = checks.iter().map(|check| check.exit).find(|exit| *exit != 0).unwrap_or(0);
        if self.json {
            output::json(&Report { schema: "kiln.verify/1", ok: exit == 0, exit, checks })?;
            return Ok(exit);
        }
        for check in &checks {
            output::line(&text(check))?;
        }
        let wrong = checks.iter().filter(|check| !check.ok).count();
        output::line(&match wrong {
            0 => format!("verified: {} comparisons, no difference", checks.len()),
            _ => format!("NOT verified: {wrong} of {} comparisons show a difference", checks.len()),
        })?;
        Ok(exit)
    }

    fn rebuild(
        &self,
        plan: &Plan,
        archs: &[Arch],
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
    ) -> Result<Vec<Check>> {
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let (source, toolchain) = (plan.source.require()?, plan.rustc.require()?);
        let published = plan.backend.require()?;
        let _in_use = store.lock_shared(inventory::GC_LOCK, &|text| progress.note(text))?;
        let parent = store.root().join("build");
        fs::create_dir_all(&parent)?;
        let elsewhere = Folder::within(&parent, ".verify-")?;
        let place = elsewhere.path().to_owned();
        // Until the end of this function it removes itself.
        let _elsewhere = if self.keep {
            elsewhere.keep();
            None
        } else {
            Some(elsewhere)
        };
        let at = |name: &str| place.join(name);

        progress.note(&format!("building again in {}", place.display()));
        let tree = at("a/copy/of/the/source");
        fs::create_dir_all(tree.parent().unwrap_or(&tree))?;
        source::copy_tree(&source.tree, &tree)?;
        let upstream = pins.pin.source.workspace(&source.tree);
        let locks = Locks::upstream(&pins.pin, &upstream, workspace)?;
        let collecting = Collecting {
            store,
            pin: &pins.pin,
            upstream: &upstream,
            workspace,
            toolchain,
            offline: env.is_offline(self.offline),
            env,
            progress,
        };
        vendor::collect(&locks, &at("collected"), &collecting)?;
        let crates = vendor::lay_at(&locks, &at("collected"), &pins.pin, &at("vendored"))?;
        let home = at("home-of-another-user");
        let cargo_home = crates.cargo_home(&home.join("cargo"), env)?;
        let making = backend::Making {
            store,
            pin: &pins.pin,
            patches: &pins.patches,
            source,
            toolchain,
            tools: plan.tools()?,
            crates: Some(&crates),
            offline: true,
            accept: false,
            env,
            progress,
        };
        let place =
            Place { tree: &tree, target: &at("built/here"), cargo_home: &cargo_home, home: Some(&home) };
        let built = backend::compile(&making, &place)?;
        let mut checks = Vec::new();
        let pairs = [(&published.library, &built.library), (&published.cargo_oxide, &built.cargo_oxide)];
        for (published, again) in pairs {
            checks.push(compare(published, again)?);
        }
        for arch in archs {
            checks.extend(self.rebuild_ptx(plan, arch, &at("device"), workspace, env, progress)?);
        }
        Ok(checks)
    }

    fn rebuild_ptx(
        &self,
        plan: &Plan,
        arch: &Arch,
        target: &Path,
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
    ) -> Result<Vec<Check>> {
        progress.note(&format!("building the kernels again for {arch}"));
        let again = GpuBuild::prepare(plan, &[*arch].into(), env, progress)?
            .ptx_in(arch, &target.join(arch.to_string()))?;
        let published: Vec<PathBuf> =
            records(workspace, &arch.to_string())?.into_iter().map(|(folder, _)| folder).collect();
        let mut checks = Vec::new();
        for path in again {
            let name = path.file_name().unwrap_or_default();
            // The folder of the same inputs has the same name.
            let inputs = path.parent().and_then(Path::file_name).unwrap_or_default();
            match published.iter().find(|folder| folder.file_name() == Some(inputs)) {
                Some(folder) => checks.push(compare(&folder.join(name), &path)?),
                None => checks.push(Check::error(
                    &format!("{arch} again"),
                    &Error::new(&NO_PTX, format!("nothing was built for {arch} from these inputs"))
                        .hint(format!("run: cargo xtask build --arch {arch}")),
                )),
            }
        }
        Ok(checks)
    }
}

/// Compares a published file with the same one, built again.
fn compare(published: &Path, again: &Path) -> Result<Check> {
    let (one, other) = (fs::read(published)?, fs::read(again)?);
    let name = published.file_name().unwrap_or_default().to_string_lossy();
    let mut check =
        Check::same(&format!("{name} again"), published, &Sha256::of(&one), Some(&Sha256::of(&other)));
    check.details = binary_diff::describe(&one, &other);
    Ok(check)
}

/// Everything that PROVENANCE and the record name.
fn recorded(plan: &Plan, workspace: &Path) -> Result<Vec<Check>> {
    let mut checks = vec![
        Check::decision(&plan.pins.decision),
        Check::decision(&plan.store.decision),
        Check::decision(&plan.rustc.decision),
        Check::decision(&plan.source.decision),
        Check::decision(&plan.backend.decision),
        Check::decision(&plan.checkout.decision),
    ];
    let (Some(pins), Some(store)) = (&plan.pins.value, &plan.store.value) else { return Ok(checks) };
    let pin = &pins.pin;
    match source::verify_pristine(store, &pin.source) {
        Ok(Some((tree, found))) => {
            checks.push(Check::same("upstream's tree", &tree, &pin.source.tree, Some(&found)));
        }
        Ok(None) => {}
        Err(error) => checks.push(Check::error("upstream's tree", &error)),
    }
    match vendor::find(store, pin, workspace).and_then(|found| found.map(|found| found.verify()).transpose())
    {
        Ok(None) => {}
        Ok(Some(hash)) => {
            let folder = store.entry(crate::store::Kind::Vendor, &vendor::key(pin, workspace)?);
            checks.push(Check::same("vendored crates", &folder, &hash, Some(&hash)));
        }
        Err(error) => checks.push(Check::error("vendored crates", &error)),
    }
    if let Some(parts) = cuda_wheels::find(store, pin) {
        match parts.verify() {
            Ok(hash) => checks.push(Check::same("CUDA toolkit parts", &parts.root, &hash, Some(&hash))),
            Err(error) => checks.push(Check::error("CUDA toolkit parts", &error)),
        }
    }
    let (Some(source), Some(backend)) = (&plan.source.value, &plan.backend.value) else { return Ok(checks) };
    checks.extend(named_by_the_record(pins, source, backend, workspace));
    Ok(checks)
}

/// The subjects and inputs of the record, each hashed again.
fn named_by_the_record(
    pins: &source::pinned::Pins,
    source: &source::Patched,
    backend: &Backend,
    workspace: &Path,
) -> Vec<Check> {
    let hash = |path: &Path| fs::read(path).ok().map(|bytes| Sha256::of(&bytes));
    let mut checks = Vec::new();
    for subject in &backend.record.subject {
        let name = subject.name.as_deref().unwrap_or_default();
        let path = backend.library.with_file_name(name);
        let recorded = subject.sha256().map_or("none".to_owned(), |recorded| recorded.to_string());
        checks.push(Check::same(name, &path, &recorded, hash(&path).as_ref()));
    }
    let upstream = pins.pin.source.workspace(&source.tree);
    for input in &backend.record.predicate.build_definition.resolved_dependencies {
        let name = input.name.as_deref().unwrap_or_default();
        match (name, input.digest.get("narSha256Sri"), input.sha256()) {
            ("patched tree", Some(recorded), _) => {
                checks.push(Check::same(name, &source.tree, recorded, Some(&source.hash)));
            }
            (_, _, Some(recorded)) if name.ends_with(".patch") => {
                let path = workspace.join(PATCH_FOLDER).join(name);
                checks.push(Check::same(name, &path, &recorded, hash(&path).as_ref()));
            }
            (_, _, Some(recorded)) if name == pins.pin.source.lock.as_str() => {
                let path = pins.pin.source.lock.under(&upstream);
                checks.push(Check::same(name, &path, &recorded, hash(&path).as_ref()));
            }
            _ => {}
        }
    }
    checks
}

/// The PTX of `archs`, or of all architectures that were built.
fn ptx(workspace: &Path, archs: &[Arch]) -> Result<Vec<Check>> {
    let mut names: Vec<String> = archs.iter().map(ToString::to_string).collect();
    if names.is_empty()
        && let Ok(entries) = fs::read_dir(workspace.join("target/device"))
    {
        for entry in entries {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
    }
    let mut checks = Vec::new();
    for name in names {
        let records = records(workspace, &name)?;
        if records.is_empty() && !archs.is_empty() {
            let error = Error::new(&NO_PTX, format!("nothing is recorded for {name}"))
                .hint(format!("run: cargo xtask build --arch {name}"));
            checks.push(Check::error(&format!("{name} PTX"), &error));
        }
        for (folder, record) in records {
            for file in record.compare(&folder) {
                let what = format!("{name} PTX");
                checks.push(Check::same(&what, &file.path, &file.recorded, file.found.as_ref()));
            }
        }
    }
    Ok(checks)
}

/// The PTX folders of an architecture that have a record.
fn records(workspace: &Path, arch: &str) -> Result<Vec<(PathBuf, PtxRecord)>> {
    let Ok(entries) = fs::read_dir(workspace.join("target/device").join(arch)) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let folder = entry?.path();
        found.extend(PtxRecord::load(&folder).map(|record| (folder, record)));
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

fn text(check: &Check) -> String {
    let mark = if check.ok { "ok" } else { "DIFF" };
    let mut text = format!("{mark:<5}{}", check.what);
    match (&check.expected, &check.found) {
        (Some(expected), _) if check.ok => text.push_str(&format!("  {expected}")),
        (Some(expected), found) => {
            let found = found.as_deref().unwrap_or("nothing");
            text.push_str(&format!("\n       expected {expected}\n       found    {found}"));
        }
        (None, Some(found)) => text.push_str(&format!("  {found}")),
        (None, None) => {}
    }
    if let Some(path) = &check.path {
        text.push_str(&format!("\n       {}", path.display()));
    }
    for detail in &check.details {
        text.push_str(&format!("\n       {detail}"));
    }
    text
}
