//! A build of the CPU engine, by the Cargo that runs us and with the user's own settings, and what it must then do.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::base::env::Env;
use crate::build::gpu::{BINARY, CARGO_FAILED, check};
use crate::pins::Pin;
use crate::plan::Request;
use crate::report::error::{Error, Exit, Result};
use crate::source::vendor;

crate::codes! {
    ENGINE_FAILED = "KILN-0131", Internal, "the engine that was just built fails",
        "After the build the engine writes a short text with its built-in model, and then tests its arithmetic. One of \
         the two failed on this machine. Please report it with the output above.";
}

/// With what to build.
pub struct CpuBuild<'a> {
    /// The store, which may hold the crates.
    pub request: &'a Request,
    /// The workspace.
    pub workspace: &'a Path,
    /// The environment.
    pub env: &'a Env,
    /// Let Cargo say nothing but warnings and errors.
    pub quiet: bool,
}

impl CpuBuild<'_> {
    /// Builds the engine; returns the program.
    ///
    /// # Errors
    /// Cargo's failure, with its own exit code.
    pub fn build(&self) -> Result<PathBuf> {
        let CpuBuild { workspace, env, .. } = *self;
        let cargo = env.var("CARGO").unwrap_or("cargo".as_ref());
        let mut command = Command::new(cargo);
        command.args(["build", "--release", "--locked", "-p", "kiln-engine", "--bin", BINARY]);
        command.arg("--message-format=json-render-diagnostics");
        if self.quiet {
            command.arg("--quiet");
        }
        // Crates from a bundle serve without any network. Without a readable PROVENANCE or store there are none.
        let crates = Pin::load(workspace).and_then(|pin| {
            let store = self.request.locate_store(workspace, env)?;
            vendor::find(&store, &pin, workspace)
        });
        if let Ok(Some(crates)) = crates {
            command.args(crates.arguments());
        }
        command.current_dir(workspace).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            Error::new(&CARGO_FAILED, format!("cannot start {}", cargo.display())).cause(error)
        })?;
        let mut binary = None;
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).lines() {
                binary = executable(&line?).or(binary);
            }
        }
        check(child.wait()?, "cargo build", &CARGO_FAILED)?;
        let binary = binary.ok_or_else(|| {
            Error::new(&CARGO_FAILED, "cargo build reported no executable `kiln`").with_exit(Exit::Internal)
        })?;
        Ok(binary)
    }
}

/// Has the engine write a story of the built-in model, and test its arithmetic, which is the verdict and comes last.
///
/// # Errors
/// [`ENGINE_FAILED`], or the child's own exit code.
pub fn try_out(binary: &Path, to_stderr: bool) -> Result<()> {
    for (arguments, what) in [(STORY, "kiln run"), (&["selftest"], "kiln selftest")] {
        let mut command = Command::new(binary);
        command.args(arguments).stdin(Stdio::null());
        if to_stderr {
            command.stdout(Stdio::from(std::io::stderr()));
        }
        let status = command.status().map_err(|error| {
            Error::new(&ENGINE_FAILED, format!("cannot start {}", binary.display())).cause(error)
        })?;
        check(status, what, &ENGINE_FAILED)?;
    }
    Ok(())
}

/// The same story everywhere: the same seed gives the same bits.
const STORY: &[&str] = &["run", "-n", "96", "--seed", "1"];

/// The program that one of Cargo's JSON messages names.
fn executable(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == BINARY;
    if is_it { message["executable"].as_str().map(PathBuf::from) } else { None }
}
