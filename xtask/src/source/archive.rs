//! Unpacking what `git archive` writes, and nothing else: a `.tar.gz`, or the tar stream itself.
//!
//! The `tar` crate finds the headers; what they mean and what is written is decided here. Every member is
//! checked before it is written, symlinks come last and are resolved against each other, and no member may
//! stand below one: so nothing outside the staging folder can be touched, whatever the order of members.
//! Names, contents, the executable bit and symlink targets are taken; owners, times and other mode bits are
//! not.
//!
//! Whether the tree is the right one is not asked here: see [`crate::source::nar`]. After a failure the caller drops
//! the staging folder.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use tar::{EntryType, Header};

use crate::base::hash::Revision;
use crate::report::error::{Error, Result};

crate::codes! {
    NOT_AN_ARCHIVE = "KILN-0611", Machine, "not a .tar.gz",
        "A source archive is a gzip-compressed tar file. The message says what the file is instead: an HTML \
         page comes from a proxy or a log-in page, a plain .tar needs `gzip`, an empty file is a failed \
         download. Remove it and run `cargo xtask setup` again, or give another file with `--source`.";
    DAMAGED = "KILN-0612", Machine, "the archive is damaged",
        "The archive ends too early, its checksums do not match, or something follows its end. That is a \
         broken copy or download: remove the file and run `cargo xtask setup` again. Nothing of it was \
         kept.";
    LAYOUT = "KILN-0613", Machine, "the archive is not laid out as git archive does it",
        "A source archive has exactly one folder at its top that holds everything, each name once, and no \
         two names that differ in case alone. Make one with `git archive --format=tar.gz --prefix=source/ \
         REVISION`.";
    UNSAFE = "KILN-0614", Machine, "the archive has a member that could leave its folder",
        "Absolute names, `..`, symlinks that point out of the tree, members below a symlink, hard links, \
         devices and pipes are refused, because unpacking them can write elsewhere. git archive writes none \
         of them from a sound repository; do not trust this file.";
    TOO_BIG = "KILN-0615", Machine, "the archive is larger than a source tree may be",
        "Unpacking stopped at a limit on members, bytes or the length of a name. The pinned source is far \
         below these limits, so this is another archive or one made to fill the disk.";
    OTHER_REVISION = "KILN-0616", Refusal, "the archive is of another revision",
        "git archive records the revision that it packed, and that is not the one pinned in PROVENANCE. Give \
         the archive of the pinned revision, or pin the other one with `cargo xtask pin`.";
    LFS_POINTER = "KILN-0617", Machine, "the archive holds Git LFS pointers",
        "A file in the archive is the pointer that Git LFS leaves in place of the content, so what it should \
         hold is missing. Make the archive from a checkout where `git lfs pull` has run.";
    SUBMODULE = "KILN-0618", Machine, "the archive lacks a submodule",
        "The archive has a .gitmodules file and an empty folder where a submodule belongs: git archive \
         leaves them out. Give a folder with `git submodule update --init` done as `--source`.";
    NOT_EMPTY = "KILN-0619", Internal, "the staging folder is not empty",
        "Sources are unpacked only into a folder of their own. Please report this as a bug.";
}

/// What an archive may hold at most. The pinned source has 1,184 members and 15 MB.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Members, folders included.
    pub entries: u64,
    /// Bytes of all files together, uncompressed.
    pub bytes: u64,
    /// Bytes of one member's whole name.
    pub name: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { entries: 50_000, bytes: 512 << 20, name: 1024 }
    }
}

/// What must stand at the top of the archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootRule {
    /// One folder that holds everything; it is left out of the unpacked names.
    One,
    /// The tree itself, as `git archive` without `--prefix` writes it.
    Bare,
}

/// What was unpacked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    /// The revision that git archive recorded, if it did.
    pub revision: Option<Revision>,
    /// Members, and folders that only other members' names imply.
    pub entries: u64,
    /// Bytes of all files together.
    pub bytes: u64,
}

impl Unpacked {
    /// Checks the recorded revision against the pinned one. An archive without a record passes: the tree hash
    /// decides.
    ///
    /// # Errors
    /// [`OTHER_REVISION`].
    pub fn check_revision(&self, pinned: &Revision) -> Result<()> {
        match &self.revision {
            Some(found) if found != pinned => Err(Error::new(
                &OTHER_REVISION,
                format!("the archive is of revision {found}, PROVENANCE pins {pinned}"),
            )
            .hint("give the archive of the pinned revision with `--source`, or leave `--source` out")),
            _ => Ok(()),
        }
    }
}

/// Unpacks the `.tar.gz` at `archive` into the folder `into`, which is made if it is missing and must be
/// empty.
///
/// All gzip members are read, to the end of the file.
///
/// # Errors
/// One of [`CODES`], naming the member. What was written by then stays in `into`, and only there.
pub fn unpack_archive(archive: &Path, into: &Path, limits: &Limits) -> Result<Unpacked> {
    let mut file = BufReader::with_capacity(64 << 10, fs_err::File::open(archive)?);
    if let Some(found) = other_format(file.fill_buf()?) {
        return Err(Error::new(
            &NOT_AN_ARCHIVE,
            format!("{} is {found}, expected a gzip-compressed tar file", archive.display()),
        )
        .hint("remove it and run `cargo xtask setup` again, or give another file with `--source`"));
    }
    unpack_tar(GzipMembers(Some(GzDecoder::new(file))), into, RootRule::One, limits)
        .map_err(|error| error.context(format!("cannot unpack {}", archive.display())))
}

/// Unpacks a tar stream, as `git archive --format=tar` writes it, into the folder `into`.
///
/// # Errors
/// As [`unpack_archive`].
pub fn unpack_tar(stream: impl Read, into: &Path, root: RootRule, limits: &Limits) -> Result<Unpacked> {
    match fs_err::create_dir(into) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if fs_err::read_dir(into)?.next().is_some() {
                return Err(Error::new(&NOT_EMPTY, format!("{} is not empty", into.display())));
            }
        }
        Err(error) => return Err(error.into()),
    }
    // Headers, padding and metadata come on top of the contents.
    let most = limits.bytes.saturating_add(limits.entries.saturating_mul(4096)).saturating_add(4 << 20);
    let mut stream = Metered { stream, left: most, failure: None };
    let mut unpacker = Unpacker::new(into, root, *limits);
    let members = unpacker.members(&mut tar::Archive::new(&mut stream));
    if let Some(failure) = stream.failure.take() {
        return Err(failure);
    }
    members?;
    stream.finish()?;
    unpacker.finish()
}

