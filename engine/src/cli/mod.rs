//! The `kiln` command line, the same for every binary: each adds the kinds of device that it was built with.
//!
//! Flags are named as in llama.cpp where it has them. Text goes to stdout; progress, timings and errors to stderr.

mod bench;
mod chat;
mod load;
mod perplexity;
mod run;
mod show;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Parser, Subcommand};

use crate::error::Error;
use crate::sample::Settings;
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
    /// Continue a text. Without a model: the built-in one writes a little story.
    Run(run::Arguments),
    /// Talk with a model, by the chat template of its file.
    Chat(chat::Arguments),
    /// Measure prompt and generation speed.
    Bench(bench::Arguments),
    /// Show what a model file holds.
    Inspect(show::InspectArguments),
    /// Show the tokens of a text.
    Tokenize(show::TokenizeArguments),
    /// Measure how well a model predicts a text.
    Perplexity(perplexity::Arguments),
    /// Compare the bits of every kernel with a scalar reference, over many shapes. Reads and writes no files.
    Selftest {
        /// Device to compare, beside the CPU: cpu, cuda or cuda:N.
        #[arg(long, default_value = "cpu", value_name = "DEVICE")]
        device: DeviceName,
        /// Add a runner with a defect, to see the self-test fail.
        #[arg(long, alias = "plant", value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(selftest::DEFECTS))]
        seed_defect: Option<String>,
    },
}

/// How tokens are chosen.
#[derive(Debug, Args)]
struct SamplingArguments {
    /// Temperature; 0 takes the most likely token always.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temp: f32,
    /// Choose among this many of the most likely tokens; 0: among all.
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// Choose among the most likely tokens that together have this probability.
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Drop tokens with less than this share of the most likely one's probability.
    #[arg(long, default_value_t = 0.05)]
    min_p: f32,
    /// Make recent tokens less likely; 1 does nothing.
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// How many tokens are recent.
    #[arg(long, default_value_t = 64)]
    repeat_last_n: usize,
    /// Where the random numbers start: the same seed gives the same text, on every machine. -1: a new one each time.
    #[arg(short, long, default_value_t = -1, allow_negative_numbers = true)]
    seed: i64,
}

impl SamplingArguments {
    fn settings(&self) -> Result<Settings, Error> {
        let check = |name: &str, value: f32, good: bool, expected: &str| {
            if good {
                Ok(())
            } else {
                Err(Error::Request(format!("--{name} is {value}, expected {expected}")))
            }
        };
        check("temp", self.temp, self.temp.is_finite(), "a number")?;
        check("top-p", self.top_p, (0.0..=1.0).contains(&self.top_p), "0 to 1")?;
        check("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1")?;
        let penalty = self.repeat_penalty;
        check("repeat-penalty", penalty, penalty.is_finite() && penalty > 0.0, "a positive number")?;
        let seed = u64::try_from(self.seed).unwrap_or_else(|_| fresh_seed());
        Ok(Settings {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: penalty,
            repeat_last: self.repeat_last_n,
            seed,
        })
    }
}

/// A seed that differs from run to run, small enough to type.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) & 0xffff_ffff
}

