//! The crates of all three workspaces, vendored: collected for a bundle, laid into the store from one, and shown to
//! Cargo as a source that needs no network.
//!
//! A crate from the registry travels as the `.crate` file that the registry serves, since that is what the checksum in
//! the lock file is of; it is unpacked here. A crate from git has no checksum in the lock file, so PROVENANCE pins the
//! hash of its vendored folder (`[source.git-crates]`). Cargo verifies every file again when it compiles.
//!
//! ```text
//! vendor/<key>/archives/NAME-VERSION.crate   as the registry serves them
//! vendor/<key>/crates/NAME-VERSION/          unpacked, or as `cargo vendor` writes them, with .cargo-checksum.json
//! vendor/<key>/entry.json                    the hash of crates/, and the git sources that it stands for
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::base::env::Env;
use crate::base::hash::{Sha256, TreeHash};
use crate::machine::child;
use crate::machine::toolchain::Toolchain;
use crate::pins::Pin;
use crate::report::error::{BUG, Error, Result};
use crate::report::progress::Progress;
use crate::source::archive::{self, Limits};
use crate::source::nar;
use crate::store::{Key, Kind, Store};

crate::codes! {
    BAD_LOCK = "KILN-0920", Machine, "a lock file cannot be read",
        "The crates to vendor are those of the three lock files: upstream's, the workspace's and that of kernels/device. \
         One of them is missing or is not what Cargo writes.";
    OTHER_REGISTRY = "KILN-0921", Machine, "a crate comes from another registry",
        "Crates of the public registry and of git repositories can be vendored. A lock file names another registry.";
    NO_CRATE = "KILN-0922", Machine, "a crate is not there",
        "Every crate of the lock files must be in CARGO_HOME (`cargo xtask bundle` fetches them unless --offline is \
         given), or in the bundle that is installed.";
    WRONG_CRATE = "KILN-0923", Refusal, "a crate is not the one in the lock file",
        "The lock file records the sha256 of every crate of the registry, and PROVENANCE the hash of the vendored folder \
         of every crate from git. The crate that was found has another one.";
    UNPINNED_GIT_CRATE = "KILN-0924", Refusal, "a crate from git is not pinned",
        "A lock file has no checksum for a crate from git, so that a vendored copy could hold anything. PROVENANCE pins \
         its folder's hash in [source.git-crates]; `cargo xtask pin --git-crates --write` records it from Cargo's own \
         checkout of the locked commit.";
    VENDOR_FAILED = "KILN-0925", Machine, "cargo cannot provide the crates",
        "`cargo fetch` or `cargo vendor` failed; its messages stand above.";
    CHANGED = "KILN-0926", Refusal, "vendored crates in the store were changed",
        "The vendored crates in the store have another hash than when setup laid them. Run `setup --bundle FILE` again.";
}

/// Version of what this module lays; part of the key.
const RECIPE: u32 = 1;

const CRATES: &str = "crates";
const ARCHIVES: &str = "archives";
const ENTRY_FILE: &str = "entry.json";

/// Cargo's name for our source.
const SOURCE: &str = "kiln-vendor";

/// The source of the public registry in lock files.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// A package of a lock file that is not a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Locked {
    name: String,
    version: String,
    source: String,
    checksum: Option<Sha256>,
}

impl Locked {
    fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }

    fn is_git(&self) -> bool {
        self.source.starts_with("git+")
    }
}

/// The lock files of everything that is built: upstream's in the patched tree, the workspace's, the device crates'.
#[derive(Clone, Debug)]
pub struct Locks {
    packages: BTreeSet<Locked>,
    key: Key,
}

impl Locks {
    /// Reads them. `upstream` is the folder of the patched tree's workspace.
    ///
    /// # Errors
    /// [`BAD_LOCK`] or [`OTHER_REGISTRY`].
    pub fn read(pin: &Pin, upstream: &Path, workspace: &Path) -> Result<Self> {
        let mut packages = BTreeSet::new();
        for path in std::iter::once(pin.source.lock.under(upstream)).chain(own_locks(workspace)) {
            packages.extend(read_lock(&path)?);
        }
        Ok(Locks { packages, key: key(pin, workspace)? })
    }

