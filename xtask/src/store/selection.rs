//! `.cargo/kiln.toml`: what the last `setup` of this checkout chose, so that `build` and `doctor` start from the
//! same store and toolchain without repeating its options.
//!
//! It records choices alone. Whether they still hold is decided by comparing with PROVENANCE, never by this file.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::base::atomic::write_atomic;
use crate::base::toml_context::excerpt;
use crate::codes;
use crate::report::error::{Error, Result};

codes! {
    SELECTION_INVALID = "KILN-0230", Machine, ".cargo/kiln.toml is not valid",
        "`.cargo/kiln.toml` is written by `cargo xtask setup` for this checkout alone and is read strictly. It was \
         edited, damaged, or written by another version of kiln. `cargo xtask setup` writes it anew once it is \
         removed.";
    SELECTION_PATH = "KILN-0231", Machine, "a chosen path cannot be recorded",
        "The store and the toolchain that `setup` chose are recorded in a TOML file, which is UTF-8, as \
         absolute paths. Choose a path whose name is UTF-8.";
}

/// The file's path in the workspace.
pub const FILE_NAME: &str = ".cargo/kiln.toml";

/// The layout of the file that this version writes and reads.
pub const SCHEMA: u32 = 1;

/// What the last `setup` of this checkout chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The store, absolute.
    pub store: PathBuf,
    /// The sysroot of the Rust toolchain that built the backend, absolute.
    pub toolchain: PathBuf,
}

#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    schema: u32,
    store: PathBuf,
    toolchain: PathBuf,
}

impl Selection {
    /// Reads the file in the workspace at `root`; `None` when there is none.
    ///
    /// # Errors
    /// It is there and unreadable or not valid ([`SELECTION_INVALID`]).
    pub fn load(root: &Path) -> Result<Option<Self>> {
        let path = root.join(FILE_NAME);
        let bytes = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let invalid = |message: String| {
            Error::new(&SELECTION_INVALID, message)
                .hint(format!("remove {} and run `cargo xtask setup`", path.display()))
        };
        let text =
            str::from_utf8(&bytes).map_err(|_| invalid(format!("{} is not UTF-8 text", path.display())))?;
        let malformed = |error: toml::de::Error| {
            let span = error.span().unwrap_or_default();
            invalid(excerpt(&path, text, span, error.message().trim_end()))
        };
        // First alone, because another version may also have other keys.
        let Schema { schema } = toml::from_str(text).map_err(malformed)?;
        if schema != SCHEMA {
            return Err(invalid(format!(
                "{} has schema {schema}, expected {SCHEMA}: another version of kiln wrote it",
                path.display()
            )));
        }
        let written: Written = toml::from_str(text).map_err(malformed)?;
        for (key, value) in written.paths() {
            if !value.is_absolute() {
                let message = format!("{}: `{key}` is {value:?}, expected an absolute path", path.display());
                return Err(invalid(message));
            }
        }
        Ok(Some(Selection { store: written.store, toolchain: written.toolchain }))
    }

    /// Writes the file in the workspace at `root`, in one step; does nothing when it already says the same.
    ///
    /// # Errors
    /// A path is relative or not UTF-8 ([`SELECTION_PATH`]), or the file cannot be written.
    pub fn save(&self, root: &Path) -> Result<()> {
        let written =
            Written { schema: SCHEMA, store: self.store.clone(), toolchain: self.toolchain.clone() };
        for (key, value) in written.paths() {
            if value.to_str().is_none() || !value.is_absolute() {
                let message = format!("`{key}` is {value:?}, expected an absolute path in UTF-8");
                return Err(Error::new(&SELECTION_PATH, message).hint("choose another path"));
            }
        }
        let table = toml::to_string(&written)
            .map_err(|error| Error::new(&crate::report::error::BUG, error.to_string()))?;
        let text = format!("{HEADER}{table}");
        let path = root.join(FILE_NAME);
        if fs_err::read(&path).is_ok_and(|present| present == text.as_bytes()) {
            return Ok(());
        }
        fs_err::create_dir_all(root.join(".cargo"))?;
        write_atomic(&path, text.as_bytes(), None)
    }
}

