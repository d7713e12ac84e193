//! PROVENANCE, the one pin file, as strict types; and the carried patches that it lists.
//!
//! Reading alone: what changes the file (`cargo xtask pin`, the `--bless` verbs) is not here, and neither is what
//! the pinned inputs are compared with.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer};
use toml::Spanned;

use crate::codes;
use crate::error::{Error, Result};
use crate::hash::{Revision, Sha256, TreeHash};
use crate::toml_context::excerpt;

codes! {
    PIN_MISSING = "KILN-0201", Machine, "PROVENANCE is missing",
        "PROVENANCE, at the root of the workspace, says which inputs a build uses, each by its hash. Without it \
         nothing can be fetched, built or checked. It is part of the repository: restore it with \
         `git checkout -- PROVENANCE`.";
    PIN_NOT_TEXT = "KILN-0202", Machine, "PROVENANCE is not UTF-8 text",
        "PROVENANCE is a TOML file, and TOML is UTF-8. An editor saved it in another encoding, or it was damaged. \
         Restore it with `git checkout -- PROVENANCE`.";
    PIN_INVALID = "KILN-0203", Machine, "PROVENANCE is not valid",
        "PROVENANCE is read strictly: a key that kiln does not know, a value of the wrong type, a hash that is no \
         hash or a path that leaves the source tree is an error, shown with its line. A misspelt key must never \
         silently unpin an input. Compare with `git diff PROVENANCE`.";
    PATCH_MISSING = "KILN-0204", Machine, "a carried patch is missing",
        "PROVENANCE lists a patch that is not in backend-patches/. The backend would be another one without it. \
         Restore the file from the repository.";
    PATCH_CHANGED = "KILN-0205", Refusal, "a carried patch is not the recorded one",
        "PROVENANCE records the sha256 of every carried patch over its bytes. The file has another hash, so the \
         backend built with it would not be the pinned one. Usual causes: the patch was edited on purpose (record \
         it with `cargo xtask pin`), or git converted its line endings on checkout (`core.autocrlf`; the \
         repository's .gitattributes turns that off for patches).";
    PATCH_STRAY = "KILN-0206", Refusal, "a patch is not listed in PROVENANCE",
        "Every *.patch file in backend-patches/ must have a [[patch]] entry in PROVENANCE, so that no patch is \
         forgotten without a word. Record it with `cargo xtask pin`, or remove the file.";
}

/// The pin file's name, at the root of the workspace.
pub const FILE_NAME: &str = "PROVENANCE";

/// The folder of the carried patches, at the root of the workspace.
pub const PATCH_FOLDER: &str = "backend-patches";

/// Everything that PROVENANCE pins.
#[derive(Clone, Debug, PartialEq)]
pub struct Pin {
    /// The upstream source: `[source]`.
    pub source: Source,
    /// The carried patches in the order in which they apply: `[[patch]]`.
    pub patches: Vec<Patch>,
    /// The Rust toolchain: `[toolchain]`.
    pub toolchain: Toolchain,
    /// The LLVM majors: `[llvm]`.
    pub llvm: Llvm,
    /// The kernels and their verified outputs: `[kernels]`.
    pub kernels: Kernels,
}

/// `[source]`: which upstream tree the backend and the device crates come from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Source {
    /// Where the revision can be fetched.
    pub repository: Repository,
    /// The commit.
    pub revision: Revision,
    /// The NAR hash of the whole tree of the revision, unpatched.
    pub tree: TreeHash,
    /// The sha256 of the archive as it was downloaded; the tree's hash decides, archives may be repacked.
    pub archive_sha256: Option<Sha256>,
    /// The folder of the tree that holds upstream's workspace; absent: the tree itself. Patches apply there, and
    /// the three paths below start there.
    pub subfolder: Option<TreePath>,
    /// The crate of the rustc codegen backend.
    pub backend: TreePath,
    /// The crate of the cargo subcommand.
    pub cargo_oxide: TreePath,
    /// The lock file that the build uses, with `--locked`.
    pub lock: TreePath,
    /// The sha256 of that lock file in the patched tree.
    pub lock_sha256: Sha256,
}

