//! Which Rust toolchain builds the backend: the pinned release and commit, with the compiler's private crates.
//!
//! A toolchain is known by its sysroot; rustup's proxies are never run, so neither `RUSTUP_TOOLCHAIN` nor a
//! `rust-toolchain.toml` in the fetched source can change the answer. Left out: installing one (see `setup`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use fs_err as fs;

use crate::base::env::Env;
use crate::base::process::{self, Failure, PROBE_LIMIT};
use crate::report::decision::{Decision, Resolved, Thoroughness, Verdict};
use crate::report::error::{Error, Result};

crate::codes! {
    NOT_FOUND = "KILN-0501", Machine, "the pinned Rust toolchain is not installed",
        "The backend is compiled against the private crates of one rustc commit, which PROVENANCE names. No \
         toolchain with that commit was found among `--toolchain`, KILN_TOOLCHAIN, the last setup's choice, \
         rustup's toolchains and PATH. Install it with the command in the hint.";
    NOT_RUNNABLE = "KILN-0502", Machine, "a rustc cannot be run",
        "The toolchain's rustc is there but does not answer `rustc -vV`. Run that command yourself to see \
         why, and install the toolchain again.";
    WRONG_RUSTC = "KILN-0503", Refusal, "a rustc is not the pinned one",
        "The named toolchain's `rustc -vV` reports another release or commit than PROVENANCE. A backend built \
         with it could not be loaded, or would compile to other bits. Install the pinned one with the command \
         in the hint, or name it with `--toolchain`.";
    NO_RUSTC_DEV = "KILN-0504", Machine, "the toolchain lacks rustc-dev",
        "The backend links the compiler's private crates, which rustup ships as the component rustc-dev. Add \
         it with the command in the hint.";
}

/// The answer of `rustc -vV`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RustcVersion {
    /// The whole answer, which is part of every key.
    pub text: String,
    /// For example `1.95.0`.
    pub release: String,
    /// 40 hexadecimal digits, or `unknown` for a build outside of git.
    pub commit_hash: String,
    /// The host triple.
    pub host: String,
    /// The version of the LLVM that rustc links, where it has one.
    pub llvm: Option<String>,
}

impl RustcVersion {
    /// Reads the answer of `rustc -vV`; `None` when a line that every rustc prints is missing.
    pub fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).map(str::to_owned)
        };
        Some(RustcVersion {
            release: field("release")?,
            commit_hash: field("commit-hash")?,
            host: field("host")?,
            llvm: field("LLVM version"),
            text: text.trim_end().to_owned(),
        })
    }

    /// The first line's gist: `rustc 1.95.0 (59807616e)`.
    pub fn short(&self) -> String {
        let commit = self.commit_hash.get(..9).unwrap_or(&self.commit_hash);
        format!("rustc {} ({commit})", self.release)
    }
}

/// The toolchain that PROVENANCE asks for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// rustup's channel name, which is also the release.
    pub channel: String,
    /// The full commit hash.
    pub commit_hash: String,
    /// rustup components that must be there.
    pub components: Vec<String>,
}

impl Wanted {
    /// The command that installs it.
    pub fn install_command(&self) -> String {
        format!("rustup toolchain install {} --component {}", self.channel, self.components.join(","))
    }
}

/// A toolchain that qualifies.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// Absolute path of its root.
    pub sysroot: PathBuf,
    /// What its rustc says of itself.
    pub version: RustcVersion,
}

impl Toolchain {
    /// Its compiler.
    pub fn rustc(&self) -> PathBuf {
        self.sysroot.join("bin").join(exe("rustc"))
    }

    /// Its cargo, or the one that runs us when the sysroot has none.
    pub fn cargo(&self, env: &Env) -> PathBuf {
        let own = self.sysroot.join("bin").join(exe("cargo"));
        if own.is_file() {
            return own;
        }
        env.var("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
    }

    /// The folder of the host's libraries, where rustc-dev puts the private crates.
    pub fn host_lib(&self) -> PathBuf {
        self.sysroot.join("lib/rustlib").join(&self.version.host).join("lib")
    }
}

/// Where the user or an earlier setup named a toolchain.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// `--toolchain`: a rustup toolchain's name or a sysroot.
    pub flag: Option<OsString>,
    /// The sysroot that the last setup of this checkout chose.
    pub remembered: Option<PathBuf>,
}

