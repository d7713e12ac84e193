//! The source that everything is built from: the pinned revision's tree, verified, with the carried patches applied.
//!
//! Two store entries: `pristine`, keyed by the tree's hash, and `sources`, keyed by that and the patches in order. A
//! change of the patches starts from the pristine tree again; nothing is ever un-applied.

pub mod archive;
pub mod bundle;
pub mod cuda_wheels;
pub mod download;
pub mod model;
pub mod nar;
pub mod patch;
pub mod pinned;
pub mod vendor;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::checkpoint;
use crate::base::env::Env;
use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::base::process::{self, Failure};
use crate::pins::{Pin, PinnedPatch, Repository, Source};
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source::archive::{Limits, RootRule};
use crate::source::download::Download;
use crate::source::patch::Patch;
use crate::store::{Key, Kind, Staging, Store};

crate::codes! {
    OFFLINE = "KILN-0380", Machine, "the source is not in the store and the network is off",
        "With `--offline` nothing is downloaded. Give the pinned revision with `--source`: an archive, a folder or a \
         git repository that has it.";
    NO_SOURCE = "KILN-0381", Machine, "the given source does not exist or is neither archive, folder nor repository",
        "`--source` takes a .tar.gz or .tar file, a folder that holds the tree, or a git repository (bare or \
         not) that has the pinned revision. Check the path, and give one of these.";
    NO_GIT = "KILN-0382", Machine, "git is needed to read a git repository",
        "`--source` names a git repository, whose tree is read with `git archive`. Nothing else needs git.";
    GIT_FAILED = "KILN-0383", Machine, "git cannot read the pinned revision from the repository",
        "`git archive REVISION` failed in the repository that `--source` names: it does not have the revision, or not all of \
         its files, as a partial or shallow copy may. Fetch the revision into that repository first.";
    WRONG_TREE = "KILN-0384", Refusal, "the source tree is not the pinned one",
        "PROVENANCE pins the hash of the revision's tree (file names, contents and executable bits; not the \
         archive's compressed bytes, which hosts change). The tree that was found has another hash. Give an \
         unchanged copy of the revision, or leave `--source` out so that it is downloaded.";
    WRONG_ARCHIVE = "KILN-0385", Refusal, "the archive is not the pinned one",
        "PROVENANCE has `archive-sha256` and the archive's bytes have another hash. Hosts sometimes compress the same \
         tree anew; the message says whether the tree is equal. If it is, record the new hash or remove \
         `archive-sha256`: the tree's hash alone decides what is built.";
    WRONG_LOCK = "KILN-0387", Refusal, "the lock file is not the pinned one",
        "The Cargo.lock of the patched tree has another hash than PROVENANCE records, so other crates would \
         be built. Restore PROVENANCE and backend-patches/ from the repository; they change together.";
    CHANGED = "KILN-0388", Refusal, "a source tree in the store was changed",
        "A tree in the store has another hash than when it was published. Something edited it. `cargo xtask setup` \
         replaces it by a fresh one.";
    MISSING = "KILN-0389", Machine, "the patched source is not in the store",
        "`build` compiles against the verified, patched source that `setup` publishes, and it is not there. \
         Run `cargo xtask setup`, which makes it.";
}

/// Version of what this module does to a tree; part of its keys.
const RECIPE: u32 = 1;

/// Where the user said the revision is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The pinned repository.
    Repository,
    /// A tar archive, compressed or not.
    Archive(PathBuf),
    /// A folder that holds the tree.
    Folder(PathBuf),
    /// A git repository that has the revision.
    Git(PathBuf),
}

impl Origin {
    /// Tells what `path` (absolute) is.
    ///
    /// # Errors
    /// It does not exist or is something else.
    pub fn of(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path).map_err(|error| {
            Error::new(&NO_SOURCE, format!("--source {} cannot be read", path.display()))
                .cause(error)
                .hint("give a .tar.gz archive, a folder, or a git repository that has the pinned revision")
        })?;
        if metadata.is_file() {
            return Ok(Origin::Archive(path.to_owned()));
        }
        if !metadata.is_dir() {
            return Err(Error::new(
                &NO_SOURCE,
                format!("--source {} is neither a file nor a folder", path.display()),
            )
            .hint("give a .tar.gz archive, a folder, or a git repository that has the pinned revision"));
        }
        let bare = path.join("HEAD").is_file() && path.join("objects").is_dir();
        if bare || path.join(".git").exists() {
            return Ok(Origin::Git(path.to_owned()));
        }
        Ok(Origin::Folder(path.to_owned()))
    }
}

