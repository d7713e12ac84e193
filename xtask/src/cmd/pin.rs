//! `pin`: shows what another revision, or changed patches, would mean for PROVENANCE, and writes it with `--write`.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::pins::{Pin, Repository};
use crate::repin::examine::{Examination, Findings};
use crate::repin::{Change, Verdict};
use crate::report::decision::Thoroughness;
use crate::report::error::Result;
use crate::report::output;
use crate::report::progress;

/// Show what another upstream revision means for PROVENANCE, or whether the pinned one still resolves
///
/// Fetches the revision (or takes --source), hashes it, looks for the crates by name, tries every patch, and reads the Rust
/// that it asks for. Writes nothing but PROVENANCE, and that only with --write; comments and order are kept.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub struct Repin {
    #[command(flatten)]
    common: Common,

    /// The revision: a full commit name, or a branch or tag that git can resolve
    #[arg(group = "what", value_name = "REV")]
    revision: Option<String>,

    /// The revision at the head of the repository
    #[arg(long, group = "what")]
    upstream_latest: bool,

    /// Fetch the pinned revision again and compare: tree, crates, lock file, patches
    #[arg(long, group = "what")]
    check: bool,

    /// Record the patches in backend-patches/ as they are now
    #[arg(long, group = "what")]
    patches: bool,

    /// Record the hashes of crates that come from git, as Cargo vendors them
    #[arg(long, group = "what")]
    git_crates: bool,

    /// Another repository than the pinned one
    #[arg(long, value_name = "URL")]
    repository: Option<Repository>,

    /// Take the revision from here instead of the network: an archive, a folder, or a git repository
    #[arg(long, value_name = "ARCHIVE|DIR|GIT-REPO")]
    source: Option<PathBuf>,

    /// Edit PROVENANCE
    #[arg(long)]
    write: bool,

    /// Use no network [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Print one JSON document (schema kiln.pin/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    #[serde(flatten)]
    findings: &'a Findings,
}

impl Repin {
    /// Runs the verb.
    ///
    /// # Errors
    /// The revision cannot be had or examined, or PROVENANCE cannot be written.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("pin", self.common.quiet);
        let pin = Pin::load(workspace)?;
        let asked = Examination {
            pin: &pin,
            request: &self.common.request(Thoroughness::First),
            repository: self.repository.as_ref().unwrap_or(&pin.source.repository),
            source: self.source.as_deref(),
            write: self.write,
            offline: env.is_offline(self.offline),
            workspace,
            env,
            progress: progress.as_ref(),
        };
        let findings = if self.patches {
            asked.patches()?
        } else if self.git_crates {
            asked.git_crates()?
        } else if self.check {
            asked.pinned()?
        } else {
            asked.other(self.revision.as_deref().unwrap_or("HEAD"))?
        };
        if self.json {
            output::json(&Report { schema: "kiln.pin/1", findings: &findings })?
        } else {
            print(&findings)?
        }
        Ok(findings.exit)
    }
}

fn print(report: &Findings) -> Result<()> {
    if let Some(revision) = &report.revision {
        output::line(&format!("revision  {revision}"))?;
    }
    for asked in &report.rust {
        output::line(&format!("rust      {asked} (pinned: {})", report.rust_pinned))?;
    }
    for tried in &report.patches {
        let verdict = match tried.verdict {
            Verdict::Applies => "applies",
            Verdict::Upstream => "already upstream, at least in part",
            Verdict::Conflicts => "conflicts",
        };
        output::line(&format!("patch     {}: {verdict}", tried.file))?;
        for line in &tried.details {
            output::line(&format!("          {line}"))?;
        }
    }
    for Change { key, old, new } in &report.changes {
        output::line(&format!("change    {key}"))?;
        output::line(&format!("        - {}", old.as_deref().unwrap_or("(nothing)")))?;
        output::line(&format!("        + {}", new.as_deref().unwrap_or("(nothing)")))?;
    }
    for note in &report.notes {
        output::line(&format!("note      {note}"))?;
    }
    output::line(match (report.changes.is_empty(), report.written) {
        (true, _) => "PROVENANCE would not change",
        (false, true) => "PROVENANCE was written",
        (false, false) if report.exit != 0 => "PROVENANCE was not written",
        (false, false) => "PROVENANCE was not written: --write does",
    })
}
