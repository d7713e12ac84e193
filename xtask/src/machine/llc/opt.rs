//! The opt that goes with an llc.

use std::path::{Path, PathBuf};

use super::banner::{Banner, probe as probe_version};
use super::{LlcRequest, NO_OPT, one_line, search_path};
use crate::base::env::Env;
use crate::base::version::LlvmMajor;
use crate::machine::probe::{self};
use crate::report::decision::{Decision, Verdict};
use crate::report::error::Error;

/// The search for an `opt` that fits one `llc`.
pub(super) struct OptSearch {
    pub(super) decision: Decision,
    pub(super) found: Option<(PathBuf, Banner)>,
}

pub(super) fn find_opt(llc: &Path, banner: &Banner, request: &LlcRequest, env: &Env) -> OptSearch {
    let major = banner.version.major;
    let mut decision = Decision::new("opt");
    decision.change = Some("set CUDA_OXIDE_OPT=/absolute/path/of/opt".into());
    if let Some(explicit) = &request.opt {
        let result = probe::explicit(&explicit.value, &explicit.from, "opt", env)
            .and_then(|path| Ok((probe_version(&path, env)?, path)))
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
        let verdict = match probe_version(&path, env) {
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

pub(super) fn opt_mismatch(opt: &Banner, major: LlvmMajor) -> Option<String> {
    if opt.version.major != major {
        return Some(format!("is LLVM {} ({})", opt.version.major, opt.line));
    }
    // Without the target it would optimise by generic costs.
    (!opt.targets.is_empty() && !opt.makes_ptx()).then(|| format!("{} was built without nvptx64", opt.line))
}

pub(super) fn opt_candidates(
    llc: &Path,
    major: LlvmMajor,
    request: &LlcRequest,
    env: &Env,
) -> Vec<(PathBuf, String)> {
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

pub(super) fn opt_not_tried() -> Decision {
    let mut decision = Decision::new("opt");
    decision.why = "not looked for: no llc was chosen".into();
    decision
}