    /// Upstream's lock file alone, as far as the backend is concerned.
    ///
    /// # Errors
    /// As [`Locks::read`].
    pub fn upstream(pin: &Pin, upstream: &Path, workspace: &Path) -> Result<Self> {
        let packages = read_lock(&pin.source.lock.under(upstream))?.into_iter().collect();
        Ok(Locks { packages, key: key(pin, workspace)? })
    }

    /// The key of the vendored crates.
    pub fn key(&self) -> &Key {
        &self.key
    }

    fn git(&self) -> impl Iterator<Item = &Locked> {
        self.packages.iter().filter(|package| package.is_git())
    }
}

/// The lock files of this repository that exist.
fn own_locks(workspace: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    ["Cargo.lock", "kernels/device/Cargo.lock"]
        .map(|name| workspace.join(name))
        .into_iter()
        .filter(|path| path.is_file())
}

/// The key of the vendored crates for these lock files. Needs no source: PROVENANCE has the hash of upstream's.
///
/// # Errors
/// A lock file cannot be read.
pub fn key(pin: &Pin, workspace: &Path) -> Result<Key> {
    let mut key = Key::builder("vendor", RECIPE).field("lock", &pin.source.lock_sha256.to_string());
    for path in own_locks(workspace) {
        key = key.field("lock", &Sha256::of(&fs::read(path)?).to_string());
    }
    for (name, hash) in &pin.source.git_crates {
        key = key.field(name, &hash.to_string());
    }
    Ok(key.finish())
}

fn read_lock(path: &Path) -> Result<Vec<Locked>> {
    #[derive(Deserialize)]
    struct Lock {
        #[serde(default)]
        package: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        version: String,
        source: Option<String>,
        checksum: Option<Sha256>,
    }
    let bad = |cause: String| {
        Error::new(&BAD_LOCK, format!("{} is not a lock file of Cargo", path.display()))
            .cause(cause)
            .hint("restore it with `git checkout -- Cargo.lock kernels/device/Cargo.lock`, and run: cargo xtask setup")
    };
    let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let lock: Lock = toml::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let mut packages = Vec::new();
    for package in lock.package {
        let Some(source) = package.source else { continue };
        let plain = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "._+-".contains(c))
        };
        // Both become names of files.
        if !plain(&package.name) || !plain(&package.version) {
            return Err(bad(format!("{:?} {:?} is no package", package.name, package.version)));
        }
        if source != REGISTRY && !source.starts_with("git+") {
            return Err(Error::new(
                &OTHER_REGISTRY,
                format!("{} {} in {} comes from {source}", package.name, package.version, path.display()),
            )
            .hint("a mirror of the public registry is set by source replacement in Cargo's configuration, not in the lock file"));
        }
        let (name, version, checksum) = (package.name, package.version, package.checksum);
        packages.push(Locked { name, version, source, checksum });
    }
    Ok(packages)
}

/// What is written beside the crates.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Hash of crates/.
    crates: TreeHash,
    /// The git sources of the lock files, as they are written there but without the commit.
    git: BTreeSet<String>,
}

/// Vendored crates in the store.
#[derive(Clone, Debug)]
pub struct Vendored {
    /// Their key.
    pub key: Key,
    /// The entry's folder.
    pub folder: PathBuf,
    entry: Entry,
}

