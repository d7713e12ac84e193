//! What an LLVM tool says of itself: its version and targets.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use super::BANNER;
use crate::base::env::Env;
use crate::base::process::PROBE_LIMIT;
use crate::base::version::LlvmMajor;
use crate::machine::probe::{self, first_line};
use crate::report::error::{Error, Result};

/// A version as an LLVM tool reports it. Ordered and compared by number through its fields, never as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LlvmVersion {
    /// The major, the only part that decides.
    pub major: LlvmMajor,
    /// The minor, where the tool tells.
    pub minor: Option<u32>,
    /// The patch number, where the tool tells.
    pub patch: Option<u32>,
    /// Everything that follows `LLVM version`, as printed.
    pub full: String,
    /// It is a build from a development branch or a release candidate: its output may differ from the release of
    /// the same major.
    pub unreleased: bool,
}

impl fmt::Display for LlvmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl FromStr for LlvmVersion {
    type Err = Error;

    /// Reads what follows `LLVM version`: `22.1.8`, `9.0`, `18.0.0git`, `22.1.2-rust-1.96.0-nightly`,
    /// `23.1.1 some-info`.
    fn from_str(text: &str) -> Result<Self> {
        let full = text.trim();
        let word = full.split_whitespace().next().unwrap_or_default();
        let not_a_number = || {
            Error::new(&BANNER, format!("{full:?} is not an LLVM version: expected a number such as 22.1.8"))
        };
        let (major, mut rest) = number(word).ok_or_else(not_a_number)?;
        let mut part = || {
            let (value, after) = number(rest.strip_prefix('.')?)?;
            rest = after;
            Some(value)
        };
        let minor = part();
        let patch = minor.and_then(|_| part());
        // Since LLVM 18 releases start at N.1.0; N.0.0 is what the development branch calls itself.
        let branch = major >= 18 && minor == Some(0);
        let marked = rest.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| {
            let candidate = word.strip_prefix("rc").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
            candidate || word.starts_with("git") || word.starts_with("svn")
        });
        let unreleased = branch || marked;
        Ok(LlvmVersion { major: LlvmMajor(major), minor, patch, full: full.to_owned(), unreleased })
    }
}

/// What an LLVM tool says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Banner {
    /// The version.
    pub version: LlvmVersion,
    /// The line that names it, with the vendor: `Debian LLVM version 22.1.8`.
    pub line: String,
    /// Names of the registered targets, such as `nvptx64`; empty when the tool lists none.
    pub targets: Vec<String>,
}

impl Banner {
    /// Says whether PTX for 64-bit addresses can be made.
    pub fn makes_ptx(&self) -> bool {
        self.targets.iter().any(|target| target == "nvptx64")
    }
}

/// Reads the standard output of `llc --version` or `opt --version`.
///
/// LLVM prints one of four layouts: with or without a vendor word in front, with or without words after the
/// number; without a vendor the version stands on the second line.
///
/// # Errors
/// No line holds `LLVM version` and a number.
pub fn parse_banner(stdout: &str) -> Result<Banner> {
    let (line, version) = stdout
        .lines()
        .find_map(|line| {
            let (before, after) = line.split_once("LLVM version ")?;
            (before.is_empty() || before.ends_with(char::is_whitespace)).then_some((line.trim(), after))
        })
        .ok_or_else(|| {
            let said = first_line(stdout).unwrap_or("nothing");
            Error::new(&BANNER, format!("no `LLVM version` in what it printed, which starts with: {said}"))
        })?;
    let targets = stdout
        .lines()
        .skip_while(|line| line.trim() != "Registered Targets:")
        .skip(1)
        .map_while(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect();
    Ok(Banner { version: version.parse()?, line: line.to_owned(), targets })
}

/// Asks the LLVM tool at `path` for its version and targets, in the environment of the real call.
///
/// # Errors
/// It cannot run, does not answer in time, or its answer is not an LLVM banner.
pub fn probe(path: &Path, env: &Env) -> Result<Banner> {
    let output = probe::run(path, &["--version"], env, PROBE_LIMIT)?;
    parse_banner(&output.stdout).map_err(|error| {
        let message = format!("{}: {}", path.display(), error.message());
        Error::new(&BANNER, message).hint("name an LLVM tool, by its absolute path")
    })
}

/// The decimal number that `text` starts with, and what follows it.
pub(super) fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at_checked(end)?;
    Some((digits.parse().ok()?, rest))
}