/// What is written beside a published tree, outside of anything that an archive could bring.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Hash of `tree/` as it was published.
    tree: TreeHash,
    revision: Revision,
    patches: Vec<String>,
}

const ENTRY_FILE: &str = "entry.json";
const TREE: &str = "tree";

/// The key of the unpatched tree.
pub fn pristine_key(source: &Source) -> Key {
    Key::builder("pristine", RECIPE).field("tree", &source.tree.to_string()).finish()
}

/// The key of the patched tree: what upstream has, and every patch in order.
pub fn key(source: &Source, patches: &[PinnedPatch]) -> Key {
    let mut key = Key::builder("source", RECIPE)
        .field("tree", &source.tree.to_string())
        .field("subfolder", source.subfolder.as_ref().map_or("", |path| path.as_str()));
    for patch in patches {
        key = key.field("patch", &patch.sha256.to_string());
    }
    key.finish()
}

/// A verified, patched tree in the store.
#[derive(Clone, Debug)]
pub struct Patched {
    /// Its key.
    pub key: Key,
    /// Absolute path of the tree.
    pub tree: PathBuf,
    /// Its hash.
    pub hash: TreeHash,
}

/// Finds the patched tree and checks every byte of it.
///
/// # Errors
/// It is not there ([`MISSING`]), or was changed ([`CHANGED`]).
pub fn verify(store: &Store, key: &Key) -> Result<Patched> {
    let folder = store.entry(Kind::Source, key);
    let (tree, hash) = verify_entry(&folder)?;
    Ok(Patched { key: key.clone(), tree, hash })
}

/// The unpatched tree and its hash, if it is in the store; its hash was compared with the one it was published with.
///
/// # Errors
/// It was changed ([`CHANGED`]).
pub fn verify_pristine(store: &Store, source: &Source) -> Result<Option<(PathBuf, TreeHash)>> {
    let folder = store.entry(Kind::Pristine, &pristine_key(source));
    if !folder.is_dir() {
        return Ok(None);
    }
    verify_entry(&folder).map(Some)
}

fn verify_entry(folder: &Path) -> Result<(PathBuf, TreeHash)> {
    let hint = "run: cargo xtask setup";
    let record = folder.join(ENTRY_FILE);
    let tree = folder.join(TREE);
    let text = match fs::read(&record) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::new(&MISSING, format!("there is no {}", record.display())).hint(hint));
        }
        Err(error) => return Err(Error::from(error).as_damage(&CHANGED, &record)),
    };
    let entry: Entry = serde_json::from_slice(&text).map_err(|error| {
        Error::new(&CHANGED, format!("{} is not what setup writes", record.display())).cause(error).hint(hint)
    })?;
    let found = nar::hash_tree(&tree).map_err(|error| error.as_damage(&CHANGED, &tree))?;
    if found != entry.tree {
        return Err(Error::new(
            &CHANGED,
            format!(
                "{} was changed since setup published it\n  published: {}\n  found:     {found}",
                tree.display(),
                entry.tree
            ),
        )
        .hint(hint));
    }
    Ok((tree, entry.tree))
}

/// What making the source needs beside the pin.
pub struct Making<'a> {
    /// Where things go.
    pub store: &'a Store,
    /// Where the revision comes from.
    pub origin: &'a Origin,
    /// Nothing may be downloaded.
    pub offline: bool,
    /// The process environment.
    pub env: &'a Env,
    /// Told what happens.
    pub progress: &'a dyn Progress,
}

