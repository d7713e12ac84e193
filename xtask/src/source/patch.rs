//! Carried patches: git-style unified diffs, read and applied exactly or not at all.
//!
//! A patch is kept beside the pinned source that it was made for, so every line of context must be where the
//! patch says it is. Nothing is searched for, nothing is ignored: no fuzz, no offsets, no whitespace or
//! line-end tolerance, no reversing. Whatever stands in the way is an error that shows both sides. A series
//! is applied in memory first and written only when all of it fits, then read back; no `git` or `patch`
//! program takes part, so an outer repository, a locale or another implementation cannot change the outcome.
//!
//! Text changes, new and deleted files, renames and the executable bit are supported. Binary data, symlinks,
//! submodules and copies are refused when the patch is read.
//!
//! The `diffy` crate reads such patches too, and the tests use it to make some. It is not used here because
//! it passes over text that belongs to nothing, looks for the best place of a hunk, and knows no line
//! numbers, which are what the author of a patch needs.

mod apply;
mod parse;

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

pub use apply::{Applied, AppliedFile, apply_series};

use crate::report::error::Result;

crate::codes! {
    MALFORMED = "KILN-0661", Machine, "a patch file is malformed",
        "The patch cannot be read as a git-style unified diff: a header is wrong, a hunk has more or fewer \
         lines than its header says, or a line belongs to nothing. Patches that were edited by hand often \
         end up so. Make it again with `git diff` or `git format-patch`, and record its new sha256 with \
         `cargo xtask pin --patches --write`.";
    EMPTY = "KILN-0662", Machine, "a patch file changes nothing",
        "The patch file is empty or holds text without a diff, so the source would be built unpatched. \
         Restore the file, or remove its entry from PROVENANCE.";
    CRLF = "KILN-0663", Machine, "a patch file has CRLF line ends",
        "The lines of the patch itself end in carriage return and line feed. Most often git converted it on \
         checkout (core.autocrlf). Mark patches with `*.patch -text` in .gitattributes and check them out \
         again.";
    PREFIX = "KILN-0664", Machine, "a patch does not use the a/ and b/ prefixes",
        "Names in a patch must start with a/ on the old side and b/ on the new one, so that they mean one \
         thing only. Make the patch with `git diff --src-prefix=a/ --dst-prefix=b/`; diff.noprefix and \
         diff.mnemonicPrefix change what git writes.";
    UNSUPPORTED = "KILN-0665", Machine, "a patch holds something that is not applied",
        "Binary data, symlinks, submodules, copies and merges are not applied from patches. `Binary files \
         differ` without data holds no change at all. Carry such a change as text, or leave it out.";
    UNSAFE_PATH = "KILN-0666", Machine, "a patch names a path outside of the source",
        "Names in a patch must stay inside the source tree: no absolute names, no `..`, nothing in `.git`, \
         and nothing beyond a symlink. Do not apply a patch that has others; make it again with `git diff` at \
         the root of the source.";
    MISMATCH = "KILN-0667", Machine, "a patch does not apply",
        "The source does not have the lines that the patch expects. The pinned source never changes, so the \
         patch was made for another revision, or after another set of patches. Make it again for this \
         source.";
    OFFSET = "KILN-0668", Machine, "a patch applies only at another line",
        "The lines that the patch expects are in the file, but elsewhere. With a pinned source that means \
         that the patch was made for another revision, and a place that merely looks alike can be the wrong \
         one. Make it again for this source.";
    ALREADY_APPLIED = "KILN-0669", Machine, "a patch is already applied",
        "The source already has what the patch would make of it: an earlier patch or the pinned revision \
         contains the change, or the patch was made the wrong way round. Remove it, or reverse it.";
    EXISTS = "KILN-0670", Machine, "a patch adds a file that exists",
        "The source already has a file of this name. After a change of the pinned revision it usually means \
         that upstream has added it, so the patch or this part of it can go.";
    MISSING = "KILN-0671", Machine, "a patch changes a file that is not there",
        "The patch was made for another revision, or it needs another patch that comes later or is gone.";
    MODE = "KILN-0672", Machine, "a patch expects another file mode",
        "The executable bit of the file is not the one that the patch states for its old side. Make the \
         patch again for this source.";
    NOT_WRITTEN = "KILN-0673", Internal, "a patched file is not what was written",
        "After writing a patched file, reading it gave something else. Either another program writes into \
         the staging folder, or the disk is failing.";
}

