//! `gc`: removes from the store what no checkout uses and what killed setups left.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::cmd::store;
use crate::report::error::Result;
use crate::report::output;
use crate::report::progress;
use crate::store::inventory::{self, Removed};

/// Remove from the store what no checkout uses, and what killed setups left
///
/// A checkout uses what its last setup chose, as long as it exists and still names this store. Waits for setups that run,
/// and never removes an entry that one works on.
#[derive(Debug, Args)]
pub struct Gc {
    #[command(flatten)]
    common: Common,

    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,

    /// Keep unused entries that are younger than this many days
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_days: u32,

    /// Print one JSON document (schema kiln.gc/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    store: &'a Path,
    dry_run: bool,
    freed: u64,
    removed: &'a [Removed],
}

impl Gc {
    /// Runs the verb.
    ///
    /// # Errors
    /// The store cannot be found, read or written.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("gc", self.common.quiet);
        let store = self.common.store(workspace, env)?;
        let keep = Duration::from_secs(u64::from(self.keep_days) * 86_400);
        let removed = inventory::collect(&store, keep, self.dry_run, &|text| progress.note(text))?;
        let gone = removed.iter().filter(|removed| removed.skipped.is_none());
        let freed = gone.map(|removed| removed.item.bytes).sum();
        if self.json {
            let (dry_run, store) = (self.dry_run, store.root());
            output::json(&Report { schema: "kiln.gc/1", store, dry_run, freed, removed: &removed })?;
            return Ok(0);
        }
        for Removed { item, skipped } in &removed {
            let line = store::describe(&store, item);
            match skipped {
                Some(reason) => output::line(&format!("kept: {reason}: {line}"))?,
                None => output::line(&line)?,
            }
        }
        let verb = if self.dry_run { "would free" } else { "freed" };
        output::line(&format!("{verb} {} in {}", HumanBytes(freed), store.root().display()))?;
        Ok(0)
    }
}