/// Fetches, verifies, unpacks and patches the source and publishes it, or returns the published one.
///
/// # Errors
/// Anything on the way; nothing half-done is left in the store.
pub fn make(pin: &Pin, patches: &[PinnedPatch], making: &Making<'_>) -> Result<Patched> {
    let store = making.store;
    let key = key(&pin.source, patches);
    let _lock = store.lock(&Kind::Source.lock_name(&key), &|text| making.progress.note(text))?;
    if let Ok(patched) = verify(store, &key) {
        return Ok(patched);
    }
    let parsed: Vec<Patch> =
        patches.iter().map(|patch| Patch::parse(patch.file.as_str(), &patch.bytes)).collect::<Result<_>>()?;
    let pristine = make_pristine(pin, making)?;

    let staging = store.stage(Kind::Source, &key)?;
    let tree = staging.path().join(TREE);
    checkpoint::pass("source-staged", making.env);
    copy_tree(&pristine, &tree)?;
    let workspace = pin.source.workspace(&tree);
    for patch in patches {
        making.progress.note(&format!("applying {}", patch.file));
    }
    patch::apply_series(&parsed, &workspace)?;
    checkpoint::pass("source-patched", making.env);
    check_lock(&pin.source, &workspace)?;
    let hash = describe_tree(&staging, &pin.source.revision, patches)?;
    checkpoint::pass("source-publishing", making.env);
    staging.publish()?;
    checkpoint::pass("source-published", making.env);
    Ok(Patched { tree: store.entry(Kind::Source, &key).join(TREE), key, hash })
}

fn check_lock(source: &Source, workspace: &Path) -> Result<()> {
    let path = source.lock.under(workspace);
    let bytes = fs::read(&path)?;
    let found = Sha256::of(&bytes);
    if found == source.lock_sha256 {
        return Ok(());
    }
    Err(Error::new(
        &WRONG_LOCK,
        format!("{} is not the pinned one\n  pinned: {}\n  found:  {found}", source.lock, source.lock_sha256),
    )
    .hint("restore PROVENANCE and backend-patches/ from the repository; both must change together"))
}

/// Writes the entry's description beside the staged tree, the last file before it is published.
fn describe_tree(staging: &Staging, revision: &Revision, patches: &[PinnedPatch]) -> Result<TreeHash> {
    let hash = nar::hash_tree(&staging.path().join(TREE))?;
    let entry = Entry {
        tree: hash,
        revision: revision.clone(),
        patches: patches.iter().map(|patch| format!("{} {}", patch.sha256, patch.file)).collect(),
    };
    let mut text = serde_json::to_vec_pretty(&entry)
        .map_err(|error| Error::new(&crate::report::error::BUG, format!("cannot write an entry: {error}")))?;
    text.push(b'\n');
    fs::write(staging.path().join(ENTRY_FILE), text)?;
    Ok(hash)
}

/// The verified, unpatched tree: from the store, or from the origin.
fn make_pristine(pin: &Pin, making: &Making<'_>) -> Result<PathBuf> {
    let store = making.store;
    let key = pristine_key(&pin.source);
    let _lock = store.lock(&Kind::Pristine.lock_name(&key), &|text| making.progress.note(text))?;
    if let Ok((tree, hash)) = verify_entry(&store.entry(Kind::Pristine, &key))
        && hash == pin.source.tree
    {
        return Ok(tree);
    }
    let staging = store.stage(Kind::Pristine, &key)?;
    let tree = staging.path().join(TREE);
    fs::create_dir(&tree)?;
    checkpoint::pass("pristine-staged", making.env);
    match making.origin {
        Origin::Repository => from_repository(&pin.source, &tree, making)?,
        Origin::Archive(path) => from_archive(&pin.source, path, &tree, making)?,
        Origin::Git(path) => from_git(&pin.source, path, &tree, making)?,
        Origin::Folder(path) => {
            making.progress.note(&format!("copying {}", path.display()));
            fs::remove_dir(&tree)?;
            copy_tree(path, &tree)?;
            check_tree(&pin.source, &tree, &path.display().to_string())?;
        }
    }
    checkpoint::pass("pristine-unpacked", making.env);
    describe_tree(&staging, &pin.source.revision, &[])?;
    checkpoint::pass("pristine-publishing", making.env);
    staging.publish()?;
    checkpoint::pass("pristine-published", making.env);
    Ok(store.entry(Kind::Pristine, &key).join(TREE))
}

