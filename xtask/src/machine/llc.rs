//! Which `llc` and `opt` lower the kernels: candidates, probes, and the choice by verified LLVM major.
//!
//! A file's name proves nothing: `llc-22` may report 14. Exit status 0 of a compile proves nothing either; the PTX
//! itself is checked by [`crate::ptx`].

mod banner;
mod opt;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::base::env::Env;
use crate::base::version::LlvmMajor;
use crate::machine::probe::{self};
pub use crate::report::decision::Thoroughness;
use crate::report::decision::{Decision, Resolved, Verdict};
use crate::report::error::{Error, Result};

pub use self::banner::{Banner, LlvmVersion, parse_banner, probe};
use self::opt::{OptSearch, find_opt, opt_not_tried};

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

#[cfg(test)]
pub(crate) mod tests;