/// One `[[patch]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Patch {
    /// The file in `backend-patches/`.
    pub file: PatchName,
    /// The sha256 of its bytes.
    pub sha256: Sha256,
    /// Why it is carried.
    pub reason: String,
    /// Where upstream discusses or has merged it.
    pub upstream: Option<String>,
}

/// `[toolchain]`: the Rust release that builds the backend and everything else.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Toolchain {
    /// The exact release.
    pub channel: Channel,
    /// The release's commit, as `rustc -vV` says it.
    pub commit_hash: Revision,
    /// The components that the backend's build needs.
    pub components: Vec<String>,
    /// The components that are used when they are there.
    #[serde(default)]
    pub optional_components: Vec<String>,
}

/// `[llvm]`: which majors of `llc` may lower the kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct Llvm {
    /// The major to choose when there are several.
    pub preferred: LlvmMajor,
    /// The majors whose output is verified; holds [`Llvm::preferred`], no duplicates.
    pub verified: Vec<LlvmMajor>,
}

/// `[kernels]`: how the kernels are compiled, and what must come out.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Kernels {
    /// Whether `a * b + c` may become one fused operation. Off, so that host and device give the same bits.
    pub contraction: bool,
    /// The hash of the kernels' sources for which the digests below hold.
    pub source_sha256: Option<Sha256>,
    /// By architecture and LLVM major: the digest of every entry, by the entry's name.
    #[serde(default)]
    pub ptx: BTreeMap<ArchName, BTreeMap<LlvmTable, BTreeMap<String, Sha256>>>,
}

/// A carried patch whose bytes are the recorded ones.
#[derive(Clone, Debug, PartialEq)]
pub struct PinnedPatch {
    /// Its file name.
    pub file: PatchName,
    /// Its content, byte for byte.
    pub bytes: Vec<u8>,
    /// The sha256 of `bytes`.
    pub sha256: Sha256,
    /// Why it is carried.
    pub reason: String,
    /// Where upstream discusses or has merged it.
    pub upstream: Option<String>,
}

/// An upstream repository's address: `https://`, or `http://` on this machine; no trailing slash, no credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository(String);

/// A path inside the source tree: relative, `/` between its parts, never leaving the tree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TreePath(String);

/// A patch's file name: one path component that ends in `.patch`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PatchName(String);

/// An exact Rust release: `1.95.0` or `nightly-2026-04-03`, never a moving name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel(String);

/// A major version of LLVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LlvmMajor(u16);

/// A GPU architecture as a key: `sm_`, digits, and at most one of `a` and `f`. Whether it exists is not checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArchName(String);

/// The key `llvm-<major>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LlvmTable(pub LlvmMajor);

