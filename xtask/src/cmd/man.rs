//! `man DIR`: manual pages, made from the same definitions as `--help`.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _};
use fs_err as fs;

use crate::cli::Cli;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::output;

/// Write manual pages into a folder
///
/// Writes DIR/cargo-xtask.1 and one page for each verb, replacing older ones. Try: man DIR/cargo-xtask-setup.1
#[derive(Debug, Args)]
pub struct Man {
    /// The folder, made if it is missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
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
        output::line(&format!("{}", folder.join("cargo-xtask.1").display()))?;
        Ok(0)
    }
}
