//! `attest`: prints the installed record, an in-toto Statement with a SLSA v1 provenance predicate.

use std::path::Path;

use clap::Args;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::plan::Plan;
use crate::report::decision::Thoroughness;
use crate::report::error::Result;
use crate::report::output;

/// Print the provenance of the installed backend: an in-toto Statement v1 with a SLSA v1 predicate
///
/// Reads the store, and first compares the backend's files with the record. The document is JSON with and without --json.
#[derive(Debug, Args)]
pub struct Attest {
    #[command(flatten)]
    common: Common,

    /// Print the statement on one line, as signing tools take it
    #[arg(long)]
    json: bool,
}

impl Attest {
    /// Runs the verb.
    ///
    /// # Errors
    /// There is no backend, or it is not the recorded one.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        for resolved in [&plan.pins.decision, &plan.store.decision, &plan.rustc.decision] {
            if let Some(problem) = &resolved.problem {
                return Err(problem.clone().into());
            }
        }
        let record = &plan.backend.require()?.record;
        if self.json {
            output::line(&serde_json::to_string(record).map_err(std::io::Error::from)?)?;
        } else {
            output::json(record)?;
        }
        Ok(0)
    }
}