/// What ends a command early.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Engine(#[from] Error),
    #[error(transparent)]
    Selftest(#[from] SelftestError),
    #[error("cannot write the output: {0}")]
    Write(#[from] io::Error),
}

/// Runs the command line of this process with the CPU and `kinds`. The exit code is 0 only for success; 130 after Ctrl-C.
pub fn main(kinds: &[&dyn DeviceKind]) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // To a closed pipe there is nothing left to say.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    // Without the handler Ctrl-C still ends the process, only less politely.
    let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst));
    match run(cli, kinds, &mut io::stdout().lock()) {
        Ok(_) if INTERRUPTED.load(Ordering::SeqCst) => ExitCode::from(130),
        Ok(code) => code,
        // A reader that has seen enough, such as `head`, is no failure.
        Err(Failure::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether to go on, or Ctrl-C was pressed.
fn proceed() -> ControlFlow<()> {
    if INTERRUPTED.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn run(cli: Cli, kinds: &[&dyn DeviceKind], out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match cli.verb {
        Verb::Run(arguments) => run::run(&arguments, kinds, out)?,
        Verb::Chat(arguments) => chat::chat(&arguments, kinds, out)?,
        Verb::Bench(arguments) => bench::bench(&arguments, kinds, out)?,
        Verb::Inspect(arguments) => show::inspect(&arguments, out)?,
        Verb::Tokenize(arguments) => show::tokenize(&arguments, out)?,
        Verb::Perplexity(arguments) => perplexity::perplexity(&arguments, kinds, out)?,
        Verb::Selftest { device, seed_defect } => {
            let mut runners = selftest::runners(&device, kinds)?;
            if let Some(name) = seed_defect {
                runners.push(selftest::defective(&name)?);
            }
            let verdict = selftest::compare(&mut runners, out)?;
            return Ok(if verdict.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn text_of(args: &[&str]) -> Result<String, Failure> {
        let cli = Cli::try_parse_from([&["kiln"], args].concat()).expect("a good command line");
        let mut text = Vec::new();
        run(cli, &[], &mut text)?;
        Ok(String::from_utf8(text).expect("text"))
    }

    fn error_of(args: &[&str]) -> String {
        text_of(args).expect_err("it cannot work").to_string()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn selftest_succeeds_and_fails_with_a_seeded_defect() {
        let code = |args: &[&str]| {
            let cli = Cli::try_parse_from(args).expect("a good command line");
            let mut text = Vec::new();
            let code = run(cli, &[], &mut text).expect("the CPU is there");
            (code == ExitCode::SUCCESS, String::from_utf8(text).expect("text"))
        };
        let (good, text) = code(&["kiln", "selftest"]);
        assert!(good, "{text}");
        let (good, text) = code(&["kiln", "selftest", "--seed-defect", "unfused"]);
        assert!(!good && !text.ends_with(" 0 failed\n"), "{text}");
    }

    #[test]
    fn the_built_in_model_writes_the_same_story_for_the_same_seed() {
        let story = |extra: &[&str]| text_of(&[&["run", "-n", "24"], extra].concat()).expect("a story");
        let first = story(&["--seed", "3", "-t", "1"]);
        assert!(first.starts_with("Once upon a time"), "{first}");
        assert_eq!(first, story(&["--seed", "3", "-t", "2"]));
        assert_ne!(first, story(&["--seed", "4"]));
        assert_eq!(text_of(&["run", "-n", "0", "-p", "One day"]).expect("no tokens"), "One day\n");
        assert_eq!(
            text_of(&["run", "-n", "12", "--temp", "0", "-p", "Once upon a time"]).expect("a story"),
            GREEDY
        );
    }
    const GREEDY: &str = "Once upon a time, there was a curious girl named Zoe. She lived at\n";

    #[test]
    fn wrong_requests_are_named() {
        assert_eq!(
            error_of(&["run", "-p", "Once", "-m", "/nonexistent.gguf"]),
            "cannot open /nonexistent.gguf: No such file or directory (os error 2)"
        );
        assert_eq!(error_of(&["run", "-p", "Once", "-t", "0"]), "0 threads, expected 1 to 512");
        assert_eq!(
            error_of(&["run", "-p", "Once upon a time", "-c", "2"]),
            "the prompt has 5 tokens, the context holds 2: shorten it or raise -c"
        );
        assert_eq!(error_of(&["run", "--top-p", "2"]), "--top-p is 2, expected 0 to 1");
        assert_eq!(
            error_of(&["run", "--device", "cuda"]),
            "this kiln was built without `cuda` devices; it has: cpu"
        );
    }

    #[test]
    fn tokens_of_the_built_in_model_are_shown() {
        assert_eq!(text_of(&["tokenize", "--ids", "-p", "Once upon a time"]).expect("tokens"), TOKENS);
    }
    const TOKENS: &str = "[0, 424, 588, 261, 383]\n";
}
