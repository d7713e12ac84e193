//! Which `llc` and `opt` lower the kernels: candidates, probes, and the choice by verified LLVM major.
//!
//! A file's name proves nothing: `llc-22` may report 14. Exit status 0 of a compile proves nothing either; the PTX
//! itself is checked by [`crate::ptx`].

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::base::env::Env;
use crate::base::process::PROBE_LIMIT;
use crate::base::version::LlvmMajor;
use crate::machine::probe::{self, first_line};
pub use crate::report::decision::Thoroughness;
use crate::report::decision::{Decision, Resolved, Verdict};
use crate::report::error::{Error, Result};

crate::codes! {
    BANNER = "KILN-0311", Machine, "an LLVM tool's version cannot be read",
        "The tool ran, and its `--version` output has no line with `LLVM version` and a number. It is probably \
         another program of the same name.";
    NO_LLC = "KILN-0312", Machine, "no llc qualifies",
        "Kernels are lowered to PTX by `llc` of an LLVM major that PROVENANCE lists as verified, built with the \
         nvptx64 target, with an `opt` of the same major. None of the candidates is that; each is listed with the \
         reason. Install that LLVM major or add the toolchain's llvm-tools component.";
    WRONG_MAJOR = "KILN-0313", Refusal, "the llc that was asked for has an unverified LLVM major",
        "CUDA_OXIDE_LLC, or the flag, names an llc whose LLVM major PROVENANCE does not list as verified. Another \
         major may give other bits or wrong PTX without any message, so it is refused rather than skipped. Unset \
         the variable to let kiln choose.";
    NO_NVPTX = "KILN-0314", Refusal, "the llc that was asked for cannot make PTX",
        "CUDA_OXIDE_LLC, or the flag, names an llc that was built without the nvptx64 target. It would fail \
         at the end of the build; it is refused now. Unset the variable, or name an llc with that target.";
    NO_OPT = "KILN-0315", Refusal, "no opt of llc's LLVM major",
        "Without an `opt` of the same major as llc the backend skips the middle end and writes unoptimised PTX; with \
         another major the IR may be rejected or misread. Install `opt` of the same release, beside llc.";
}

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

/// The Rust toolchain whose llvm-tools are candidates.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// Its rustup name, for hints; `None` when it is a bare sysroot.
    pub name: Option<String>,
    /// Its sysroot, absolute.
    pub sysroot: PathBuf,
    /// The host triple.
    pub host: String,
    /// The LLVM that its rustc is built with.
    pub llvm: Option<LlvmVersion>,
}

impl Toolchain {
    fn tool(&self, name: &str) -> PathBuf {
        self.sysroot.join("lib/rustlib").join(&self.host).join("bin").join(name)
    }
}

/// A tool that the user names, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explicit {
    /// The value as given; relative ones start at the invocation folder.
    pub value: OsString,
    /// The flag or variable.
    pub from: String,
}

impl Explicit {
    /// The value of `variable` in `env`, else in `settings` (the `[env]` of `.cargo/cuda-oxide.toml`).
    pub fn of(variable: &str, env: &Env, settings: &BTreeMap<String, String>) -> Option<Self> {
        if let Some(value) = env.var(variable) {
            return Some(Explicit { value: value.to_owned(), from: variable.to_owned() });
        }
        let value = settings.get(variable).filter(|value| !value.is_empty())?;
        let from = format!("{variable} in .cargo/cuda-oxide.toml");
        Some(Explicit { value: value.into(), from })
    }

    /// What undoes the naming.
    fn undo(&self) -> String {
        if self.from.starts_with("--") {
            format!("leave out {}", self.from)
        } else {
            format!("unset {}", self.from)
        }
    }
}

/// What to look for, and where.
#[derive(Clone, Debug)]
pub struct LlcRequest {
    /// `CUDA_OXIDE_LLC` or a flag: the only candidate when given.
    pub llc: Option<Explicit>,
    /// `CUDA_OXIDE_OPT` or a flag: the only `opt` when given.
    pub opt: Option<Explicit>,
    /// The pinned toolchain.
    pub toolchain: Option<Toolchain>,
    /// The major that is taken first.
    pub preferred: LlvmMajor,
    /// All majors that may be used; the preferred one counts as one of them.
    pub verified: Vec<LlvmMajor>,
    /// The preferred major was asked for, by [`LlcRequest::narrow`].
    pub asked: bool,
    /// Folders to search after PATH, usually [`usual_folders`].
    pub folders: Vec<PathBuf>,
    /// How much to look at.
    pub thoroughness: Thoroughness,
}

impl LlcRequest {
    /// A request that honours the variables in `env` and searches PATH and the usual folders. For the user's own
    /// `[env]` of `.cargo/cuda-oxide.toml` set `llc` and `opt` by [`Explicit::of`].
    pub fn new(preferred: LlvmMajor, verified: &[LlvmMajor], env: &Env) -> Self {
        let none = BTreeMap::new();
        let mut request = LlcRequest {
            llc: Explicit::of("CUDA_OXIDE_LLC", env, &none),
            opt: Explicit::of("CUDA_OXIDE_OPT", env, &none),
            toolchain: None,
            preferred,
            verified: verified.to_vec(),
            asked: false,
            folders: Vec::new(),
            thoroughness: Thoroughness::First,
        };
        request.folders = usual_folders(&request.majors());
        request
    }

    /// Takes what `--llc` says, which wins over the variable: digits alone are a major, of which a tool is searched as
    /// usual; anything else is the path of the only candidate.
    ///
    /// # Errors
    /// The major is not verified ([`WRONG_MAJOR`]).
    pub fn narrow(&mut self, value: &OsStr) -> Result<()> {
        let digits =
            value.to_str().filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
        let Some(digits) = digits else {
            self.llc = Some(Explicit { value: value.to_owned(), from: "--llc".to_owned() });
            return Ok(());
        };
        let major = digits.parse().ok().map(LlvmMajor);
        let Some(major) = major.filter(|major| self.rank(*major).is_some()) else {
            let verified = list(&self.majors());
            let what = format!("--llc {digits} asks for LLVM {digits}, and PROVENANCE verifies {verified}");
            return Err(Error::new(&WRONG_MAJOR, what)
                .hint(format!("leave out --llc, or name one of the verified majors: {verified}")));
        };
        self.llc = None;
        self.preferred = major;
        self.verified = vec![major];
        self.asked = true;
        Ok(())
    }

