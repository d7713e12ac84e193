//! `cargo xtask`: the command line of kiln's toolchain manager. It only dispatches.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;
use xtask::base::env::Env;
use xtask::base::interrupt;
use xtask::cmd::cli::{self, Cli};
use xtask::report::error::{Error, Report};
use xtask::report::output;

fn main() -> ExitCode {
    interrupt::install();
    let json = cli::asks_for_json(std::env::args_os());
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // `--help` and `--version` are no failures; a closed standard output is not ours to report.
        Err(text) if !text.use_stderr() => {
            let _ = text.print();
            return ExitCode::SUCCESS;
        }
        // Without a verb, the help is the answer.
        Err(help) if help.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand && !json => {
            let _ = help.print();
            return ExitCode::FAILURE;
        }
        Err(error) => {
            report(&cli::usage_error(&error), json);
            return ExitCode::FAILURE;
        }
    };
    match cli.run(&Env::of_process()) {
        Ok(status) => ExitCode::from(status),
        // What an interrupt broke off is no failure to report.
        Err(_) if interrupt::is_pending() => interrupt::wait_for_end(),
        Err(error) => {
            report(&error, json);
            ExitCode::from(error.exit().status())
        }
    }
}

/// Prints an error, its causes and its hint on standard error, and with `json` as a document on standard output.
fn report(error: &Error, json: bool) {
    let mut text = format!("error[{}]: {error}\n", error.code().id);
    match error.hint_text() {
        Some(hint) => text.push_str(&format!("hint: {hint}\n")),
        None => text.push_str(&format!("hint: run: cargo xtask explain {}\n", error.code().id)),
    }
    // With standard error closed there is nobody to tell; the exit status still says it.
    let _ = std::io::stderr().write_all(text.as_bytes());
    if json {
        // The same holds here.
        let _ = output::json(&Report::from(error));
    }
}