/// What a file that is not gzip seems to be.
fn other_format(start: &[u8]) -> Option<&'static str> {
    let text = start.trim_ascii_start();
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text).trim_ascii_start();
    let begins = |with: &[u8]| text.get(..with.len()).is_some_and(|part| part.eq_ignore_ascii_case(with));
    match start {
        [] => Some("empty"),
        [0x1f, 0x8b, ..] => None,
        [b'P', b'K', 3 | 5, ..] => Some("a zip file"),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("an xz file"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("a zstd file"),
        [b'B', b'Z', b'h', ..] => Some("a bzip2 file"),
        _ if start.get(257..262) == Some(b"ustar") => Some("a plain .tar that was never compressed"),
        _ if begins(b"<!doctype html") || begins(b"<html") || begins(b"<?xml") => Some("an HTML page"),
        _ if begins(LFS_START) => Some("a Git LFS pointer, not the content"),
        _ => Some("not a gzip file"),
    }
}

/// All members of a gzip file; unlike flate2's own reader it tells what follows the last one from a cut.
struct GzipMembers<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.0 {
            let read = decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let follows = decoder.get_mut().fill_buf()?;
            let another = match follows.first() {
                None => false,
                Some(0x1f) => true,
                Some(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "trailing bytes")),
            };
            self.0 = self.0.take().filter(|_| another).map(|decoder| GzDecoder::new(decoder.into_inner()));
        }
        Ok(0)
    }
}

/// The uncompressed stream: counts, and turns failures into errors that say which kind of damage it is.
struct Metered<R> {
    stream: R,
    left: u64,
    failure: Option<Error>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match self.stream.read(buffer) {
            Ok(read) => read as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(error) => {
                self.failure = Some(damage(&error));
                return Err(io::ErrorKind::Other.into());
            }
        };
        match self.left.checked_sub(read) {
            Some(left) => self.left = left,
            None => {
                self.failure = Some(too_big("the uncompressed archive is larger than its limit".into()));
                return Err(io::ErrorKind::Other.into());
            }
        }
        Ok(read as usize)
    }
}

impl<R: Read> Metered<R> {
    /// Reads what follows the last member: the second of two blocks of zeros, padding, and nothing else.
    fn finish(mut self) -> Result<()> {
        let mut tail = [0; 4096];
        let mut zeros = 0;
        loop {
            match self.read(&mut tail) {
                Ok(0) if zeros < 512 => {
                    return Err(damaged(
                        "the archive ends without its end-of-archive blocks, so it was cut off",
                    ));
                }
                Ok(0) => return Ok(()),
                Ok(read) if tail[..read].iter().any(|&byte| byte != 0) => {
                    return Err(damaged("the archive has something behind its end"));
                }
                Ok(read) => zeros += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(self.failure.take().unwrap_or_else(|| damage(&error)));
                }
            }
        }
    }
}

fn damage(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged("the compressed file ends too early, so it was cut off"),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            damaged("the compressed file is corrupt, or something follows its end").cause(error)
        }
        _ => damaged("the archive cannot be read").cause(error),
    }
}

fn damaged(what: &str) -> Error {
    Error::new(&DAMAGED, what).hint("remove the file and run `cargo xtask setup` again")
}

/// What is known of a name in the tree.
#[derive(Debug)]
struct Node {
    /// As spelled, without the root folder.
    name: Vec<u8>,
    kind: NodeKind,
}

#[derive(Debug)]
enum NodeKind {
    /// Made because a member stands below it.
    Implied,
    Folder,
    File,
    Symlink(Vec<u8>),
}

struct Unpacker<'a> {
    into: &'a Path,
    rule: RootRule,
    limits: Limits,
    root: Option<Vec<u8>>,
    /// By the name with its case folded.
    nodes: HashMap<Vec<u8>, Node>,
    revision: Option<Revision>,
    entries: u64,
    bytes: u64,
    buffer: Vec<u8>,
}

