//! What is in the store, why, and who uses it; and the removal of what nobody uses.
//!
//! Only names that this program makes are ever removed. Leftovers are what a killed setup left: staging folders, build
//! folders, parts of downloads. While setups run they may be in use, so [`collect`] first waits for the store's `gc`
//! lock, which every setup holds in common, and then takes each entry's own lock, too.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use serde::Serialize;

use crate::pins::Pin;
use crate::report::error::Result;
use crate::store::record::Statement;
use crate::store::roots;
use crate::store::{Kind, Store};

/// What an item is, for the decision to keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A checkout uses it.
    Used,
    /// No checkout uses it.
    Unused,
    /// A killed setup left it.
    Leftover,
    /// This program did not make it; it is never touched.
    Foreign,
}

/// A file or folder of the store.
#[derive(Clone, Debug, Serialize)]
pub struct Item {
    /// Its path, absolute.
    pub path: PathBuf,
    /// Bytes of all files in it.
    pub bytes: u64,
    /// Seconds since it was last changed.
    pub age: u64,
    /// Whether it is needed.
    pub state: State,
    /// What it is and why it is there.
    pub why: String,
    /// The checkouts that use it.
    pub used_by: Vec<PathBuf>,
    /// The lock that its maker holds.
    #[serde(skip)]
    lock: Option<String>,
}

/// Everything in the store, folder by folder.
///
/// # Errors
/// The store, or the note of a checkout, cannot be read.
pub fn list(store: &Store) -> Result<Vec<Item>> {
    let live: Vec<roots::Root> =
        roots::all(store)?.into_iter().map(|(_, root)| root).filter(|root| root.is_live(store)).collect();
    let users = |name: &str| -> Vec<PathBuf> {
        let uses = live.iter().filter(|root| root.entries.iter().any(|entry| entry == name));
        uses.map(|root| root.workspace.clone()).collect()
    };
    let mut items = Vec::new();
    for kind in Kind::ALL {
        for (path, name) in children(&store.root().join(kind.folder()))? {
            let key = is_key(&name).then_some(name.as_str());
            let staged = name.strip_prefix(".staging-").and_then(|rest| rest.split_once('-'));
            let staged = staged.map(|(key, _)| key).filter(|key| is_key(key));
            let (state, why, used_by) = if let Some(key) = key {
                let used_by = match kind {
                    Kind::Model => models(&live, key),
                    _ => users(&roots::name(kind, key)),
                };
                let state = if used_by.is_empty() { State::Unused } else { State::Used };
                (state, describe(kind, &path), used_by)
            } else if staged.is_some() || name.starts_with(REMOVING) {
                (State::Leftover, "left by a command that was killed".to_owned(), Vec::new())
            } else {
                (State::Foreign, "kiln did not make this".to_owned(), Vec::new())
            };
            let lock = key.or(staged).map(|key| kind.lock_name_of(key));
            items.push(item(path, state, why, used_by, lock)?);
        }
    }
    for (path, name) in children(&store.root().join("build"))? {
        let (state, lock) = match is_key(&name) {
            true => (State::Leftover, Some(format!("backend-{name}"))),
            false if name.starts_with('.') => (State::Leftover, None),
            false => (State::Foreign, None),
        };
        let why = match state {
            State::Leftover => "the unfinished build of a setup that was killed or failed",
            _ => "kiln did not make this",
        };
        items.push(item(path, state, why.to_owned(), Vec::new(), lock)?);
    }
    for (path, name) in children(&store.downloads())? {
        let revision = name.strip_suffix(".tar.gz");
        let users = live.iter().filter(|root| revision == Some(root.revision.as_str()));
        let used_by: Vec<PathBuf> = users.map(|root| root.workspace.clone()).collect();
        let (state, why) = match revision {
            Some(_) if used_by.is_empty() => (State::Unused, "a downloaded archive"),
            Some(_) => (State::Used, "a downloaded archive"),
            None if name.contains(".part") => (State::Leftover, "a part of a download"),
            None => (State::Foreign, "kiln did not make this"),
        };
        items.push(item(path, state, why.to_owned(), used_by, None)?);
    }
    Ok(items)
}

/// What [`collect`] did with an item.
#[derive(Clone, Debug, Serialize)]
pub struct Removed {
    /// The item.
    #[serde(flatten)]
    pub item: Item,
    /// Why it was left alone after all.
    pub skipped: Option<String>,
}

