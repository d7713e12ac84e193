//! Which checkout uses which entries of the store: one small file per checkout, written by `setup`.
//!
//! A checkout counts while its `.cargo/kiln.toml` still names this store; what it uses is what its last setup wrote here,
//! so a checkout that moved on to another key lets go of the old one.

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::atomic::write_atomic;
use crate::base::hash::Sha256;
use crate::report::error::{BUG, Error, Result};
use crate::store::selection::Selection;
use crate::store::{Key, Kind, Store};

crate::codes! {
    ROOT_INVALID = "KILN-0907", Machine, "the note of a checkout that uses the store cannot be read",
        "The store's roots/ folder has a file for every checkout that uses it. One cannot be read, so nobody can say \
         which entries are in use, and nothing is removed. `cargo xtask setup` in that checkout writes it anew.";
}

/// The layout of the files.
const SCHEMA: u32 = 1;

/// What a checkout uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Root {
    schema: u32,
    /// The checkout's physical path.
    pub workspace: PathBuf,
    /// The pinned revision.
    pub revision: String,
    /// `KIND/KEY` of every entry that it uses.
    pub entries: Vec<String>,
}

impl Root {
    /// A root of `workspace`.
    pub fn new(workspace: &Path, revision: &str, entries: &[(Kind, Key)]) -> Self {
        Root {
            schema: SCHEMA,
            workspace: workspace.to_owned(),
            revision: revision.to_owned(),
            entries: entries.iter().map(|(kind, key)| name(*kind, &key.to_string())).collect(),
        }
    }

    /// Writes it into the store, in one step; does nothing when the store says the same.
    ///
    /// # Errors
    /// The path is not UTF-8, or the store cannot be written.
    pub fn register(&self, store: &Store) -> Result<()> {
        let path = path(store, &self.workspace);
        if load(&path).is_ok_and(|present| present == *self) {
            return Ok(());
        }
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| {
            Error::new(&BUG, format!("cannot note that {} uses the store", self.workspace.display()))
                .cause(error)
        })?;
        text.push(b'\n');
        fs::create_dir_all(folder(store))?;
        write_atomic(&path, &text, None)
    }

    /// Whether the checkout still exists and uses `store`. When that cannot be told, it does.
    pub fn is_live(&self, store: &Store) -> bool {
        match fs::symlink_metadata(&self.workspace) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return false,
            _ => {}
        }
        let same = |one: &Path, other: &Path| {
            one == other
                || fs::canonicalize(one)
                    .is_ok_and(|one| fs::canonicalize(other).is_ok_and(|other| one == other))
        };
        match Selection::load(&self.workspace) {
            Ok(Some(selection)) => same(&selection.store, store.root()),
            Ok(None) => false,
            Err(_) => true,
        }
    }
}

/// The name of an entry in [`Root::entries`].
pub fn name(kind: Kind, key: &str) -> String {
    format!("{}/{key}", kind.folder())
}

/// Every root and its file, live or not, by path.
///
/// # Errors
/// One cannot be read ([`ROOT_INVALID`]).
pub fn all(store: &Store) -> Result<Vec<(PathBuf, Root)>> {
    let entries = match fs::read_dir(folder(store)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut roots = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "json") {
            roots.push((path.clone(), load(&path)?));
        }
    }
    roots.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(roots)
}

fn load(path: &Path) -> Result<Root> {
    let invalid = |cause: String| {
        Error::new(&ROOT_INVALID, format!("{} is not what setup writes", path.display())).cause(cause).hint(
            format!("run `cargo xtask setup` in that checkout, or, if it is gone, rm {}", path.display()),
        )
    };
    let root: Root = serde_json::from_slice(&fs::read(path)?).map_err(|error| invalid(error.to_string()))?;
    if root.schema == SCHEMA { Ok(root) } else { Err(invalid(format!("schema {}", root.schema))) }
}

fn folder(store: &Store) -> PathBuf {
    store.root().join("roots")
}

fn path(store: &Store, workspace: &Path) -> PathBuf {
    let hash = Sha256::of(workspace.as_os_str().as_encoded_bytes()).to_string();
    folder(store).join(format!("{}.json", &hash[..16]))
}
