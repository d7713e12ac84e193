//! Looking at a revision, at changed patches or at the crates from git, and pinning what was found.

use std::collections::BTreeMap;
use std::path::Path;

use fs_err as fs;
use serde::Serialize;

use super::prepared::Prepared;
use super::{Candidate, Change, NO_REVISION, PATCHES_CONFLICT, PatchEntry, Tried, Verdict};
use crate::base::env::Env;
use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::base::interrupt::Folder;
use crate::pins::{PATCH_FOLDER, Pin, Repository};
use crate::plan::{Plan, Request};
use crate::report::error::{Error, Exit, Result};
use crate::report::progress::Progress;
use crate::source::patch::{self, Patch};
use crate::source::vendor::{self, Collecting, Locks};
use crate::source::{self, Origin};

/// With what to look.
pub struct Examination<'a> {
    /// What is pinned.
    pub pin: &'a Pin,
    /// The plan, where one is needed.
    pub request: &'a Request,
    /// The repository of the revision.
    pub repository: &'a Repository,
    /// An archive, a folder or a git repository instead of the network.
    pub source: Option<&'a Path>,
    /// Edit PROVENANCE.
    pub write: bool,
    /// Use no network.
    pub offline: bool,
    /// The workspace.
    pub workspace: &'a Path,
    /// The environment.
    pub env: &'a Env,
    /// Where notes go.
    pub progress: &'a dyn Progress,
}

/// What was found and done.
#[derive(Default, Serialize)]
pub struct Findings {
    /// The exit status of what was found.
    pub exit: u8,
    /// The revision.
    pub revision: Option<String>,
    /// Which Rust the revision asks for, and which is pinned.
    pub rust: Vec<String>,
    /// The pinned one alone.
    pub rust_pinned: String,
    /// Every patch, tried.
    pub patches: Vec<Tried>,
    /// What PROVENANCE would get.
    pub changes: Vec<Change>,
    /// What else there is to say.
    pub notes: Vec<String>,
    /// PROVENANCE was written.
    pub written: bool,
}

