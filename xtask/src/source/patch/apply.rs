//! Applying patches: in memory first, then written, then read back.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::{
    ALREADY_APPLIED, EXISTS, FilePatch, Hunk, MISMATCH, MISSING, MODE, NOT_WRITTEN, OFFSET, Patch, TreePath,
    UNSAFE_PATH, shown,
};
use crate::base::hash::Sha256;
use crate::report::error::{Code, Error, Result};

/// What one patch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// In the patch's own order. A rename is two entries.
    pub files: Vec<AppliedFile>,
}

/// What one patch did to one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedFile {
    /// Relative to the root of the source.
    pub path: PathBuf,
    /// The content before this patch; `None` where there was no file.
    pub before: Option<Sha256>,
    /// The content after this patch; `None` where there is no file any more.
    pub after: Option<Sha256>,
    /// Whether it is executable now.
    pub executable: bool,
}

/// Applies `patches` in order to the tree below `root`, one [`Applied`] each.
///
/// Nothing is written unless every patch fits. Every file is replaced as a whole, and read back.
///
/// # Errors [`MISMATCH`], [`OFFSET`], [`ALREADY_APPLIED`], [`EXISTS`], [`MISSING`], [`MODE`] and
/// [`UNSAFE_PATH`] name the patch, the file and the hunk, and leave the tree alone. After [`NOT_WRITTEN`] or
/// a failure to write, the caller drops the tree.
pub fn apply_series(patches: &[Patch], root: &Path) -> Result<Vec<Applied>> {
    let mut tree = Tree { root, files: BTreeMap::new() };
    let applied = patches.iter().map(|patch| tree.apply(patch)).collect::<Result<Vec<_>>>()?;
    tree.check_folders()?;
    tree.write()?;
    tree.read_back()?;
    Ok(applied)
}

/// The tree as the patches so far leave it; only the files that they touch are in memory.
struct Tree<'a> {
    root: &'a Path,
    files: BTreeMap<TreePath, State>,
}

struct State {
    original: Option<Content>,
    now: Option<Content>,
}

#[derive(Clone, PartialEq, Eq)]
struct Content {
    bytes: Vec<u8>,
    /// Permission bits; `None` for a file that the umask decides about.
    mode: Option<u32>,
    executable: bool,
}

