//! Everything that PROVENANCE and the installed record name, hashed again and compared; [`rebuild`] builds it again elsewhere.

pub mod rebuild;

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::backend::Backend;
use crate::base::hash::Sha256;
use crate::machine::arch::Arch;
use crate::pins::PATCH_FOLDER;
use crate::plan::Plan;
use crate::ptx::build_record::PtxRecord;
use crate::report::decision::Decision;
use crate::report::error::{Error, Exit, Result};
use crate::source::cuda_wheels;
use crate::source::pinned::Pins;
use crate::source::vendor;
use crate::source::{self, Patched};
use crate::store::Kind;

crate::codes! {
    NO_PTX = "KILN-0240", Machine, "no recorded PTX for an architecture",
        "`verify --arch` compares the PTX files of an architecture with the digests that `build --arch` recorded after \
         checking them, and there is no such record in target/device/ARCH.";
}

/// One comparison.
#[derive(Debug, Serialize)]
pub struct Check {
    /// No difference.
    pub ok: bool,
    /// What is compared.
    pub what: String,
    /// Where it lies.
    pub path: Option<PathBuf>,
    /// As recorded.
    pub expected: Option<String>,
    /// As it is.
    pub found: Option<String>,
    /// Where it differs, or what stands in the way.
    pub details: Vec<String>,
    #[serde(skip)]
    /// The exit status of the difference.
    pub exit: u8,
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

/// Everything that PROVENANCE and the record name.
///
/// # Errors
/// Something stands in the way of comparing.
pub fn recorded(plan: &Plan, workspace: &Path) -> Result<Vec<Check>> {
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
            let folder = store.entry(Kind::Vendor, &vendor::key(pin, workspace)?);
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
fn named_by_the_record(pins: &Pins, source: &Patched, backend: &Backend, workspace: &Path) -> Vec<Check> {
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
///
/// # Errors
/// A folder cannot be read.
pub fn ptx(workspace: &Path, archs: &[Arch]) -> Result<Vec<Check>> {
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
