//! Gathering the crates: from the store, else from Cargo's own caches, which Cargo fills.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;

use super::locks::{Locked, Locks, own_locks, read_lock};
use super::{ARCHIVES, CRATES, GIT_CRATES, NO_CRATE, VENDOR_FAILED, check_git_crate, find};
use crate::base::env::Env;
use crate::base::hash::{Sha256, TreeHash};
use crate::machine::child;
use crate::machine::toolchain::Toolchain;
use crate::pins::Pin;
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source::nar;
use crate::store::Store;

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
/// One of [`super::CODES`].
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
