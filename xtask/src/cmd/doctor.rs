//! `doctor`: prints the plan. No network, no writes, no builds; every check runs even if another fails or crashes.

use std::path::Path;

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::plan::{self, Plan};
use crate::report::decision::{Candidate, Decision, Thoroughness, Verdict};
use crate::report::error::Result;
use crate::report::output;

/// Show what a GPU build would use and why, and what is missing
///
/// Reads PROVENANCE, the store, Cargo's configuration and the answers of `--version`. Writes nothing, builds nothing,
/// uses no network. Exit code 0 only if `build --arch` would start.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    common: Common,

    /// Also check these architectures against the chosen llc and the cards that are there
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Print one JSON document (schema kiln.doctor/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

/// The version of the JSON document; it changes when a key is removed or changes its meaning.
const SCHEMA: &str = "kiln.doctor/1";

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    /// Whether `build --arch` would start.
    ok: bool,
    /// The process's exit status.
    exit: u8,
    workspace: String,
    decisions: Vec<&'a Decision>,
}

impl Doctor {
    /// Runs the verb; the status is that of the first problem.
    ///
    /// # Errors
    /// Standard output fails. A problem that doctor finds is not an error of doctor.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let plan = Plan::resolve(&self.common.request(Thoroughness::All), workspace, env);
        let mut decisions: Vec<Decision> = plan.decisions().into_iter().cloned().collect();
        for arch in &self.arch {
            decisions
                .push(plan::resolve_arch(arch, plan.lowering().ok(), plan.gpu.value.as_ref(), env).decision);
        }
        let exit = decisions
            .iter()
            .find_map(|decision| decision.problem.as_ref())
            .map_or(0, |problem| problem.exit.status());
        if self.json {
            let report = Report {
                schema: SCHEMA,
                ok: exit == 0,
                exit,
                workspace: workspace.display().to_string(),
                decisions: decisions.iter().collect(),
            };
            output::json(&report)?;
        } else {
            output::line(&text(&decisions))?;
        }
        Ok(exit)
    }
}

/// The report for people.
fn text(decisions: &[Decision]) -> String {
    let mut text = String::new();
    for decision in decisions {
        describe(decision, &mut text);
    }
    match decisions.iter().filter(|decision| decision.problem.is_some()).count() {
        0 => text.push_str("ready: `cargo xtask build --arch sm_NN` would start"),
        1 => text.push_str("not ready: mend the problem above"),
        count => text.push_str(&format!("not ready: mend the {count} problems above, the first one first")),
    }
    text
}

fn describe(decision: &Decision, text: &mut String) {
    let mark = match (&decision.problem, &decision.chosen) {
        (Some(_), _) => "FAIL",
        (None, Some(_)) => "ok",
        (None, None) => "-",
    };
    let chosen = decision.chosen.as_deref().unwrap_or("none");
    text.push_str(&format!("{mark:<5}{:<12} {chosen}\n", decision.subject));
    let mut detail = |label: &str, value: &str| {
        for (index, line) in value.lines().enumerate() {
            let label = if index == 0 { label } else { "" };
            text.push_str(&format!("     {label:<12} {line}\n"));
        }
    };
    if !decision.why.is_empty() {
        detail("  why", &decision.why);
    }
    for candidate in &decision.candidates {
        detail("  candidate", &candidate_line(candidate));
    }
    for note in &decision.notes {
        detail("  note", note);
    }
    if let Some(problem) = &decision.problem {
        detail("  problem", &format!("[{}] {}", problem.code.id, problem.message));
        for cause in &problem.causes {
            detail("  cause", cause);
        }
        if let Some(hint) = &problem.hint {
            detail("  mend", hint);
        }
    } else if let Some(change) = &decision.change {
        detail("  change", change);
    }
}

fn candidate_line(candidate: &Candidate) -> String {
    let verdict = match &candidate.verdict {
        Verdict::Chosen => "chosen".to_owned(),
        Verdict::Rejected(reason) => format!("rejected: {reason}"),
        Verdict::NotTried(reason) => format!("not tried: {reason}"),
    };
    format!("{} ({}): {verdict}", candidate.what, candidate.from)
}
