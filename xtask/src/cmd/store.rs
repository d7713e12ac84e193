//! `store`: what is in the store, how big it is, why it is there and who uses it.

use std::path::Path;

use clap::Args;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::report::error::Result;
use crate::report::output;
use crate::store::Store;
use crate::store::inventory::{self, Item, State};

/// List what is in the store: sizes, why it is there, and which checkouts use it
///
/// Reads the store and the settings of the checkouts that use it. Writes nothing.
#[derive(Debug, Args)]
pub struct List {
    #[command(flatten)]
    common: Common,

    /// Print one JSON document (schema kiln.store/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    store: &'a Path,
    bytes: u64,
    items: &'a [Item],
}

impl List {
    /// Runs the verb.
    ///
    /// # Errors
    /// The store cannot be found or read.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let store = self.common.store(workspace, env)?;
        let items = inventory::list(&store)?;
        let bytes = items.iter().map(|item| item.bytes).sum();
        if self.json {
            output::json(&Report { schema: "kiln.store/1", store: store.root(), bytes, items: &items })?;
            return Ok(0);
        }
        for item in &items {
            output::line(&describe(&store, item))?;
            for user in &item.used_by {
                output::line(&format!("{:25}used by {}", "", user.display()))?;
            }
        }
        output::line(&format!("{} in {}", HumanBytes(bytes), store.root().display()))?;
        Ok(0)
    }
}

/// One line about an item.
pub fn describe(store: &Store, item: &Item) -> String {
    let state = match item.state {
        State::Used => "used",
        State::Unused => "unused",
        State::Leftover => "leftover",
        State::Foreign => "foreign",
    };
    let name = item.path.strip_prefix(store.root()).unwrap_or(&item.path);
    let size = HumanBytes(item.bytes).to_string();
    let days = item.age / 86_400;
    format!("{state:<9}{size:>11}  {days:>3} d {}: {}", name.display(), item.why)
}
