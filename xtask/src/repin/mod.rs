//! What another revision of upstream would mean for PROVENANCE: its hashes, where its crates are, which carried patches
//! still apply, which Rust it asks for; and the edit of PROVENANCE, which keeps comments and order.

pub mod examine;
pub mod prepared;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;
use toml_edit::{DocumentMut, Item, Value};

use crate::base::atomic::write_atomic;
use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::pins::{FILE_NAME, PATCH_FOLDER, Pin, PinnedPatch, Repository, TreePath};
use crate::report::error::{Error, Result};
use crate::source::nar;
use crate::source::patch::{self, Patch};

crate::codes! {
    NOT_UPSTREAM = "KILN-0260", Machine, "the tree is not one of upstream's",
        "A revision must hold the packages rustc_codegen_cuda and cargo-oxide, each once, and the lock file of the \
         workspace that cargo-oxide is in. Their places are looked up by name; something is missing.";
    NO_REVISION = "KILN-0261", Machine, "the revision cannot be found",
        "A revision is a full commit name of 40 digits, or a name that `git` can resolve in the repository or in the git \
         repository that --source gives.";
    PATCHES_CONFLICT = "KILN-0262", Machine, "carried patches do not apply to the revision",
        "PROVENANCE is not written, because `setup` could not build from it. Make the patches anew for the revision, or \
         remove those that upstream has, and run `pin` again.";
    NO_ENTRY = "KILN-0263", Machine, "PROVENANCE cannot be edited",
        "An entry that must be changed is not where it belongs, or the edited file would not be valid. Nothing was \
         written. See what `git diff PROVENANCE` shows, mend the file by hand, and run `cargo xtask pin` again.";
}

/// The names under which upstream's crates are looked up.
const BACKEND: &[&str] = &["rustc_codegen_cuda", "rustc-codegen-cuda"];
const CARGO_OXIDE: &[&str] = &["cargo-oxide"];

/// Folders that are not looked into for crates.
const SKIPPED: &[&str] = &["target", ".git", "node_modules", "examples"];

/// What became of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It applies.
    Applies,
    /// The tree has it.
    Upstream,
    /// It does not apply.
    Conflicts,
}

/// A patch that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Its file.
    pub file: String,
    /// What became of it.
    pub verdict: Verdict,
    /// The hunk in the way, both sides.
    pub details: Vec<String>,
}

/// The values of `[source]` for a revision.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The repository.
    pub repository: Repository,
    /// The commit.
    pub revision: Revision,
    /// The hash of its tree.
    pub tree: TreeHash,
    /// Where its workspace is.
    pub subfolder: Option<TreePath>,
    /// The backend's crate, from there.
    pub backend: TreePath,
    /// The subcommand's crate, from there.
    pub cargo_oxide: TreePath,
    /// The lock file, from there.
    pub lock: TreePath,
    /// Its hash in the patched tree.
    pub lock_sha256: Sha256,
    /// Every carried patch.
    pub patches: Vec<Tried>,
    /// `FILE: CHANNEL` of every rust-toolchain.toml that concerns the two crates.
    pub rust: Vec<String>,
    /// The hashes of crates from git, once they are known.
    pub git_crates: BTreeMap<String, TreeHash>,
}

impl Candidate {
    /// Hashes the tree in `tree`, looks for the crates, and tries the patches, which changes the tree.
    ///
    /// # Errors
    /// [`NOT_UPSTREAM`], or the tree cannot be read.
    pub fn examine(
        tree: &Path,
        repository: &Repository,
        revision: &Revision,
        patches: &[PinnedPatch],
    ) -> Result<Self> {
        let hash = nar::hash_tree(tree)?;
        let packages = packages(tree)?;
        let cargo_oxide = only(&packages, CARGO_OXIDE, tree)?;
        let backend = only(&packages, BACKEND, tree)?;
        let workspace = workspace_of(&tree.join(&cargo_oxide), tree);
        let below = |path: &Path| -> Result<TreePath> {
            let path = tree.join(path);
            let text = path.strip_prefix(&workspace).ok().and_then(Path::to_str).unwrap_or_default();
            text.replace(std::path::MAIN_SEPARATOR, "/").parse().map_err(|cause| {
                Error::new(
                    &NOT_UPSTREAM,
                    format!("{} is not in the workspace {}", path.display(), workspace.display()),
                )
                .cause(cause)
                .hint("give another revision")
            })
        };
        let subfolder = match workspace.strip_prefix(tree) {
            Ok(folder) if !folder.as_os_str().is_empty() => {
                folder.to_str().and_then(|folder| folder.parse().ok())
            }
            _ => None,
        };
        let lock_path = workspace.join("Cargo.lock");
        if !lock_path.is_file() {
            return Err(Error::new(&NOT_UPSTREAM, format!("there is no {}", lock_path.display()))
                .hint("give another revision"));
        }
        let rust = channels(&[&workspace, &tree.join(&backend)], tree);
        let (backend, cargo_oxide) = (below(&backend)?, below(&cargo_oxide)?);
        let patches = patches.iter().map(|patch| try_patch(patch, &workspace)).collect::<Result<_>>()?;
        Ok(Candidate {
            repository: repository.clone(),
            revision: revision.clone(),
            tree: hash,
            subfolder,
            backend,
            cargo_oxide,
            lock: below(&lock_path)?,
            lock_sha256: Sha256::of(&fs::read(lock_path)?),
            patches,
            rust,
            git_crates: BTreeMap::new(),
        })
    }

