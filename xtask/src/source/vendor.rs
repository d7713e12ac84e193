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

mod collect;
mod locks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::base::env::Env;
use crate::base::hash::{Sha256, TreeHash};
use crate::machine::child;
use crate::pins::Pin;
use crate::report::error::{BUG, Error, Result};
use crate::report::progress::Progress;
use crate::source::archive::{self, Limits};
use crate::source::nar;
use crate::store::{Key, Kind, Store};

pub use self::collect::{Collecting, collect, git_crates, hashes};
use self::locks::Locked;
pub use self::locks::{Locks, key};

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

/// The folder of crates from git in a bundle.
const GIT_CRATES: &str = "git-crates";

/// Cargo's name for our source.
const SOURCE: &str = "kiln-vendor";

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
