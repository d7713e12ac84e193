//! `man DIR`: manual pages, made from the same definitions as `--help`.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _};
use fs_err as fs;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Cli;
use crate::report::error::{Error, Result};
use crate::report::output;

/// Write manual pages into a folder
///
/// Writes DIR/cargo-xtask.1 and one page for each verb, replacing older ones. Try: man DIR/cargo-xtask-setup.1
#[derive(Debug, Args)]
pub struct Man {
    /// The folder, made if it is missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Print one JSON document (schema kiln.man/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    /// The page to start with, and all pages.
    page: PathBuf,
    pages: Vec<PathBuf>,
}

impl Man {
    /// Writes the pages.
    ///
    /// # Errors
    /// The folder is not writable.
    pub fn run(self, env: &Env) -> Result<u8> {
        let folder = env.absolute(&self.folder)?;
        fs::create_dir_all(&folder)?;
        clap_mangen::generate_to(Cli::command().name("cargo-xtask"), &folder)
            .map_err(|error| Error::from(error).context(format!("cannot write into {}", folder.display())))?;
        let page = folder.join("cargo-xtask.1");
        if self.json {
            let mut pages = Vec::new();
            for entry in fs::read_dir(&folder)? {
                let name = entry?.file_name();
                let is_page = |name: &str| name.starts_with("cargo-xtask") && name.ends_with(".1");
                if name.to_str().is_some_and(is_page) {
                    pages.push(folder.join(name));
                }
            }
            pages.sort();
            output::json(&Report { schema: "kiln.man/1", page, pages })?;
        } else {
            output::line(&format!("{}", page.display()))?;
        }
        Ok(0)
    }
}