/// Chooses the toolchain.
pub fn resolve(
    wanted: &Wanted,
    request: &Request,
    env: &Env,
    thoroughness: Thoroughness,
) -> Resolved<Toolchain> {
    let mut decision = Decision::new("rustc");
    decision.change =
        Some(format!("{}, or name another with --toolchain NAME|SYSROOT", wanted.install_command()));
    let explicit = request
        .flag
        .clone()
        .map(|name| (name, "--toolchain"))
        .or_else(|| env.var("KILN_TOOLCHAIN").map(|name| (name.to_owned(), "KILN_TOOLCHAIN")));
    if let Some((name, from)) = explicit {
        return resolve_explicit(decision, wanted, &name, from, env);
    }

    let candidates = candidates(wanted, request, env);
    // Every rustc takes some 20 ms to answer: with all of them asked, side by side.
    let examined: Vec<Option<Result<Toolchain>>> = match thoroughness {
        Thoroughness::First => Vec::new(),
        Thoroughness::All => thread::scope(|scope| {
            let asked: Vec<_> = candidates
                .iter()
                .map(|candidate| scope.spawn(|| examine(&candidate.sysroot, wanted, env)))
                .collect();
            asked.into_iter().map(|asked| asked.join().ok()).collect()
        }),
    };
    let mut examined = examined.into_iter();
    let mut best_problem: Option<Error> = None;
    let mut chosen: Option<Toolchain> = None;
    for candidate in candidates {
        let shown = candidate.sysroot.display();
        if chosen.is_some() && thoroughness == Thoroughness::First {
            let reason = "a toolchain before it qualifies".to_owned();
            decision.consider(shown, candidate.from, Verdict::NotTried(reason));
            continue;
        }
        let outcome = examined.next().flatten().unwrap_or_else(|| examine(&candidate.sysroot, wanted, env));
        match outcome {
            Ok(toolchain) if chosen.is_none() => {
                decision.consider(shown, candidate.from.clone(), Verdict::Chosen);
                decision.why = format!("{}: is the pinned commit and has rustc-dev", candidate.from);
                chosen = Some(toolchain);
            }
            Ok(_) => {
                let reason = "qualifies too, but comes later".to_owned();
                decision.consider(shown, candidate.from, Verdict::Rejected(reason));
            }
            Err(error) => {
                decision.consider(shown, candidate.from, Verdict::Rejected(error.message().to_owned()));
                // The pinned toolchain without rustc-dev is one command away: the most useful thing to say.
                if best_problem.is_none() && std::ptr::eq(error.code(), &NO_RUSTC_DEV) {
                    best_problem = Some(error);
                }
            }
        }
    }
    finish(decision, wanted, chosen, best_problem)
}

fn resolve_explicit(
    mut decision: Decision,
    wanted: &Wanted,
    name: &OsString,
    from: &str,
    env: &Env,
) -> Resolved<Toolchain> {
    let outcome = explicit_sysroot(name, from, env).and_then(|sysroot| {
        decision.consider(sysroot.display(), from, Verdict::Chosen);
        examine(&sysroot, wanted, env)
    });
    match outcome {
        Ok(toolchain) => {
            decision.why = format!("{from} names it; it is the pinned commit and has rustc-dev");
            finish(decision, wanted, Some(toolchain), None)
        }
        Err(error) => {
            if let Some(candidate) = decision.candidates.last_mut() {
                candidate.verdict = Verdict::Rejected(error.message().to_owned());
            }
            finish(decision, wanted, None, Some(error))
        }
    }
}

fn finish(
    mut decision: Decision,
    wanted: &Wanted,
    chosen: Option<Toolchain>,
    problem: Option<Error>,
) -> Resolved<Toolchain> {
    match &chosen {
        Some(toolchain) => {
            decision.chosen =
                Some(format!("{} in {}", toolchain.version.short(), toolchain.sysroot.display()));
        }
        None => {
            let error = problem.unwrap_or_else(|| not_found(wanted));
            decision.why = "no toolchain qualifies".to_owned();
            decision.problem = Some(error.into());
        }
    }
    Resolved { decision, value: chosen }
}

fn not_found(wanted: &Wanted) -> Error {
    Error::new(
        &NOT_FOUND,
        format!(
            "no Rust toolchain with release {} and commit {} was found",
            wanted.channel, wanted.commit_hash
        ),
    )
    .hint(format!("run: {}", wanted.install_command()))
}

struct Found {
    sysroot: PathBuf,
    from: String,
}