impl Examination<'_> {
    /// Compares the pinned revision, taken again, with what is pinned.
    ///
    /// # Errors
    /// The revision cannot be had or examined. A difference is no error.
    pub fn pinned(&self) -> Result<Findings> {
        self.revision(self.pin.source.revision.clone(), &self.origin()?, true)
    }

    /// Tries another revision: a full commit name, or a name that git can resolve. With `write`, pins it.
    ///
    /// # Errors
    /// The revision cannot be had or examined, or it is to be written and a patch does not apply ([`PATCHES_CONFLICT`]).
    pub fn other(&self, name: &str) -> Result<Findings> {
        let origin = self.origin()?;
        let revision = match name.parse() {
            Ok(revision) => revision,
            Err(_) => self.resolve(name, &origin)?,
        };
        self.revision(revision, &origin, false)
    }

    fn findings(&self) -> Findings {
        Findings { rust_pinned: self.pin.toolchain.channel.to_string(), ..Findings::default() }
    }

    fn origin(&self) -> Result<Origin> {
        match self.source {
            Some(path) => Origin::of(&self.env.absolute(path)?),
            None => Ok(Origin::Repository),
        }
    }

    fn revision(&self, revision: Revision, origin: &Origin, check: bool) -> Result<Findings> {
        let Examination { pin, repository, workspace, offline, env, progress, .. } = *self;
        let mut report = self.findings();
        let prepared = match check {
            true => None,
            false => Prepared::load(workspace, &revision, pin)?,
        };
        let patches = match &prepared {
            Some(prepared) => prepared.patches.clone(),
            None => pin.check_patches(&workspace.join(PATCH_FOLDER))?,
        };
        let scratch = Folder::temporary("kiln-pin-")?;
        let tree = scratch.path().join("tree");
        let store = self.request.locate_store(workspace, env)?;
        let making = source::Making { store: &store, origin, offline, env, progress };
        source::take(repository, &revision, &tree, scratch.path(), &making)?;
        let mut candidate = Candidate::examine(&tree, repository, &revision, &patches)?;

        candidate.git_crates.clone_from(&pin.source.git_crates);
        if candidate.is_clean() && candidate.lock_sha256 != pin.source.lock_sha256 {
            let hashed = self.hash_git_crates(&candidate, &tree);
            match hashed {
                Ok(hashes) => candidate.git_crates = hashes,
                Err(error) if self.write => return Err(error),
                Err(error) => report.notes.push(format!("the crates from git were not hashed: {error}")),
            }
        }

        report.revision = Some(revision.to_string());
        report.rust.clone_from(&candidate.rust);
        report.patches.clone_from(&candidate.patches);
        report.changes = candidate.changes(pin);
        let entries = prepared.as_ref().map(Prepared::entries);
        if let Some(entries) = &entries {
            report.changes.extend(super::entry_changes(pin, entries));
            report.notes.push(format!(
                "the patches are those in {PATCH_FOLDER}/{}, made for this revision",
                &revision.as_str()[..12]
            ));
        }
        if !candidate.rust.iter().any(|asked| asked.ends_with(&format!(": {}", pin.toolchain.channel))) {
            report.notes.push(format!(
                "the revision asks for another Rust than the pinned {}: a patch must bridge it, or [toolchain] must change",
                pin.toolchain.channel
            ));
        }
        if check {
            let same = report.changes.is_empty() && candidate.is_clean();
            report.exit = if same { 0 } else { Exit::Refusal.status() };
            if same {
                report
                    .notes
                    .push("the pin resolves: tree, crates, lock file and patches are as pinned".to_owned());
            }
            return Ok(report);
        }
        if !candidate.is_clean() {
            if self.write {
                return Err(conflict(&candidate.patches));
            }
            report.exit = Exit::Machine.status();
            report
                .notes
                .push("--write would refuse: the patches above must be made anew, in a folder backend-patches/ followed by the first 12 digits of the revision, or removed".to_owned());
            return Ok(report);
        }
        if self.write && !report.changes.is_empty() {
            if let Some(prepared) = &prepared {
                prepared.lay(workspace, pin)?;
            }
            super::write(workspace, &report.changes, entries.as_deref())?;
            if let Some(prepared) = &prepared {
                prepared.remove()?;
            }
            report.written = true;
            report.notes.push("comments in PROVENANCE were kept: see whether they are still true".to_owned());
        }
        Ok(report)
    }

    fn resolve(&self, name: &str, origin: &Origin) -> Result<Revision> {
        let Examination { repository, env, .. } = *self;
        if self.offline && matches!(origin, Origin::Repository) {
            return Err(Error::new(
                &source::OFFLINE,
                format!(
                    "only {repository} can say which revision {name} is, and --offline forbids to ask it"
                ),
            )
            .hint("give the full commit name, or a git repository with --source"));
        }
        resolve(name, repository, origin, env)
    }

    /// The crates from git of the candidate's lock file.
    fn hash_git_crates(&self, candidate: &Candidate, tree: &Path) -> Result<BTreeMap<String, TreeHash>> {
        let mut pin = self.pin.clone();
        pin.source.subfolder.clone_from(&candidate.subfolder);
        pin.source.lock = candidate.lock.clone();
        let upstream = pin.source.workspace(tree);
        self.vendored_hashes(&pin, &upstream)
    }

    fn vendored_hashes(&self, pin: &Pin, upstream: &Path) -> Result<BTreeMap<String, TreeHash>> {
        let Examination { workspace, offline, env, progress, .. } = *self;
        let locks = Locks::upstream(pin, upstream, workspace)?;
        let plan = Plan::resolve(self.request, workspace, env);
        let (store, toolchain) = (plan.store.require()?, plan.rustc.require()?);
        let scratch = Folder::temporary("kiln-pin-")?;
        let collecting = Collecting { store, pin, upstream, workspace, toolchain, offline, env, progress };
        vendor::git_crates(&locks, scratch.path(), &collecting)?;
        vendor::hashes(scratch.path())
    }

    /// Hashes the crates that come from git, as Cargo vendors them. With `write`, pins the hashes.
    ///
    /// # Errors
    /// The checkout is not set up, or a crate cannot be had.
    pub fn git_crates(&self) -> Result<Findings> {
        let Examination { pin, workspace, env, .. } = *self;
        let mut report = self.findings();
        let plan = Plan::resolve(self.request, workspace, env);
        let upstream = pin.source.workspace(&plan.source.require()?.tree);
        let hashes = self.vendored_hashes(pin, &upstream)?;
        report.changes = super::git_crate_changes(pin, &hashes);
        self.finish(None, report)
    }

    /// Compares the patches as they lie there with their entries. With `write`, pins them.
    ///
    /// # Errors
    /// A patch cannot be read, or does not apply to the pinned tree.
    pub fn patches(&self) -> Result<Findings> {
        let Examination { pin, workspace, env, .. } = *self;
        let mut report = self.findings();
        let (entries, changes) = super::patch_entries(pin, workspace)?;
        report.changes = changes;
        let store = self.request.locate_store(workspace, env)?;
        let mut patches = Vec::new();
        for entry in &entries {
            let bytes = fs::read(workspace.join(PATCH_FOLDER).join(&entry.file))?;
            patches.push(Patch::parse(entry.file.as_str(), &bytes)?);
        }
        match source::verify_pristine(&store, &pin.source)? {
            Some((pristine, _)) => {
                let scratch = Folder::temporary("kiln-pin-")?;
                let tree = scratch.path().join("tree");
                source::copy_tree(&pristine, &tree)?;
                let upstream = pin.source.workspace(&tree);
                patch::apply_series(&patches, &upstream)?;
                let lock = Sha256::of(&fs::read(pin.source.lock.under(&upstream))?);
                if lock != pin.source.lock_sha256 {
                    report.changes.push(Change {
                        key: "source.lock-sha256".to_owned(),
                        old: Some(pin.source.lock_sha256.to_string()),
                        new: Some(lock.to_string()),
                    });
                }
            }
            None => report.notes.push(
                "the patches were not tried: upstream's tree is not in the store (cargo xtask setup)"
                    .to_owned(),
            ),
        }
        self.finish(Some(&entries), report)
    }

    fn finish(&self, entries: Option<&[PatchEntry]>, mut report: Findings) -> Result<Findings> {
        if self.write && !report.changes.is_empty() {
            super::write(self.workspace, &report.changes, entries)?;
            report.written = true;
        }
        Ok(report)
    }
}

