//! `pin`: shows what another revision, or changed patches, would mean for PROVENANCE, and writes it with `--write`.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use fs_err as fs;
use serde::Serialize;

use crate::base::env::Env;
use crate::base::hash::{Revision, Sha256};
use crate::base::interrupt::Folder;
use crate::cmd::cli::Common;
use crate::cmd::store;
use crate::pins::{PATCH_FOLDER, Pin, Repository};
use crate::plan::Plan;
use crate::repin::{self, Candidate, Change, NO_REVISION, PATCHES_CONFLICT, Tried, Verdict};
use crate::report::decision::Thoroughness;
use crate::report::error::{Error, Exit, Result};
use crate::report::output;
use crate::report::progress::{self, Progress};
use crate::source::patch::{self, Patch};
use crate::source::vendor::{self, Collecting, Locks};
use crate::source::{self, Origin};

/// Show what another upstream revision means for PROVENANCE, or whether the pinned one still resolves
///
/// Fetches the revision (or takes --source), hashes it, looks for the crates by name, tries every patch, and reads the Rust
/// that it asks for. Writes nothing but PROVENANCE, and that only with --write; comments and order are kept.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub struct Repin {
    #[command(flatten)]
    common: Common,

    /// The revision: a full commit name, or a branch or tag that git can resolve
    #[arg(group = "what", value_name = "REV")]
    revision: Option<String>,

    /// The revision at the head of the repository
    #[arg(long, group = "what")]
    upstream_latest: bool,

    /// Fetch the pinned revision again and compare: tree, crates, lock file, patches
    #[arg(long, group = "what")]
    check: bool,

    /// Record the patches in backend-patches/ as they are now
    #[arg(long, group = "what")]
    patches: bool,

    /// Record the hashes of crates that come from git, as Cargo vendors them
    #[arg(long, group = "what")]
    git_crates: bool,

    /// Another repository than the pinned one
    #[arg(long, value_name = "URL")]
    repository: Option<Repository>,

    /// Take the revision from here instead of the network: an archive, a folder, or a git repository
    #[arg(long, value_name = "ARCHIVE|DIR|GIT-REPO")]
    source: Option<PathBuf>,

    /// Edit PROVENANCE
    #[arg(long)]
    write: bool,

    /// Use no network [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Print one JSON document (schema kiln.pin/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct Report {
    schema: &'static str,
    exit: u8,
    revision: Option<String>,
    /// Which Rust the revision asks for, and which is pinned.
    rust: Vec<String>,
    rust_pinned: String,
    patches: Vec<Tried>,
    changes: Vec<Change>,
    notes: Vec<String>,
    written: bool,
}