/// The vendored crates for these lock files, where the store has them. Their content is not checked here: Cargo does.
///
/// # Errors
/// They are there and their record is damaged.
pub fn find(store: &Store, pin: &Pin, workspace: &Path) -> Result<Option<Vendored>> {
    let key = key(pin, workspace)?;
    let folder = store.entry(Kind::Vendor, &key);
    let bytes = match fs::read(folder.join(ENTRY_FILE)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let entry = serde_json::from_slice(&bytes).map_err(|error| {
        Error::new(&CHANGED, format!("{} is not what setup writes", folder.join(ENTRY_FILE).display()))
            .cause(error)
            .hint(format!("run: rm -r {}", folder.display()))
    })?;
    Ok(Some(Vendored { key, folder, entry }))
}

impl Vendored {
    /// Hashes all crates and compares with what setup laid.
    ///
    /// # Errors
    /// [`CHANGED`].
    pub fn verify(&self) -> Result<TreeHash> {
        let found = nar::hash_tree(&self.folder.join(CRATES))?;
        if found == self.entry.crates {
            return Ok(found);
        }
        Err(Error::new(
            &CHANGED,
            format!(
                "{} was changed since setup laid it\n  recorded: {}\n  found:    {found}",
                self.folder.join(CRATES).display(),
                self.entry.crates
            ),
        )
        .hint(format!("run: rm -r {}, and: cargo xtask setup --bundle FILE", self.folder.display())))
    }

    /// Makes `folder` a Cargo home that knows these crates and no network: the user's own configuration, with the sources
    /// replaced. A home and not an option, because programs that call Cargo themselves must see it too.
    ///
    /// # Errors
    /// The user's configuration cannot be read, or the folder cannot be written.
    pub fn cargo_home(&self, folder: &Path, env: &Env) -> Result<PathBuf> {
        let user = child::cargo_home(env)?;
        let path =
            ["config.toml", "config"].map(|name| user.join(name)).into_iter().find(|path| path.is_file());
        let mut config = match &path {
            Some(path) => fs::read_to_string(path)?.parse::<toml::Table>().map_err(|error| {
                Error::new(
                    &crate::machine::cargo_config::CARGO_CONFIG_INVALID,
                    format!("{} is not TOML", path.display()),
                )
                .cause(error)
            })?,
            None => toml::Table::new(),
        };
        // Registries and their credentials are of no use without a network.
        config.retain(|name, _| !matches!(name, "source" | "registry" | "registries" | "credential-alias"));
        config.insert("source".to_owned(), self.sources().into());
        let net = config.entry("net").or_insert_with(|| toml::Table::new().into());
        if let Some(net) = net.as_table_mut() {
            net.insert("offline".to_owned(), true.into());
        }
        fs::create_dir_all(folder)?;
        let text = toml::to_string(&config)
            .map_err(|error| Error::new(&BUG, format!("cannot write Cargo's configuration: {error}")))?;
        crate::base::atomic::write_atomic(&folder.join("config.toml"), text.as_bytes(), None)?;
        Ok(folder.to_owned())
    }

    /// Cargo's `[source]` table.
    fn sources(&self) -> toml::Table {
        let text = |value: &str| toml::Value::from(value.to_owned());
        let table = |pairs: &[(&str, toml::Value)]| -> toml::Value {
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect::<toml::Table>()
                .into()
        };
        let mut sources = toml::Table::new();
        let crates = self.folder.join(CRATES).display().to_string();
        sources.insert(SOURCE.to_owned(), table(&[("directory", text(&crates))]));
        sources.insert("crates-io".to_owned(), table(&[("replace-with", text(SOURCE))]));
        for source in &self.entry.git {
            let address = source.strip_prefix("git+").unwrap_or(source);
            let (url, query) = address.split_once('?').unwrap_or((address, ""));
            let mut pairs = vec![("git", text(url)), ("replace-with", text(SOURCE))];
            for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
                if let "rev" | "branch" | "tag" = name {
                    pairs.push((name, text(value)));
                }
            }
            sources.insert(source.clone(), table(&pairs));
        }
        sources
    }

    /// The same as arguments, for a Cargo that must keep its home.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        for (source, table) in self.sources() {
            for (name, value) in table.as_table().into_iter().flatten() {
                arguments
                    .extend(["--config".to_owned(), format!("source.{}.{name}={value}", quoted(&source))]);
            }
        }
        arguments.extend(["--config".to_owned(), "net.offline=true".to_owned()]);
        arguments
    }
}

/// A TOML key in quotes.
fn quoted(key: &str) -> String {
    toml::Value::from(key.to_owned()).to_string()
}

