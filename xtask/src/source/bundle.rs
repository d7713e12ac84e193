//! Bundles: one archive that sets up a checkout without any network.
//!
//! The same inputs give the same bytes: members are sorted, and times, owners and modes are fixed. Nothing in a bundle is
//! trusted: the tree, the lock file and the crates are checked against PROVENANCE and the lock files of the checkout
//! exactly as if they had been downloaded. A built backend cannot be checked that way, so it is taken only from a bundle
//! whose sha256 the user gives.
//!
//! ```text
//! kiln-bundle/kiln-bundle.json   what is in it
//! kiln-bundle/PROVENANCE, backend-patches/
//! kiln-bundle/source/            upstream's tree, unpatched
//! kiln-bundle/archives/          crates of the registry
//! kiln-bundle/git-crates/        crates from git
//! kiln-bundle/backend/           the built backend, if asked for
//! kiln-bundle/bootstrap.sh       lays the crates for the Cargo that builds xtask itself
//! ```

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::base::interrupt::{Folder, Guard};
use crate::pins::{FILE_NAME, PATCH_FOLDER, Pin};
use crate::report::error::{BUG, Error, Result};
use crate::source::archive::{self, Limits};
use crate::source::pinned::Pins;
use crate::source::{self, Origin};
use crate::store::{Key, Store};

crate::codes! {
    NOT_A_BUNDLE = "KILN-0250", Machine, "the file is not a bundle of this version",
        "`--bundle` takes a file that `cargo xtask bundle` wrote. This one has no kiln-bundle.json, or one of another \
         layout.";
    OTHER_BUNDLE = "KILN-0251", Refusal, "the bundle is of another upstream tree",
        "The bundle holds another tree than PROVENANCE of this checkout pins. Make a bundle from this commit, or check \
         out the one that it was made from.";
    WRONG_SHA256 = "KILN-0252", Refusal, "the bundle has another sha256 than given",
        "`--bundle-sha256` says which bundle is meant, and the file is another one. It was damaged on the way, or \
         replaced.";
}

/// What is in a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    schema: String,
    /// The pinned revision.
    pub revision: Revision,
    /// The hash of source/.
    pub tree: TreeHash,
    /// The key of the patched source.
    pub source: Key,
    /// The key of the crates.
    pub crates: Key,
    /// The key of the backend, where there is one.
    pub backend: Option<Key>,
}

impl Manifest {
    /// The manifest for `pins`.
    pub fn new(pins: &Pins, crates: Key, backend: Option<Key>) -> Self {
        Manifest {
            schema: SCHEMA.to_owned(),
            revision: pins.pin.source.revision.clone(),
            tree: pins.pin.source.tree,
            source: pins.source_key(),
            crates,
            backend,
        }
    }
}

const SCHEMA: &str = "kiln.bundle/1";
const MANIFEST: &str = "kiln-bundle.json";
const ROOT: &str = "kiln-bundle";
const BOOTSTRAP: &str = include_str!("bootstrap.sh.txt");

/// Seconds since 1970 that every member bears: 1980-01-01, the first that every archiver takes.
const TIME: u64 = 315_532_800;

/// Where a bundle's content is.
pub struct Content<'a> {
    /// What to say about it.
    pub manifest: &'a Manifest,
    /// The root of the checkout.
    pub workspace: &'a Path,
    /// The pins.
    pub pins: &'a Pins,
    /// Upstream's tree.
    pub pristine: &'a Path,
    /// `archives/` and `git-crates/`.
    pub crates: &'a Path,
    /// The backend's entry.
    pub backend: Option<&'a Path>,
}

/// Writes a bundle to `file`, replacing an older one in one step, and returns its sha256.
///
/// # Errors
/// Something cannot be read, or the file cannot be written.
pub fn write(file: &Path, content: &Content<'_>) -> Result<Sha256> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::Builder::new()
        .prefix(".kiln-bundle-")
        .permissions(permissions())
        .tempfile_in(folder)
        .map_err(|error| Error::from(error).context(format!("cannot write in {}", folder.display())))?;
    let _guard = Guard::new(part.path());
    // No name, no time and no system in the header.
    let gzip = GzBuilder::new().mtime(0).operating_system(255);
    let hashing = Hashing { inner: io::BufWriter::new(part), hasher: Default::default() };
    let mut archive = tar::Builder::new(gzip.write(hashing, Compression::default()));
    append(&mut archive, content)?;
    let mut hashing = archive.into_inner()?.finish()?;
    hashing.flush()?;
    let sha256 = hashing.sha256();
    let part = hashing.inner.into_inner().map_err(|error| Error::from(error.into_error()))?;
    part.as_file().sync_all()?;
    part.persist(file)
        .map_err(|error| Error::from(error.error).context(format!("cannot write {}", file.display())))?;
    Ok(sha256)
}

#[cfg(unix)]
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}

fn append<W: Write>(archive: &mut tar::Builder<W>, content: &Content<'_>) -> Result<()> {
    let mut manifest = serde_json::to_vec_pretty(content.manifest)
        .map_err(|error| Error::new(&BUG, format!("cannot write the manifest: {error}")))?;
    manifest.push(b'\n');
    // In the order of their names.
    file(archive, FILE_NAME, &fs::read(content.workspace.join(FILE_NAME))?, false)?;
    folder(archive, "archives", &content.crates.join("archives"))?;
    if let Some(backend) = content.backend {
        folder(archive, "backend", backend)?;
    }
    for patch in &content.pins.patches {
        file(archive, &format!("{PATCH_FOLDER}/{}", patch.file), &patch.bytes, false)?;
    }
    file(archive, "bootstrap.sh", BOOTSTRAP.as_bytes(), true)?;
    folder(archive, "git-crates", &content.crates.join("git-crates"))?;
    file(archive, MANIFEST, &manifest, false)?;
    folder(archive, "source", content.pristine)
}