/// What pax and GNU headers say about the member that follows.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl<'a> Unpacker<'a> {
    fn new(into: &'a Path, rule: RootRule, limits: Limits) -> Self {
        Unpacker {
            into,
            rule,
            limits,
            root: None,
            nodes: HashMap::new(),
            revision: None,
            entries: 0,
            bytes: 0,
            buffer: vec![0; 64 << 10],
        }
    }

    fn members<R: Read>(&mut self, archive: &mut tar::Archive<R>) -> Result<()> {
        let unreadable = |error: io::Error| damaged("the archive has a broken header").cause(error);
        // Raw: headers that describe the next member are interpreted here, with limits on their size.
        let entries = archive.entries().map_err(unreadable)?.raw(true);
        let mut extended = Extended::default();
        for entry in entries {
            let mut entry = entry.map_err(unreadable)?;
            let kind = entry.header().entry_type();
            match kind {
                EntryType::XGlobalHeader => {
                    let records = metadata(&mut entry)?;
                    self.global(&records)?;
                }
                EntryType::XHeader => {
                    let records = metadata(&mut entry)?;
                    local(&records, &mut extended)?;
                }
                EntryType::GNULongName => extended.name = Some(long_name(&mut entry)?),
                EntryType::GNULongLink => extended.link = Some(long_name(&mut entry)?),
                _ => self.member(&mut entry, std::mem::take(&mut extended))?,
            }
        }
        Ok(())
    }

    fn global(&mut self, records: &[u8]) -> Result<()> {
        for (key, value) in pax_records(records)? {
            if matches!(key, b"path" | b"linkpath" | b"size") {
                return Err(layout(format!("a global header sets {} for every member", shown(key))));
            }
            if key != b"comment" {
                continue;
            }
            // Only git writes its revision here; any other comment is none of ours.
            let Some(revision) = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()) else {
                continue;
            };
            match &self.revision {
                Some(first) if *first != revision => {
                    return Err(layout(format!("the archive names two revisions, {first} and {revision}")));
                }
                _ => self.revision = Some(revision),
            }
        }
        Ok(())
    }

    fn member<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>, extended: Extended) -> Result<()> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(too_many(&self.limits));
        }
        let header = entry.header().clone();
        let name = extended.name.unwrap_or_else(|| header.path_bytes().into_owned());
        let kind = header.entry_type();
        let Some(inside) = self.inside(&name, kind)? else { return Ok(()) };
        match kind {
            EntryType::Directory => self.folder(&name, inside),
            EntryType::Regular => {
                self.claim(&name, &inside, NodeKind::File)?;
                self.file(&name, &inside, &header, entry)
            }
            EntryType::Symlink => {
                let target = extended.link.or_else(|| header.link_name_bytes().map(Into::into));
                let target = target.unwrap_or_default();
                self.claim(&name, &inside, NodeKind::Symlink(target))
            }
            other => Err(escape(format!("{} is {}", shown(&name), kind_name(other)))),
        }
    }

    /// The member's name below the root folder; `None` for the root folder itself.
    fn inside(&mut self, name: &[u8], kind: EntryType) -> Result<Option<Vec<u8>>> {
        if name.len() > self.limits.name {
            let start = shown(&name[..self.limits.name.min(64)]);
            return Err(too_big(format!(
                "a member's name has {} bytes, more than {}; it starts {start}",
                name.len(),
                self.limits.name
            )));
        }
        if name.is_empty() || name.contains(&0) {
            return Err(layout(format!("{} is no name for a member", shown(name))));
        }
        if name[0] == b'/' {
            return Err(escape(format!("{} is an absolute name", shown(name))));
        }
        let is_folder = kind == EntryType::Directory;
        if name.ends_with(b"/") && !is_folder {
            return Err(layout(format!("{} ends in a slash and is {}", shown(name), kind_name(kind))));
        }
        let mut parts = Vec::new();
        for part in name.split(|&byte| byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return Err(escape(format!("{} leads upwards with `..`", shown(name)))),
                part if part.len() > 255 => {
                    return Err(too_big(format!("{} has a part of more than 255 bytes", shown(name))));
                }
                part => parts.push(part),
            }
        }
        if parts.is_empty() {
            // `./`: the folder that the archive was made in.
            return if is_folder {
                Ok(None)
            } else {
                Err(layout(format!("{} is no name for a member", shown(name))))
            };
        }
        if self.rule == RootRule::One {
            let root = parts.remove(0);
            if parts.is_empty() && !is_folder {
                return Err(match kind {
                    EntryType::Regular | EntryType::Symlink => layout(format!(
                        "{} stands at the top of the archive, expected one folder that holds everything",
                        shown(name)
                    )),
                    other => escape(format!("{} is {}", shown(name), kind_name(other))),
                });
            }
            match &self.root {
                Some(first) if first != root => {
                    return Err(layout(format!(
                        "the archive has two folders at its top, {} and {}, expected one",
                        shown(first),
                        shown(root)
                    )));
                }
                Some(_) => {}
                None => self.root = Some(root.to_vec()),
            }
        }
        Ok(if parts.is_empty() { None } else { Some(parts.join(&b'/')) })
    }

    fn folder(&mut self, name: &[u8], inside: Vec<u8>) -> Result<()> {
        if let Some(node) = self.nodes.get_mut(&fold(&inside))
            && node.name == inside
            && matches!(node.kind, NodeKind::Implied)
        {
            node.kind = NodeKind::Folder;
            return Ok(());
        }
        self.claim(name, &inside, NodeKind::Folder)?;
        Ok(fs_err::create_dir(self.path(&inside))?)
    }

    /// Takes `inside` for a new member, and makes the folders above it.
    fn claim(&mut self, name: &[u8], inside: &[u8], kind: NodeKind) -> Result<()> {
        let above = inside.iter().enumerate().filter(|&(_, &byte)| byte == b'/').map(|(at, _)| &inside[..at]);
        for folder in above {
            match self.nodes.entry(fold(folder)) {
                Slot::Vacant(slot) => {
                    // They cost an inode each and no byte of the archive.
                    self.entries += 1;
                    if self.entries > self.limits.entries {
                        return Err(too_many(&self.limits));
                    }
                    slot.insert(Node { name: folder.to_vec(), kind: NodeKind::Implied });
                    fs_err::create_dir(self.into.join(OsStr::from_bytes(folder)))?;
                }
                Slot::Occupied(slot) => {
                    let node = slot.get();
                    match node.kind {
                        NodeKind::Symlink(_) => {
                            let link = shown(&node.name);
                            return Err(escape(format!("{} stands below the symlink {link}", shown(name))));
                        }
                        NodeKind::File => {
                            let file = shown(&node.name);
                            return Err(layout(format!("{} stands below the file {file}", shown(name))));
                        }
                        _ if node.name != folder => return Err(folded(&node.name, folder)),
                        _ => {}
                    }
                }
            }
        }
        match self.nodes.entry(fold(inside)) {
            Slot::Vacant(slot) => {
                slot.insert(Node { name: inside.to_vec(), kind });
                Ok(())
            }
            Slot::Occupied(slot) => {
                let node = slot.get();
                Err(match (&node.kind, &kind) {
                    _ if node.name != inside => folded(&node.name, inside),
                    (NodeKind::Symlink(_), NodeKind::Folder) => {
                        escape(format!("{} is a symlink and then a folder", shown(name)))
                    }
                    _ => layout(format!("{} is in the archive twice", shown(name))),
                })
            }
        }
    }

    fn file<R: Read>(
        &mut self,
        name: &[u8],
        inside: &[u8],
        header: &Header,
        contents: &mut tar::Entry<'_, R>,
    ) -> Result<()> {
        let size = contents.size();
        self.bytes = self.bytes.saturating_add(size);
        if self.bytes > self.limits.bytes {
            return Err(too_big(format!(
                "with {} the archive unpacks to more than {} bytes",
                shown(name),
                self.limits.bytes
            )));
        }
        let executable =
            header.mode().map_err(|error| damaged("a member has a broken mode").cause(error))? & 0o100 != 0;
        let path = self.path(inside);
        // The umask of the caller applies on top.
        let mode = if executable { 0o755 } else { 0o644 };
        let mut file = fs_err::OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        let mut written = 0;
        loop {
            let read = match contents.read(&mut self.buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(damage(&error)),
            };
            if read == 0 {
                break;
            }
            if written == 0 && size <= LFS_MOST && self.buffer[..read].starts_with(LFS_START) {
                return Err(Error::new(
                    &LFS_POINTER,
                    format!("{} is a Git LFS pointer, expected the content that it stands for", shown(name)),
                )
                .hint("make the archive from a checkout where `git lfs pull` has run"));
            }
            file.write_all(&self.buffer[..read])?;
            written += read as u64;
        }
        if written != size {
            return Err(damaged(&format!("the archive ends within {}, so it was cut off", shown(name))));
        }
        Ok(())
    }

    fn finish(self) -> Result<Unpacked> {
        if self.entries == 0 {
            return Err(layout("the archive is empty".into()));
        }
        if self.rule == RootRule::One && self.root.is_none() {
            return Err(layout("the archive has no folder at its top".into()));
        }
        // Last, so that no file can be written through one.
        for node in self.nodes.values() {
            if let NodeKind::Symlink(target) = &node.kind {
                self.check_symlink(&node.name, target)?;
            }
        }
        for node in self.nodes.values() {
            if let NodeKind::Symlink(target) = &node.kind {
                fs_err::os::unix::fs::symlink(OsStr::from_bytes(target), self.path(&node.name))?;
            }
        }
        self.check_submodules()?;
        Ok(Unpacked { revision: self.revision, entries: self.entries, bytes: self.bytes })
    }

    /// Follows a symlink through the archive's other symlinks; it may dangle, and may not leave the tree.
    fn check_symlink(&self, link: &[u8], target: &[u8]) -> Result<()> {
        let bad = |why: &str| escape(format!("the symlink {} to {} {why}", shown(link), shown(target)));
        let mut place: Vec<Vec<u8>> = link.split(|&byte| byte == b'/').map(<[u8]>::to_vec).collect();
        place.pop();
        let parts = |target: &[u8]| -> Result<Vec<Vec<u8>>> {
            if target.is_empty() || target.contains(&0) || target.len() > self.limits.name {
                return Err(bad("has no usable target"));
            }
            if target[0] == b'/' {
                return Err(bad("is absolute"));
            }
            Ok(target.split(|&byte| byte == b'/').rev().map(<[u8]>::to_vec).collect())
        };
        // The next part to walk is the last.
        let mut todo = parts(target)?;
        let mut followed = 0;
        while let Some(part) = todo.pop() {
            match part.as_slice() {
                b"" | b"." => {}
                b".." => {
                    if place.pop().is_none() {
                        return Err(bad("leaves the tree"));
                    }
                }
                _ => {
                    place.push(part);
                    let node = self.nodes.get(&fold(&place.join(&b'/')));
                    if let Some(NodeKind::Symlink(next)) = node.map(|node| &node.kind) {
                        followed += 1;
                        if followed > MOST_SYMLINKS {
                            return Err(bad("goes round in circles"));
                        }
                        place.pop();
                        todo.extend(parts(next)?);
                    }
                }
            }
        }
        Ok(())
    }

    fn check_submodules(&self) -> Result<()> {
        let Some(Node { kind: NodeKind::File, name }) = self.nodes.get(&b".gitmodules"[..]) else {
            return Ok(());
        };
        let listed = fs_err::read(self.path(name))?;
        for line in String::from_utf8_lossy(&listed).lines() {
            let Some((key, value)) = line.split_once('=') else { continue };
            let folder = value.trim().trim_matches('"').trim_end_matches('/').as_bytes();
            if key.trim() != "path" || !self.nodes.contains_key(&fold(folder)) {
                continue;
            }
            let path = self.path(folder);
            if path.is_dir() && fs_err::read_dir(&path)?.next().is_none() {
                return Err(Error::new(
                    &SUBMODULE,
                    format!("{} is empty, expected the submodule that .gitmodules lists", shown(folder)),
                )
                .hint("give a checkout with `git submodule update --init` done as `--source`"));
            }
        }
        Ok(())
    }

    fn path(&self, inside: &[u8]) -> PathBuf {
        self.into.join(OsStr::from_bytes(inside))
    }
}

