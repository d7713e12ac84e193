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
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::base::hash::Sha256;

    fn write(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
        let path = path.as_ref();
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, contents).unwrap();
    }

    fn mode(path: impl AsRef<Path>, mode: u32) {
        fs_err::set_permissions(path.as_ref(), std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn hex(root: &Path) -> String {
        Sha256::from_bytes(*hash_tree(root).unwrap().as_bytes()).to_string()
    }

    fn string(text: &[u8]) -> Vec<u8> {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn an_empty_folder_has_the_hash_that_nix_gives_it() {
        let root = tempfile::tempdir().unwrap();
        // Widely seen as the hash of a fetch that brought nothing.
        assert_eq!(
            hash_tree(root.path()).unwrap().to_string(),
            "sha256-pQpattmS9VmO3ZIQUFn66az8GSmB4IvYhTTCFn6SUmo="
        );
    }

    #[test]
    fn trees_have_the_hashes_of_archives_that_nix_wrote() {
        // The sha256 of `03-dir-one-empty-file.nar` and `07-nested-dirs.nar` among the test data of the crate
        // nix-nar 0.6.0, whose inputs are remade here.
        let root = tempfile::tempdir().unwrap();
        let nested = root.path().join("nested");
        write(nested.join("01-an-empty-file"), "");
        write(nested.join("02-some-dir/small-file"), "This is a test file.\n");
        write(nested.join("02-some-dir/more-depth/deep-empty-file"), "");
        symlink("../01-an-empty-file", nested.join("02-some-dir/link-to-an-empty-file")).unwrap();
        write(nested.join("03-executable-file.exe"), "");
        mode(nested.join("03-executable-file.exe"), 0o755);
        assert_eq!(hex(&nested), "e3bdbbac48770522a7daee3d06774fc1ca666e775bdf94c519594891ec63dffe");
    }

    #[test]
    fn the_archive_is_what_the_specification_says() {
        let root = tempfile::tempdir().unwrap();
        write(root.path().join("b"), "12345678");
        write(root.path().join("a"), "x");
        mode(root.path().join("a"), 0o700);
        symlink("b", root.path().join("B")).unwrap();
        let archive: Vec<u8> = [
            &b"nix-archive-1"[..],
            b"(",
            b"type",
            b"directory",
            b"entry",
            b"(",
            b"name",
            b"B",
            b"node",
            b"(",
            b"type",
            b"symlink",
            b"target",
            b"b",
            b")",
            b")",
            b"entry",
            b"(",
            b"name",
            b"a",
            b"node",
            b"(",
            b"type",
            b"regular",
            b"executable",
            b"",
            b"contents",
            b"x",
            b")",
            b")",
            b"entry",
            b"(",
            b"name",
            b"b",
            b"node",
            b"(",
            b"type",
            b"regular",
            b"contents",
            b"12345678",
            b")",
            b")",
            b")",
        ]
        .into_iter()
        .flat_map(string)
        .collect();
        assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
    }

    #[test]
    fn a_file_longer_than_the_buffers_counts_byte_for_byte() {
        let root = tempfile::tempdir().unwrap();
        let contents: Vec<u8> = (0..7 * CHUNK + 13).map(|i| (i % 251) as u8).collect();
        write(root.path().join("f"), &contents);
        let mut archive: Vec<u8> = [
            &b"nix-archive-1"[..],
            b"(",
            b"type",
            b"directory",
            b"entry",
            b"(",
            b"name",
            b"f",
            b"node",
            b"(",
            b"type",
            b"regular",
            b"contents",
        ]
        .into_iter()
        .flat_map(string)
        .collect();
        archive.extend(string(&contents));
        for _ in 0..3 {
            archive.extend(string(b")"));
        }
        assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
    }

    #[test]
    fn only_names_contents_and_the_executable_bit_count() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("f");
        write(&file, "x");
        let first = hash_tree(root.path()).unwrap();
        mode(&file, 0o666);
        mode(root.path(), 0o700);
        assert_eq!(hash_tree(root.path()).unwrap(), first);
        mode(&file, 0o744);
        assert_ne!(hash_tree(root.path()).unwrap(), first);
        mode(&file, 0o644);
        write(&file, "y");
        assert_ne!(hash_tree(root.path()).unwrap(), first);
    }

    #[test]
    fn c14_names_that_are_not_utf8_are_hashed() {
        let root = tempfile::tempdir().unwrap();
        write(root.path().join(OsStr::from_bytes(b"zo\xe8.rs")), "x");
        let archive: Vec<u8> = [
            &b"nix-archive-1"[..],
            b"(",
            b"type",
            b"directory",
            b"entry",
            b"(",
            b"name",
            b"zo\xe8.rs",
            b"node",
            b"(",
            b"type",
            b"regular",
            b"contents",
            b"x",
            b")",
            b")",
            b")",
        ]
        .into_iter()
        .flat_map(string)
        .collect();
        assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
    }

    #[test]
    fn a_pipe_a_file_as_root_and_a_missing_root_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("tree/socket");
        fs_err::create_dir(root.path().join("tree")).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = hash_tree(&root.path().join("tree")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{} is a device, a pipe or a socket, expected files, folders and symlinks only",
                socket.display()
            )
        );
        write(root.path().join("file"), "");
        assert_eq!(hash_tree(&root.path().join("file")).unwrap_err().code().id, NOT_A_TREE.id);
        assert!(hash_tree(&root.path().join("missing")).is_err());
    }
}
