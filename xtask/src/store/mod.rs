//! The content-keyed store: where fetched, patched and built things live, and how they get there.
//!
//! ```text
//! downloads/<revision>.tar.gz     archives as fetched
//! pristine/<key>/                 tree/ as upstream has it, entry.json
//! sources/<key>/                  tree/ with the carried patches applied, entry.json
//! backends/<key>/                 the backend, cargo-oxide, record.json
//! vendor/<key>/                   the crates of all workspaces, from a bundle
//! cuda/<key>/                     CUDA toolkit parts from NVIDIA's wheels
//! models/<sha256>/                a model's file, keyed by its own hash
//! roots/<hash>.json               which checkout uses which entries
//! build/<key>/                    Cargo's target folder of a build that has not been published yet
//! locks/<name>.lock               kernel locks; the content only informs
//! ```
//!
//! An entry is staged beside its final name, completed, and renamed: it is there whole or not at all. A key is a
//! hash of everything that decides the content, so an entry never changes; no time stamp is ever looked at.
//! Readers take no lock and work on a read-only store. What a killed setup leaves is swept by a later one. Removing
//! entries is in [`crate::store::inventory`].

mod durable;
pub mod inventory;
mod key;
pub mod record;
pub mod roots;
pub mod selection;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fs_err as fs;

use crate::base::env::{BAD_ROOT, Env, NO_ROOT, refuse_tilde};
use crate::base::interrupt::{self, Folder};
use crate::base::lock::{self, Failure, Mode};
use crate::report::error::{Error, Result};

use self::durable::{sync_folder, sync_tree};
pub use self::key::{Key, KeyBuilder};

crate::codes! {
    NO_LOCK = "KILN-0902", Machine, "the store's file system cannot lock files",
        "Two setups must never work on one entry at once, which kernel file locks ensure. The file system of the \
         store does not offer them. Choose a store on a local disk with `--store DIR`.";
    IN_THE_WAY = "KILN-0903", Machine, "something is in the way of a store entry",
        "A file or folder that setup did not write stands where an entry belongs. Move it away.";
}

/// The kinds of entries, each a folder of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Upstream's tree, unchanged.
    Pristine,
    /// The patched tree.
    Source,
    /// The built backend.
    Backend,
    /// The crates of all workspaces.
    Vendor,
    /// CUDA toolkit parts.
    Cuda,
    /// A model's file.
    Model,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 6] =
        [Kind::Pristine, Kind::Source, Kind::Backend, Kind::Vendor, Kind::Cuda, Kind::Model];

    /// The name of the lock that whoever makes the entry `key` holds.
    pub fn lock_name(self, key: &Key) -> String {
        self.lock_name_of(&key.0)
    }

    pub(crate) fn lock_name_of(self, key: &str) -> String {
        let kind = match self {
            Kind::Pristine => "pristine",
            Kind::Source => "source",
            Kind::Backend => "backend",
            Kind::Model => "model",
            Kind::Vendor => "vendor",
            Kind::Cuda => "cuda",
        };
        format!("{kind}-{key}")
    }

    /// Its folder's name.
    pub fn folder(self) -> &'static str {
        match self {
            Kind::Pristine => "pristine",
            Kind::Source => "sources",
            Kind::Backend => "backends",
            Kind::Vendor => "vendor",
            Kind::Cuda => "cuda",
            Kind::Model => "models",
        }
    }
}

/// The store's root and how it was chosen.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    /// Where the choice comes from: `--store`, `KILN_STORE`, ...
    pub from: &'static str,
    patience: Option<Duration>,
}