impl Pin {
    /// Reads PROVENANCE at `workspace_root`.
    ///
    /// # Errors
    /// It is missing, unreadable, not UTF-8 or not valid ([`PIN_MISSING`], [`PIN_NOT_TEXT`], [`PIN_INVALID`]).
    pub fn load(workspace_root: &Path) -> Result<Self> {
        let path = workspace_root.join(FILE_NAME);
        let bytes = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::new(&PIN_MISSING, format!("there is no {}", path.display()))
                    .hint("restore it with `git checkout -- PROVENANCE`"));
            }
            Err(error) => return Err(error.into()),
        };
        let text = str::from_utf8(&bytes).map_err(|error| {
            Error::new(
                &PIN_NOT_TEXT,
                format!("{} is not UTF-8 text: wrong byte at offset {}", path.display(), error.valid_up_to()),
            )
            .hint("restore it with `git checkout -- PROVENANCE`, or save it as UTF-8")
        })?;
        Self::parse(&path, text)
    }

    /// Parses `text`, the content of the pin file `path`; a byte order mark is allowed.
    ///
    /// # Errors
    /// [`PIN_INVALID`], with the place.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let invalid = |span: Range<usize>, message: &str| {
            Error::new(&PIN_INVALID, excerpt(path, text, span, message))
                .hint("`git diff PROVENANCE` shows what changed; docs/reference describes every key")
        };
        let raw: RawPin = toml::from_str(text)
            .map_err(|error| invalid(error.span().unwrap_or_default(), error.message().trim_end()))?;
        raw.check().map_err(|(span, message)| invalid(span, &message))
    }

    /// Reads the carried patches in `folder` and compares them with their recorded hashes, in order.
    ///
    /// # Errors
    /// A patch is missing ([`PATCH_MISSING`]), altered ([`PATCH_CHANGED`]) or not listed ([`PATCH_STRAY`]).
    pub fn check_patches(&self, folder: &Path) -> Result<Vec<PinnedPatch>> {
        let patches = self.patches.iter().map(|patch| patch.read(folder)).collect::<Result<_>>()?;
        self.refuse_strays(folder)?;
        Ok(patches)
    }

    fn refuse_strays(&self, folder: &Path) -> Result<()> {
        let entries = match fs_err::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let mut strays = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let is_patch = Path::new(&name).extension().is_some_and(|end| end.eq_ignore_ascii_case("patch"));
            if is_patch && !self.patches.iter().any(|patch| name == patch.file.as_str()) {
                strays.push(folder.join(name).display().to_string());
            }
        }
        if strays.is_empty() {
            return Ok(());
        }
        strays.sort();
        let message = format!("not listed in {FILE_NAME}: {}", strays.join(", "));
        Err(Error::new(&PATCH_STRAY, message).hint("record it with `cargo xtask pin`, or remove it"))
    }
}

impl Source {
    /// The folder of upstream's workspace in the tree that was unpacked at `tree`.
    pub fn workspace(&self, tree: &Path) -> PathBuf {
        self.subfolder.as_ref().map_or_else(|| tree.to_owned(), |subfolder| subfolder.under(tree))
    }
}

impl Patch {
    fn read(&self, folder: &Path) -> Result<PinnedPatch> {
        let path = folder.join(self.file.as_str());
        let shown = path.display();
        let restore = format!("restore it with `rm -f {shown}` and `git checkout -- {shown}`");
        let bytes = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let message = format!("the patch {shown} is listed in {FILE_NAME} and is not there");
                return Err(Error::new(&PATCH_MISSING, message).hint(restore));
            }
            Err(error) if path.is_dir() => {
                let message = format!("the patch {shown} is a folder, expected a file");
                return Err(Error::new(&PATCH_MISSING, message).cause(error).hint(restore));
            }
            Err(error) => return Err(error.into()),
        };
        let found = Sha256::of(&bytes);
        if found != self.sha256 {
            let why = if self.differs_in_line_endings_alone(&bytes) {
                "changed on checkout (autocrlf?): only its line endings differ"
            } else {
                "is not the recorded one"
            };
            let message = format!(
                "the patch {shown} {why}\n  recorded: sha256 {}\n  found:    sha256 {found}",
                self.sha256
            );
            return Err(Error::new(&PATCH_CHANGED, message)
                .hint(format!("{restore}, or, if the change is meant, record it with `cargo xtask pin`")));
        }
        Ok(PinnedPatch {
            file: self.file.clone(),
            bytes,
            sha256: found,
            reason: self.reason.clone(),
            upstream: self.upstream.clone(),
        })
    }

    fn differs_in_line_endings_alone(&self, bytes: &[u8]) -> bool {
        let lf = with_lf(bytes);
        Sha256::of(&lf) == self.sha256 || Sha256::of(&with_crlf(&lf)) == self.sha256
    }
}