    /// Whether every patch applies.
    pub fn is_clean(&self) -> bool {
        self.patches.iter().all(|tried| tried.verdict == Verdict::Applies)
    }

    /// The keys of `[source]` whose values would change: key, old, new.
    pub fn changes(&self, pin: &Pin) -> Vec<Change> {
        let source = &pin.source;
        let optional = |path: &Option<TreePath>| path.as_ref().map(ToString::to_string);
        let pairs = [
            ("repository", Some(source.repository.to_string()), Some(self.repository.to_string())),
            ("revision", Some(source.revision.to_string()), Some(self.revision.to_string())),
            ("tree", Some(source.tree.to_string()), Some(self.tree.to_string())),
            ("subfolder", optional(&source.subfolder), optional(&self.subfolder)),
            ("backend", Some(source.backend.to_string()), Some(self.backend.to_string())),
            ("cargo-oxide", Some(source.cargo_oxide.to_string()), Some(self.cargo_oxide.to_string())),
            ("lock", Some(source.lock.to_string()), Some(self.lock.to_string())),
            ("lock-sha256", Some(source.lock_sha256.to_string()), Some(self.lock_sha256.to_string())),
        ];
        let mut changes: Vec<Change> = pairs
            .into_iter()
            .filter(|(_, old, new)| old != new)
            .map(|(key, old, new)| Change { key: format!("source.{key}"), old, new })
            .collect();
        // The archive's bytes are of the old revision; whoever wants them pinned adds the new ones.
        if source.tree != self.tree
            && let Some(old) = source.archive_sha256
        {
            changes.push(Change {
                key: "source.archive-sha256".into(),
                old: Some(old.to_string()),
                new: None,
            });
        }
        changes.extend(git_crate_changes(pin, &self.git_crates));
        changes
    }
}

/// A value of PROVENANCE that changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// `table.key`.
    pub key: String,
    /// `None` when it is new.
    pub old: Option<String>,
    /// `None` when it goes.
    pub new: Option<String>,
}

/// The entries of `[source.git-crates]` that change.
pub fn git_crate_changes(pin: &Pin, new: &BTreeMap<String, TreeHash>) -> Vec<Change> {
    let mut names: Vec<_> = pin.source.git_crates.keys().chain(new.keys()).collect();
    names.sort();
    names.dedup();
    let text = |map: &BTreeMap<String, TreeHash>, name: &String| map.get(name).map(ToString::to_string);
    let all = names.into_iter().map(|name| Change {
        key: format!("source.git-crates.{name}"),
        old: text(&pin.source.git_crates, name),
        new: text(new, name),
    });
    all.filter(|change| change.old != change.new).collect()
}

/// Edits PROVENANCE at `workspace`, comments and order kept, and reads it back before it replaces the old one.
///
/// # Errors
/// It cannot be edited or would not be valid; the old one stays.
pub fn write(workspace: &Path, changes: &[Change], patches: Option<&[PatchEntry]>) -> Result<()> {
    let path = workspace.join(FILE_NAME);
    let text = fs::read_to_string(&path)?;
    let malformed = |cause: String| {
        Error::new(&NO_ENTRY, format!("{} cannot be edited", path.display()))
            .cause(cause)
            .hint("compare with `git diff PROVENANCE`")
    };
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| malformed(error.to_string()))?;
    for change in changes.iter().filter(|change| change.key.starts_with("source.")) {
        set(&mut document, change).ok_or_else(|| malformed(format!("no place for {}", change.key)))?;
    }
    if let Some(patches) = patches {
        set_patches(&mut document, patches);
    }
    let edited = document.to_string();
    Pin::parse(&path, &edited)?;
    write_atomic(&path, edited.as_bytes(), None)
}