impl Store {
    /// Chooses the root: `--store`, KILN_STORE, the last setup's, XDG_CACHE_HOME, HOME. A relative one starts at the
    /// workspace root, so that it means the same folder from everywhere.
    ///
    /// # Errors
    /// Nothing names a folder.
    pub fn locate(
        flag: Option<&Path>,
        remembered: Option<&Path>,
        workspace: &Path,
        env: &Env,
    ) -> Result<Self> {
        let named = |path: &Path, from: &'static str| {
            refuse_tilde(path, from)?;
            Self::at(workspace.join(path), from)
        };
        if let Some(path) = flag.filter(|path| !path.as_os_str().is_empty()) {
            return named(path, "--store");
        }
        if let Some(path) = env.var("KILN_STORE") {
            return named(Path::new(path), "KILN_STORE");
        }
        if let Some(path) = remembered {
            return named(path, "the last setup of this checkout");
        }
        // The XDG specification says that a relative path is to be ignored.
        if let Some(path) = env.var("XDG_CACHE_HOME").map(Path::new).filter(|path| path.is_absolute()) {
            return Self::at(path.join("kiln"), "XDG_CACHE_HOME");
        }
        if let Some(path) = env.var("HOME").map(Path::new).filter(|path| path.is_absolute()) {
            return Self::at(path.join(".cache/kiln"), "HOME");
        }
        Err(Error::new(&NO_ROOT, "no folder for the store: HOME and XDG_CACHE_HOME name no absolute path")
            .hint("give one with --store DIR"))
    }

    fn at(root: PathBuf, from: &'static str) -> Result<Self> {
        // Found out later, the whole source would have been fetched for nothing.
        let odd = |c: char| c.is_control() || (cfg!(unix) && matches!(c, ':' | '%'));
        let why = match root.to_str() {
            None => "is not UTF-8".to_owned(),
            Some(text) => match text.chars().find(|&c| odd(c)) {
                Some(c) => format!("has {c:?} in it, which compilers and linkers cannot deal with"),
                None => return Ok(Store { root, from, patience: None }),
            },
        };
        Err(Error::new(&BAD_ROOT, format!("{from} puts the store at {}, which {why}", root.display()))
            .hint("choose another folder with --store DIR"))
    }

    /// The same store, whose locks are waited for no longer than `limit`; without one, as long as it takes.
    #[must_use]
    pub fn with_patience(self, limit: Option<Duration>) -> Self {
        Store { patience: limit, ..self }
    }

    /// Checks that nothing but a folder stands at the root, or nothing at all.
    ///
    /// # Errors
    /// [`IN_THE_WAY`].
    pub fn check_root(&self) -> Result<()> {
        let found = match fs::metadata(&self.root) {
            Ok(metadata) if !metadata.is_dir() => "is not a folder",
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => "is below a file",
            _ => return Ok(()),
        };
        Err(Error::new(&IN_THE_WAY, format!("the store {} {found}", self.root.display()))
            .hint("move it away, or choose another store with --store DIR"))
    }

    /// Files and folders of the store's upper levels that belong to another user than the one of this process, with
    /// the user's number: what `sudo` leaves.
    pub fn foreign(&self) -> Vec<(PathBuf, u32)> {
        let mut places = vec![self.root.clone()];
        for folder in ["downloads", "pristine", "sources", "backends", "build", "locks"] {
            let folder = self.root.join(folder);
            places.extend(fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()));
            places.push(folder);
        }
        places.into_iter().filter_map(|path| owner_other_than_us(&path).map(|owner| (path, owner))).collect()
    }

    /// The absolute root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The final place of an entry.
    pub fn entry(&self, kind: Kind, key: &Key) -> PathBuf {
        self.root.join(kind.folder()).join(&key.0)
    }

    /// The folder of downloads.
    pub fn downloads(&self) -> PathBuf {
        self.root.join("downloads")
    }

    /// Cargo's target folder for the build of `key`; kept until it is published, so that an interrupted build goes
    /// on where it was.
    pub fn build_folder(&self, key: &Key) -> PathBuf {
        self.root.join("build").join(&key.0)
    }

    /// An empty folder beside the entry's final place, which removes itself unless it is published. What a killed
    /// setup left of the same entry is removed first, so hold the entry's lock.
    pub fn stage(&self, kind: Kind, key: &Key) -> Result<Staging> {
        let parent = self.root.join(kind.folder());
        fs::create_dir_all(&parent)?;
        let prefix = format!("{STAGING}{key}-");
        for entry in fs::read_dir(&parent)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let folder = temporary_folder(&parent, &prefix)?;
        Ok(Staging { folder, entry: self.entry(kind, key), prefix })
    }

    /// Removes what killed setups left, of all keys: staging folders, and the target folders of builds that are
    /// published. What a living setup works on is locked and left alone; what cannot be removed now stays.
    pub fn sweep(&self) {
        for kind in Kind::ALL {
            for (path, name) in listed(&self.root.join(kind.folder())) {
                let key = name.strip_prefix(STAGING).and_then(|rest| rest.split_once('-'));
                if let Some((key, _)) = key {
                    self.remove_unlocked(&path, &kind.lock_name_of(key));
                }
            }
        }
        for (path, key) in listed(&self.root.join("build")) {
            if self.root.join(Kind::Backend.folder()).join(&key).is_dir() {
                self.remove_unlocked(&path, &Kind::Backend.lock_name_of(&key));
            }
        }
    }

    fn remove_unlocked(&self, path: &Path, lock: &str) {
        let path_of_lock = self.root.join("locks").join(format!("{lock}.lock"));
        let open =
            fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path_of_lock);
        // Held until the folder is gone.
        let Ok(lock) = open else { return };
        if lock.file().try_lock().is_ok() {
            let _ = fs::remove_dir_all(path);
        }
    }

    /// Takes the exclusive lock `name`, calling `waiting` once when another process holds it. The kernel releases it
    /// when this process ends, however it ends.
    ///
    /// # Errors
    /// The file system has no locks, the lock file cannot be written, or the wait was too long
    /// ([`lock::LOCK_TIMEOUT`]).
    pub fn lock(&self, name: &str, waiting: &dyn Fn(&str)) -> Result<Lock> {
        self.take(name, Mode::Alone, "which works on the same entry", waiting)
    }

    fn take(&self, name: &str, mode: Mode, why: &str, waiting: &dyn Fn(&str)) -> Result<Lock> {
        let (path, file) = self.lock_file(name)?;
        lock::take(&file, &path, mode, why, self.patience, waiting).map_err(|failure| match failure {
            Failure::System(error) => no_lock(&path, error),
            Failure::TimedOut(error) => error,
        })?;
        let mut lock = Lock { file };
        lock.inform();
        Ok(lock)
    }

    /// As [`Store::lock`], without waiting: `None` when another process holds it.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn try_lock(&self, name: &str) -> Result<Option<Lock>> {
        let (path, file) = self.lock_file(name)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { file })),
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            Err(std::fs::TryLockError::Error(error)) => Err(no_lock(&path, error)),
        }
    }

    /// Takes the lock `name` in common with others that do the same; who takes it alone waits for all of them.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn lock_shared(&self, name: &str, waiting: &dyn Fn(&str)) -> Result<Lock> {
        self.take(name, Mode::Shared, "which cleans the store", waiting)
    }

    fn lock_file(&self, name: &str) -> Result<(PathBuf, std::fs::File)> {
        let folder = self.root.join("locks");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{name}.lock"));
        let file = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        Ok((path, file.into_file()))
    }
}