/// Removes leftovers, and what no checkout has used for `keep`. With `dry_run` nothing is removed and no lock taken.
///
/// # Errors
/// The note of a checkout cannot be read, or the file system fails. What was removed by then stays removed.
pub fn collect(store: &Store, keep: Duration, dry_run: bool, waiting: &dyn Fn(&str)) -> Result<Vec<Removed>> {
    if !store.root().is_dir() {
        return Ok(Vec::new());
    }
    let _exclusive = if dry_run { None } else { Some(store.lock(GC_LOCK, waiting)?) };
    if !dry_run {
        for (path, root) in roots::all(store)? {
            if !root.is_live(store) {
                fs::remove_file(path)?;
            }
        }
    }
    let mut removed = Vec::new();
    for item in list(store)? {
        let old = item.age >= keep.as_secs();
        match item.state {
            State::Leftover => {}
            State::Unused if old => {}
            _ => continue,
        }
        let skipped = if dry_run { None } else { remove(store, &item)? };
        removed.push(Removed { item, skipped });
    }
    Ok(removed)
}

/// The lock that setups share and [`collect`] takes alone.
pub const GC_LOCK: &str = "gc";

/// How the name of an entry that is being removed begins.
const REMOVING: &str = ".removing-";

fn remove(store: &Store, item: &Item) -> Result<Option<String>> {
    let _lock = match &item.lock {
        Some(name) => match store.try_lock(name)? {
            Some(lock) => Some(lock),
            None => return Ok(Some("a setup works on it".to_owned())),
        },
        None => None,
    };
    if !fs::symlink_metadata(&item.path)?.is_dir() {
        fs::remove_file(&item.path)?;
        return Ok(None);
    }
    // Under another name first: an entry is there whole or not at all, even when this is killed half-way.
    let name = item.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = match name.starts_with('.') {
        true => item.path.clone(),
        false => item.path.with_file_name(format!("{REMOVING}{name}")),
    };
    if aside != item.path {
        if aside.exists() {
            fs::remove_dir_all(&aside)?;
        }
        fs::rename(&item.path, &aside)?;
    }
    fs::remove_dir_all(aside)?;
    Ok(None)
}

fn item(
    path: PathBuf,
    state: State,
    why: String,
    used_by: Vec<PathBuf>,
    lock: Option<String>,
) -> Result<Item> {
    let metadata = fs::symlink_metadata(&path)?;
    let age = metadata.modified().ok().and_then(|then| SystemTime::now().duration_since(then).ok());
    let bytes = size(&path)?;
    Ok(Item { path, bytes, age: age.unwrap_or_default().as_secs(), state, why, used_by, lock })
}

fn describe(kind: Kind, path: &Path) -> String {
    match kind {
        Kind::Pristine | Kind::Source => {
            let entry = fs::read(path.join("entry.json")).ok();
            let entry = entry.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
            let revision = entry.as_ref().and_then(|entry| entry["revision"].as_str()).unwrap_or("unknown");
            let patches = entry.as_ref().and_then(|entry| entry["patches"].as_array()).map_or(0, Vec::len);
            match kind {
                Kind::Pristine => format!("upstream's tree at {revision}"),
                _ => format!("that tree with {patches} patches, at {revision}"),
            }
        }
        Kind::Backend => match Statement::load(path) {
            Ok(Some(record)) => {
                let rustc = record.internal("rustc").and_then(|text| text.lines().next()).unwrap_or("rustc");
                format!(
                    "the backend, built {} with {rustc}",
                    record.predicate.run_details.metadata.finished_on
                )
            }
            _ => "a backend without a readable record".to_owned(),
        },
        Kind::Vendor => "the crates of all workspaces, from a bundle".to_owned(),
        Kind::Model => "a model".to_owned(),
        Kind::Cuda => "CUDA toolkit parts from NVIDIA's wheels".to_owned(),
    }
}

/// The checkouts whose PROVENANCE lists the model with this sha256.
fn models(live: &[roots::Root], sha256: &str) -> Vec<PathBuf> {
    let lists = |root: &&roots::Root| {
        // Where it cannot be read, it may.
        Pin::load(&root.workspace)
            .map_or(true, |pin| pin.models.iter().any(|model| model.sha256.to_string() == sha256))
    };
    live.iter().filter(lists).map(|root| root.workspace.clone()).collect()
}

fn children(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        found.push((entry.path(), entry.file_name().to_string_lossy().into_owned()));
    }
    found.sort();
    Ok(found)
}

fn is_key(name: &str) -> bool {
    matches!(name.len(), 32 | 64) && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Bytes of all files below `path`. What vanishes meanwhile counts nothing.
fn size(path: &Path) -> Result<u64> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error.into()),
    };
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    let mut bytes = 0;
    for (path, _) in children(path)? {
        bytes += size(&path)?;
    }
    Ok(bytes)
}