impl Tree<'_> {
    fn apply(&mut self, patch: &Patch) -> Result<Applied> {
        let mut applied = Applied::default();
        for file in &patch.files {
            self.apply_file(&patch.name, file, &mut applied)?;
        }
        Ok(applied)
    }

    fn apply_file(&mut self, patch: &str, file: &FilePatch, applied: &mut Applied) -> Result<()> {
        let renamed = file.old != file.new;
        let before = match &file.old {
            Some(path) => Some(self.existing(patch, file, path)?),
            None => None,
        };
        let (bytes, mode, was_executable) = match &before {
            Some(content) => (content.bytes.as_slice(), content.mode, content.executable),
            None => (&b""[..], None, false),
        };
        if let (Some(path), Some(expected)) = (&file.old, file.old_executable)
            && expected != was_executable
        {
            let word = |executable| if executable { "executable" } else { "not executable" };
            return Err(Error::new(
                &MODE,
                format!("{patch}: {path} is {}, expected {}", word(was_executable), word(expected)),
            )
            .hint("make the patch again for this source"));
        }
        if let Some(path) = file.new.as_ref().filter(|_| renamed) {
            self.absent(patch, file, path)?;
        }
        let path = file.old.as_ref().or(file.new.as_ref());
        let after = match path {
            Some(path) => patched(patch, path, bytes, &file.hunks)?,
            None => Vec::new(),
        };
        let hash = |content: &Content| Sha256::of(&content.bytes);
        match &file.new {
            None if !after.is_empty() => {
                let path = path.map(TreePath::to_string).unwrap_or_default();
                return Err(Error::new(
                    &MISMATCH,
                    format!("{patch}: {path} has more lines than the patch deletes with the file"),
                )
                .hint(REMAKE));
            }
            None => {}
            Some(path) => {
                let executable = file.new_executable.unwrap_or(was_executable);
                let content = Content { bytes: after, mode, executable };
                applied.files.push(AppliedFile {
                    path: path.to_path_buf(),
                    before: before.as_ref().filter(|_| !renamed).map(hash),
                    after: Some(hash(&content)),
                    executable,
                });
                if let Some(state) = self.files.get_mut(path) {
                    state.now = Some(content);
                }
            }
        }
        if let Some(path) = file.old.as_ref().filter(|_| renamed) {
            applied.files.push(AppliedFile {
                path: path.to_path_buf(),
                before: before.as_ref().map(hash),
                after: None,
                executable: false,
            });
            if let Some(state) = self.files.get_mut(path) {
                state.now = None;
            }
        }
        Ok(())
    }

    fn existing(&mut self, patch: &str, file: &FilePatch, path: &TreePath) -> Result<Content> {
        if let Some(content) = self.state(patch, path)?.now.clone() {
            return Ok(content);
        }
        // A rename that was done already leaves its new name.
        let renamed_to = file.new.as_ref().filter(|&new| new != path);
        if let Some(new) = renamed_to
            && self.state(patch, new)?.now.is_some()
        {
            let what = format!("{patch}: {path} is already renamed to {new}");
            return Err(Error::new(&ALREADY_APPLIED, what).hint(DROP));
        }
        let (code, what) = if file.new.is_none() {
            (&ALREADY_APPLIED, format!("{patch}: {path} is already deleted"))
        } else {
            (&MISSING, format!("{patch}: {path} is not in the source, expected a file to change"))
        };
        Err(Error::new(code, what).hint(REMAKE))
    }

    fn absent(&mut self, patch: &str, file: &FilePatch, path: &TreePath) -> Result<()> {
        let Some(content) = self.state(patch, path)?.now.clone() else { return Ok(()) };
        let is_the_same = file.old.is_none()
            && patched(patch, path, b"", &file.hunks).is_ok_and(|bytes| bytes == content.bytes);
        let what = if is_the_same {
            format!("{patch}: {path} is already in the source, with the content that the patch adds")
        } else {
            format!("{patch}: {path} is already in the source, with other content than the patch adds")
        };
        Err(Error::new(&EXISTS, what)
            .hint("if upstream now has this file, drop the patch or this part of it"))
    }

    /// The present state of a path, read at its first use.
    fn state(&mut self, patch: &str, path: &TreePath) -> Result<&mut State> {
        if !self.files.contains_key(path) {
            let original = self.load(patch, path)?;
            self.files.insert(path.clone(), State { now: original.clone(), original });
        }
        self.files
            .get_mut(path)
            .ok_or_else(|| Error::new(&crate::report::error::BUG, "a file was read and is not there"))
    }

    fn load(&self, patch: &str, path: &TreePath) -> Result<Option<Content>> {
        for folder in path.above() {
            match fs_err::symlink_metadata(self.root.join(folder.as_path())) {
                Ok(metadata) if metadata.is_dir() => {}
                Ok(metadata) if metadata.is_symlink() => {
                    let what = format!("{patch}: {path} stands beyond the symlink {folder}");
                    return Err(Error::new(&UNSAFE_PATH, what).hint(REMAKE));
                }
                Ok(_) => {
                    let what = format!("{patch}: {path} cannot be there, because {folder} is a file");
                    return Err(Error::new(&MISSING, what).hint(REMAKE));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let full = self.root.join(path.as_path());
        let metadata = match fs_err::symlink_metadata(&full) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if metadata.is_symlink() {
            let what = format!("{patch}: {path} is a symlink, expected a file");
            return Err(Error::new(&UNSAFE_PATH, what).hint(REMAKE));
        }
        if !metadata.is_file() {
            let what = format!("{patch}: {path} is a folder or a special file, expected a file");
            return Err(Error::new(&MISSING, what).hint(REMAKE));
        }
        let mode = metadata.permissions().mode() & 0o777;
        Ok(Some(Content { bytes: fs_err::read(full)?, mode: Some(mode), executable: mode & 0o100 != 0 }))
    }

    /// No path may be a file and the folder of another.
    fn check_folders(&self) -> Result<()> {
        for (path, _) in self.files.iter().filter(|(_, state)| state.now.is_some()) {
            for folder in path.above() {
                if self.files.get(&folder).is_some_and(|state| state.now.is_some()) {
                    let what = format!("the patches make {folder} a file and {path} one below it");
                    return Err(Error::new(&MISMATCH, what).hint(REMAKE));
                }
            }
        }
        Ok(())
    }

    fn write(&self) -> Result<()> {
        // All contents first: a full disk is found before anything is replaced.
        let mut written = Vec::new();
        for (path, state) in self.changed() {
            if let Some(content) = &state.now {
                written.push((path, content.write_beside(&self.root.join(path.as_path()))?));
            }
        }
        for (path, file) in written {
            let full = self.root.join(path.as_path());
            file.persist(&full).map_err(|error| {
                Error::from(error.error).context(format!("cannot replace {}", full.display()))
            })?;
        }
        for (path, state) in self.changed() {
            if state.now.is_none() {
                let full = self.root.join(path.as_path());
                fs_err::remove_file(&full)?;
                self.remove_empty_folders(path);
            }
        }
        Ok(())
    }

    /// As git does; a folder that is not empty stays.
    fn remove_empty_folders(&self, path: &TreePath) {
        let mut folders: Vec<_> = path.above().collect();
        while let Some(folder) = folders.pop() {
            if fs_err::remove_dir(self.root.join(folder.as_path())).is_err() {
                break;
            }
        }
    }

    fn read_back(&self) -> Result<()> {
        for (path, state) in self.changed() {
            let found = self.load("reading back", path)?;
            let same = match (&found, &state.now) {
                (Some(found), Some(now)) => found.bytes == now.bytes && found.executable == now.executable,
                (None, None) => true,
                _ => false,
            };
            if !same {
                let what = format!("{path} is not what was just written to {}", self.root.display());
                return Err(Error::new(&NOT_WRITTEN, what)
                    .hint("check the disk, stop what writes there, and run `cargo xtask setup` again"));
            }
        }
        Ok(())
    }

    fn changed(&self) -> impl Iterator<Item = (&TreePath, &State)> {
        self.files.iter().filter(|(_, state)| state.original != state.now)
    }
}

impl Content {
    fn write_beside(&self, path: &Path) -> Result<tempfile::NamedTempFile> {
        let folder = path.parent().unwrap_or(path);
        fs_err::create_dir_all(folder)?;
        let failed = |error: io::Error| {
            Error::from(error).context(format!("cannot write the patched {}", path.display()))
        };
        let default = if self.executable { 0o755 } else { 0o644 };
        let mut file = tempfile::Builder::new()
            .prefix(".patched-")
            .permissions(std::fs::Permissions::from_mode(default))
            .tempfile_in(folder)
            .map_err(failed)?;
        if let Some(mode) = self.mode {
            // Whoever may read may execute, or nobody.
            let mode = if self.executable { mode | (mode & 0o444) >> 2 } else { mode & !0o111 };
            file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        }
        file.write_all(&self.bytes).map_err(failed)?;
        Ok(file)
    }
}

/// `bytes` with `hunks` applied, each exactly where it says.
fn patched(patch: &str, path: &TreePath, bytes: &[u8], hunks: &[Hunk]) -> Result<Vec<u8>> {
    let lines: Vec<&[u8]> = bytes.split_inclusive(|&byte| byte == b'\n').collect();
    let mut result: Vec<&[u8]> = Vec::with_capacity(lines.len());
    let mut done = 0;
    for hunk in hunks {
        let old: Vec<&[u8]> = hunk.old_side().collect();
        // Without a line to compare, only an empty file is the right place.
        let is_blind = old.is_empty() && !lines.is_empty();
        if is_blind || lines.get(hunk.old_at..hunk.old_at + old.len()) != Some(&old[..]) {
            return Err(diagnosis(patch, path, &lines, hunks, hunk));
        }
        result.extend(lines.get(done..hunk.old_at).unwrap_or_default());
        result.extend(hunk.new_side());
        done = hunk.old_at + old.len();
    }
    result.extend(lines.get(done..).unwrap_or_default());
    let ends = result.iter().position(|line| !line.ends_with(b"\n")).map_or(result.len(), |last| last + 1);
    if ends < result.len() {
        let header = hunks.last().map_or("", |hunk| &hunk.header);
        return Err(does_not_apply(
            &MISMATCH,
            patch,
            path,
            header,
            &format!("the patch ends the file without a newline after line {ends}, and more lines follow"),
        ));
    }
    Ok(result.concat())
}

/// Says why `hunk` does not fit.
fn diagnosis(patch: &str, path: &TreePath, lines: &[&[u8]], hunks: &[Hunk], hunk: &Hunk) -> Error {
    let is_done = hunks.iter().all(|hunk| {
        let new: Vec<&[u8]> = hunk.new_side().collect();
        !new.is_empty() && lines.get(hunk.new_at..hunk.new_at + new.len()) == Some(&new[..])
    });
    if is_done {
        let what = format!(
            "{patch}: {path} already has what the patch would make of it: it is already applied, or reversed"
        );
        return Error::new(&ALREADY_APPLIED, what).hint(DROP);
    }
    let old: Vec<&[u8]> = hunk.old_side().collect();
    if old.is_empty() {
        let what = "the patch expects an empty file, and it is not empty";
        return does_not_apply(&MISMATCH, patch, path, &hunk.header, what);
    }
    let elsewhere = (0..=lines.len().saturating_sub(old.len()))
        .filter(|&at| lines.get(at..at + old.len()) == Some(&old[..]))
        .min_by_key(|at| at.abs_diff(hunk.old_at));
    if let Some(at) = elsewhere {
        let (sign, offset) = if at < hunk.old_at { ('-', hunk.old_at - at) } else { ('+', at - hunk.old_at) };
        let what = format!("it would apply at line {}, offset {sign}{offset}", at + 1);
        return does_not_apply(&OFFSET, patch, path, &hunk.header, &what);
    }
    let present = lines.get(hunk.old_at..).unwrap_or_default();
    let same = old.iter().zip(present).take_while(|(expected, found)| expected == found).count();
    let mut what = String::new();
    let shortest = old.len().min(same + SHOWN_LINES);
    for at in same..shortest {
        let number = hunk.old_at + at + 1;
        what.push_str(&format!("line {number} expected {}\n", shown_line(old.get(at).copied())));
        what.push_str(&format!("line {number} found    {}\n", shown_line(present.get(at).copied())));
    }
    let has_crlf = |line: Option<&&[u8]>| line.is_some_and(|line| line.ends_with(b"\r\n"));
    if has_crlf(old.get(same)) != has_crlf(present.get(same)) {
        what.push_str("the line ends differ: one side has CRLF\n");
    }
    does_not_apply(&MISMATCH, patch, path, &hunk.header, what.trim_end())
}

fn does_not_apply(code: &'static Code, patch: &str, path: &TreePath, header: &str, what: &str) -> Error {
    let details: String = what.lines().map(|line| format!("\n  {line}")).collect();
    Error::new(code, format!("{patch} does not apply to {path} at `{header}`{details}")).hint(REMAKE)
}

fn shown_line(line: Option<&[u8]>) -> String {
    match line {
        None => "the end of the file".into(),
        Some(line) => match line.strip_suffix(b"\n") {
            Some(text) => format!("`{}`", shown(text)),
            None => format!("`{}` without a newline at the end of the file", shown(line)),
        },
    }
}

const REMAKE: &str = "make the patch again for the pinned source and the patches before it";
const DROP: &str = "remove the patch from PROVENANCE, or reverse it if it was made the wrong way round";
/// Pairs of lines in a message, from the first that differs.
const SHOWN_LINES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d1_a_file_that_is_not_what_was_written_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("f");
        let patch = Patch::parse("p.patch", b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n").unwrap();
        for tampering in ["x\n", "y", ""] {
            fs_err::write(&file, "x\n").unwrap();
            let mut tree = Tree { root: root.path(), files: BTreeMap::new() };
            tree.apply(&patch).unwrap();
            tree.write().unwrap();
            tree.read_back().unwrap();
            fs_err::write(&file, tampering).unwrap();
            assert_eq!(tree.read_back().unwrap_err().code().id, NOT_WRITTEN.id);
        }
        fs_err::remove_file(&file).unwrap();
        let mut tree = Tree { root: root.path(), files: BTreeMap::new() };
        assert_eq!(tree.apply(&patch).unwrap_err().code().id, MISSING.id);
    }
}