fn check_tree(source: &Source, tree: &Path, what: &str) -> Result<()> {
    let found = nar::hash_tree(tree)?;
    if found == source.tree {
        return Ok(());
    }
    Err(Error::new(
        &WRONG_TREE,
        format!(
            "the tree of {what} is not the one that PROVENANCE pins for revision {}\n  pinned: {}\n  found:  {found}",
            source.revision, source.tree
        ),
    )
    .hint("give an unchanged copy of the revision with --source, for example a git repository that has it"))
}

fn from_repository(source: &Source, tree: &Path, making: &Making<'_>) -> Result<()> {
    let folder = making.store.downloads();
    let path = folder.join(format!("{}.tar.gz", source.revision));
    let url = format!("{}/archive/{}.tar.gz", source.repository, source.revision);
    let mut fresh = false;
    if !path.is_file() {
        fetch(&url, &path, making)?;
        fresh = true;
    }
    match from_archive(source, &path, tree, making) {
        // A full disk says nothing about the archive.
        Err(error) if is_about_the_machine(&error) => Err(error),
        Err(error) => {
            // A bad file must not be found again by the next run.
            fs::remove_file(&path)?;
            if fresh {
                return Err(error.context(format!("the archive from {url} cannot be used")));
            }
            making.progress.note(&format!(
                "the archive that was downloaded earlier is damaged, fetching it again: {error}"
            ));
            fs::remove_dir_all(tree)?;
            fs::create_dir(tree)?;
            fetch(&url, &path, making)?;
            from_archive(source, &path, tree, making).inspect_err(|_| {
                // The first error is the one to report.
                let _ = fs::remove_file(&path);
            })
        }
        Ok(()) => Ok(()),
    }
}

fn is_about_the_machine(error: &Error) -> bool {
    crate::report::error::CODES.iter().any(|code| std::ptr::eq(*code, error.code()))
}

