//! The digests of the PTX files that `build --arch` wrote and checked, beside them: so that a later change is noticed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::hash::Sha256;
use crate::report::error::{BUG, Error, Result};

/// The record's name in a PTX folder.
const FILE_NAME: &str = "digests.json";

/// What was written and checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PtxRecord {
    /// The architecture.
    pub arch: String,
    /// The sha256 of the backend's library.
    pub backend: Sha256,
    /// The sha256 of every file by its name.
    pub files: BTreeMap<String, Sha256>,
}

/// A file and its recorded digest, with what is there now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// The file.
    pub path: PathBuf,
    /// What was recorded.
    pub recorded: Sha256,
    /// What is there; `None` when the file is gone.
    pub found: Option<Sha256>,
}

impl PtxRecord {
    /// Reads the record in `folder`; `None` when there is none that can be read.
    pub fn load(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(FILE_NAME)).ok()?).ok()
    }

    /// Records `files` in `folder`.
    ///
    /// # Errors
    /// A file cannot be read, or the record cannot be written.
    pub fn write(folder: &Path, arch: &str, backend: Sha256, files: &[PathBuf]) -> Result<()> {
        let mut digests = BTreeMap::new();
        for path in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            digests.insert(name, Sha256::of(&fs::read(path)?));
        }
        let record = PtxRecord { arch: arch.to_owned(), backend, files: digests };
        let mut text = serde_json::to_vec_pretty(&record)
            .map_err(|error| Error::new(&BUG, format!("cannot write digests: {error}")))?;
        text.push(b'\n');
        crate::base::atomic::write_atomic(&folder.join(FILE_NAME), &text, None)
    }

    /// Compares every recorded file in `folder`.
    pub fn compare(&self, folder: &Path) -> Vec<Compared> {
        let compared = self.files.iter().map(|(name, recorded)| {
            let path = folder.join(name);
            let found = fs::read(&path).ok().map(|bytes| Sha256::of(&bytes));
            Compared { path, recorded: *recorded, found }
        });
        compared.collect()
    }
}

/// Removes PTX files that are not the recorded ones. Cargo would take them for fresh, and the record of the next build
/// would make them good.
///
/// # Errors
/// A file cannot be removed.
pub fn drop_changed(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut dropped = Vec::new();
    for compared in PtxRecord::load(folder).into_iter().flat_map(|record| record.compare(folder)) {
        if compared.found.is_some_and(|found| found != compared.recorded) {
            fs::remove_file(&compared.path)?;
            dropped.push(compared.path);
        }
    }
    Ok(dropped)
}
