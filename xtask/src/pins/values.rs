//! The values in PROVENANCE that are texts there: each is a type that holds its rules.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

use super::PATCH_FOLDER;
use crate::base::version::{CudaVersion, LlvmMajor};
use crate::report::error::Result;

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
pub(super) fn cuda_release(text: &str) -> Option<CudaVersion> {
    CudaVersion::parse(text).filter(|release| release.to_string() == text)
}

/// The major version `number`, if LLVM may have it: its majors begin at 1.
pub(super) fn pinned_major(number: i64) -> Option<LlvmMajor> {
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