/// What [`collect`] needs.
pub struct Collecting<'a> {
    /// The store, which may have the crates already.
    pub store: &'a Store,
    /// The pins.
    pub pin: &'a Pin,
    /// The workspace of the patched tree.
    pub upstream: &'a Path,
    /// The root of the checkout.
    pub workspace: &'a Path,
    /// The compiler whose Cargo is used.
    pub toolchain: &'a Toolchain,
    /// Nothing may be downloaded.
    pub offline: bool,
    /// The process environment.
    pub env: &'a Env,
    /// Told what happens.
    pub progress: &'a dyn Progress,
}

/// Gathers every crate of the lock files in the new folder `into`, as `archives/` and `git-crates/`. All are verified.
///
/// # Errors
/// One of [`CODES`].
pub fn collect(locks: &Locks, into: &Path, collecting: &Collecting<'_>) -> Result<()> {
    fs::create_dir_all(into.join(ARCHIVES))?;
    fs::create_dir_all(into.join(GIT_CRATES))?;
    if let Some(vendored) = find(collecting.store, collecting.pin, collecting.workspace)? {
        vendored.verify()?;
        for package in &locks.packages {
            let from = vendored.folder.join(CRATES).join(package.folder());
            if package.is_git() {
                crate::source::copy_tree(&from, &into.join(GIT_CRATES).join(package.folder()))?;
            } else {
                let name = format!("{}.crate", package.folder());
                fs::copy(vendored.folder.join(ARCHIVES).join(&name), into.join(ARCHIVES).join(&name))?;
            }
        }
        return Ok(());
    }
    let home = child::cargo_home(collecting.env)?;
    let mut missing = copy_archives(locks, &home, &into.join(ARCHIVES))?;
    if !missing.is_empty() && !collecting.offline {
        for manifest in manifests(collecting) {
            run_cargo(&["fetch", "--locked", "--manifest-path"], &[&manifest], collecting)?;
        }
        missing = copy_archives(locks, &home, &into.join(ARCHIVES))?;
    }
    if let Some(first) = missing.first() {
        return Err(Error::new(
            &NO_CRATE,
            format!(
                "{} of {} crates are not in {}, the first is {first}",
                missing.len(),
                locks.packages.len(),
                home.display()
            ),
        )
        .hint("run it again without --offline"));
    }
    git_crates(locks, &into.join(GIT_CRATES), collecting)?;
    for package in locks.git() {
        check_git_crate(&into.join(GIT_CRATES).join(package.folder()), package, collecting.pin)?;
    }
    Ok(())
}

/// Lays every crate from git into `into`, as `cargo vendor` writes it from its checkout of the locked commit.
///
/// # Errors
/// [`VENDOR_FAILED`] or [`NO_CRATE`].
pub fn git_crates(locks: &Locks, into: &Path, collecting: &Collecting<'_>) -> Result<()> {
    if locks.git().next().is_none() {
        return Ok(());
    }
    let scratch = tempfile::Builder::new().prefix(".vendor-").tempdir_in(into)?;
    let folder = scratch.path().join("all");
    let manifests = manifests_with_git(collecting)?;
    let Some((first, others)) = manifests.split_first() else { return Ok(()) };
    let mut arguments = vec![
        "vendor",
        "--quiet",
        "--locked",
        "--versioned-dirs",
        "--respect-source-config",
        "--manifest-path",
    ];
    let mut paths = vec![first.as_path()];
    for manifest in others {
        // Each option is followed by its path in `run_cargo`.
        arguments.push("--sync");
        paths.push(manifest);
    }
    arguments.push("--");
    paths.push(&folder);
    run_cargo(&arguments, &paths, collecting)?;
    for package in locks.git() {
        let from = folder.join(package.folder());
        if !from.is_dir() {
            return Err(Error::new(&NO_CRATE, format!("cargo vendor wrote no {}", package.folder())));
        }
        crate::source::copy_tree(&from, &into.join(package.folder()))?;
    }
    Ok(())
}

/// The hash of every folder in `folder`, by its name: what PROVENANCE pins for crates from git.
///
/// # Errors
/// The folder cannot be read.
pub fn hashes(folder: &Path) -> Result<BTreeMap<String, TreeHash>> {
    let mut hashes = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() && !name.starts_with('.') {
            hashes.insert(name, nar::hash_tree(&entry.path())?);
        }
    }
    Ok(hashes)
}