fn fetch(url: &str, path: &Path, making: &Making<'_>) -> Result<()> {
    if making.offline {
        return Err(Error::new(
            &OFFLINE,
            format!("{} is not in the store, and --offline forbids to download it", path.display()),
        )
        .hint(format!("give the revision with --source, or fetch {url} elsewhere and name the file")));
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    making.progress.note(&format!("downloading {url}"));
    download::download(&Download::new(url)?, path, making.progress)?;
    checkpoint::pass("downloaded", making.env);
    Ok(())
}

fn from_archive(source: &Source, path: &Path, tree: &Path, making: &Making<'_>) -> Result<()> {
    making.progress.note(&format!("unpacking {}", path.display()));
    let bytes = match &source.archive_sha256 {
        Some(pinned) => {
            let found = Sha256::of_reader(fs::File::open(path)?)?;
            (found != *pinned).then_some((pinned, found))
        }
        None => None,
    };
    let unpacked = archive::unpack_archive(path, tree, &Limits::default());
    if let Some((pinned, found)) = bytes {
        let same_tree = unpacked.is_ok() && nar::hash_tree(tree).is_ok_and(|hash| hash == source.tree);
        let also = if same_tree {
            "the compressed bytes differ, the uncompressed tree is equal: the host compressed it anew"
        } else {
            "the tree in it is not the pinned one either"
        };
        return Err(Error::new(
            &WRONG_ARCHIVE,
            format!(
                "{} is not the pinned archive; {also}\n  pinned: {pinned}\n  found:  {found}",
                path.display()
            ),
        )
        .hint("to go by the tree's hash alone, remove `archive-sha256` from [source] in PROVENANCE"));
    }
    let unpacked = unpacked?;
    unpacked.check_revision(&source.revision)?;
    check_tree(source, tree, &path.display().to_string())
}

fn from_git(source: &Source, path: &Path, tree: &Path, making: &Making<'_>) -> Result<()> {
    unpack_git(&source.repository, &source.revision, path, tree, making)?;
    check_tree(source, tree, &path.display().to_string())
}

/// Takes any revision, whose tree nobody has pinned yet, into `tree`; downloads go to the folder `scratch`.
///
/// # Errors
/// It cannot be had. That it is the right tree is not checked.
pub fn take(
    repository: &Repository,
    revision: &Revision,
    tree: &Path,
    scratch: &Path,
    making: &Making<'_>,
) -> Result<()> {
    let unpack = |archive: &Path| -> Result<()> {
        archive::unpack_archive(archive, tree, &Limits::default())?.check_revision(revision)
    };
    match making.origin {
        Origin::Repository => {
            let archive = scratch.join("archive.tar.gz");
            fetch(&format!("{repository}/archive/{revision}.tar.gz"), &archive, making)?;
            unpack(&archive)
        }
        Origin::Archive(path) => unpack(path),
        Origin::Folder(path) => copy_tree(path, tree),
        Origin::Git(path) => unpack_git(repository, revision, path, tree, making),
    }
}

/// Runs git and returns what it prints.
///
/// # Errors
/// It cannot be started, or fails.
pub fn git(arguments: &[&str], env: &Env) -> Result<String> {
    let mut command = git_command(env);
    command.args(arguments);
    let output = process::output(&mut command, GIT_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => Error::new(&NO_GIT, "cannot start git").cause(error).hint("install git"),
        Failure::TimedOut(limit) => {
            Error::new(&GIT_FAILED, format!("git gave no answer within {} s", limit.as_secs()))
                .hint("check the network")
        }
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::new(&GIT_FAILED, format!("git {} ended with {}", arguments.join(" "), output.status))
        .cause(output.stderr.trim())
        .hint("check the name of the revision and the network"))
}

/// The time that git may take to ask a server.
const GIT_LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

fn git_command(env: &Env) -> Command {
    let mut command = Command::new("git");
    // GIT_DIR and its like would make git read another repository than the named one.
    command.env_clear().envs(env.vars().filter(|(name, _)| !is_git_variable(name)));
    command
}

fn unpack_git(
    repository: &Repository,
    revision: &Revision,
    path: &Path,
    tree: &Path,
    making: &Making<'_>,
) -> Result<()> {
    making.progress.note(&format!("reading revision {revision} from {}", path.display()));
    let mut command = git_command(making.env);
    command.arg("-C").arg(path).args(["archive", "--format=tar", revision.as_str()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| {
        Error::new(&NO_GIT, format!("cannot start git to read {}", path.display()))
            .cause(error)
            .hint("install git, or give an archive or a folder with --source")
    })?;
    let errors = child.stderr.take().map(|mut pipe| {
        std::thread::spawn(move || {
            let mut text = String::new();
            // What came before a broken pipe is still worth showing.
            let _ = std::io::Read::read_to_string(&mut pipe, &mut text);
            text
        })
    });
    let unpacked = match child.stdout.take() {
        Some(stream) => archive::unpack_tar(stream, tree, RootRule::Bare, &Limits::default()),
        None => Err(Error::new(&crate::report::error::BUG, "git has no standard output")),
    };
    let status = child.wait()?;
    let said = errors.and_then(|thread| thread.join().ok()).unwrap_or_default();
    if !status.success() {
        return Err(Error::new(
            &GIT_FAILED,
            format!("git archive {revision} failed in {}: {}", path.display(), said.trim()),
        )
        // A partial copy has the commit and not all of its files: only --refetch asks for those again.
        .hint(format!(
            "fetch all of the revision there: git -C {} fetch --refetch {repository} {revision}",
            path.display()
        )));
    }
    unpacked?;
    Ok(())
}

fn is_git_variable(name: &OsStr) -> bool {
    const KEPT: [&str; 2] = ["GIT_CONFIG_GLOBAL", "GIT_SSH_COMMAND"];
    name.to_str().is_some_and(|name| name.starts_with("GIT_") && !KEPT.contains(&name))
}

/// Copies a tree: folders, files with their executable bit, and links as they are.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_tree(&source, &target)?;
        } else if kind.is_symlink() {
            copy_link(&fs::read_link(&source)?, &target)?;
        } else if kind.is_file() {
            fs::copy(&source, &target)?;
        } else {
            return Err(Error::new(
                &NO_SOURCE,
                format!("{} is neither file, folder nor link", source.display()),
            )
            .hint("give a clean copy of the revision with --source"));
        }
    }
    Ok(())
}

#[cfg(unix)]
fn copy_link(target: &Path, link: &Path) -> Result<()> {
    Ok(fs::os::unix::fs::symlink(target, link)?)
}

#[cfg(not(unix))]
fn copy_link(target: &Path, link: &Path) -> Result<()> {
    Err(Error::new(&NO_SOURCE, format!("{} links to {}: links need Unix", link.display(), target.display())))
}