fn conflict(patches: &[Tried]) -> Error {
    let bad: Vec<_> = patches.iter().filter(|tried| tried.verdict != Verdict::Applies).collect();
    let names: Vec<_> = bad.iter().map(|tried| tried.file.as_str()).collect();
    let mut error = Error::new(&PATCHES_CONFLICT, format!("PROVENANCE is not written: {}", names.join(", ")));
    for tried in bad {
        error = error.cause(tried.details.join("\n"));
    }
    error.hint(format!("remove what upstream has (git rm {PATCH_FOLDER}/FILE, then: cargo xtask pin --patches --write), make the others anew"))
}

/// The commit that `name` means.
fn resolve(name: &str, repository: &Repository, origin: &Origin, env: &Env) -> Result<Revision> {
    let missing = |what: String| Error::new(&NO_REVISION, what).hint("give the full commit name, 40 digits");
    match origin {
        Origin::Git(path) => {
            let revision = format!("{name}^{{commit}}");
            let path = path.display().to_string();
            let said =
                source::git(&["-C", &path, "rev-parse", "--verify", "--end-of-options", &revision], env)?;
            said.trim().parse().map_err(|_| missing(format!("{path} has no revision {name}")))
        }
        Origin::Repository => {
            let said = source::git(&["ls-remote", "--", repository.as_str(), name], env)?;
            let first = said.split_whitespace().next().unwrap_or_default();
            first.parse().map_err(|_| missing(format!("{repository} has no revision {name}")))
        }
        Origin::Archive(path) | Origin::Folder(path) => {
            Err(missing(format!("{} cannot say which commit {name} is", path.display())))
        }
    }
}
