//! The lock files of everything that is built, and the crates that they name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Deserialize;

use super::{BAD_LOCK, OTHER_REGISTRY, RECIPE};
use crate::base::hash::Sha256;
use crate::pins::Pin;
use crate::report::error::{Error, Result};
use crate::store::Key;

/// The source of the public registry in lock files.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// A package of a lock file that is not a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Locked {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) source: String,
    pub(super) checksum: Option<Sha256>,
}

impl Locked {
    pub(super) fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }

    pub(super) fn is_git(&self) -> bool {
        self.source.starts_with("git+")
    }
}

/// The lock files of everything that is built: upstream's in the patched tree, the workspace's, the device crates'.
#[derive(Clone, Debug)]
pub struct Locks {
    pub(super) packages: BTreeSet<Locked>,
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

    pub(super) fn git(&self) -> impl Iterator<Item = &Locked> {
        self.packages.iter().filter(|package| package.is_git())
    }
}

/// The lock files of this repository that exist.
pub(super) fn own_locks(workspace: &Path) -> impl Iterator<Item = PathBuf> + use<> {
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

pub(super) fn read_lock(path: &Path) -> Result<Vec<Locked>> {
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