    /// How messages call the preferred major.
    fn preference(&self) -> &'static str {
        if self.asked { "the major that --llc asks for" } else { "the preferred major" }
    }

    /// The acceptable majors, best first.
    fn majors(&self) -> Vec<LlvmMajor> {
        let others = self.verified.iter().copied().filter(|major| *major != self.preferred);
        std::iter::once(self.preferred).chain(others).collect()
    }

    fn rank(&self, major: LlvmMajor) -> Option<usize> {
        self.majors().iter().position(|verified| *verified == major)
    }
}

/// Where Debian, Ubuntu and Homebrew put the tools of `majors`, and `/usr/local/bin`.
pub fn usual_folders(majors: &[LlvmMajor]) -> Vec<PathBuf> {
    let of_major = |major: &LlvmMajor| {
        [
            format!("/usr/lib/llvm-{major}/bin"),
            format!("/opt/homebrew/opt/llvm@{major}/bin"),
            format!("/usr/local/opt/llvm@{major}/bin"),
        ]
    };
    majors.iter().flat_map(of_major).map(PathBuf::from).chain([PathBuf::from("/usr/local/bin")]).collect()
}

/// A tool that was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tool {
    /// The absolute path to run, as found: a link or wrapper is not replaced by what is behind it.
    pub path: PathBuf,
    /// The file behind it.
    pub realpath: PathBuf,
    /// What it reports.
    pub version: LlvmVersion,
    /// The whole version line, with the vendor.
    pub line: String,
    /// Of the file behind it, 64 lowercase hexadecimal digits.
    pub sha256: String,
}

impl Tool {
    fn new(path: &Path, banner: Banner) -> Result<Self> {
        let realpath = probe::realpath(path);
        let mut hasher = Sha256::new();
        let mut file = fs_err::File::open(&realpath)?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match io::Read::read(&mut file, &mut buffer) {
                Ok(0) => break,
                Ok(n) => hasher.update(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Tool { path: path.to_owned(), realpath, version: banner.version, line: banner.line, sha256 })
    }

    /// What a build key holds: another tool at the same path, or another library behind the same file, is
    /// another identity. The path itself is left out.
    pub fn identity(&self) -> String {
        format!("sha256:{} {}", self.sha256, self.line)
    }
}

/// The tools that make PTX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tools {
    /// Lowers IR to PTX.
    pub llc: Tool,
    /// Optimises IR; its major is llc's.
    pub opt: Tool,
}

/// What [`find_llc`] decided.
#[derive(Clone, Debug)]
pub struct LlcChoice {
    /// The decision about `llc`, with both tools.
    pub llc: Resolved<Tools>,
    /// The decision about `opt` for the chosen `llc`.
    pub opt: Decision,
}

/// Chooses `llc` and `opt` as the request says. Never fails: a problem is part of the decision.
pub fn find_llc(request: &LlcRequest, env: &Env) -> LlcChoice {
    match &request.llc {
        Some(explicit) => explicit_llc(explicit, request, env),
        None => search(request, env),
    }
}

/// A candidate that was probed.
struct Examined {
    banner: Banner,
    opt: OptSearch,
}

/// The search for an `opt` that fits one `llc`.
struct OptSearch {
    decision: Decision,
    found: Option<(PathBuf, Banner)>,
}

fn explicit_llc(explicit: &Explicit, request: &LlcRequest, env: &Env) -> LlcChoice {
    let mut decision = Decision::new("llc");
    decision.change = Some(format!("{} to let kiln choose", explicit.undo()));
    let shown = explicit.value.to_string_lossy().into_owned();
    let examined = probe::explicit(&explicit.value, &explicit.from, "llc", env).and_then(|path| {
        let banner = probe(&path, env).map_err(|error| {
            let hint = error.hint_text().map(str::to_owned);
            let error = error.context(format!("{} names an llc that cannot be used", explicit.from));
            error.hint(hint.unwrap_or_else(|| format!("{} to let kiln choose", explicit.undo())))
        })?;
        let told = |what: String| format!("{} is {}: {what}", explicit.from, path.display());
        if request.rank(banner.version.major).is_none() {
            let what = told(format!(
                "it is LLVM {} ({}), and PROVENANCE verifies {}",
                banner.version.major,
                banner.line,
                list(&request.majors())
            ));
            return Err(Error::new(&WRONG_MAJOR, what).hint(format!(
                "{}, or name an llc of LLVM {}",
                explicit.undo(),
                request.preferred
            )));
        }
        if !banner.makes_ptx() {
            let what = told(format!("{} was built without the target nvptx64", banner.line));
            return Err(Error::new(&NO_NVPTX, what)
                .hint(format!("{}, or name an llc whose --version lists nvptx64", explicit.undo())));
        }
        Ok((path, banner))
    });
    let (path, banner) = match examined {
        Ok(examined) => examined,
        Err(error) => {
            decision.why = format!("{} is used alone, and does not qualify", explicit.from);
            decision.consider(shown, &explicit.from, Verdict::Rejected(one_line(&error)));
            decision.problem = Some(error.into());
            return LlcChoice { llc: Resolved { decision, value: None }, opt: opt_not_tried() };
        }
    };
    let opt = find_opt(&path, &banner, request, env);
    decision.why = format!("{} names it, and LLVM {} is verified", explicit.from, banner.version.major);
    finish(decision, path, &explicit.from, Examined { banner, opt }, request)
}