fn header(kind: tar::EntryType, executable: bool) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(if executable || kind == tar::EntryType::Directory { 0o755 } else { 0o644 });
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(TIME);
    header.set_size(0);
    header
}

fn file<W: Write>(archive: &mut tar::Builder<W>, name: &str, bytes: &[u8], executable: bool) -> Result<()> {
    let mut header = header(tar::EntryType::Regular, executable);
    header.set_size(bytes.len() as u64);
    archive.append_data(&mut header, format!("{ROOT}/{name}"), bytes)?;
    Ok(())
}

/// Appends a folder and everything below it, by name.
fn folder<W: Write>(archive: &mut tar::Builder<W>, name: &str, path: &Path) -> Result<()> {
    archive.append_data(
        &mut header(tar::EntryType::Directory, true),
        format!("{ROOT}/{name}/"),
        io::empty(),
    )?;
    let mut entries: Vec<_> = fs::read_dir(path)?.collect::<io::Result<_>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let below = entry.file_name();
        let Some(below) = below.to_str() else {
            return Err(Error::new(&BUG, format!("{} is not UTF-8", path.display())));
        };
        let name = format!("{name}/{below}");
        let kind = entry.file_type()?;
        if kind.is_dir() {
            folder(archive, &name, &path)?;
        } else if kind.is_symlink() {
            let mut header = header(tar::EntryType::Symlink, true);
            archive.append_link(&mut header, format!("{ROOT}/{name}"), fs::read_link(&path)?)?;
        } else {
            file(archive, &name, &fs::read(&path)?, is_executable(&entry.metadata()?))?;
        }
    }
    Ok(())
}

#[cfg(unix)]
fn is_executable(metadata: &std::fs::Metadata) -> bool {
    std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o100 != 0
}

struct Hashing<W> {
    inner: W,
    hasher: sha2::Sha256,
}

impl<W> Hashing<W> {
    fn sha256(&self) -> Sha256 {
        Sha256::from_bytes(sha2::Digest::finalize(self.hasher.clone()).into())
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        sha2::Digest::update(&mut self.hasher, &bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// An unpacked bundle, which removes itself.
#[derive(Debug)]
pub struct Bundle {
    folder: Folder,
    /// What it says of itself.
    pub manifest: Manifest,
}

impl Bundle {
    /// Unpacks the bundle at `path` in the store.
    ///
    /// # Errors
    /// It is none, or not the one that is meant.
    pub fn open(path: &Path, sha256: Option<&Sha256>, pin: &Pin, store: &Store) -> Result<Self> {
        let hint = "make one with: cargo xtask bundle FILE";
        if let Some(expected) = sha256 {
            let found = Sha256::of_reader(fs::File::open(path)?)?;
            if found != *expected {
                return Err(Error::new(
                    &WRONG_SHA256,
                    format!(
                        "{} is not the bundle that is meant\n  given: {expected}\n  found: {found}",
                        path.display()
                    ),
                )
                .hint("copy it again, and compare with the sha256 that `cargo xtask bundle` printed"));
            }
        }
        let parent = store.root().join("build");
        fs::create_dir_all(&parent)?;
        let folder = Folder::within(&parent, ".bundle-")?;
        archive::unpack_archive(path, folder.path(), &Limits::default())?;
        let not_one = |cause: String| {
            Error::new(&NOT_A_BUNDLE, format!("{} is not a bundle of this version", path.display()))
                .cause(cause)
                .hint(hint)
        };
        let text = fs::read(folder.path().join(MANIFEST)).map_err(|error| not_one(error.to_string()))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| not_one(error.to_string()))?;
        if manifest.schema != SCHEMA {
            return Err(not_one(format!("schema {:?}, expected {SCHEMA:?}", manifest.schema)));
        }
        if manifest.tree != pin.source.tree {
            return Err(Error::new(
                &OTHER_BUNDLE,
                format!(
                    "{} is of revision {}, tree {}; PROVENANCE pins {}, tree {}",
                    path.display(),
                    manifest.revision,
                    manifest.tree,
                    pin.source.revision,
                    pin.source.tree
                ),
            )
            .hint(hint));
        }
        Ok(Bundle { folder, manifest })
    }

    /// The upstream tree in it.
    pub fn origin(&self) -> Origin {
        Origin::Folder(self.folder.path().join("source"))
    }

    /// The crates in it.
    pub fn crates(&self) -> &Path {
        self.folder.path()
    }

    /// The built backend in it.
    pub fn backend(&self) -> Option<PathBuf> {
        let folder = self.folder.path().join("backend");
        folder.is_dir().then_some(folder)
    }
}

/// The key under which a CI should save [`cache_paths`]: it changes when anything of it does.
pub fn cache_key(source: &Key, crates: &Key, backend: &Key) -> Key {
    Key::builder("ci-cache", 1)
        .field("source", &source.to_string())
        .field("crates", &crates.to_string())
        .field("backend", &backend.to_string())
        .finish()
}

/// The folders of the store that a checkout of these pins needs.
pub fn cache_paths(store: &Store, pins: &Pins, crates: &Key, backend: &Key) -> Vec<PathBuf> {
    use crate::store::Kind;
    let all = [
        store.entry(Kind::Pristine, &source::pristine_key(&pins.pin.source)),
        store.entry(Kind::Source, &pins.source_key()),
        store.entry(Kind::Vendor, crates),
        store.entry(Kind::Backend, backend),
    ];
    all.into_iter().filter(|path| path.is_dir()).collect()
}
