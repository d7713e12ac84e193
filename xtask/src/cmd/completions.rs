//! `completions SHELL`: what a shell needs to complete the verbs and options.

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;
use serde::Serialize;

use crate::cmd::cli::Cli;
use crate::report::error::Result;
use crate::report::output;

/// Print completions for a shell, for a command called `xtask`
///
/// Cargo does not let an alias complete its arguments, so give it a name of its own, for example in bash:
/// alias xtask='cargo xtask'; source <(cargo xtask completions bash). Reads and writes nothing.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    shell: Shell,

    /// Print one JSON document (schema kiln.completions/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    shell: String,
    text: &'a str,
}

impl Completions {
    /// Prints them.
    ///
    /// # Errors
    /// Standard output fails.
    pub fn run(self) -> Result<u8> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "xtask", &mut text);
        let text = String::from_utf8_lossy(&text);
        if self.json {
            let shell = self.shell.to_string();
            output::json(&Report { schema: "kiln.completions/1", shell, text: &text })?;
        } else {
            output::line(text.trim_end())?;
        }
        Ok(0)
    }
}
