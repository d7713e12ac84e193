//! `completions SHELL`: what a shell needs to complete the verbs and options.

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::error::Result;
use crate::output;

/// Print completions for a shell, for a command called `xtask`
///
/// Cargo does not let an alias complete its arguments, so give it a name of its own, for example in bash:
/// alias xtask='cargo xtask'; source <(cargo xtask completions bash). Reads and writes nothing.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Prints them.
    ///
    /// # Errors
    /// Standard output fails.
    pub fn run(self) -> Result<u8> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "xtask", &mut text);
        output::line(String::from_utf8_lossy(&text).trim_end())?;
        Ok(0)
    }
}