/// Every place where a toolchain may be, in order of precedence, each real folder once: rustup's names are often
/// links to each other.
fn candidates(wanted: &Wanted, request: &Request, env: &Env) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    let mut real_folders = Vec::new();
    let mut add = |sysroot: PathBuf, from: String| {
        let real = fs::canonicalize(&sysroot).unwrap_or_else(|_| sysroot.clone());
        if !real_folders.contains(&real) {
            real_folders.push(real);
            found.push(Found { sysroot, from });
        }
    };
    if let Some(sysroot) = &request.remembered {
        add(sysroot.clone(), "the last setup of this checkout".to_owned());
    }
    let mut installed = rustup_toolchains(env);
    // The channel's own toolchain first, then the others in the order of their names.
    installed.sort_by_key(|(name, _)| (!is_channel(name, &wanted.channel), name.clone()));
    for (name, sysroot) in installed {
        add(sysroot, format!("rustup toolchain {name}"));
    }
    for folder in env.search_path() {
        let rustc = folder.join(exe("rustc"));
        if let Some(sysroot) = sysroot_of(&rustc) {
            add(sysroot, format!("PATH ({})", rustc.display()));
        }
    }
    found
}

/// Says whether rustup's toolchain `name` is `channel`, with or without a host triple.
fn is_channel(name: &str, channel: &str) -> bool {
    name.strip_prefix(channel).is_some_and(|rest| rest.is_empty() || is_triple_suffix(rest))
}

fn is_triple_suffix(rest: &str) -> bool {
    // `1.95.0-dev` is a custom toolchain; a triple has at least two dashes.
    rest.starts_with('-') && rest.matches('-').count() >= 2
}

/// The names and folders of rustup's toolchains; none when rustup is not there.
fn rustup_toolchains(env: &Env) -> Vec<(String, PathBuf)> {
    let Some(home) = rustup_home(env) else { return Vec::new() };
    let Ok(entries) = fs::read_dir(home.join("toolchains")) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.file_name().into_string().ok()?, entry.path()))
        })
        .collect()
}

fn rustup_home(env: &Env) -> Option<PathBuf> {
    match env.path("RUSTUP_HOME") {
        Ok(Some(home)) => Some(home),
        _ => env.var("HOME").map(|home| Path::new(home).join(".rustup")),
    }
}

/// The sysroot of a rustc on PATH that is not one of rustup's proxies.
fn sysroot_of(rustc: &Path) -> Option<PathBuf> {
    let real = rustc.canonicalize().ok()?;
    let bin = real.parent()?;
    // rustup's proxies are links to, or copies of, one binary that stands beside them.
    if real.file_stem()? != "rustc" || bin.join(exe("rustup")).is_file() {
        return None;
    }
    let sysroot = bin.parent()?;
    sysroot.join("lib/rustlib").is_dir().then(|| sysroot.to_owned())
}

fn explicit_sysroot(name: &OsString, from: &str, env: &Env) -> Result<PathBuf> {
    let as_path = Path::new(name);
    if process::is_path(name) || as_path.is_absolute() {
        let sysroot = env.absolute(as_path)?;
        if sysroot.join("bin").join(exe("rustc")).exists() {
            return Ok(sysroot);
        }
        return Err(Error::new(
            &NOT_FOUND,
            format!("{from} names {}, which has no bin/{}", sysroot.display(), exe("rustc")),
        )
        .hint("name a rustup toolchain, or the folder that `rustc --print sysroot` prints"));
    }
    let name = name.to_string_lossy();
    let installed = rustup_toolchains(env);
    let known = installed
        .iter()
        .find(|(have, _)| *have == name)
        .or_else(|| installed.iter().find(|(have, _)| is_channel(have, &name)));
    if let Some((_, sysroot)) = known {
        return Ok(sysroot.clone());
    }
    let mut names: Vec<_> = installed.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let have = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(Error::new(
        &NOT_FOUND,
        format!("{from} names the toolchain `{name}`, which rustup does not have (it has: {have})"),
    )
    .hint("give one of these names, or a sysroot as a path (with a slash)"))
}

/// Checks that the toolchain at `sysroot` is the wanted one, complete.
fn examine(sysroot: &Path, wanted: &Wanted, env: &Env) -> Result<Toolchain> {
    let version = version_of(&sysroot.join("bin").join(exe("rustc")), env)?;
    if version.release != wanted.channel || version.commit_hash != wanted.commit_hash {
        return Err(Error::new(
            &WRONG_RUSTC,
            format!(
                "rustc in {} is {} commit {}, PROVENANCE pins {} commit {}",
                sysroot.display(),
                version.release,
                version.commit_hash,
                wanted.channel,
                wanted.commit_hash
            ),
        )
        .hint(format!("run: {}", wanted.install_command())));
    }
    let toolchain = Toolchain { sysroot: sysroot.to_owned(), version };
    if wanted.components.iter().any(|name| name == "rustc-dev") && !has_rustc_dev(&toolchain) {
        return Err(Error::new(
            &NO_RUSTC_DEV,
            format!(
                "{} has no rustc-dev (no librustc_codegen_ssa in {})",
                sysroot.display(),
                toolchain.host_lib().display()
            ),
        )
        .hint(format!("run: rustup component add rustc-dev --toolchain {}", wanted.channel)));
    }
    Ok(toolchain)
}

