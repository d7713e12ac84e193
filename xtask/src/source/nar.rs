//! The hash of a source tree: the sha256 of its Nix archive (NAR), which `nix hash path` prints too.
//!
//! A NAR holds names, contents, the executable bit and symlink targets, in one order, and nothing else: no
//! times, owners or other mode bits. So the hash names the sources, not the archive that brought them. The
//! format is specified in the Nix manual (<https://nix.dev/manual/nix/stable/protocols/nix-archive>). Nothing
//! here writes a NAR to disk.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::OFlags;
use sha2::Digest as _;

use crate::base::hash::TreeHash;
use crate::report::error::{BUG, Error, Result};

crate::codes! {
    NOT_A_TREE = "KILN-0601", Machine, "not a folder that can be hashed",
        "A source tree is a folder of regular files, folders and symlinks. The named path is something else: \
         a device, a pipe or a socket, or the root is not a folder. git stores nothing of the kind, so \
         something on this machine put it there; remove it, or fetch the source again with `cargo xtask \
         setup`.";
    CHANGED = "KILN-0602", Machine, "a file changed while it was hashed",
        "The named file became longer, shorter or something else while the tree was being hashed, so there \
         is no hash that means anything. Stop what writes into the store and run the command again.";
}

/// The NAR hash of the tree below `root`.
///
/// Reads every file once, on this thread, while another one hashes; memory stays below 2 MiB. A symlink to a
/// folder is accepted as the root and only there.
///
/// # Errors [`NOT_A_TREE`] for anything but files, folders and symlinks, [`CHANGED`] when a file changes
/// meanwhile, and failures to read.
pub fn hash_tree(root: &Path) -> Result<TreeHash> {
    let kind = fs_err::metadata(root)?.file_type();
    if !kind.is_dir() {
        return Err(not_a_tree(root, kind.into()));
    }
    let (full, chunks) = mpsc::sync_channel(CHUNKS);
    let (give_back, spent) = mpsc::sync_channel(CHUNKS + 2);
    thread::scope(|scope| {
        let hasher = scope.spawn(move || hash_chunks(&chunks, &give_back));
        let mut nar = Nar { chunk: vec![0; CHUNK], filled: 0, full, spent };
        let written = nar.archive(root);
        // Dropping the sender ends the hasher, whether or not the walk failed.
        drop(nar);
        let digest = hasher.join().map_err(|_| Error::new(&BUG, "the hashing thread panicked"))?;
        written.map(|()| TreeHash::from_bytes(digest))
    })
}

/// A filled part of the archive, and how much of it counts.
type Chunk = (Vec<u8>, usize);

fn hash_chunks(chunks: &Receiver<Chunk>, give_back: &SyncSender<Vec<u8>>) -> [u8; 32] {
    let mut hasher = sha2::Sha256::new();
    for (chunk, filled) in chunks {
        hasher.update(&chunk[..filled]);
        // Nobody takes chunks back once the walk is over.
        let _ = give_back.try_send(chunk);
    }
    hasher.finalize().into()
}

/// Writes the archive into chunks that the hasher takes.
struct Nar {
    chunk: Vec<u8>,
    filled: usize,
    full: SyncSender<Chunk>,
    spent: Receiver<Vec<u8>>,
}

impl Nar {
    fn archive(&mut self, root: &Path) -> Result<()> {
        self.text(b"nix-archive-1")?;
        self.text(b"(")?;
        self.folder(root)?;
        self.text(b")")?;
        self.flush()
    }

