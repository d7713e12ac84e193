//! Patches made anew for a revision that is not pinned yet: `backend-patches/<its first 12 digits>/`.
//!
//! They take the place of the carried ones when `pin` tries that revision, and with `--write` they become the carried ones. Until
//! then nothing else reads them: setup and build go on with what PROVENANCE pins.

use std::path::{Path, PathBuf};

use fs_err as fs;

use super::{PatchEntry, reason};
use crate::base::atomic::write_atomic;
use crate::base::hash::{Revision, Sha256};
use crate::pins::{PATCH_FOLDER, Pin, PinnedPatch};
use crate::report::error::Result;
use crate::source::patch::Patch;

/// How many digits of a revision name its folder.
const DIGITS: usize = 12;

/// The patches that were made for one revision, in the order of their names.
pub struct Prepared {
    folder: PathBuf,
    /// The patches.
    pub patches: Vec<PinnedPatch>,
}

impl Prepared {
    /// Reads the patches for `revision`; `None` when there is no folder for it.
    ///
    /// # Errors
    /// A patch cannot be read or is none.
    pub fn load(workspace: &Path, revision: &Revision, pin: &Pin) -> Result<Option<Prepared>> {
        let folder = workspace.join(PATCH_FOLDER).join(&revision.as_str()[..DIGITS]);
        if !folder.is_dir() {
            return Ok(None);
        }
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "patch") {
                paths.push(path);
            }
        }
        paths.sort();
        let mut patches = Vec::new();
        for path in paths {
            let bytes = fs::read(&path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Patch::parse(name.as_str(), &bytes)?;
            let file = name.parse().map_err(|cause: String| super::malformed_name(&path, cause))?;
            let carried = pin.patches.iter().find(|patch| patch.file == file);
            patches.push(PinnedPatch {
                file,
                sha256: Sha256::of(&bytes),
                reason: carried.map_or_else(|| reason(&bytes), |patch| patch.reason.clone()),
                upstream: carried.and_then(|patch| patch.upstream.clone()),
                bytes,
            });
        }
        Ok(Some(Prepared { folder, patches }))
    }

    /// The entries that PROVENANCE gets.
    pub fn entries(&self) -> Vec<PatchEntry> {
        let entry = |patch: &PinnedPatch| PatchEntry {
            file: patch.file.to_string(),
            sha256: patch.sha256,
            reason: patch.reason.clone(),
        };
        self.patches.iter().map(entry).collect()
    }

    /// Puts the patches into the place of the carried ones. PROVENANCE is to be written after this and before
    /// [`Prepared::remove`]: broken off in between, the same command does it again.
    ///
    /// # Errors
    /// A file cannot be written or removed.
    pub fn lay(&self, workspace: &Path, pin: &Pin) -> Result<()> {
        let carried = workspace.join(PATCH_FOLDER);
        for patch in &self.patches {
            write_atomic(&carried.join(patch.file.as_str()), &patch.bytes, None)?;
        }
        for old in pin.patches.iter().filter(|old| !self.patches.iter().any(|patch| patch.file == old.file)) {
            match fs::remove_file(carried.join(old.file.as_str())) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the folder.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self) -> Result<()> {
        Ok(fs::remove_dir_all(&self.folder)?)
    }
}