/// The folder of crates from git in a bundle.
const GIT_CRATES: &str = "git-crates";

/// The manifests of the workspaces, upstream's first.
fn manifests(collecting: &Collecting<'_>) -> Vec<PathBuf> {
    let own = own_locks(collecting.workspace).map(|lock| lock.with_file_name("Cargo.toml"));
    std::iter::once(collecting.upstream.join("Cargo.toml")).chain(own).collect()
}

/// Those of [`manifests`] whose lock files name a git repository.
fn manifests_with_git(collecting: &Collecting<'_>) -> Result<Vec<PathBuf>> {
    let mut locks = vec![collecting.pin.source.lock.under(collecting.upstream)];
    locks.extend(own_locks(collecting.workspace));
    let mut found = Vec::new();
    for (manifest, lock) in manifests(collecting).into_iter().zip(locks) {
        if read_lock(&lock)?.iter().any(Locked::is_git) {
            found.push(manifest);
        }
    }
    Ok(found)
}

/// Runs Cargo with `arguments`; each of the last `paths.len()` options is followed by its path.
fn run_cargo(arguments: &[&str], paths: &[&Path], collecting: &Collecting<'_>) -> Result<()> {
    let Collecting { toolchain, env, .. } = collecting;
    let mut command: Command = child::command(toolchain.cargo(env), toolchain, env)?;
    let plain = arguments.len() - paths.len();
    command.args(&arguments[..plain]);
    if collecting.offline {
        command.arg("--offline");
    }
    for (option, path) in arguments[plain..].iter().zip(paths) {
        command.arg(option).arg(path);
    }
    command.current_dir(collecting.workspace).stdin(Stdio::null()).stdout(Stdio::null());
    collecting.progress.note(&format!("cargo {} for {}", arguments[0], paths[0].display()));
    let failed = |what: String| {
        Error::new(&VENDOR_FAILED, format!("cargo {} {what}", arguments[0]))
            .hint("check the network, the proxy variables and the registry settings in CARGO_HOME; what is missing stands above")
    };
    let status = command.status().map_err(|error| failed(format!("cannot be started: {error}")))?;
    if status.success() { Ok(()) } else { Err(failed(format!("ended with {status}"))) }
}

/// Copies the verified archives of all crates of the registry from `home`; returns what is not there.
fn copy_archives(locks: &Locks, home: &Path, into: &Path) -> Result<Vec<String>> {
    let mut caches = Vec::new();
    if let Ok(entries) = fs::read_dir(home.join("registry/cache")) {
        for entry in entries {
            caches.push(entry?.path());
        }
    }
    caches.sort();
    let mut missing = Vec::new();
    for package in locks.packages.iter().filter(|package| !package.is_git()) {
        let name = format!("{}.crate", package.folder());
        // A file of another content is passed over: Cargo fetches it again, and so do we.
        let found = caches.iter().map(|cache| cache.join(&name)).find_map(|path| {
            let bytes = fs::read(path).ok()?;
            (Some(Sha256::of(&bytes)) == package.checksum).then_some(bytes)
        });
        match found {
            Some(bytes) => fs::write(into.join(&name), bytes)?,
            None => missing.push(name),
        }
    }
    Ok(missing)
}

/// Verifies the crates in `from` (as [`collect`] leaves them) and lays them into the store, or returns those that are
/// there.
///
/// # Errors
/// A crate is missing or is not the locked one; nothing is published then.
pub fn install(
    locks: &Locks,
    from: &Path,
    pin: &Pin,
    store: &Store,
    progress: &dyn Progress,
) -> Result<Vendored> {
    let key = locks.key().clone();
    let _lock = store.lock(&format!("vendor-{key}"), &|text| progress.note(text))?;
    let folder = store.entry(Kind::Vendor, &key);
    if let Some(entry) = read_entry(&folder) {
        let present = Vendored { key: key.clone(), folder: folder.clone(), entry };
        if present.verify().is_ok() {
            return Ok(present);
        }
    }
    progress.note(&format!("verifying and unpacking {} crates", locks.packages.len()));
    let staging = store.stage(Kind::Vendor, &key)?;
    let entry = lay(locks, from, pin, staging.path())?;
    staging.publish()?;
    Ok(Vendored { key, folder, entry })
}