fn search(request: &LlcRequest, env: &Env) -> LlcChoice {
    let candidates = llc_candidates(request, env);
    let mut outcomes: Vec<Option<Result<Examined>>> = Vec::new();
    if request.thoroughness == Thoroughness::All {
        // Starting llc costs some tens of milliseconds, nearly all of it loading its library.
        thread::scope(|scope| {
            let probes: Vec<_> = candidates
                .iter()
                .map(|candidate| {
                    candidate.worth.is_ok().then(|| scope.spawn(|| examine(&candidate.path, request, env)))
                })
                .collect();
            let crashed = |_| Err(Error::new(&crate::report::error::BUG, "examining this candidate crashed"));
            outcomes = probes
                .into_iter()
                .map(|probe| probe.map(|probe| probe.join().unwrap_or_else(crashed)))
                .collect();
        });
    } else {
        let mut done = false;
        for candidate in &candidates {
            let outcome = (!done && candidate.worth.is_ok()).then(|| examine(&candidate.path, request, env));
            done |=
                matches!(&outcome, Some(Ok(examined)) if examined.banner.version.major == request.preferred);
            outcomes.push(outcome);
        }
    }

    let best = outcomes
        .iter()
        .enumerate()
        .filter_map(|(at, outcome)| match outcome {
            Some(Ok(examined)) => Some((request.rank(examined.banner.version.major)?, at)),
            _ => None,
        })
        .min()
        .map(|(_, at)| at);

    let mut decision = Decision::new("llc");
    decision.change = Some("set CUDA_OXIDE_LLC=/absolute/path/of/llc".into());
    let mut chosen = None;
    let mut opt_problem = None;
    for (at, (candidate, outcome)) in candidates.iter().zip(outcomes).enumerate() {
        let verdict = match (&candidate.worth, outcome) {
            (Err(reason), _) => reason.clone(),
            (Ok(()), Some(Ok(examined))) if Some(at) == best => {
                chosen = Some((candidate.path.clone(), candidate.from.clone(), examined));
                Verdict::Chosen
            }
            (Ok(()), Some(Ok(examined))) => {
                let winner = best.and_then(|best| candidates.get(best)).map(|winner| winner.path.display());
                let winner = winner.map_or_else(|| "another".to_owned(), |winner| winner.to_string());
                Verdict::Rejected(format!("qualifies ({}), but {winner} comes first", examined.banner.line))
            }
            (Ok(()), Some(Err(error))) => {
                let reason = one_line(&error);
                if error.code() == &NO_OPT {
                    opt_problem.get_or_insert(error);
                }
                Verdict::Rejected(reason)
            }
            (Ok(()), None) => {
                Verdict::NotTried("an earlier candidate of the preferred major qualifies".into())
            }
        };
        decision.consider(candidate.path.display(), &candidate.from, verdict);
    }
    match chosen {
        Some((path, from, examined)) => {
            let major = examined.banner.version.major;
            decision.why = if major == request.preferred {
                format!(
                    "the first candidate of LLVM {major}, {}, that makes PTX and has an opt",
                    request.preference()
                )
            } else {
                format!(
                    "no candidate of the preferred LLVM {} qualifies; {major} is verified",
                    request.preferred
                )
            };
            finish(decision, path, &from, examined, request)
        }
        None => {
            decision.why = "no candidate qualifies".into();
            decision.change = Some(remedy(request));
            let mut opt = opt_not_tried();
            // An llc that lacks only its opt says best what to mend.
            if let Some(error) = opt_problem {
                opt.why = one_line(&error);
                decision.change = error.hint_text().map(str::to_owned);
                decision.problem = Some(error.into());
                return LlcChoice { llc: Resolved { decision, value: None }, opt };
            }
            // With `--llc MAJOR` the variable does not count.
            let unset = if request.asked { "" } else { ", and CUDA_OXIDE_LLC is not set" };
            let mut error = Error::new(
                &NO_LLC,
                format!(
                    "no llc of LLVM {} that makes PTX for nvptx64 was found in the toolchain's llvm-tools, on PATH \
                     or in the usual folders{unset}",
                    list(&request.majors())
                ),
            )
            .hint(remedy(request));
            for candidate in &decision.candidates {
                if let Verdict::Rejected(reason) = &candidate.verdict {
                    let told = reason.contains(&candidate.what);
                    error = error.cause(if told {
                        reason.clone()
                    } else {
                        format!("{}: {reason}", candidate.what)
                    });
                }
            }
            decision.problem = Some(error.into());
            LlcChoice { llc: Resolved { decision, value: None }, opt }
        }
    }
}

/// Turns the winner into tools, and the absence of an `opt` into the problem.
fn finish(
    mut decision: Decision,
    path: PathBuf,
    from: &str,
    examined: Examined,
    request: &LlcRequest,
) -> LlcChoice {
    let Examined { banner, opt } = examined;
    let OptSearch { decision: mut opt, found } = opt;
    decision.chosen = Some(format!("{} ({})", path.display(), banner.line));
    if !decision.candidates.iter().any(|candidate| candidate.verdict == Verdict::Chosen) {
        decision.consider(path.display(), from, Verdict::Chosen);
    }
    if banner.version.unreleased {
        decision.notes.push(format!(
            "{} is not a release: its PTX may differ from what LLVM {} gives",
            banner.version, banner.version.major
        ));
    }
    if let Some(rustc) = request.toolchain.as_ref().and_then(|toolchain| toolchain.llvm.as_ref())
        && rustc.major != banner.version.major
    {
        decision.notes.push(format!(
            "rustc is built with LLVM {rustc} and llc is LLVM {}; PROVENANCE verifies that llc",
            banner.version
        ));
    }
    let major = banner.version.major;
    let Some((opt_path, opt_banner)) = found else {
        decision.problem = opt.problem.clone();
        return LlcChoice { llc: Resolved { decision, value: None }, opt };
    };
    if opt_banner.version.full != banner.version.full {
        opt.notes
            .push(format!("opt is {} and llc is {}, both LLVM {major}", opt_banner.version, banner.version));
    }
    let tools =
        Tool::new(&path, banner).and_then(|llc| Ok(Tools { llc, opt: Tool::new(&opt_path, opt_banner)? }));
    match tools {
        Ok(tools) => LlcChoice { llc: Resolved { decision, value: Some(tools) }, opt },
        Err(error) => {
            decision.problem =
                Some(error.context("a tool that runs cannot be read, to record what it is").into());
            LlcChoice { llc: Resolved { decision, value: None }, opt }
        }
    }
}

/// Probes one llc that was found, and looks for its opt when it is otherwise good.
fn examine(path: &Path, request: &LlcRequest, env: &Env) -> Result<Examined> {
    let banner = probe(path, env)?;
    let major = banner.version.major;
    if request.rank(major).is_none() {
        let what = format!("is LLVM {major} ({}); verified: {}", banner.line, list(&request.majors()));
        return Err(Error::new(&WRONG_MAJOR, what));
    }
    if !banner.makes_ptx() {
        return Err(Error::new(&NO_NVPTX, format!("{} was built without the target nvptx64", banner.line)));
    }
    let opt = find_opt(path, &banner, request, env);
    // An opt that the user names stands for every llc: it is the opt that is wrong then, not this llc.
    match &opt.decision.problem {
        Some(problem) if request.opt.is_none() => Err(problem.clone().into()),
        _ => Ok(Examined { banner, opt }),
    }
}

struct Found {
    path: PathBuf,
    from: String,
    /// `Err`: why it is not probed.
    worth: Result<(), Verdict>,
}

