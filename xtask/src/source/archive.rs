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

mod headers;
mod stream;

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

use self::headers::{Extended, local, long_name, metadata, pax_records};
use self::stream::{GzipMembers, Metered, damage, damaged, other_format};

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
mod tests;