impl Repin {
    /// Runs the verb.
    ///
    /// # Errors
    /// The revision cannot be had or examined, or PROVENANCE cannot be written.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("pin", self.common.quiet);
        let pin = Pin::load(workspace)?;
        let mut report = Report {
            schema: "kiln.pin/1",
            rust_pinned: pin.toolchain.channel.to_string(),
            ..Report::default()
        };
        if self.patches {
            self.record_patches(&pin, workspace, env, &mut report)?;
        } else if self.git_crates {
            self.record_git_crates(&pin, workspace, env, progress.as_ref(), &mut report)?;
        } else {
            self.examine(&pin, workspace, env, progress.as_ref(), &mut report)?;
        }
        if self.json {
            output::json(&report)?
        } else {
            print(&report)?
        }
        Ok(report.exit)
    }

    fn examine(
        &self,
        pin: &Pin,
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
        report: &mut Report,
    ) -> Result<()> {
        let patches = pin.check_patches(&workspace.join(PATCH_FOLDER))?;
        let origin = match &self.source {
            Some(path) => Origin::of(&env.absolute(path)?)?,
            None => Origin::Repository,
        };
        let repository = self.repository.as_ref().unwrap_or(&pin.source.repository);
        let revision = match &self.revision {
            _ if self.check => pin.source.revision.clone(),
            Some(name) => match name.parse() {
                Ok(revision) => revision,
                Err(_) => self.resolve(name, repository, &origin, env)?,
            },
            None => self.resolve("HEAD", repository, &origin, env)?,
        };
        let scratch = Folder::temporary("kiln-pin-")?;
        let tree = scratch.path().join("tree");
        let store = store::locate(&self.common, workspace, env)?;
        let making = source::Making {
            store: &store,
            origin: &origin,
            offline: env.is_offline(self.offline),
            env,
            progress,
        };
        source::take(repository, &revision, &tree, scratch.path(), &making)?;
        let mut candidate = Candidate::examine(&tree, repository, &revision, &patches)?;

        candidate.git_crates.clone_from(&pin.source.git_crates);
        if candidate.is_clean() && candidate.lock_sha256 != pin.source.lock_sha256 {
            let hashed = self.hash_git_crates(&candidate, &tree, pin, workspace, env, progress);
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
        if !candidate.rust.iter().any(|asked| asked.ends_with(&format!(": {}", pin.toolchain.channel))) {
            report.notes.push(format!(
                "the revision asks for another Rust than the pinned {}: a patch must bridge it, or [toolchain] must change",
                pin.toolchain.channel
            ));
        }
        if self.check {
            let same = report.changes.is_empty() && candidate.is_clean();
            report.exit = if same { 0 } else { Exit::Refusal.status() };
            if same {
                report
                    .notes
                    .push("the pin resolves: tree, crates, lock file and patches are as pinned".to_owned());
            }
            return Ok(());
        }
        if !candidate.is_clean() {
            if self.write {
                return Err(conflict(&candidate.patches));
            }
            report.exit = Exit::Machine.status();
            report
                .notes
                .push("--write would refuse: the patches above must be made anew or removed".to_owned());
            return Ok(());
        }
        if self.write && !report.changes.is_empty() {
            repin::write(workspace, &report.changes, None)?;
            report.written = true;
            report.notes.push("comments in PROVENANCE were kept: see whether they are still true".to_owned());
        }
        Ok(())
    }

    fn resolve(&self, name: &str, repository: &Repository, origin: &Origin, env: &Env) -> Result<Revision> {
        if env.is_offline(self.offline) && matches!(origin, Origin::Repository) {
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
    fn hash_git_crates(
        &self,
        candidate: &Candidate,
        tree: &Path,
        pin: &Pin,
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
    ) -> Result<std::collections::BTreeMap<String, crate::base::hash::TreeHash>> {
        let mut pin = pin.clone();
        pin.source.subfolder.clone_from(&candidate.subfolder);
        pin.source.lock = candidate.lock.clone();
        let upstream = pin.source.workspace(tree);
        self.vendored_hashes(&pin, &upstream, workspace, env, progress)
    }

    fn vendored_hashes(
        &self,
        pin: &Pin,
        upstream: &Path,
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
    ) -> Result<std::collections::BTreeMap<String, crate::base::hash::TreeHash>> {
        let locks = Locks::upstream(pin, upstream, workspace)?;
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let (store, toolchain) = (plan.store.require()?, plan.rustc.require()?);
        let scratch = Folder::temporary("kiln-pin-")?;
        let offline = env.is_offline(self.offline);
        let collecting = Collecting { store, pin, upstream, workspace, toolchain, offline, env, progress };
        vendor::git_crates(&locks, scratch.path(), &collecting)?;
        vendor::hashes(scratch.path())
    }

    fn record_git_crates(
        &self,
        pin: &Pin,
        workspace: &Path,
        env: &Env,
        progress: &dyn Progress,
        report: &mut Report,
    ) -> Result<()> {
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let upstream = pin.source.workspace(&plan.source.require()?.tree);
        let hashes = self.vendored_hashes(pin, &upstream, workspace, env, progress)?;
        report.changes = repin::git_crate_changes(pin, &hashes);
        self.finish(workspace, None, report)
    }

    fn record_patches(&self, pin: &Pin, workspace: &Path, env: &Env, report: &mut Report) -> Result<()> {
        let (entries, changes) = repin::patch_entries(pin, workspace)?;
        report.changes = changes;
        let store = store::locate(&self.common, workspace, env)?;
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
        self.finish(workspace, Some(&entries), report)
    }

    fn finish(
        &self,
        workspace: &Path,
        entries: Option<&[repin::PatchEntry]>,
        report: &mut Report,
    ) -> Result<()> {
        if self.write && !report.changes.is_empty() {
            repin::write(workspace, &report.changes, entries)?;
            report.written = true;
        }
        Ok(())
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

fn print(report: &Report) -> Result<()> {
    if let Some(revision) = &report.revision {
        output::line(&format!("revision  {revision}"))?;
    }
    for asked in &report.rust {
        output::line(&format!("rust      {asked} (pinned: {})", report.rust_pinned))?;
    }
    for tried in &report.patches {
        let verdict = match tried.verdict {
            Verdict::Applies => "applies",
            Verdict::Upstream => "already upstream, at least in part",
            Verdict::Conflicts => "conflicts",
        };
        output::line(&format!("patch     {}: {verdict}", tried.file))?;
        for line in &tried.details {
            output::line(&format!("          {line}"))?;
        }
    }
    for Change { key, old, new } in &report.changes {
        output::line(&format!("change    {key}"))?;
        output::line(&format!("        - {}", old.as_deref().unwrap_or("(nothing)")))?;
        output::line(&format!("        + {}", new.as_deref().unwrap_or("(nothing)")))?;
    }
    for note in &report.notes {
        output::line(&format!("note      {note}"))?;
    }
    output::line(match (report.changes.is_empty(), report.written) {
        (true, _) => "PROVENANCE would not change",
        (false, true) => "PROVENANCE was written",
        (false, false) if report.exit != 0 => "PROVENANCE was not written",
        (false, false) => "PROVENANCE was not written: --write does",
    })
}