fn llc_candidates(request: &LlcRequest, env: &Env) -> Vec<Found> {
    let mut found = Vec::new();
    let add = |found: &mut Vec<Found>, path: PathBuf, from: &str| {
        let worth = match same_file(found, &path) {
            Some(first) => Err(Verdict::NotTried(format!("the same file as {}", first.display()))),
            None => Ok(()),
        };
        found.push(Found { path, from: from.to_owned(), worth });
    };
    if let Some(toolchain) = &request.toolchain {
        let path = toolchain.tool("llc");
        if probe::is_there(&path) {
            add(&mut found, path, "the toolchain's llvm-tools");
        } else {
            let missing = Verdict::Rejected("not there: the toolchain has no llvm-tools with an llc".into());
            found.push(Found { path, from: "the toolchain's llvm-tools".into(), worth: Err(missing) });
        }
    }
    let mut names: Vec<String> = request.majors().iter().map(|major| format!("llc-{major}")).collect();
    names.push("llc".into());
    let on_path = search_path(env);
    for name in &names {
        for folder in on_path.iter().filter(|folder| probe::is_there(&folder.join(name))) {
            add(&mut found, folder.join(name), "PATH");
        }
    }
    for folder in request.folders.iter().filter(|folder| !on_path.contains(folder)) {
        for name in names.iter().rev().filter(|name| probe::is_there(&folder.join(name))) {
            add(&mut found, folder.join(name), "usual install folders");
        }
    }
    found
}

/// An earlier candidate that is the same program. A link to something of another name may be a dispatcher that
/// looks at its own name: then the same file is not the same tool.
fn same_file<'a>(found: &'a [Found], path: &Path) -> Option<&'a Path> {
    let target = probe::realpath(path);
    let is_tool = target.file_name().is_some_and(|name| name.to_string_lossy().starts_with("llc"));
    found
        .iter()
        .filter(|other| other.worth.is_ok())
        .map(|other| other.path.as_path())
        .find(|other| *other == path || (is_tool && probe::realpath(other) == target))
}

fn find_opt(llc: &Path, banner: &Banner, request: &LlcRequest, env: &Env) -> OptSearch {
    let major = banner.version.major;
    let mut decision = Decision::new("opt");
    decision.change = Some("set CUDA_OXIDE_OPT=/absolute/path/of/opt".into());
    if let Some(explicit) = &request.opt {
        let result = probe::explicit(&explicit.value, &explicit.from, "opt", env)
            .and_then(|path| Ok((probe(&path, env)?, path)))
            .and_then(|(opt, path)| match opt_mismatch(&opt, major) {
                Some(reason) => Err(Error::new(
                    &NO_OPT,
                    format!(
                        "{} is {}: it {reason}, and llc is {} ({})",
                        explicit.from,
                        path.display(),
                        llc.display(),
                        banner.line
                    ),
                )
                .hint(format!("unset {}, or name an opt of LLVM {major}", explicit.from))),
                None => Ok((path, opt)),
            });
        return match result {
            Ok((path, opt)) => {
                decision.why = format!("{} names it, and its LLVM major is llc's", explicit.from);
                decision.chosen = Some(format!("{} ({})", path.display(), opt.line));
                decision.consider(path.display(), &explicit.from, Verdict::Chosen);
                OptSearch { decision, found: Some((path, opt)) }
            }
            Err(error) => {
                decision.why = format!("{} is used alone, and does not qualify", explicit.from);
                let shown = explicit.value.to_string_lossy().into_owned();
                decision.consider(shown, &explicit.from, Verdict::Rejected(one_line(&error)));
                decision.problem = Some(error.into());
                OptSearch { decision, found: None }
            }
        };
    }
    let mut found: Option<(PathBuf, Banner)> = None;
    for (path, from) in opt_candidates(llc, major, request, env) {
        if found.is_some() {
            decision.consider(
                path.display(),
                from,
                Verdict::NotTried("an earlier candidate qualifies".into()),
            );
            continue;
        }
        let verdict = match probe(&path, env) {
            Err(error) => Verdict::Rejected(one_line(&error)),
            Ok(opt) => match opt_mismatch(&opt, major) {
                Some(reason) => Verdict::Rejected(format!("{reason}; llc is LLVM {major}")),
                None => {
                    found = Some((path.clone(), opt));
                    Verdict::Chosen
                }
            },
        };
        decision.consider(path.display(), from, verdict);
    }
    if let Some((path, opt)) = &found {
        decision.chosen = Some(format!("{} ({})", path.display(), opt.line));
        decision.why = format!("the first opt of LLVM {major}, llc's major");
    } else {
        let what = format!("no opt of LLVM {major}, the major of {}, was found", llc.display());
        decision.why = "no candidate qualifies; without opt the backend would write unoptimised PTX".into();
        let mut error = Error::new(&NO_OPT, what).hint(format!(
            "install opt of LLVM {major} beside llc (Debian, Ubuntu: apt install llvm-{major}), or set CUDA_OXIDE_OPT"
        ));
        for candidate in &decision.candidates {
            if let Verdict::Rejected(reason) = &candidate.verdict {
                error = error.cause(format!("{}: {reason}", candidate.what));
            }
        }
        decision.problem = Some(error.into());
    }
    OptSearch { decision, found }
}

fn opt_mismatch(opt: &Banner, major: LlvmMajor) -> Option<String> {
    if opt.version.major != major {
        return Some(format!("is LLVM {} ({})", opt.version.major, opt.line));
    }
    // Without the target it would optimise by generic costs.
    (!opt.targets.is_empty() && !opt.makes_ptx()).then(|| format!("{} was built without nvptx64", opt.line))
}

fn opt_candidates(llc: &Path, major: LlvmMajor, request: &LlcRequest, env: &Env) -> Vec<(PathBuf, String)> {
    let names = [format!("opt-{major}"), "opt".to_owned()];
    let on_path = search_path(env);
    let mut candidates: Vec<(PathBuf, String)> = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut add = |folder: &Path, name: &str, from: &str| {
        let path = folder.join(name);
        let target = probe::realpath(&path);
        let is_tool = target.file_name().is_some_and(|name| name.to_string_lossy().starts_with("opt"));
        let key = if is_tool { target } else { path.clone() };
        if probe::is_there(&path) && !seen.contains(&key) {
            seen.push(key);
            candidates.push((path, from.to_owned()));
        }
    };
    let behind = probe::realpath(llc);
    for folder in [llc.parent(), behind.parent()].into_iter().flatten() {
        names.iter().for_each(|name| add(folder, name, "beside llc"));
    }
    if let Some(folder) = request.toolchain.as_ref().map(|toolchain| toolchain.tool("opt")) {
        folder.parent().into_iter().for_each(|folder| add(folder, "opt", "the toolchain's llvm-tools"));
    }
    for name in &names {
        on_path.iter().for_each(|folder| add(folder, name, "PATH"));
    }
    for folder in &request.folders {
        names.iter().for_each(|name| add(folder, name, "usual install folders"));
    }
    candidates
}