    fn folder(&mut self, folder: &Path) -> Result<()> {
        self.text(b"type")?;
        self.text(b"directory")?;
        let mut entries = fs_err::read_dir(folder)?
            .map(|entry| entry.and_then(|entry| Ok((entry.file_name(), Kind::from(entry.file_type()?)))))
            .collect::<Result<Vec<_>, _>>()?;
        entries.sort_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()));
        for (name, kind) in entries {
            let path = folder.join(&name);
            self.text(b"entry")?;
            self.text(b"(")?;
            self.text(b"name")?;
            self.text(name.as_bytes())?;
            self.text(b"node")?;
            self.text(b"(")?;
            match kind {
                Kind::File => self.file(&path)?,
                Kind::Folder => self.folder(&path)?,
                Kind::Symlink => self.symlink(&path)?,
                Kind::Other => return Err(not_a_tree(&path, kind)),
            }
            self.text(b")")?;
            self.text(b")")?;
        }
        Ok(())
    }

    fn file(&mut self, path: &Path) -> Result<()> {
        // NOFOLLOW and NONBLOCK: what the folder listing called a file may have become a link or a pipe
        // since.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
        let mut file = fs_err::OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(changed(path));
        }
        self.text(b"type")?;
        self.text(b"regular")?;
        if metadata.permissions().mode() & 0o100 != 0 {
            self.text(b"executable")?;
            self.text(b"")?;
        }
        self.text(b"contents")?;
        self.put(&metadata.len().to_le_bytes())?;
        let mut left = metadata.len();
        while left > 0 {
            let room = self.room()?;
            let wanted = usize::try_from(left).map_or(room.len(), |left| left.min(room.len()));
            match file.read(&mut room[..wanted])? {
                0 => return Err(changed(path)),
                read => {
                    self.filled += read;
                    left -= read as u64;
                }
            }
        }
        if file.read(&mut [0])? != 0 {
            return Err(changed(path));
        }
        self.padding(metadata.len())
    }

    fn symlink(&mut self, path: &Path) -> Result<()> {
        let target = fs_err::read_link(path)?;
        self.text(b"type")?;
        self.text(b"symlink")?;
        self.text(b"target")?;
        self.text(OsStr::as_bytes(target.as_os_str()))
    }

    /// The `str` of the specification: length, bytes, zeros up to a multiple of eight.
    fn text(&mut self, bytes: &[u8]) -> Result<()> {
        self.put(&(bytes.len() as u64).to_le_bytes())?;
        self.put(bytes)?;
        self.padding(bytes.len() as u64)
    }

    fn padding(&mut self, length: u64) -> Result<()> {
        let zeros = (8 - length % 8) % 8;
        self.put(&[0; 8][..zeros as usize])
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.room()?;
            let length = bytes.len().min(room.len());
            room[..length].copy_from_slice(&bytes[..length]);
            self.filled += length;
            bytes = &bytes[length..];
        }
        Ok(())
    }

    /// The unfilled rest of the present chunk, never empty.
    fn room(&mut self) -> Result<&mut [u8]> {
        if self.filled == self.chunk.len() {
            self.flush()?;
        }
        Ok(&mut self.chunk[self.filled..])
    }

    fn flush(&mut self) -> Result<()> {
        let next = self.spent.try_recv().unwrap_or_else(|_| vec![0; CHUNK]);
        let chunk = std::mem::replace(&mut self.chunk, next);
        let filled = std::mem::take(&mut self.filled);
        self.full.send((chunk, filled)).map_err(|_| Error::new(&BUG, "the hashing thread ended early"))
    }
}

/// What a folder entry is, as far as an archive can say.
#[derive(Clone, Copy)]
enum Kind {
    File,
    Folder,
    Symlink,
    Other,
}

impl From<std::fs::FileType> for Kind {
    fn from(kind: std::fs::FileType) -> Self {
        if kind.is_file() {
            Kind::File
        } else if kind.is_dir() {
            Kind::Folder
        } else if kind.is_symlink() {
            Kind::Symlink
        } else {
            Kind::Other
        }
    }
}

fn not_a_tree(path: &Path, kind: Kind) -> Error {
    let found = match kind {
        Kind::File => "is a file, expected a folder",
        Kind::Other => "is a device, a pipe or a socket, expected files, folders and symlinks only",
        Kind::Folder | Kind::Symlink => "cannot be hashed",
    };
    Error::new(&NOT_A_TREE, format!("{} {found}", path.display()))
        .hint("remove it, or fetch the source again with `cargo xtask setup`")
}

fn changed(path: &Path) -> Error {
    Error::new(&CHANGED, format!("{} changed while the tree was being hashed", path.display()))
        .hint("stop what writes into this folder and run the command again")
}

/// Bytes in one chunk: large enough that handing it over costs nothing, small enough for the second-level
/// cache.
const CHUNK: usize = 256 << 10;
/// Chunks that may wait for the hasher.
const CHUNKS: usize = 4;

#[cfg(test)]
mod tests;