fn set(document: &mut DocumentMut, change: &Change) -> Option<()> {
    let source = document.get_mut("source")?.as_table_mut()?;
    let mut parts = change.key.splitn(3, '.').skip(1);
    let (first, second) = (parts.next()?, parts.next());
    let (table, key) = match second {
        None => (source, first),
        Some(name) => {
            let table = source.entry(first).or_insert_with(|| Item::Table(toml_edit::Table::new()));
            (table.as_table_mut()?, name)
        }
    };
    match &change.new {
        None => drop(table.remove(key)),
        Some(new) => match table.get_mut(key).and_then(Item::as_value_mut) {
            Some(value) => {
                // The decor is what stands around the value: a comment at the end of the line.
                let decor = value.decor().clone();
                *value = Value::from(new.as_str());
                *value.decor_mut() = decor;
            }
            None => drop(table.insert(key, Item::Value(new.as_str().into()))),
        },
    }
    Some(())
}

/// A `[[patch]]` entry as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchEntry {
    /// The file.
    pub file: String,
    /// Its hash.
    pub sha256: Sha256,
    /// For a new entry.
    pub reason: String,
}

/// How the entries of patches change.
pub fn entry_changes(pin: &Pin, entries: &[PatchEntry]) -> Vec<Change> {
    let mut files: Vec<&str> = pin.patches.iter().map(|patch| patch.file.as_str()).collect();
    files.extend(entries.iter().map(|entry| entry.file.as_str()));
    files.sort_unstable();
    files.dedup();
    let changes = files.into_iter().map(|file| {
        let old = pin.patches.iter().find(|patch| patch.file.as_str() == file);
        let new = entries.iter().find(|entry| entry.file == file);
        Change {
            key: format!("patch.{file}"),
            old: old.map(|patch| patch.sha256.to_string()),
            new: new.map(|entry| entry.sha256.to_string()),
        }
    });
    changes.filter(|change| change.old != change.new).collect()
}

/// Compares the patches in `workspace` with their entries: what should be written, and what changes.
///
/// # Errors
/// The folder or a patch cannot be read.
pub fn patch_entries(pin: &Pin, workspace: &Path) -> Result<(Vec<PatchEntry>, Vec<Change>)> {
    let folder = workspace.join(PATCH_FOLDER);
    let mut present = BTreeMap::new();
    if folder.is_dir() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "patch") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                present.insert(name, fs::read(&path)?);
            }
        }
    }
    let (mut entries, mut changes) = (Vec::new(), Vec::new());
    let mut note = |file: &str, old: Option<&Sha256>, new: Option<&Sha256>| {
        if old != new {
            let text = |hash: Option<&Sha256>| hash.map(ToString::to_string);
            changes.push(Change { key: format!("patch.{file}"), old: text(old), new: text(new) });
        }
    };
    // Entries keep their order; new patches come last, by name.
    for patch in &pin.patches {
        let bytes = present.remove(patch.file.as_str());
        let sha256 = bytes.as_deref().map(Sha256::of);
        note(patch.file.as_str(), Some(&patch.sha256), sha256.as_ref());
        if let Some(sha256) = sha256 {
            entries.push(PatchEntry { file: patch.file.to_string(), sha256, reason: patch.reason.clone() });
        }
    }
    for (file, bytes) in present {
        Patch::parse(file.as_str(), &bytes)?;
        let sha256 = Sha256::of(&bytes);
        note(&file, None, Some(&sha256));
        entries.push(PatchEntry { reason: reason(&bytes), file, sha256 });
    }
    Ok((entries, changes))
}

fn malformed_name(path: &Path, cause: String) -> Error {
    Error::new(&NO_ENTRY, format!("{} has a name that PROVENANCE cannot hold", path.display()))
        .cause(cause)
        .hint("rename the patch: NNNN-name.patch")
}

/// The first line of a patch's message, without the marks of a mail.
fn reason(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mail = text.lines().find_map(|line| line.strip_prefix("Subject:"));
    let line = mail.or_else(|| text.lines().find(|line| !line.trim().is_empty())).unwrap_or_default();
    let line = line.trim().trim_start_matches("[PATCH]").trim();
    match line.starts_with("diff ") || line.is_empty() {
        true => "to be described".to_owned(),
        false => line.to_owned(),
    }
}