/// Asks `rustc` for its version.
///
/// # Errors
/// It cannot be started, does not end in time, or answers something else.
pub fn version_of(rustc: &Path, env: &Env) -> Result<RustcVersion> {
    let mut command = Command::new(rustc);
    command.arg("-vV").env_clear();
    // A wrapped rustc needs what the user's environment gives it; rustup's own variables must not steer it.
    command.envs(env.vars().filter(|(key, _)| *key != "RUSTUP_TOOLCHAIN"));
    let unrunnable = |what: String| {
        Error::new(&NOT_RUNNABLE, format!("{} -vV {what}", rustc.display()))
            .hint("reinstall the toolchain, or name another with --toolchain")
    };
    let output = process::output(&mut command, PROBE_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => unrunnable(format!("cannot be started: {error}")),
        Failure::TimedOut(limit) => unrunnable(format!("did not end within {} s", limit.as_secs())),
    })?;
    if !output.status.success() {
        return Err(unrunnable(format!("ended with {}: {}", output.status, output.stderr.trim())));
    }
    RustcVersion::parse(&output.stdout)
        .ok_or_else(|| unrunnable(format!("printed no release, commit-hash and host: {:?}", output.stdout)))
}

fn has_rustc_dev(toolchain: &Toolchain) -> bool {
    let Ok(entries) = fs::read_dir(toolchain.host_lib()) else { return false };
    entries
        .filter_map(|entry| entry.ok())
        .any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"librustc_codegen_ssa-"))
}