/// The whole content of a header that describes other members.
fn metadata<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>> {
    if entry.size() > MOST_METADATA {
        return Err(too_big(format!("a metadata header has {} bytes", entry.size())));
    }
    let mut bytes = Vec::new();
    let size = entry.size();
    entry.read_to_end(&mut bytes).map_err(|error| damage(&error))?;
    if bytes.len() as u64 != size {
        return Err(damaged("the archive ends within a header, so it was cut off"));
    }
    Ok(bytes)
}

fn long_name<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>> {
    let mut name = metadata(entry)?;
    if name.last() == Some(&0) {
        name.pop();
    }
    Ok(name)
}

fn local(records: &[u8], extended: &mut Extended) -> Result<()> {
    for (key, value) in pax_records(records)? {
        match key {
            b"path" => extended.name = Some(value.to_vec()),
            b"linkpath" => extended.link = Some(value.to_vec()),
            // Readers disagree about which size counts, and nothing near 8 GiB belongs here.
            b"size" => return Err(layout("a member's size is in a pax header".into())),
            key if key.starts_with(b"GNU.sparse.") => {
                return Err(layout("a member is a sparse file".into()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The records `LENGTH KEY=VALUE\n` of a pax header; the tar crate's own reader splits at newlines in values.
fn pax_records(mut rest: &[u8]) -> Result<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !rest.is_empty() {
        let record = (|| {
            let space = rest.iter().take(20).position(|&byte| byte == b' ')?;
            let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
            let record = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|&byte| byte == b'=')?;
            Some((length, (&record[..equals], &record[equals + 1..])))
        })();
        let Some((length, pair)) = record else { return Err(damaged("a pax header is malformed")) };
        records.push(pair);
        rest = &rest[length..];
    }
    Ok(records)
}

/// Equal for names that a case-folding file system takes for the same.
fn fold(name: &[u8]) -> Vec<u8> {
    match std::str::from_utf8(name) {
        // Through upper case, so that letters with one capital and several small forms are equal too.
        Ok(name) if !name.is_ascii() => {
            name.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect::<String>().into()
        }
        _ => name.to_ascii_lowercase(),
    }
}

fn kind_name(kind: EntryType) -> String {
    match kind {
        EntryType::Link => "a hard link".into(),
        EntryType::Char => "a character device".into(),
        EntryType::Block => "a block device".into(),
        EntryType::Fifo => "a pipe".into(),
        EntryType::Regular => "a file".into(),
        EntryType::Symlink => "a symlink".into(),
        EntryType::Directory => "a folder".into(),
        other => format!("of the unknown kind {}", shown(&[other.as_byte()])),
    }
}

/// A name from the archive, quoted, with nothing in it that a terminal would act on.
fn shown(name: &[u8]) -> String {
    format!("{:?}", OsStr::from_bytes(name))
}

fn folded(first: &[u8], second: &[u8]) -> Error {
    layout(format!("{} and {} differ in case alone", shown(first), shown(second)))
}

fn layout(what: String) -> Error {
    Error::new(&LAYOUT, what)
        .hint("make an archive with `git archive --format=tar.gz --prefix=source/ REVISION`")
}

fn escape(what: String) -> Error {
    Error::new(&UNSAFE, what).hint("do not trust this file; remove it and run `cargo xtask setup` again")
}

fn too_many(limits: &Limits) -> Error {
    too_big(format!("the archive has more than {} members", limits.entries))
}

fn too_big(what: String) -> Error {
    Error::new(&TOO_BIG, what).hint("check that this is the archive of the pinned revision")
}

/// Bytes of a pax or GNU header. git's own have a few hundred.
const MOST_METADATA: u64 = 64 << 10;
/// Symlinks followed for one target, as Linux does.
const MOST_SYMLINKS: u32 = 40;
/// Bytes of a Git LFS pointer, by its specification.
const LFS_MOST: u64 = 1024;
const LFS_START: &[u8] = b"version https://git-lfs.github.com/spec/";

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::source::nar::hash_tree;

    /// A folder that stands alone in another, so that writing beside it is seen.
    struct Place {
        root: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Self {
            Place { root: tempfile::tempdir().unwrap() }
        }

        fn staging(&self) -> PathBuf {
            self.root.path().join("work/staging")
        }

        fn fixture(&self, name: &str) -> Result<Unpacked> {
            let archives = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/archives");
            fs_err::create_dir_all(self.root.path().join("work")).unwrap();
            unpack_archive(&archives.join(name), &self.staging(), &Limits::default())
        }

        fn tar(&self, stream: &[u8], root: RootRule, limits: &Limits) -> Result<Unpacked> {
            fs_err::create_dir_all(self.root.path().join("work")).unwrap();
            unpack_tar(stream, &self.staging(), root, limits)
        }

        fn made(&self, members: &[Member<'_>]) -> Result<Unpacked> {
            self.tar(&stream(members), RootRule::One, &Limits::default())
        }

        fn read(&self, name: &str) -> String {
            fs_err::read_to_string(self.staging().join(name)).unwrap()
        }

        fn mode(&self, name: &str) -> u32 {
            fs_err::metadata(self.staging().join(name)).unwrap().permissions().mode() & 0o7777
        }

        /// Everything in the outer folder but the staging folder.
        fn strays(&self) -> Vec<PathBuf> {
            let mut found = Vec::new();
            for folder in [self.root.path().to_owned(), self.root.path().join("work")] {
                for entry in fs_err::read_dir(folder).unwrap() {
                    let path = entry.unwrap().path();
                    if !path.ends_with("work") && !path.ends_with("staging") {
                        found.push(path);
                    }
                }
            }
            found
        }
    }

    enum Member<'a> {
        File(&'a [u8], &'a [u8]),
        Folder(&'a [u8], u32),
        Link(&'a [u8], &'a [u8]),
        Raw(EntryType, &'a [u8]),
    }

    fn stream(members: &[Member<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for member in members {
            let mut header = Header::new_ustar();
            header.set_mtime(1_700_000_000);
            let (kind, name, mode, link, data): (_, _, _, &[u8], &[u8]) = match *member {
                Member::File(name, data) => (EntryType::Regular, name, 0o644, b"", data),
                Member::Folder(name, mode) => (EntryType::Directory, name, mode, b"", b""),
                Member::Link(name, target) => (EntryType::Symlink, name, 0o777, target, b""),
                Member::Raw(kind, data) => (kind, &b"extension"[..], 0o644, b"", data),
            };
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_uid(2000);
            header.set_gid(2000);
            header.set_size(data.len() as u64);
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
            header.set_cksum();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// What the innermost failure says; checks that nothing was written outside.
    #[track_caller]
    fn refused(place: &Place, result: Result<Unpacked>, code: &crate::report::error::Code) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.code().id, code.id, "{error}");
        assert!(error.hint_text().is_some());
        assert_eq!(place.strays(), Vec::<PathBuf>::new());
        error.causes().first().map_or_else(|| error.message().to_owned(), Clone::clone)
    }

    #[test]
    fn c1_other_gzip_bytes_of_the_same_tar_give_the_same_tree() {
        let (first, second) = (Place::new(), Place::new());
        assert_eq!(first.fixture("global.tgz").unwrap(), second.fixture("regz.tgz").unwrap());
        assert_eq!(hash_tree(&first.staging()).unwrap(), hash_tree(&second.staging()).unwrap());
    }

    #[test]
    fn c2_the_recorded_revision_must_be_the_pinned_one() {
        let unpacked = Place::new().fixture("global.tgz").unwrap();
        let revision = |digit: &str| digit.repeat(40).parse::<Revision>().unwrap();
        assert_eq!(unpacked.revision, Some(revision("a")));
        unpacked.check_revision(&revision("a")).unwrap();
        let error = unpacked.check_revision(&revision("b")).unwrap_err();
        assert_eq!(error.exit(), crate::report::error::Exit::Refusal);
        assert_eq!(
            error.to_string(),
            "the archive is of revision aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, \
             PROVENANCE pins bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
        );
        let silent = Unpacked { revision: None, ..unpacked };
        silent.check_revision(&revision("b")).unwrap();
    }

    #[test]
    fn c2_two_different_recorded_revisions_are_refused_and_other_comments_ignored() {
        let comment = |value: &str| format!("{} comment={value}\n", value.len() + 12).into_bytes();
        let (a, b) = (comment(&"a".repeat(40)), comment(&"b".repeat(40)));
        let global = EntryType::XGlobalHeader;
        let place = Place::new();
        let result = place.made(&[Member::Raw(global, &a), Member::Raw(global, &b)]);
        assert!(refused(&place, result, &LAYOUT).starts_with("the archive names two revisions, aaaa"));
        let other = comment("made by hand, on a Monday, with great care, a");
        let unpacked = Place::new().made(&[Member::Raw(global, &other), Member::File(b"r/f", b"x")]).unwrap();
        assert_eq!(unpacked.revision, None);
    }

    #[test]
    fn c3_a_global_pax_header_is_no_member() {
        let place = Place::new();
        let unpacked = place.fixture("global.tgz").unwrap();
        assert_eq!((unpacked.entries, unpacked.bytes), (2, 1));
        let names: Vec<_> =
            fs_err::read_dir(place.staging()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["f"]);
        assert_eq!(place.read("f"), "x");
    }

    #[test]
    fn c4_a_member_below_a_symlink_is_refused() {
        let place = Place::new();
        let result = place.fixture("symthrough.tgz");
        assert_eq!(refused(&place, result, &UNSAFE), r#""r/d/evil" stands below the symlink "d""#);
        let place = Place::new();
        let result = place.made(&[
            Member::Link(b"r/a", b"."),
            Member::File(b"r/a/x", b"evil"),
            Member::Folder(b"r", 0o755),
        ]);
        assert_eq!(refused(&place, result, &UNSAFE), r#""r/a/x" stands below the symlink "a""#);
    }

    #[test]
    fn c4_symlinks_that_leave_the_tree_are_refused_however_they_are_spelled() {
        let cases: &[(&[(&str, &str)], &str)] = &[
            (&[("a", "../x")], r#"the symlink "a" to "../x" leaves the tree"#),
            (&[("d/a", "../../x")], r#"the symlink "d/a" to "../../x" leaves the tree"#),
            (&[("a", "/etc/passwd")], r#"the symlink "a" to "/etc/passwd" is absolute"#),
            (&[("a", "")], r#"the symlink "a" to "" has no usable target"#),
            (&[("a", "b/../../x")], r#"the symlink "a" to "b/../../x" leaves the tree"#),
            // By its letters it stays inside; through the first link it does not.
            (
                &[("d/e/l", "../.."), ("m", "d/e/l/../x")],
                r#"the symlink "m" to "d/e/l/../x" leaves the tree"#,
            ),
            (&[("a", "."), ("m", "a/a/a/../x")], r#"the symlink "m" to "a/a/a/../x" leaves the tree"#),
            (&[("a", "a")], r#"the symlink "a" to "a" goes round in circles"#),
        ];
        for (links, expected) in cases {
            let place = Place::new();
            let names: Vec<_> =
                links.iter().map(|(name, target)| (format!("r/{name}"), target.as_bytes())).collect();
            let members: Vec<_> =
                names.iter().map(|(name, target)| Member::Link(name.as_bytes(), target)).collect();
            assert_eq!(refused(&place, place.made(&members), &UNSAFE), *expected);
            assert!(!place.staging().join("a").is_symlink());
        }
    }

    #[test]
    fn symlinks_inside_the_tree_are_kept() {
        let place = Place::new();
        place
            .made(&[
                Member::Link(b"r/first", b"d/second"),
                Member::Link(b"r/d/second", b"../f"),
                Member::Link(b"r/dangling", b"nowhere"),
                Member::File(b"r/f", b"x"),
            ])
            .unwrap();
        assert_eq!(place.read("first"), "x");
        assert_eq!(fs_err::read_link(place.staging().join("dangling")).unwrap(), Path::new("nowhere"));
    }

    #[test]
    fn c5_a_folder_over_a_symlink_changes_no_foreign_permissions() {
        let place = Place::new();
        let outside = place.root.path().join("outside");
        fs_err::create_dir(&outside).unwrap();
        fs_err::set_permissions(&outside, std::fs::Permissions::from_mode(0o700)).unwrap();
        let error = place.fixture("symdir_chmod.tgz").unwrap_err();
        assert_eq!(error.causes(), [r#""r/d/" is a symlink and then a folder"#]);
        assert_eq!(fs_err::metadata(&outside).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn c6_absolute_names_dots_links_and_special_files_are_refused_by_name() {
        for (fixture, code, expected) in [
            ("abs.tgz", &UNSAFE, r#""/kiln-abs-evil" is an absolute name"#),
            ("dotdot.tgz", &UNSAFE, r#""r/../../evil" leads upwards with `..`"#),
            ("hard.tgz", &UNSAFE, r#""r/h" is a hard link"#),
            ("fifo.tgz", &UNSAFE, r#""r/p" is a pipe"#),
            ("dup.tgz", &LAYOUT, r#""r/f" is in the archive twice"#),
        ] {
            let place = Place::new();
            assert_eq!(refused(&place, place.fixture(fixture), code), expected);
        }
        assert!(!Path::new("/kiln-abs-evil").exists());
    }

    #[test]
    fn c6_names_from_pax_and_gnu_headers_obey_the_same_rules() {
        for (kind, data) in [
            (EntryType::XHeader, &b"21 path=r/../../evil\n"[..]),
            (EntryType::GNULongName, b"r/../../evil\0"),
        ] {
            let place = Place::new();
            let result = place.made(&[Member::Raw(kind, data), Member::File(b"r/f", b"x")]);
            assert_eq!(refused(&place, result, &UNSAFE), r#""r/../../evil" leads upwards with `..`"#);
        }
        let place = Place::new();
        let result =
            place.made(&[Member::Raw(EntryType::XHeader, b"8 size=1\n"), Member::File(b"r/f", b"x")]);
        assert_eq!(refused(&place, result, &DAMAGED), "a pax header is malformed");
        let place = Place::new();
        let result =
            place.made(&[Member::Raw(EntryType::XHeader, b"9 size=1\n"), Member::File(b"r/f", b"x")]);
        assert_eq!(refused(&place, result, &LAYOUT), "a member's size is in a pax header");
    }

    #[test]
    fn long_names_are_taken_from_pax_and_gnu_headers() {
        let long = format!("r/{}/f", "d".repeat(200));
        let pax = format!("{} path={long}\n", long.len() + 10);
        for (kind, data) in [(EntryType::XHeader, pax), (EntryType::GNULongName, format!("{long}\0"))] {
            let place = Place::new();
            place.made(&[Member::Raw(kind, data.as_bytes()), Member::File(b"r/short", b"x")]).unwrap();
            assert_eq!(place.read(&long[2..]), "x");
        }
    }

    #[test]
    fn c7_truncation_and_trailing_garbage_are_refused() {
        let place = Place::new();
        let result = place.fixture("trunc.tgz");
        assert_eq!(
            refused(&place, result, &DAMAGED),
            "the compressed file ends too early, so it was cut off"
        );
        let place = Place::new();
        let result = place.fixture("trail.tgz");
        assert_eq!(
            refused(&place, result, &DAMAGED),
            "the compressed file is corrupt, or something follows its end"
        );
    }

    #[test]
    fn c7_every_way_of_cutting_a_tar_stream_is_refused() {
        let whole = stream(&[Member::Folder(b"r/", 0o755), Member::File(b"r/f", &[7; 700])]);
        Place::new().tar(&whole, RootRule::One, &Limits::default()).unwrap();
        for length in (0..whole.len()).step_by(64) {
            let place = Place::new();
            let error = place.tar(&whole[..length], RootRule::One, &Limits::default()).unwrap_err();
            assert_eq!(error.code().id, DAMAGED.id, "{length}: {error}");
            match length {
                1088..1724 => assert!(error.message().starts_with(r#"the archive ends within "r/f""#)),
                2048 | 2560.. => assert!(error.message().starts_with("the archive ends without its end")),
                _ => {}
            }
        }
        for extra in [&b"x"[..], &[0, 0, 1]] {
            let place = Place::new();
            let longer = [&whole, extra].concat();
            let result = place.tar(&longer, RootRule::One, &Limits::default());
            assert_eq!(refused(&place, result, &DAMAGED), "the archive has something behind its end");
        }
        // Padding up to a record of 20 blocks is normal.
        let padded = [&whole[..], &[0; 10240]].concat();
        Place::new().tar(&padded, RootRule::One, &Limits::default()).unwrap();
    }

    #[test]
    fn c7_every_way_of_cutting_a_gzip_file_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let archive = root.path().join("a.tgz");
        let whole = gzip(&stream(&[Member::Folder(b"r/", 0o755), Member::File(b"r/f", &[7; 700])]));
        for length in 2..whole.len() {
            fs_err::write(&archive, &whole[..length]).unwrap();
            let into = root.path().join(format!("{length}"));
            let error = unpack_archive(&archive, &into, &Limits::default()).unwrap_err();
            assert_eq!(error.code().id, DAMAGED.id, "{length}: {error}");
        }
    }

    #[test]
    fn c13_names_that_differ_in_case_alone_are_refused() {
        let place = Place::new();
        let result = place.fixture("casefold.tgz");
        assert_eq!(refused(&place, result, &LAYOUT), r#""README" and "Readme" differ in case alone"#);
        for (first, second) in [
            (Member::Folder(b"r/Dir", 0o755), Member::File(b"r/dir", b"")),
            (Member::File(b"r/Dir/a", b""), Member::File(b"r/dir/b", b"")),
            (Member::File("r/\u{c9}".as_bytes(), b""), Member::File("r/\u{e9}".as_bytes(), b"")),
            (Member::File("r/\u{17f}".as_bytes(), b""), Member::File(b"r/s", b"")),
        ] {
            let place = Place::new();
            let said = refused(&place, place.made(&[first, second]), &LAYOUT);
            assert!(said.ends_with("differ in case alone"), "{said}");
        }
    }

    #[test]
    fn c14_names_that_are_not_utf8_are_unpacked_and_shown_escaped() {
        let place = Place::new();
        place.made(&[Member::File(b"r/zo\xe8.rs", b"x")]).unwrap();
        assert!(place.staging().join(OsStr::from_bytes(b"zo\xe8.rs")).is_file());
        let place = Place::new();
        let result =
            place.made(&[Member::File(b"r/zo\xe8\x1b[2J", b"x"), Member::File(b"r/zo\xe8\x1b[2J", b"x")]);
        assert_eq!(refused(&place, result, &LAYOUT), r#""r/zo\xE8\u{1b}[2J" is in the archive twice"#);
    }

    #[test]
    fn c15_dangerous_modes_and_owners_are_dropped_and_the_executable_bit_kept() {
        let place = Place::new();
        place.fixture("setuid.tgz").unwrap();
        assert_eq!(place.mode("s") & 0o7022, 0);
        assert_eq!(place.mode("s") & 0o700, 0o700);
        assert_eq!(place.mode("w") & 0o7133, 0);

        let place = Place::new();
        fs_err::create_dir_all(place.staging()).unwrap();
        fs_err::set_permissions(place.staging(), std::fs::Permissions::from_mode(0o710)).unwrap();
        place
            .made(&[
                Member::Folder(b"./", 0o777),
                Member::Folder(b"./r/", 0o777),
                Member::File(b"./r/f", b""),
            ])
            .unwrap();
        assert_eq!(place.mode(""), 0o710);
        let owner = fs_err::metadata(place.root.path()).unwrap().uid();
        assert_eq!(fs_err::metadata(place.staging().join("f")).unwrap().uid(), owner);
    }

    #[test]
    fn c15_modes_are_safe_under_every_umask() {
        // The umask belongs to the process, so another one runs the test above.
        let name = "source::archive::tests::c15_dangerous_modes_and_owners_are_dropped_and_the_executable_bit_kept";
        for umask in ["000", "027", "077"] {
            let output = std::process::Command::new("sh")
                .args(["-c", r#"umask "$1" && exec "$2" --exact "$3""#, "sh", umask])
                .arg(std::env::current_exe().unwrap())
                .arg(name)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "umask {umask}: {said}");
        }
    }

    #[test]
    fn c16_a_git_lfs_pointer_is_named() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
        let place = Place::new();
        let result = place.made(&[Member::File(b"r/weights.bin", pointer)]);
        assert_eq!(
            refused(&place, result, &LFS_POINTER),
            r#""r/weights.bin" is a Git LFS pointer, expected the content that it stands for"#
        );
    }

    #[test]
    fn c16_an_empty_submodule_folder_is_named() {
        let modules = b"[submodule \"x\"]\n\tpath = third/x\n\turl = https://example.org/x\n";
        let list = || Member::File(b"r/.gitmodules", modules);
        let place = Place::new();
        let result = place.made(&[list(), Member::Folder(b"r/third/x/", 0o755)]);
        assert_eq!(
            refused(&place, result, &SUBMODULE),
            r#""third/x" is empty, expected the submodule that .gitmodules lists"#
        );
        Place::new().made(&[list(), Member::File(b"r/third/x/f", b"")]).unwrap();
    }

    #[test]
    fn c17_an_unexpected_top_level_is_refused_by_name() {
        for (fixture, code, expected) in [
            (
                "flat.tgz",
                &LAYOUT,
                r#""Cargo.toml" stands at the top of the archive, expected one folder that holds everything"#,
            ),
            ("noroot.tgz", &LAYOUT, r#"the archive has two folders at its top, "a" and "b", expected one"#),
            ("empty.tgz", &LAYOUT, "the archive is empty"),
        ] {
            let place = Place::new();
            assert_eq!(refused(&place, place.fixture(fixture), code), expected);
        }
    }

    #[test]
    fn c17_files_that_are_no_gzip_are_named() {
        for (fixture, expected) in
            [("plain.tar", "a plain .tar that was never compressed"), ("html.tgz", "an HTML page")]
        {
            let place = Place::new();
            let error = place.fixture(fixture).unwrap_err();
            assert_eq!(error.code().id, NOT_AN_ARCHIVE.id);
            let said = error.message();
            assert!(said.ends_with(&format!("{fixture} is {expected}, expected a gzip-compressed tar file")));
        }
        assert_eq!(other_format(b""), Some("empty"));
        assert_eq!(other_format(b"\xef\xbb\xbf\n <HTML>"), Some("an HTML page"));
        assert_eq!(other_format(b"PK\x03\x04"), Some("a zip file"));
        assert_eq!(other_format(b"hello"), Some("not a gzip file"));
        assert_eq!(other_format(b"\x1f\x8b\x08"), None);
    }

    #[test]
    fn c17_all_gzip_members_are_read() {
        let place = Place::new();
        let unpacked = place.fixture("twomember.tgz").unwrap();
        assert_eq!(unpacked, Place::new().fixture("global.tgz").unwrap());
        assert_eq!(place.read("f"), "x");
    }

    #[test]
    fn c17_a_bare_tree_is_taken_where_it_is_expected() {
        let place = Place::new();
        let bare = stream(&[Member::File(b"Cargo.toml", b"x"), Member::File(b"src/lib.rs", b"y")]);
        place.tar(&bare, RootRule::Bare, &Limits::default()).unwrap();
        assert_eq!((place.read("Cargo.toml"), place.read("src/lib.rs")), ("x".into(), "y".into()));
    }

    #[test]
    fn c18_unpacked_files_are_as_new_as_now() {
        let place = Place::new();
        place.fixture("global.tgz").unwrap();
        let modified = fs_err::metadata(place.staging().join("f")).unwrap().modified().unwrap();
        assert!(modified > SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_001));
    }

    #[test]
    fn c19_a_marker_of_ours_in_the_archive_stays_inside_the_tree() {
        let place = Place::new();
        place
            .made(&[Member::File(b"r/.kiln-complete", b"forged"), Member::File(b"r/installed.json", b"{}")])
            .unwrap();
        assert_eq!(place.strays(), Vec::<PathBuf>::new());
        assert_eq!(place.read(".kiln-complete"), "forged");
        let place = Place::new();
        let result = place.made(&[Member::Link(b"r/.kiln-complete", b"../.kiln-complete")]);
        refused(&place, result, &UNSAFE);
    }

    #[test]
    fn c19_an_expansion_bomb_is_stopped_before_it_is_unpacked() {
        let mut header = Header::new_ustar();
        header.set_size(4 << 30);
        header.set_mode(0o644);
        header.as_old_mut().name[..3].copy_from_slice(b"r/f");
        header.set_cksum();
        let place = Place::new();
        fs_err::create_dir_all(place.root.path().join("work")).unwrap();
        let bomb = Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(0));
        let result = unpack_tar(bomb, &place.staging(), RootRule::One, &Limits::default());
        assert_eq!(
            refused(&place, result, &TOO_BIG),
            r#"with "r/f" the archive unpacks to more than 536870912 bytes"#
        );
        assert!(!place.staging().join("f").exists());
    }

    #[test]
    fn c19_limits_hold_for_members_names_and_endless_padding() {
        let limits = Limits { entries: 3, bytes: 10, name: 20 };
        let place = Place::new();
        let many: Vec<_> = [&b"r/a"[..], b"r/b", b"r/c", b"r/d"].map(|name| Member::File(name, b"")).into();
        let result = place.tar(&stream(&many), RootRule::One, &limits);
        assert_eq!(refused(&place, result, &TOO_BIG), "the archive has more than 3 members");
        let place = Place::new();
        let deep = stream(&[Member::File(b"r/a/b/c/d", b"")]);
        let result = place.tar(&deep, RootRule::One, &limits);
        assert_eq!(refused(&place, result, &TOO_BIG), "the archive has more than 3 members");
        let place = Place::new();
        let long = stream(&[Member::File(b"r/aaaaaaaaaaaaaaaaaaaaaaaa", b"")]);
        let result = place.tar(&long, RootRule::One, &limits);
        assert_eq!(
            refused(&place, result, &TOO_BIG),
            r#"a member's name has 26 bytes, more than 20; it starts "r/aaaaaaaaaaaaaaaaaa""#
        );
        let place = Place::new();
        fs_err::create_dir_all(place.root.path().join("work")).unwrap();
        let endless = Cursor::new(stream(&[Member::File(b"r/a", b"")])).chain(io::repeat(0));
        let result = unpack_tar(endless, &place.staging(), RootRule::One, &limits);
        assert_eq!(refused(&place, result, &TOO_BIG), "the uncompressed archive is larger than its limit");
    }

    #[test]
    fn a_staging_folder_with_something_in_it_is_not_used() {
        let place = Place::new();
        fs_err::create_dir_all(place.staging().join("old")).unwrap();
        assert_eq!(place.fixture("global.tgz").unwrap_err().code().id, NOT_EMPTY.id);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

        #[test]
        fn damaged_headers_never_panic_or_write_outside(
            changes in proptest::collection::vec((0usize..2048, proptest::num::u8::ANY), 1..6),
        ) {
            let mut bytes = stream(&[
                Member::Raw(EntryType::XHeader, b"15 path=r/long\n"),
                Member::File(b"r/f", b"contents"),
                Member::Link(b"r/l", b"f"),
            ]);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            for start in [0, 1024, 2048] {
                let mut header = Header::new_old();
                header.as_mut_bytes().copy_from_slice(&bytes[start..start + 512]);
                header.set_cksum();
                bytes[start..start + 512].copy_from_slice(header.as_bytes());
            }
            let place = Place::new();
            let _ = place.tar(&bytes, RootRule::One, &Limits::default());
            proptest::prop_assert_eq!(place.strays(), Vec::<PathBuf>::new());
        }
    }
}