fn with_lf(bytes: &[u8]) -> Vec<u8> {
    let next = bytes.iter().skip(1).map(Some).chain([None]);
    let kept = bytes.iter().zip(next).filter(|(byte, next)| !(**byte == b'\r' && *next == Some(&b'\n')));
    kept.map(|(byte, _)| *byte).collect()
}

fn with_crlf(lf: &[u8]) -> Vec<u8> {
    lf.iter()
        .flat_map(|byte| if *byte == b'\n' { &b"\r\n"[..] } else { std::slice::from_ref(byte) })
        .copied()
        .collect()
}

/// The file as it is written: what the types alone cannot say is checked afterwards, so places are kept.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawPin {
    source: Source,
    #[serde(default)]
    patch: Vec<RawPatch>,
    toolchain: Toolchain,
    llvm: RawLlvm,
    kernels: Kernels,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawPatch {
    file: Spanned<PatchName>,
    sha256: Sha256,
    reason: Spanned<String>,
    upstream: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawLlvm {
    preferred: Spanned<LlvmMajor>,
    verified: Spanned<Vec<Spanned<LlvmMajor>>>,
}

impl RawPin {
    fn check(self) -> Result<Pin, (Range<usize>, String)> {
        let mut patches: Vec<Patch> = Vec::new();
        for patch in self.patch {
            let RawPatch { file, sha256, reason, upstream } = patch;
            let span = file.span();
            let file = file.into_inner();
            if patches.iter().any(|earlier| earlier.file == file) {
                return Err((span, format!("the patch {file} is listed twice")));
            }
            if reason.get_ref().trim().is_empty() {
                return Err((reason.span(), "a patch needs a reason".to_owned()));
            }
            patches.push(Patch { file, sha256, reason: reason.into_inner(), upstream });
        }

        let mut verified = Vec::new();
        let all = self.llvm.verified.span();
        for major in self.llvm.verified.into_inner() {
            if verified.contains(major.get_ref()) {
                return Err((major.span(), format!("LLVM {} is listed twice", major.get_ref())));
            }
            verified.push(major.into_inner());
        }
        if verified.is_empty() {
            return Err((all, "no LLVM major is verified, expected at least the preferred one".to_owned()));
        }
        let preferred = *self.llvm.preferred.get_ref();
        if !verified.contains(&preferred) {
            let listed = verified.iter().map(LlvmMajor::to_string).collect::<Vec<_>>().join(", ");
            let message = format!("the preferred LLVM {preferred} is not among the verified ones ({listed})");
            return Err((self.llvm.preferred.span(), message));
        }

        Ok(Pin {
            source: self.source,
            patches,
            toolchain: self.toolchain,
            llvm: Llvm { preferred, verified },
            kernels: self.kernels,
        })
    }
}

impl TreePath {
    /// This path below `tree`.
    pub fn under(&self, tree: &Path) -> PathBuf {
        tree.join(&self.0)
    }
}

impl LlvmMajor {
    /// The major version `number`; LLVM's majors begin at 1.
    pub fn new(number: u16) -> Option<Self> {
        (1..=999).contains(&number).then_some(LlvmMajor(number))
    }

    /// The number.
    pub fn number(self) -> u16 {
        self.0
    }
}

impl FromStr for Repository {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let local = ["http://127.0.0.1", "http://[::1]", "http://localhost"];
        let rest = text.strip_prefix("https://").or_else(|| {
            let rest = local.iter().find_map(|prefix| text.strip_prefix(prefix))?;
            (rest.starts_with(['/', ':'])).then_some(rest)
        });
        match rest {
            None => Err(format!("expected an https:// address of a repository, found {text:?}")),
            Some(rest) if rest.is_empty() || rest.ends_with('/') || rest.contains("//") => Err(format!(
                "expected a repository's address without a trailing or double slash, found {text:?}"
            )),
            // The address is printed and recorded: a password in it would be, too.
            Some(rest)
                if rest.contains(|c: char| "@?#\\\"'".contains(c) || c.is_whitespace() || c.is_control()) =>
            {
                Err("expected a plain repository address, without user, query, quotes or spaces".to_owned())
            }
            Some(_) => Ok(Repository(text.to_owned())),
        }
    }
}