/// As [`install`], into any new folder and not into the store.
///
/// # Errors
/// As [`install`].
pub fn lay_at(locks: &Locks, from: &Path, pin: &Pin, folder: &Path) -> Result<Vendored> {
    fs::create_dir_all(folder)?;
    let entry = lay(locks, from, pin, folder)?;
    Ok(Vendored { key: locks.key().clone(), folder: folder.to_owned(), entry })
}

fn read_entry(folder: &Path) -> Option<Entry> {
    serde_json::from_slice(&fs::read(folder.join(ENTRY_FILE)).ok()?).ok()
}

fn lay(locks: &Locks, from: &Path, pin: &Pin, to: &Path) -> Result<Entry> {
    let (archives, crates) = (to.join(ARCHIVES), to.join(CRATES));
    fs::create_dir_all(&archives)?;
    fs::create_dir_all(&crates)?;
    for package in &locks.packages {
        let name = package.folder();
        let target = crates.join(&name);
        if package.is_git() {
            let source = from.join(GIT_CRATES).join(&name);
            check_git_crate(&source, package, pin)?;
            crate::source::copy_tree(&source, &target)?;
            continue;
        }
        let file = format!("{name}.crate");
        let archive = archives.join(&file);
        let bytes = fs::read(from.join(ARCHIVES).join(&file)).map_err(|error| {
            Error::new(&NO_CRATE, format!("there is no {file}"))
                .cause(error)
                .hint("make the bundle again from a checkout with the same lock files")
        })?;
        let found = Sha256::of(&bytes);
        if Some(found) != package.checksum {
            let locked = package.checksum.map_or("none".to_owned(), |checksum| checksum.to_string());
            return Err(wrong_crate(&file, "in the lock file", &locked, &found.to_string()));
        }
        fs::write(&archive, bytes)?;
        archive::unpack_archive(&archive, &target, &Limits::default())?;
        write_checksums(&target, &found)?;
    }
    let git = locks.git().map(|package| match package.source.split_once('#') {
        Some((source, _)) => source.to_owned(),
        None => package.source.clone(),
    });
    let entry = Entry { crates: nar::hash_tree(&crates)?, git: git.collect() };
    let mut text = serde_json::to_vec_pretty(&entry)
        .map_err(|error| Error::new(&BUG, format!("cannot write an entry: {error}")))?;
    text.push(b'\n');
    fs::write(to.join(ENTRY_FILE), text)?;
    Ok(entry)
}

fn wrong_crate(what: &str, place: &str, expected: &str, found: &str) -> Error {
    Error::new(
        &WRONG_CRATE,
        format!("{what} is not the one {place}\n  expected: {expected}\n  found:    {found}"),
    )
    .hint("make the bundle again, or fetch it from a place that you trust")
}

fn check_git_crate(folder: &Path, package: &Locked, pin: &Pin) -> Result<()> {
    let name = package.folder();
    if !folder.is_dir() {
        return Err(Error::new(&NO_CRATE, format!("there is no git-crates/{name}"))
            .hint("make the bundle again from a checkout with the same lock files"));
    }
    let found = nar::hash_tree(folder)?;
    match pin.source.git_crates.get(&name) {
        Some(pinned) if *pinned == found => Ok(()),
        Some(pinned) => {
            Err(wrong_crate(&name, "that PROVENANCE pins", &pinned.to_string(), &found.to_string()))
        }
        None => Err(Error::new(
            &UNPINNED_GIT_CRATE,
            format!("{name} comes from git, and PROVENANCE does not pin its folder; found {found}"),
        )
        .hint("run: cargo xtask pin --git-crates --write")),
    }
}

/// Writes what Cargo compares the files of a vendored crate with.
fn write_checksums(folder: &Path, package: &Sha256) -> Result<()> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) {
                files.insert(name.to_owned(), Sha256::of(&fs::read(&path)?).to_string());
            }
        }
    }
    let text = json!({ "files": files, "package": package.to_string() }).to_string();
    fs::write(folder.join(".cargo-checksum.json"), text)?;
    Ok(())
}