fn exe(name: &str) -> String {
    format!("{name}{}", std::env::consts::EXE_SUFFIX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const COMMIT: &str = "59807616e1fa2540724bfbac14d7976d7e4a3860";

    /// A home with rustup toolchains whose rustc are scripts.
    struct Home(tempfile::TempDir);

    impl Home {
        fn new() -> Self {
            let home = Home(tempfile::tempdir().unwrap());
            fs::create_dir_all(home.toolchain("")).unwrap();
            home
        }

        fn toolchain(&self, name: &str) -> PathBuf {
            self.0.path().join(".rustup/toolchains").join(name)
        }

        fn add(&self, name: &str, release: &str, commit: &str, rustc_dev: bool) -> PathBuf {
            let sysroot = self.toolchain(name);
            fs::create_dir_all(sysroot.join("bin")).unwrap();
            fs::create_dir_all(sysroot.join("lib/rustlib/triple/lib")).unwrap();
            let script = format!(
                "#!/bin/sh\n[ -z \"$RUSTUP_TOOLCHAIN\" ] || exit 9\n\
                 printf 'rustc {release}\\ncommit-hash: {commit}\\nhost: triple\\nrelease: {release}\\n'\n"
            );
            let rustc = sysroot.join("bin/rustc");
            let fresh = sysroot.join("fresh");
            fs::write(&fresh, script).unwrap();
            fs::set_permissions(&fresh, PermissionsExt::from_mode(0o755)).unwrap();
            fs::rename(fresh, rustc).unwrap();
            if rustc_dev {
                fs::write(sysroot.join("lib/rustlib/triple/lib/librustc_codegen_ssa-1.rmeta"), "").unwrap();
            }
            sysroot
        }

        fn env(&self, more: &[(&str, &str)]) -> Env {
            let home = self.0.path().to_str().unwrap();
            let base = [("HOME", home), ("PATH", "/usr/bin:/bin")];
            Env::of(base.into_iter().chain(more.iter().copied()), home)
        }

        fn resolve(&self, request: &Request, env: &Env) -> Resolved<Toolchain> {
            let wanted = Wanted {
                channel: "1.95.0".to_owned(),
                commit_hash: COMMIT.to_owned(),
                components: vec!["rustc-dev".to_owned()],
            };
            let first = resolve(&wanted, request, env, Thoroughness::First);
            let all = resolve(&wanted, request, env, Thoroughness::All);
            let sysroot =
                |resolved: &Resolved<Toolchain>| resolved.value.as_ref().map(|value| value.sysroot.clone());
            assert_eq!(sysroot(&first), sysroot(&all), "doctor and build disagree");
            assert_eq!(first.decision.problem, all.decision.problem);
            all
        }
    }

    #[test]
    fn b3_rustup_s_variable_and_default_decide_nothing() {
        let home = Home::new();
        home.add("stable-triple", "1.96.0", "1111111111111111111111111111111111111111", true);
        let right = home.add("1.95.0-x86_64-unknown-linux-gnu", "1.95.0", COMMIT, true);
        let found = home.resolve(&Request::default(), &home.env(&[("RUSTUP_TOOLCHAIN", "stable")]));
        assert_eq!(found.require().unwrap().sysroot, right);
    }

    #[test]
    fn a_custom_toolchain_of_the_same_commit_serves_when_the_pinned_one_lacks_rustc_dev() {
        let home = Home::new();
        home.add("1.95.0-x86_64-unknown-linux-gnu", "1.95.0", COMMIT, false);
        let dev = home.add("1.95.0-dev", "1.95.0", COMMIT, true);
        symlink(&dev, home.toolchain("again")).unwrap();
        let found = home.resolve(&Request::default(), &home.env(&[]));
        assert_eq!(found.require().unwrap().sysroot, dev);
        let reasons: Vec<_> = found.decision.candidates.iter().map(|candidate| &candidate.verdict).collect();
        assert!(
            matches!(reasons[..2], [Verdict::Rejected(reason), Verdict::Chosen] if reason.contains("no rustc-dev"))
        );
        assert_eq!(reasons.len(), found.decision.candidates.len());
    }

    #[test]
    fn without_rustc_dev_the_component_is_named_and_without_the_release_the_toolchain() {
        let home = Home::new();
        let none = home.resolve(&Request::default(), &home.env(&[])).require().unwrap_err();
        assert_eq!(none.code().id, "KILN-0501");
        assert_eq!(none.hint_text(), Some("run: rustup toolchain install 1.95.0 --component rustc-dev"));
        home.add("1.95.0-x86_64-unknown-linux-gnu", "1.95.0", COMMIT, false);
        let bare = home.resolve(&Request::default(), &home.env(&[])).require().unwrap_err();
        assert_eq!(bare.code().id, "KILN-0504");
        assert_eq!(bare.hint_text(), Some("run: rustup component add rustc-dev --toolchain 1.95.0"));
    }

    #[test]
    fn an_explicit_toolchain_is_used_alone() {
        let home = Home::new();
        home.add("1.95.0-dev", "1.95.0", COMMIT, true);
        let wrong = home.add("other", "1.95.0", "2222222222222222222222222222222222222222", true);
        let name = |flag: &str| Request { flag: Some(flag.into()), ..Request::default() };
        let refused = home.resolve(&name("other"), &home.env(&[])).require().unwrap_err();
        assert_eq!((refused.code().id, refused.exit().status()), ("KILN-0503", 70));
        let by_path = name(wrong.to_str().unwrap());
        assert_eq!(home.resolve(&by_path, &home.env(&[])).require().unwrap_err().code().id, "KILN-0503");
        let missing = home.resolve(&name("nightly"), &home.env(&[])).require().unwrap_err();
        assert_eq!(
            missing.message(),
            "--toolchain names the toolchain `nightly`, which rustup does not have (it has: 1.95.0-dev, other)"
        );
        let variable = home.env(&[("KILN_TOOLCHAIN", "1.95.0-dev")]);
        assert!(home.resolve(&Request::default(), &variable).require().is_ok());
    }

    #[test]
    fn a_rustc_that_cannot_run_or_answers_nonsense_is_named() {
        let home = Home::new();
        let sysroot = home.add("1.95.0-dev", "1.95.0", COMMIT, true);
        fs::write(sysroot.join("bin/rustc"), "#!/bin/sh\necho hello\n").unwrap();
        let name = Request { flag: Some("1.95.0-dev".into()), ..Request::default() };
        let error = home.resolve(&name, &home.env(&[])).require().unwrap_err();
        assert_eq!(error.code().id, "KILN-0502");
        assert!(
            error.message().ends_with(r#"printed no release, commit-hash and host: "hello\n""#),
            "{error}"
        );
    }

    #[test]
    fn b20_a_distribution_s_rustc_on_path_counts_and_a_rustup_proxy_does_not() {
        let home = Home::new();
        let distro = home.add("../../usr", "1.95.0", COMMIT, true);
        let bin = fs::canonicalize(distro.join("bin")).unwrap();
        let path = format!("{}:/usr/bin", bin.display());
        let found = home.resolve(&Request::default(), &home.env(&[("PATH", &path)]));
        assert_eq!(found.require().unwrap().sysroot, bin.parent().unwrap());
        fs::write(bin.join("rustup"), "").unwrap();
        assert!(home.resolve(&Request::default(), &home.env(&[("PATH", &path)])).require().is_err());
    }
}
