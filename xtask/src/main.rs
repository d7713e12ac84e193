//! `cargo xtask`: the command line of kiln's toolchain manager. It only dispatches.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use xtask::cli::Cli;
use xtask::env::Env;
use xtask::error::Error;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // `--help` and `--version` are no failures; a closed standard output is not ours to report.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 1 } else { 0 });
        }
    };
    match cli.run(&Env::of_process()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            report(&error);
            ExitCode::from(error.exit().status())
        }
    }
}

/// Prints an error, its causes and its hint on standard error.
fn report(error: &Error) {
    let mut text = format!("error[{}]: {error}\n", error.code().id);
    match error.hint_text() {
        Some(hint) => text.push_str(&format!("hint: {hint}\n")),
        None => text.push_str(&format!("hint: run: cargo xtask explain {}\n", error.code().id)),
    }
    // With standard error closed there is nobody to tell; the exit status still says it.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