/// A carried patch that was read and found sound. Whether it fits a source is known only by applying it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    name: String,
    files: Vec<FilePatch>,
}

impl Patch {
    /// Reads the patch file `name`, whose content is `bytes`. A mail header, a message and a mail signature
    /// around the diff are passed over.
    ///
    /// # Errors [`EMPTY`], [`CRLF`], [`PREFIX`], [`UNSUPPORTED`], [`UNSAFE_PATH`] or [`MALFORMED`], with the
    /// line of the patch.
    pub fn parse(name: impl Into<String>, bytes: &[u8]) -> Result<Self> {
        let name = name.into();
        let files = parse::files(&name, bytes)?;
        Ok(Patch { name, files })
    }

    /// The name that it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The paths that it changes, makes or removes, in its own order, relative to the root of the source.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().flat_map(|file| {
            let new = file.new.as_ref().filter(|&new| file.old.as_ref() != Some(new));
            file.old.iter().chain(new).map(TreePath::as_path)
        })
    }

    /// Applies the patch to the tree below `root`; as [`apply_series`] of this patch alone.
    ///
    /// # Errors
    /// As [`apply_series`].
    pub fn apply(&self, root: &Path) -> Result<Applied> {
        let mut applied = apply_series(std::slice::from_ref(self), root)?;
        Ok(applied.pop().unwrap_or_default())
    }
}

/// What a patch does to one file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FilePatch {
    /// `None` for a new file.
    old: Option<TreePath>,
    /// `None` for a deleted file.
    new: Option<TreePath>,
    /// The executable bit on the old side, where the patch states it.
    old_executable: Option<bool>,
    /// The executable bit on the new side, where the patch states it.
    new_executable: Option<bool>,
    hunks: Vec<Hunk>,
}

/// A run of lines and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hunk {
    /// As written, for messages.
    header: String,
    /// Index of its first line on the old side.
    old_at: usize,
    /// Index of its first line on the new side.
    new_at: usize,
    lines: Vec<Line>,
}

/// A line of a hunk with its line end; only the last line of a file may have none.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Line {
    Both(Vec<u8>),
    Old(Vec<u8>),
    New(Vec<u8>),
}

impl Hunk {
    fn old_side(&self) -> impl Iterator<Item = &[u8]> {
        self.lines.iter().filter_map(|line| match line {
            Line::Both(text) | Line::Old(text) => Some(text.as_slice()),
            Line::New(_) => None,
        })
    }

    fn new_side(&self) -> impl Iterator<Item = &[u8]> {
        self.lines.iter().filter_map(|line| match line {
            Line::Both(text) | Line::New(text) => Some(text.as_slice()),
            Line::Old(_) => None,
        })
    }
}

/// A path inside the source tree: relative, without `.`, `..` or `.git`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct TreePath(Vec<u8>);

impl TreePath {
    /// The path, or why it is none.
    fn new(path: &[u8]) -> Result<Self, &'static str> {
        if path.starts_with(b"/") {
            return Err("is absolute");
        }
        if path.contains(&0) {
            return Err("contains a zero byte");
        }
        for part in path.split(|&byte| byte == b'/') {
            match part {
                b"" => return Err("has an empty part"),
                b"." => return Err("contains `.`"),
                b".." => return Err("leads upwards with `..`"),
                _ if part.eq_ignore_ascii_case(b".git") => return Err("is in `.git`"),
                _ => {}
            }
        }
        Ok(TreePath(path.to_vec()))
    }

    fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    fn to_path_buf(&self) -> PathBuf {
        self.as_path().to_owned()
    }

    /// The folders that it stands in, outermost first.
    fn above(&self) -> impl Iterator<Item = TreePath> {
        self.0
            .iter()
            .enumerate()
            .filter(|&(_, &byte)| byte == b'/')
            .map(|(at, _)| TreePath(self.0[..at].to_vec()))
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.0))
    }
}

impl fmt::Debug for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text from a patch or a source file, with nothing in it that a terminal would act on.
fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .flat_map(|c| {
            let plain = !c.is_control() || c == '\t';
            let escaped = (!plain).then(|| c.escape_default());
            escaped.into_iter().flatten().chain(plain.then_some(c))
        })
        .collect()
}

#[cfg(test)]
mod tests;
