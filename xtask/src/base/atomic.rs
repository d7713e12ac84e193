//! Replacing a file in one step: a reader sees the old content or the new one, never a part, even after a crash.
//!
//! Locks are not here: of two writers at once, the later one wins as a whole.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::report::error::{Error, Result};

/// Replaces the file at `path` by `bytes`: through a uniquely named file in the same folder, flushed to the disk
/// and renamed.
///
/// `mode` is the new file's permission bits; `None` keeps those of the file that is replaced, or, where there is
/// none, takes what the process's umask gives. A symbolic link at `path` is itself replaced: see [`through_links`].
///
/// # Errors
/// The folder is missing or not writable, or its disk is full. The old file is then untouched, and no temporary
/// file is left.
pub fn write_atomic(path: &Path, bytes: &[u8], mode: Option<u32>) -> Result<()> {
    let failed = |error: io::Error| Error::from(error).context(format!("cannot write {}", path.display()));
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mode = match mode {
        Some(mode) => Some(mode),
        None => fs_err::metadata(path).ok().map(|old| old.permissions().mode() & 0o7777),
    };
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push(".");
    let mut file = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    if let Some(mode) = mode {
        file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    }
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    // Some file systems cannot flush a folder; the file itself is safe by then.
    match fs_err::File::open(folder)?.sync_all() {
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Err(failed(error))
        }
        _ => Ok(()),
    }
}

/// Where writing to `path` ends up: the target of its symbolic links, which need not exist.
///
/// # Errors
/// The links form a ring, or one cannot be read.
pub fn through_links(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_owned();
    // As many as Linux follows.
    for _ in 0..40 {
        match fs_err::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new(".")).join(target),
            // Not a link, or nothing there.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => {
                return Ok(path);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let message = format!("too many symbolic links at {}", path.display());
    Err(Error::new(&crate::report::error::ACCESS, message).hint("replace the link by a file"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs_err::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn names(folder: &Path) -> Vec<OsString> {
        fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_file_is_made_and_replaced_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a b ü");
        write_atomic(&path, b"one", None).unwrap();
        write_atomic(&path, b"two", None).unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), b"two");
        assert_eq!(names(folder.path()), ["a b ü"]);
    }

    #[test]
    fn the_mode_is_kept_unless_one_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        write_atomic(&path, b"", Some(0o640)).unwrap();
        assert_eq!(mode(&path), 0o640);
        write_atomic(&path, b"x", None).unwrap();
        assert_eq!(mode(&path), 0o640);
        write_atomic(&path, b"x", Some(0o755)).unwrap();
        assert_eq!(mode(&path), 0o755);
    }

    #[test]
    fn a_failure_names_the_path_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none/f");
        let error = write_atomic(&path, b"", None).unwrap_err();
        assert_eq!(error.message(), format!("cannot write {}", path.display()));
        let taken = folder.path().join("taken");
        fs_err::create_dir_all(taken.join("x")).unwrap();
        assert!(write_atomic(&taken, b"", None).is_err());
        assert_eq!(names(folder.path()), ["taken"]);
    }

    #[test]
    fn links_are_followed_to_where_they_end() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs_err::create_dir(at("sub")).unwrap();
        symlink("sub/two", at("one")).unwrap();
        symlink(at("file"), at("sub/two")).unwrap();
        assert_eq!(through_links(&at("one")).unwrap(), at("file"));
        assert_eq!(through_links(&at("plain")).unwrap(), at("plain"));
        symlink("ring", at("ring")).unwrap();
        assert!(through_links(&at("ring")).unwrap_err().message().starts_with("too many symbolic links"));
    }

    #[test]
    fn writers_at_once_leave_one_whole_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let contents: Vec<Vec<u8>> = (b'a'..=b'h').map(|letter| vec![letter; 100_000]).collect();
        std::thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| write_atomic(&path, content, None).unwrap());
            }
        });
        assert!(contents.contains(&fs_err::read(&path).unwrap()));
        assert_eq!(names(folder.path()), ["f"]);
    }
}