fn no_lock(path: &Path, error: std::io::Error) -> Error {
    Error::new(&NO_LOCK, format!("cannot lock {}: {error}", path.display()))
        .hint("choose a store on a local disk with --store DIR")
}

#[cfg(unix)]
fn owner_other_than_us(path: &Path) -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let owner = fs::symlink_metadata(path).ok()?.uid();
    (owner != rustix::process::geteuid().as_raw()).then_some(owner)
}

#[cfg(not(unix))]
fn owner_other_than_us(_: &Path) -> Option<u32> {
    None
}

/// A held lock.
#[derive(Debug)]
pub struct Lock {
    file: std::fs::File,
}

impl Lock {
    /// Says in the file who holds it. Only for people: the kernel's lock is what counts.
    fn inform(&mut self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let line = format!("process {} (since {} UTC)", std::process::id(), utc(since));
        // A full disk must not stop a setup that may still have everything it needs.
        let _ = self.file.set_len(0).and_then(|()| self.file.write_all(line.as_bytes()));
    }
}

/// A folder that becomes an entry, or vanishes.
#[derive(Debug)]
pub struct Staging {
    folder: Folder,
    entry: PathBuf,
    prefix: String,
}

impl Staging {
    /// Where to put the content.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Flushes the content to disk and renames the folder to the entry's final place, which is returned. Hold the
    /// entry's lock.
    ///
    /// A folder that stands there already (incomplete, or tampered with) is moved aside first and then removed.
    ///
    /// # Errors
    /// Something other than a folder is in the way, or the file system fails.
    pub fn publish(self) -> Result<PathBuf> {
        let Staging { folder, entry, prefix } = self;
        let parent = entry.parent().unwrap_or(&entry);
        sync_tree(folder.path())?;
        if let Ok(metadata) = fs::symlink_metadata(&entry) {
            if !metadata.is_dir() {
                return Err(Error::new(&IN_THE_WAY, format!("{} is not a folder", entry.display()))
                    .hint(format!("move it away: mv {0} {0}.old", entry.display())));
            }
            // In one step where the file system can: a reader then never finds nothing.
            if interrupt::hold_back(|| exchange(folder.path(), &entry)) {
                drop(folder);
                sync_folder(parent)?;
                return Ok(entry);
            }
            let aside = temporary_folder(parent, &prefix)?;
            interrupt::hold_back(|| {
                fs::rename(&entry, aside.path().join("old"))?;
                fs::rename(folder.path(), &entry)
            })?;
        } else {
            interrupt::hold_back(|| fs::rename(folder.path(), &entry))?;
        }
        // The folder has another name now: nothing is left to remove.
        let _ = folder.keep();
        sync_folder(parent)?;
        Ok(entry)
    }
}

/// Begins the name of a staging folder; the key and a random end follow.
const STAGING: &str = ".staging-";

/// The entries of a folder with their names; none when it cannot be read.
fn listed(folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.path(), entry.file_name().into_string().ok()?))).collect()
}

/// Lets two paths change places; says whether the system did.
#[cfg(target_os = "linux")]
fn exchange(one: &Path, other: &Path) -> bool {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> bool {
    false
}

fn temporary_folder(parent: &Path, prefix: &str) -> Result<Folder> {
    Folder::within(parent, prefix)
        .map_err(|error| Error::from(error).context(format!("cannot stage in {}", parent.display())))
}

/// As many files are flushed one by one: less than what others have just written to the same file system.
const FEW: usize = 64;

/// `seconds` since 1970 as `2026-07-04T12:00:00`, by the days-from-civil algorithm of Howard Hinnant.
pub fn utc(seconds: u64) -> String {
    let days = (seconds / 86_400) as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests;