/// The folders on PATH, absolute; a folder that is there twice, such as `/bin` as a link to `/usr/bin`, counts once.
fn search_path(env: &Env) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let absolute = env.search_path().into_iter().filter_map(|folder| env.absolute(&folder).ok());
    absolute
        .filter(|folder| {
            let real = probe::realpath(folder);
            let new = !seen.contains(&real);
            seen.push(real);
            new
        })
        .collect()
}

fn opt_not_tried() -> Decision {
    let mut decision = Decision::new("opt");
    decision.why = "not looked for: no llc was chosen".into();
    decision
}

fn remedy(request: &LlcRequest) -> String {
    let major = request.preferred;
    let component = match &request.toolchain {
        Some(Toolchain { name: Some(name), llvm, .. })
            if llvm.as_ref().is_none_or(|llvm| llvm.major == major) =>
        {
            format!("rustup component add llvm-tools --toolchain {name}, or ")
        }
        _ => String::new(),
    };
    format!(
        "{component}install LLVM {major} (Debian, Ubuntu: apt install llvm-{major}; Homebrew: brew install \
         llvm@{major}), or set CUDA_OXIDE_LLC to the path of its llc"
    )
}

fn list(majors: &[LlvmMajor]) -> String {
    majors.iter().map(LlvmMajor::to_string).collect::<Vec<_>>().join(", ")
}

