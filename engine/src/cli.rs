//! The `kiln` command line, the same for every binary: each adds the kinds of device that it was built with.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::selftest::{self, DeviceKind, DeviceName, SelftestError};

/// LLM inference with the same bits on every machine.
#[derive(Debug, Parser)]
#[command(name = "kiln", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Compare the bits of every kernel with a scalar reference, over many shapes. Reads and writes no files.
    Selftest {
        /// Device to compare, beside the CPU: cpu, cuda or cuda:N.
        #[arg(long, default_value = "cpu", value_name = "DEVICE")]
        device: DeviceName,
        /// Add a runner with a defect, to see the self-test fail.
        #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(selftest::PLANTS))]
        plant: Option<String>,
    },
}

/// Runs the command line of this process with the CPU and `kinds`. The exit code is 0 only for success.
pub fn main(kinds: &[&dyn DeviceKind]) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // To a closed pipe there is nothing left to say.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(cli, kinds, &mut std::io::stdout().lock()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli, kinds: &[&dyn DeviceKind], out: &mut dyn Write) -> Result<ExitCode, SelftestError> {
    match cli.verb {
        Verb::Selftest { device, plant } => {
            let mut runners = selftest::runners(&device, kinds)?;
            if let Some(name) = plant {
                runners.push(selftest::plant(&name)?);
            }
            let verdict = selftest::compare(&mut runners, out)?;
            Ok(if verdict.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn selftest_succeeds_and_fails_with_a_plant() {
        let code = |args: &[&str]| {
            let cli = Cli::try_parse_from(args).expect("a good command line");
            let mut text = Vec::new();
            let code = run(cli, &[], &mut text).expect("the CPU is there");
            (code == ExitCode::SUCCESS, String::from_utf8(text).expect("text"))
        };
        let (good, text) = code(&["kiln", "selftest"]);
        assert!(good, "{text}");
        let (good, text) = code(&["kiln", "selftest", "--plant", "unfused"]);
        assert!(!good && !text.ends_with(" 0 failed\n"), "{text}");
    }
}