impl Written {
    fn paths(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        [("store", &self.store), ("toolchain", &self.toolchain)].into_iter()
    }
}

const HEADER: &str = "# Written by `cargo xtask setup` for this checkout; not to be edited or committed.\n";

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;

    use insta::assert_snapshot;

    use super::*;

    fn selection() -> Selection {
        Selection { store: "/s t/ö".into(), toolchain: "/t".into() }
    }

    fn error_of(text: &str) -> String {
        let root = tempfile::tempdir().unwrap();
        fs_err::create_dir(root.path().join(".cargo")).unwrap();
        fs_err::write(root.path().join(FILE_NAME), text).unwrap();
        let error = Selection::load(root.path()).unwrap_err();
        let shown = format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap());
        shown.replace(&root.path().display().to_string(), "[root]")
    }

    #[test]
    fn absence_is_no_error_and_what_is_saved_is_loaded() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Selection::load(root.path()).unwrap(), None);
        for selection in [Selection { store: "/other".into(), ..selection() }, selection()] {
            selection.save(root.path()).unwrap();
            assert_eq!(Selection::load(root.path()).unwrap(), Some(selection));
        }
        assert_snapshot!(fs_err::read_to_string(root.path().join(FILE_NAME)).unwrap(), @r#"
        # Written by `cargo xtask setup` for this checkout; not to be edited or committed.
        schema = 1
        store = "/s t/ö"
        toolchain = "/t"
        "#);
    }

    #[test]
    fn an_unchanged_selection_is_not_written_again() {
        use std::os::unix::fs::MetadataExt as _;
        let root = tempfile::tempdir().unwrap();
        selection().save(root.path()).unwrap();
        let inode = fs_err::metadata(root.path().join(FILE_NAME)).unwrap().ino();
        selection().save(root.path()).unwrap();
        assert_eq!(fs_err::metadata(root.path().join(FILE_NAME)).unwrap().ino(), inode);
    }

    #[test]
    fn anything_else_in_the_file_is_an_error() {
        assert_snapshot!(error_of("schema = 1\nstore = '/s'\ntoolchain = '/t'\nlcc = '/l'\n"), @"
        KILN-0230: [root]/.cargo/kiln.toml:4:1: unknown field `lcc`, expected one of `schema`, `store`, `toolchain`
          |
        3 | toolchain = '/t'
        4 | lcc = '/l'
          | ^^^
        hint: remove [root]/.cargo/kiln.toml and run `cargo xtask setup`
        ");
        assert_snapshot!(error_of("schema = 2\nshop = '/s'\ntoolchain = '/t'\n"), @"
        KILN-0230: [root]/.cargo/kiln.toml has schema 2, expected 1: another version of kiln wrote it
        hint: remove [root]/.cargo/kiln.toml and run `cargo xtask setup`
        ");
        assert_snapshot!(error_of("schema = 1\nstore = 's'\ntoolchain = '/t'\n"), @r#"
        KILN-0230: [root]/.cargo/kiln.toml: `store` is "s", expected an absolute path
        hint: remove [root]/.cargo/kiln.toml and run `cargo xtask setup`
        "#);
        assert_snapshot!(error_of("schema = 1\nstore = '/s'\n"), @"
        KILN-0230: [root]/.cargo/kiln.toml:1:1: missing field `toolchain`
          |
        1 | schema = 1
          | ^
        2 | store = '/s'
        hint: remove [root]/.cargo/kiln.toml and run `cargo xtask setup`
        ");
    }

    #[test]
    fn g1_paths_that_toml_cannot_hold_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let odd = PathBuf::from(OsString::from_vec(b"/a/\xff".to_vec()));
        let error = Selection { store: odd, ..selection() }.save(root.path()).unwrap_err();
        assert_snapshot!(error.to_string(), @r#"`store` is "/a/\xFF", expected an absolute path in UTF-8"#);
        let error = Selection { toolchain: "rel".into(), ..selection() }.save(root.path()).unwrap_err();
        assert_snapshot!(error.to_string(), @r#"`toolchain` is "rel", expected an absolute path in UTF-8"#);
        assert!(!root.path().join(".cargo").exists());
    }
}