/// An error with its causes on one line, for a candidate's reason.
fn one_line(error: &Error) -> String {
    std::iter::once(error.message())
        .chain(error.causes().iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join("; ")
}

/// The decimal number that `text` starts with, and what follows it.
fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at_checked(end)?;
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::machine::probe::tests::{executable, script};
    use crate::report::decision::Candidate;
    use fs_err::os::unix::fs::symlink;
    use proptest::prelude::*;

    const PTX: &str = "    nvptx       - NVIDIA PTX 32-bit\n    nvptx64     - NVIDIA PTX 64-bit\n";

    fn banner_text(line: &str, targets: &str) -> String {
        format!(
            "{line}\n  Optimized build.\n  Default target: x86_64-pc-linux-gnu\n\n  Registered Targets:\n{targets}"
        )
    }

    /// A tool that answers with an LLVM banner.
    pub(crate) fn fake(folder: &Path, name: &str, line: &str, targets: &str) -> PathBuf {
        script(folder, name, &format!("printf %s '{}'", banner_text(line, targets)))
    }

    /// A folder with `bin` on PATH and nothing else to be found.
    struct World {
        folder: tempfile::TempDir,
        variables: Vec<(&'static str, OsString)>,
        request: LlcRequest,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("bin").into_os_string();
            let request = LlcRequest {
                llc: None,
                opt: None,
                toolchain: None,
                preferred: LlvmMajor(22),
                asked: false,
                verified: vec![LlvmMajor(22)],
                folders: Vec::new(),
                thoroughness: Thoroughness::All,
            };
            World { folder, variables: vec![("PATH", path)], request }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn tool(&self, name: &str, version: &str) -> PathBuf {
            fake(self.folder.path(), name, &format!("Debian LLVM version {version}"), PTX)
        }

        fn env(&self) -> Env {
            Env::of(self.variables.clone(), self.folder.path())
        }

        fn find(&self) -> LlcChoice {
            let mut request = self.request.clone();
            request.llc =
                request.llc.or_else(|| Explicit::of("CUDA_OXIDE_LLC", &self.env(), &BTreeMap::new()));
            request.opt =
                request.opt.or_else(|| Explicit::of("CUDA_OXIDE_OPT", &self.env(), &BTreeMap::new()));
            let choice = find_llc(&request, &self.env());
            // Both thoroughnesses agree, whatever the case is.
            request.thoroughness = Thoroughness::First;
            let quick = find_llc(&request, &self.env());
            assert_eq!(quick.llc.value, choice.llc.value);
            assert_eq!(quick.llc.decision.chosen, choice.llc.decision.chosen);
            choice
        }

        fn chosen(&self) -> Tools {
            self.find().llc.require().unwrap().clone()
        }

        fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
            self.variables.push((name, value.into()));
        }

        fn reasons(&self, decision: &Decision) -> Vec<String> {
            let root = format!("{}/", self.folder.path().display());
            let line = |candidate: &Candidate| {
                let verdict = match &candidate.verdict {
                    Verdict::Chosen => "chosen".to_owned(),
                    Verdict::Rejected(reason) => format!("rejected: {reason}"),
                    Verdict::NotTried(reason) => format!("not tried: {reason}"),
                };
                format!("{} [{}] {verdict}", candidate.what, candidate.from).replace(&root, "")
            };
            decision.candidates.iter().map(line).collect()
        }
    }

    fn version_of(banner: &str) -> (u32, String, bool) {
        let version = parse_banner(banner).unwrap().version;
        (version.major.0, version.full, version.unreleased)
    }

    #[test]
    fn a1_all_four_banner_layouts_are_read() {
        let cases = [
            ("Debian LLVM version 22.1.8", 22, "22.1.8"),
            ("Ubuntu LLVM version 21.1.8", 21, "21.1.8"),
            ("Homebrew LLVM version 22.1.8", 22, "22.1.8"),
            (
                "LLVM (http://llvm.org/):\n  LLVM version 22.1.2-rust-1.96.0-nightly",
                22,
                "22.1.2-rust-1.96.0-nightly",
            ),
            ("LLVM (http://llvm.org/):\n  LLVM version 23.1.1 some-info", 23, "23.1.1 some-info"),
            ("LLVM version 22.1.2-rust-1.96.0-nightly", 22, "22.1.2-rust-1.96.0-nightly"),
            ("Debian LLVM version 14.0.6", 14, "14.0.6"),
        ];
        for (line, major, full) in cases {
            assert_eq!(version_of(&banner_text(line, PTX)), (major, full.to_owned(), false), "{line}");
        }
    }

    #[test]
    fn a2_suffixes_are_read_and_unreleased_builds_are_marked() {
        let cases = [
            ("18.0.0git", 18, true),
            ("22.0.0git", 22, true),
            ("18.1.7+libcxx", 18, false),
            ("7.0.0-svn331815-1~exp1~20180509", 7, true),
            ("23.1.0-rust-1.100.0-nightly", 23, false),
            ("23.1.0-rc2", 23, true),
            ("22.1.8", 22, false),
            // The development branch of LLVM 22, without a word; before LLVM 18 such a number was a release.
            ("22.0.0", 22, true),
            ("17.0.0", 17, false),
        ];
        for (full, major, unreleased) in cases {
            let banner = format!("LLVM (http://llvm.org/):\n  LLVM version {full}\n");
            assert_eq!(version_of(&banner), (major, full.to_owned(), unreleased), "{full}");
        }
    }

    #[test]
    fn a2_an_unreleased_llc_is_flagged() {
        let world = World::new();
        world.tool("bin/llc-22", "22.0.0git");
        world.tool("bin/opt-22", "22.0.0git");
        assert_eq!(
            world.find().llc.decision.notes,
            ["22.0.0git is not a release: its PTX may differ from what LLVM 22 gives"]
        );
    }

    #[test]
    fn a3_numbers_are_compared_as_numbers() {
        for (full, major) in [("9.0", 9), ("22", 22), ("100.0.0", 100), ("2.2", 2)] {
            assert_eq!(version_of(&format!("LLVM version {full}\n")).0, major);
        }
        let version: LlvmVersion = "22.1".parse().unwrap();
        assert_eq!((version.minor, version.patch), (Some(1), None));
        // `2` and `220` must not satisfy `22`.
        for bad in ["2.2", "220.1.0", "2"] {
            let world = World::new();
            world.tool("bin/llc-22", bad);
            world.tool("bin/opt", bad);
            assert!(world.find().llc.value.is_none(), "{bad}");
        }
        for bad in
            ["", "LLVM version", "LLVM version \n", "LLVM version x", "LLVM version 99999999999", "gcc 12"]
        {
            assert!(parse_banner(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a4_an_llc_without_nvptx64_is_skipped_or_refused() {
        let x86 =
            "    x86    - 32-bit X86: Pentium-Pro and above\n    x86-64 - 64-bit X86: EM64T and AMD64\n";
        let narrow = "    nvptx - NVIDIA PTX 32-bit\n";
        for targets in [x86, narrow] {
            let mut world = World::new();
            fake(world.folder.path(), "bin/llc-22", "LLVM version 22.1.0", targets);
            world.tool("bin/llc", "22.1.8");
            world.tool("bin/opt", "22.1.8");
            assert_eq!(world.chosen().llc.path, world.at("bin/llc"));
            assert_eq!(
                world.reasons(&world.find().llc.decision),
                [
                    "bin/llc-22 [PATH] rejected: LLVM version 22.1.0 was built without the target nvptx64",
                    "bin/llc [PATH] chosen"
                ]
            );
            world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
            let error = world.find().llc.require().unwrap_err();
            assert_eq!((error.code().id, error.exit().status()), ("KILN-0314", 70));
        }
    }

    #[test]
    fn a5_bare_llc_of_another_major_is_not_chosen() {
        let world = World::new();
        world.tool("bin/llc", "14.0.6");
        world.tool("bin/opt", "14.0.6");
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        let tools = world.chosen();
        assert_eq!(tools.llc.path, world.at("bin/llc-22"));
        assert_eq!(tools.opt.path, world.at("bin/opt-22"));
        assert_eq!(
            world.reasons(&world.find().llc.decision),
            [
                "bin/llc-22 [PATH] chosen",
                "bin/llc [PATH] rejected: is LLVM 14 (Debian LLVM version 14.0.6); verified: 22"
            ]
        );
    }

    #[test]
    fn a5_bare_llc_of_the_verified_major_is_chosen() {
        let world = World::new();
        world.tool("bin/llc", "22.1.8");
        world.tool("bin/opt", "22.1.8");
        assert_eq!(world.chosen().llc.path, world.at("bin/llc"));
    }

    #[test]
    fn a5_a_file_called_llc_22_that_reports_14_is_rejected() {
        let mut world = World::new();
        world.tool("bin/llc-22", "14.0.6");
        world.tool("bin/opt-22", "14.0.6");
        let choice = world.find();
        assert_eq!(
            world.reasons(&choice.llc.decision),
            ["bin/llc-22 [PATH] rejected: is LLVM 14 (Debian LLVM version 14.0.6); verified: 22"]
        );
        world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
        let error = world.find().llc.require().unwrap_err();
        assert_eq!(error.exit().status(), 70);
        assert_eq!(
            error.message(),
            format!(
                "CUDA_OXIDE_LLC is {}: it is LLVM 14 (Debian LLVM version 14.0.6), and PROVENANCE verifies 22",
                world.at("bin/llc-22").display()
            )
        );
    }

    #[test]
    fn a5_the_preferred_major_wins_over_order_and_others_are_taken_without_it() {
        let mut world = World::new();
        world.request.verified = vec![LlvmMajor(21), LlvmMajor(22)];
        world.request.toolchain = Some(toolchain(&world, "21.1.8"));
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        let choice = world.find();
        assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-22"));
        assert_eq!(
            world.reasons(&choice.llc.decision),
            [
                "sysroot/lib/rustlib/h/bin/llc [the toolchain's llvm-tools] rejected: qualifies (Debian LLVM version 21.1.8), but bin/llc-22 comes first",
                "bin/llc-22 [PATH] chosen",
            ]
        );
        fs_err::remove_file(world.at("bin/llc-22")).unwrap();
        assert_eq!(world.chosen().llc.version.major, LlvmMajor(21));
    }

    fn toolchain(world: &World, version: &str) -> Toolchain {
        world.tool("sysroot/lib/rustlib/h/bin/llc", version);
        world.tool("sysroot/lib/rustlib/h/bin/opt", version);
        Toolchain {
            name: Some("1.95.0".into()),
            sysroot: world.at("sysroot"),
            host: "h".into(),
            llvm: Some(version.parse().unwrap()),
        }
    }

    #[test]
    fn a6_llc_of_another_major_than_rustc_is_shown_and_follows_the_policy() {
        let mut world = World::new();
        world.request.toolchain = Some(toolchain(&world, "23.1.1-rust-1.100.0-nightly"));
        // Not verified: nothing qualifies, however well it fits rustc.
        let choice = world.find();
        assert!(choice.llc.value.is_none());
        assert_eq!(
            world.reasons(&choice.llc.decision)[0],
            "sysroot/lib/rustlib/h/bin/llc [the toolchain's llvm-tools] rejected: is LLVM 23 (Debian LLVM version 23.1.1-rust-1.100.0-nightly); verified: 22"
        );
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        assert_eq!(
            world.find().llc.decision.notes,
            [
                "rustc is built with LLVM 23.1.1-rust-1.100.0-nightly and llc is LLVM 22.1.8; PROVENANCE verifies that llc"
            ]
        );
    }

    #[test]
    fn a7_a_broken_toolchain_llc_is_reported_and_the_next_one_taken() {
        let mut world = World::new();
        world.request.toolchain = Some(toolchain(&world, "22.1.2"));
        script(
            world.folder.path(),
            "sysroot/lib/rustlib/h/bin/llc",
            "echo 'error while loading shared libraries: libLLVM.so.22.1' >&2; exit 127",
        );
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        let choice = world.find();
        assert_eq!(choice.llc.value.as_ref().unwrap().llc.path, world.at("bin/llc-22"));
        let reason = &world.reasons(&choice.llc.decision)[0];
        assert!(reason.contains("found but not runnable"), "{reason}");
        assert!(reason.contains("libLLVM.so.22.1"), "{reason}");
        assert!(reason.ends_with("LD_LIBRARY_PATH was not set"), "{reason}");
    }

    #[test]
    fn a9_tools_are_probed_without_what_cargo_run_adds() {
        let mut world = World::new();
        let body = banner_text("LLVM version 22.1.8", PTX);
        for name in ["bin/llc-22", "bin/opt-22"] {
            script(
                world.folder.path(),
                name,
                &format!("[ -n \"${{LD_LIBRARY_PATH+set}}\" ] && exit 127\nprintf %s '{body}'"),
            );
        }
        world.set("LD_LIBRARY_PATH", "/w/target/debug/deps:/w/target/debug::/r/toolchains/x/lib");
        assert_eq!(world.chosen().llc.path, world.at("bin/llc-22"));
    }

    #[test]
    fn a10_an_explicit_llc_is_made_absolute_and_never_skipped() {
        let mut world = World::new();
        world.tool("tools/llc", "22.1.8");
        world.tool("tools/opt", "22.1.8");
        world.tool("a b/ü/llc", "22.1.8");
        world.tool("a b/ü/opt", "22.1.8");
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        for (value, path) in
            [("tools/llc", "tools/llc"), ("./tools/llc", "tools/llc"), ("a b/ü/llc", "a b/ü/llc")]
        {
            world.set("CUDA_OXIDE_LLC", value);
            assert_eq!(world.chosen().llc.path.as_os_str(), world.at(path).as_os_str());
        }
        for bad in ["tools", "none", "~/llc", "tools/llc\n", "tools/llc "] {
            world.set("CUDA_OXIDE_LLC", bad);
            let choice = world.find();
            let error = choice.llc.require().unwrap_err();
            assert_eq!(error.exit().status(), 1, "{bad}");
            assert!(error.hint_text().is_some(), "{bad}");
            assert_eq!(choice.llc.decision.candidates.len(), 1, "{bad}");
        }
        world.set("CUDA_OXIDE_LLC", "");
        assert_eq!(world.chosen().llc.path, world.at("bin/llc-22"));
    }

    #[test]
    fn a12_nothing_at_all_says_what_is_missing_and_one_command() {
        let mut world = World::new();
        world.variables.clear();
        world.request.toolchain = Some(Toolchain {
            name: Some("1.95.0".into()),
            sysroot: world.at("sysroot"),
            host: "h".into(),
            llvm: None,
        });
        let choice = world.find();
        let error = choice.llc.require().unwrap_err();
        let text = format!("{error}\nhint: {}", error.hint_text().unwrap());
        assert_eq!(error.exit().status(), 1);
        assert_eq!(
            text.replace(&world.folder.path().display().to_string(), "/t"),
            "no llc of LLVM 22 that makes PTX for nvptx64 was found in the toolchain's llvm-tools, on PATH or in the \
             usual folders, and CUDA_OXIDE_LLC is not set\n  \
             caused by: /t/sysroot/lib/rustlib/h/bin/llc: not there: the toolchain has no llvm-tools with an llc\n\
             hint: rustup component add llvm-tools --toolchain 1.95.0, or install LLVM 22 (Debian, Ubuntu: apt \
             install llvm-22; Homebrew: brew install llvm@22), or set CUDA_OXIDE_LLC to the path of its llc"
        );
    }

    #[test]
    fn a5_the_flag_takes_a_verified_major_or_a_path_and_wins_over_the_variable() {
        let mut world = World::new();
        let (new, old) = (world.tool("bin/llc-22", "22.1.8"), world.tool("bin/llc-21", "21.1.8"));
        world.tool("bin/opt-22", "22.1.8");
        world.tool("bin/opt-21", "21.1.8");
        world.set("PATH", world.at("bin"));
        world.request.verified = vec![LlvmMajor(22), LlvmMajor(21)];
        world.request.llc = Explicit::of("X", &Env::of([("X", "/none")], "/"), &BTreeMap::new());
        let asked = |value: &str| {
            let mut request = world.request.clone();
            request.narrow(OsStr::new(value)).map(|()| find_llc(&request, &world.env()).llc)
        };
        let resolved = asked("21").unwrap();
        assert_eq!(resolved.require().unwrap().llc.path, old);
        assert_eq!(
            resolved.decision.why,
            "the first candidate of LLVM 21, the major that --llc asks for, that makes PTX and has an opt"
        );
        let path = new.display().to_string();
        assert_eq!(asked(&path).unwrap().require().unwrap().llc.path, new);
        let error = asked("23").unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0313", 70));
        assert_eq!(error.message(), "--llc 23 asks for LLVM 23, and PROVENANCE verifies 22, 21");
        let missing = asked("llc-24").unwrap().require().unwrap_err();
        assert!(missing.message().starts_with("--llc is \"llc-24\""), "{missing}");
        fs_err::remove_file(&old).unwrap();
        let error = asked("21").unwrap().require().unwrap_err();
        assert_eq!(error.code().id, "KILN-0312");
        assert!(error.message().ends_with("or in the usual folders"), "{error}");
    }

    #[test]
    fn a13_variables_in_the_config_file_count_after_the_environment() {
        let settings = BTreeMap::from([("CUDA_OXIDE_LLC".to_owned(), "/f/llc".to_owned())]);
        let from_file = Explicit::of("CUDA_OXIDE_LLC", &Env::of::<&str, &str>([], "/"), &settings).unwrap();
        assert_eq!(from_file.from, "CUDA_OXIDE_LLC in .cargo/cuda-oxide.toml");
        let both =
            Explicit::of("CUDA_OXIDE_LLC", &Env::of([("CUDA_OXIDE_LLC", "/e")], "/"), &settings).unwrap();
        assert_eq!(both.value, "/e");
    }

    #[test]
    fn a14_an_opt_of_another_major_is_refused() {
        let mut world = World::new();
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        world.tool("bin/opt-21", "21.1.8");
        world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
        world.set("CUDA_OXIDE_OPT", world.at("bin/opt-21"));
        let error = world.find().llc.require().unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0315", 70));
        assert_eq!(
            error.message().replace(&world.folder.path().display().to_string(), "/t"),
            "CUDA_OXIDE_OPT is /t/bin/opt-21: it is LLVM 21 (Debian LLVM version 21.1.8), and llc is /t/bin/llc-22 \
             (Debian LLVM version 22.1.8)"
        );
        // The same without an explicit llc.
        world.set("CUDA_OXIDE_LLC", "");
        assert_eq!(world.find().llc.require().unwrap_err().code().id, "KILN-0315");
    }

    #[test]
    fn a14_no_opt_anywhere_is_refused_with_all_candidates() {
        let mut world = World::new();
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "21.1.8");
        for explicit in ["", "bin/llc-22"] {
            world.set("CUDA_OXIDE_LLC", explicit);
            let choice = world.find();
            let error = choice.llc.require().unwrap_err();
            assert_eq!((error.code().id, error.exit().status()), ("KILN-0315", 70), "{error}");
            assert_eq!(
                error.to_string().replace(&world.folder.path().display().to_string(), "/t"),
                "no opt of LLVM 22, the major of /t/bin/llc-22, was found\n  \
                 caused by: /t/bin/opt-22: is LLVM 21 (Debian LLVM version 21.1.8); llc is LLVM 22"
            );
        }
    }

    #[test]
    fn a14_an_llc_with_an_opt_is_taken_over_one_without() {
        let mut world = World::new();
        world.request.verified = vec![LlvmMajor(22), LlvmMajor(21)];
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/llc-21", "21.1.8");
        world.tool("bin/opt", "21.1.8");
        let choice = world.find();
        assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-21"));
        assert_eq!(
            world.reasons(&choice.llc.decision)[0],
            "bin/llc-22 [PATH] rejected: no opt of LLVM 22, the major of bin/llc-22, was found; bin/opt: is LLVM 21 \
             (Debian LLVM version 21.1.8); llc is LLVM 22"
        );
    }

    #[test]
    fn a14_an_opt_in_a_usual_folder_serves_any_llc_of_its_major() {
        let mut world = World::new();
        world.request.folders = vec![world.at("usual/bin")];
        world.tool("bin/llc-22", "22.1.8");
        world.tool("usual/bin/llc", "22.1.7");
        let opt = world.tool("usual/bin/opt", "22.1.7");
        let choice = world.find();
        assert_eq!(choice.llc.value.unwrap().opt.path, opt);
        assert_eq!(choice.opt.notes, ["opt is 22.1.7 and llc is 22.1.8, both LLVM 22"]);
    }

    #[test]
    fn a15_a_wrapper_is_run_as_given_and_both_paths_are_recorded() {
        let mut world = World::new();
        let real = script(
            world.folder.path(),
            "real/llc",
            &format!(
                "[ \"$LD_LIBRARY_PATH\" = /priv ] || exit 127\nprintf %s '{}'",
                banner_text("LLVM version 22.1.8", PTX)
            ),
        );
        let wrapper = script(
            world.folder.path(),
            "bin/llc-22",
            &format!("LD_LIBRARY_PATH=/priv exec {} \"$@\"", real.display()),
        );
        symlink(&wrapper, world.at("llc-link")).unwrap();
        world.tool("bin/opt-22", "22.1.8");
        assert_eq!(world.chosen().llc.path, wrapper);
        world.set("CUDA_OXIDE_LLC", "llc-link");
        let tool = world.chosen().llc;
        assert_eq!(tool.path, world.at("llc-link"));
        assert_eq!(tool.realpath, fs_err::canonicalize(&wrapper).unwrap());
    }

    #[test]
    fn a15_a_dispatcher_by_its_own_name_works_and_links_are_not_probed_twice() {
        let world = World::new();
        script(
            world.folder.path(),
            "launcher",
            &format!(
                "case \"${{0##*/}}\" in llc-22|opt-22) v=22.1.8;; *) v=14.0.6;; esac\necho \"Debian LLVM version $v\"\nprintf %s '{}'",
                banner_text("", PTX)
            ),
        );
        fs_err::create_dir_all(world.at("bin")).unwrap();
        for name in ["llc", "llc-22", "opt-22"] {
            symlink("../launcher", world.at("bin").join(name)).unwrap();
        }
        let choice = world.find();
        assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-22"));
        let reasons = world.reasons(&choice.llc.decision);
        assert!(reasons[1].starts_with("bin/llc [PATH] rejected: is LLVM 14"), "{reasons:?}");

        let mut world = World::new();
        world.tool("llvm/bin/llc", "22.1.8");
        world.tool("llvm/bin/opt", "22.1.8");
        fs_err::create_dir_all(world.at("bin")).unwrap();
        symlink("../llvm/bin/llc", world.at("bin/llc-22")).unwrap();
        let bin = world.at("bin").display().to_string();
        world.set("PATH", format!("{bin}::{bin}"));
        world.request.folders = vec![world.at("llvm/bin")];
        assert_eq!(
            world.reasons(&world.find().llc.decision),
            [
                "bin/llc-22 [PATH] chosen".to_owned(),
                "llvm/bin/llc [usual install folders] not tried: the same file as bin/llc-22".to_owned(),
            ]
        );
    }

    #[test]
    fn another_llc_at_the_same_path_is_another_identity() {
        let world = World::new();
        world.tool("bin/llc-22", "22.1.8");
        world.tool("bin/opt-22", "22.1.8");
        let before = world.chosen();
        assert_eq!(before.llc.identity(), world.chosen().llc.identity());
        world.tool("bin/llc-22", "22.1.9");
        assert_ne!(world.chosen().llc.identity(), before.llc.identity());
        assert_eq!(world.chosen().opt, before.opt);
    }

    #[test]
    fn something_else_called_llc_is_rejected() {
        let mut world = World::new();
        let other = executable(world.folder.path(), "bin/llc", "#!/bin/sh\necho Lua 5.4\n");
        world.set("CUDA_OXIDE_LLC", &other);
        let error = world.find().llc.require().unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "CUDA_OXIDE_LLC names an llc that cannot be used\n  caused by: {}: no `LLVM version` in what it \
                 printed, which starts with: Lua 5.4",
                other.display()
            )
        );
    }

    proptest! {
        #[test]
        fn no_banner_panics(text in "\\PC*|(LLVM version |[0-9]{1,12}|[.]|git|rc|[ \n-]|Registered Targets:\n)*") {
            if let Ok(banner) = parse_banner(&text) {
                prop_assert!(banner.version.full.starts_with(|c: char| c.is_ascii_digit()));
            }
        }
    }
}
