//! `verify`: hashes everything again that the installed record names, and with `--rebuild` builds it again elsewhere.

use std::path::Path;

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::machine::arch::Arch;
use crate::plan::Plan;
use crate::report::decision::Thoroughness;
use crate::report::error::Result;
use crate::report::output;
use crate::report::progress;
use crate::verify::rebuild::Rebuild;
use crate::verify::{self, Check};

/// Hash everything again that the installed record names; with --rebuild, build it again elsewhere and compare
///
/// Compares the source tree, the patches, the lock file, the backend, cargo-oxide, the host config and the PTX of every
/// architecture that was built. Writes nothing; --rebuild works in a folder of the store that it removes afterwards.
#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    common: Common,

    /// Build the backend again from a copy of the source, with another target folder, HOME and CARGO_HOME, and compare
    /// byte for byte; with --arch, also the kernels
    #[arg(long)]
    rebuild: bool,

    /// Require and compare the PTX of this architecture; may be given several times [default: all that were built]
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Use no network: with --rebuild, the crates must be in the store or in CARGO_HOME [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// With --rebuild, keep the folder in which it was built
    #[arg(long)]
    keep: bool,

    /// Print one JSON document (schema kiln.verify/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    ok: bool,
    exit: u8,
    checks: Vec<Check>,
}

impl Verify {
    /// Runs the verb; the status is that of the first difference.
    ///
    /// # Errors
    /// Something stands in the way of comparing. A difference is not an error of verify.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("verify", self.common.quiet);
        let archs: Vec<Arch> = self.arch.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let mut checks = verify::recorded(&plan, workspace)?;
        checks.extend(verify::ptx(workspace, &archs)?);
        if self.rebuild && checks.iter().all(|check| check.ok) {
            let progress = progress.as_ref();
            let (offline, keep) = (env.is_offline(self.offline), self.keep);
            let rebuild = Rebuild { plan: &plan, archs: &archs, workspace, offline, keep, env, progress };
            checks.extend(rebuild.run()?);
        } else if self.rebuild {
            progress.note("not built again: mend the differences first");
        }
        let exit = checks.iter().map(|check| check.exit).find(|exit| *exit != 0).unwrap_or(0);
        if self.json {
            output::json(&Report { schema: "kiln.verify/1", ok: exit == 0, exit, checks })?;
            return Ok(exit);
        }
        for check in &checks {
            output::line(&text(check))?;
        }
        let wrong = checks.iter().filter(|check| !check.ok).count();
        output::line(&match wrong {
            0 => format!("verified: {} comparisons, no difference", checks.len()),
            _ => format!("NOT verified: {wrong} of {} comparisons show a difference", checks.len()),
        })?;
        Ok(exit)
    }
}

fn text(check: &Check) -> String {
    let mark = if check.ok { "ok" } else { "DIFF" };
    let mut text = format!("{mark:<5}{}", check.what);
    match (&check.expected, &check.found) {
        (Some(expected), _) if check.ok => text.push_str(&format!("  {expected}")),
        (Some(expected), found) => {
            let found = found.as_deref().unwrap_or("nothing");
            text.push_str(&format!("\n       expected {expected}\n       found    {found}"));
        }
        (None, Some(found)) => text.push_str(&format!("  {found}")),
        (None, None) => {}
    }
    if let Some(path) = &check.path {
        text.push_str(&format!("\n       {}", path.display()));
    }
    for detail in &check.details {
        text.push_str(&format!("\n       {detail}"));
    }
    text
}