impl FromStr for TreePath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected a relative path inside the source tree, such as `crates/cargo-oxide`";
        if text.contains(|c: char| matches!(c, '\\' | ':') || c.is_control()) {
            return Err(format!("{expected}; found a character in {text:?} that is not portable"));
        }
        match text.split('/').find(|part| matches!(*part, "" | "." | "..")) {
            None => Ok(TreePath(text.to_owned())),
            Some("..") => Err(format!("{expected}; {text:?} leaves the tree")),
            Some(_) if text.starts_with('/') => Err(format!("{expected}; {text:?} is absolute")),
            Some(_) => Err(format!("{expected}; found an empty part or a `.` in {text:?}")),
        }
    }
}

impl FromStr for PatchName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = !text.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control());
        match text.strip_suffix(".patch") {
            Some(stem) if plain && !stem.is_empty() => Ok(PatchName(text.to_owned())),
            _ => {
                Err(format!("expected a file name in {PATCH_FOLDER}/ that ends in `.patch`, found {text:?}"))
            }
        }
    }
}

impl FromStr for Channel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits =
            |part: &str, length: usize| part.len() == length && part.bytes().all(|b| b.is_ascii_digit());
        let release = semver::Version::parse(text)
            .is_ok_and(|version| version.pre.is_empty() && version.build.is_empty());
        let nightly = text.strip_prefix("nightly-").is_some_and(|date| {
            let parts: Vec<_> = date.split('-').collect();
            matches!(parts[..], [year, month, day] if digits(year, 4) && digits(month, 2) && digits(day, 2))
        });
        if release || nightly {
            return Ok(Channel(text.to_owned()));
        }
        Err(format!(
            "expected an exact Rust release such as `1.95.0` or `nightly-2026-04-03`, found {text:?}"
        ))
    }
}

impl FromStr for ArchName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("sm_").map(|rest| rest.strip_suffix(['a', 'f']).unwrap_or(rest));
        match digits {
            Some(digits) if (2..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()) => {
                Ok(ArchName(text.to_owned()))
            }
            _ => Err(format!("expected an architecture such as `sm_90` or `sm_120a`, found {text:?}")),
        }
    }
}

impl FromStr for LlvmTable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("llvm-").filter(|number| !number.starts_with(['0', '+']));
        number
            .and_then(|number| number.parse().ok())
            .and_then(LlvmMajor::new)
            .map(LlvmTable)
            .ok_or_else(|| format!("expected a table `llvm-<major>` such as `llvm-22`, found {text:?}"))
    }
}

impl<'de> Deserialize<'de> for LlvmMajor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(deserializer)?;
        u16::try_from(number).ok().and_then(LlvmMajor::new).ok_or_else(|| {
            serde::de::Error::custom(format!("expected an LLVM major version such as 22, found {number}"))
        })
    }
}

impl fmt::Display for LlvmMajor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for LlvmTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "llvm-{}", self.0)
    }
}

macro_rules! text_types {
    ($($name:ident),+) => {
        $(
            impl $name {
                /// The text as it is written in the file.
                pub fn as_str(&self) -> &str {
                    &self.0
                }
            }

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str(&self.0)
                }
            }
        )+
    };
}

macro_rules! parsed_from_text {
    ($($name:ident),+) => {
        $(
            impl<'de> Deserialize<'de> for $name {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
                }
            }
        )+
    };
}

text_types!(Repository, TreePath, PatchName, Channel, ArchName);
parsed_from_text!(Repository, TreePath, PatchName, Channel, ArchName, LlvmTable);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_s_own_file_is_valid() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pin = Pin::load(root).unwrap();
        assert_eq!(pin.llvm.preferred.number(), 22);
        assert!(!pin.kernels.contraction);
    }
}
