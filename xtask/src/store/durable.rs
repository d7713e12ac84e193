//! Writing to disk for good: what is published must survive a power cut.

use std::path::{Path, PathBuf};

use fs_err as fs;

use super::FEW;
use crate::report::error::{Error, Result};

/// Flushes every file and folder below `root` to disk.
///
/// Each one alone costs a commit of the file system's journal, which takes minutes for the thousands of files of a source
/// tree and its crates. So where there are many and the system can, the whole file system is flushed at once.
pub(super) fn sync_tree(root: &Path) -> Result<()> {
    let mut few = Vec::new();
    if list_up_to(root, FEW, &mut few)? || !sync_file_system(root)? {
        return sync_each(root);
    }
    Ok(())
}

/// Lists what is below `root`, unless it is more than `most`; says whether that is all.
pub(super) fn list_up_to(root: &Path, most: usize, found: &mut Vec<PathBuf>) -> Result<bool> {
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        found.push(entry.path());
        if found.len() > most || (entry.file_type()?.is_dir() && !list_up_to(&entry.path(), most, found)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn sync_each(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_each(&entry.path())?;
        } else if kind.is_file() {
            fs::File::open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(root)
}

/// Flushes the file system that holds `folder`; says whether the system can. It returns when everything is written, and
/// since Linux 5.8 with an error if something could not be.
#[cfg(target_os = "linux")]
pub(super) fn sync_file_system(folder: &Path) -> Result<bool> {
    use rustix::io::Errno;
    match rustix::fs::syncfs(fs::File::open(folder)?.file()) {
        Ok(()) => Ok(true),
        // A sandbox or an emulated kernel may lack it.
        Err(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM) => Ok(false),
        Err(error) => Err(Error::from(std::io::Error::from(error))
            .context(format!("cannot flush the file system of {}", folder.display()))),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn sync_file_system(_: &Path) -> Result<bool> {
    Ok(false)
}

pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    // Folders cannot be opened for syncing everywhere; the rename itself is atomic all the same.
    if cfg!(unix) {
        fs::File::open(folder)?.sync_all()?;
    }
    Ok(())
}