fn set_patches(document: &mut DocumentMut, entries: &[PatchEntry]) {
    let item = document.entry("patch").or_insert_with(|| Item::ArrayOfTables(Default::default()));
    let Some(tables) = item.as_array_of_tables_mut() else { return };
    let file_of = |table: &toml_edit::Table| table.get("file").and_then(Item::as_str).map(str::to_owned);
    tables.retain(|table| entries.iter().any(|entry| file_of(table).as_deref() == Some(&*entry.file)));
    for entry in entries {
        let sha256 = Value::from(entry.sha256.to_string());
        if let Some(table) = tables.iter_mut().find(|table| file_of(table).as_deref() == Some(&*entry.file)) {
            if let Some(value) = table.get_mut("sha256").and_then(Item::as_value_mut) {
                let decor = value.decor().clone();
                *value = sha256;
                *value.decor_mut() = decor;
            }
            continue;
        }
        let mut table = toml_edit::Table::new();
        table.insert("file", Item::Value(entry.file.as_str().into()));
        table.insert("sha256", Item::Value(sha256));
        table.insert("reason", Item::Value(entry.reason.as_str().into()));
        table.decor_mut().set_prefix("\n");
        tables.push(table);
    }
}

/// Applies a patch to the workspace, or says why not.
fn try_patch(pinned: &PinnedPatch, workspace: &Path) -> Result<Tried> {
    let file = pinned.file.to_string();
    let applied = Patch::parse(file.as_str(), &pinned.bytes)?.apply(workspace);
    let (verdict, details) = match applied {
        Ok(_) => (Verdict::Applies, Vec::new()),
        Err(error) if error.exit() == crate::report::error::Exit::Internal => return Err(error),
        Err(error) => {
            let upstream = [&patch::ALREADY_APPLIED, &patch::EXISTS];
            let verdict = match upstream.iter().any(|code| std::ptr::eq(*code, error.code())) {
                true => Verdict::Upstream,
                false => Verdict::Conflicts,
            };
            (verdict, error.to_string().lines().map(str::to_owned).collect())
        }
    };
    Ok(Tried { file, verdict, details })
}

/// Every package below `tree`: its name and its folder from there.
fn packages(tree: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut folders = vec![tree.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if entry.file_type()?.is_dir() {
                if !SKIPPED.iter().any(|skipped| name == *skipped) {
                    folders.push(entry.path());
                }
            } else if name == "Cargo.toml"
                && let Some(package) = manifest(&entry.path()).as_ref().and_then(package_name)
                && let Ok(place) = folder.strip_prefix(tree)
            {
                found.push((package, place.to_owned()));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn manifest(path: &Path) -> Option<toml::Table> {
    fs::read_to_string(path).ok()?.parse().ok()
}

fn package_name(manifest: &toml::Table) -> Option<String> {
    manifest.get("package")?.get("name")?.as_str().map(str::to_owned)
}

fn only(packages: &[(String, PathBuf)], names: &[&str], tree: &Path) -> Result<PathBuf> {
    let found: Vec<_> = packages.iter().filter(|(name, _)| names.contains(&name.as_str())).collect();
    match found[..] {
        [(_, folder)] => Ok(folder.clone()),
        [] => Err(Error::new(&NOT_UPSTREAM, format!("{} has no package {}", tree.display(), names[0]))
            .hint("give a revision of the CUDA-Rust toolchain")),
        _ => {
            let places: Vec<_> = found.iter().map(|(_, folder)| folder.display().to_string()).collect();
            Err(Error::new(
                &NOT_UPSTREAM,
                format!("the package {} is there more than once: {}", names[0], places.join(", ")),
            )
            .hint("pin it by hand in PROVENANCE"))
        }
    }
}

/// The nearest folder above `crate_folder` whose manifest has `[workspace]`; else the crate's own.
fn workspace_of(crate_folder: &Path, tree: &Path) -> PathBuf {
    let above = crate_folder.ancestors().skip(1).take_while(|folder| folder.starts_with(tree));
    let has = |folder: &&Path| {
        manifest(&folder.join("Cargo.toml")).is_some_and(|table| table.contains_key("workspace"))
    };
    above.into_iter().find(has).unwrap_or(crate_folder).to_owned()
}

fn channels(folders: &[&Path], tree: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for folder in folders {
        for name in ["rust-toolchain.toml", "rust-toolchain"] {
            let path = folder.join(name);
            let channel = manifest(&path)
                .and_then(|table| table.get("toolchain")?.get("channel")?.as_str().map(str::to_owned));
            let shown = path.strip_prefix(tree).unwrap_or(&path).display().to_string();
            found.extend(channel.map(|channel| format!("{shown}: {channel}")));
        }
    }
    found.dedup();
    found
}
