//! `build`: the CPU engine, a sample of its text and its self-test, on any machine; with `--arch`, the GPU engine with the verified toolchain.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::build::gpu::{BINARY, Built, CARGO_FAILED, GpuBuild, check};
use crate::cmd::cli::Common;
use crate::cmd::store;
use crate::machine::arch::Arch;
use crate::pins::Pin;
use crate::plan::Plan;
use crate::report::decision::Thoroughness;
use crate::report::error::{Error, Exit, Result};
use crate::report::output;
use crate::report::progress;
use crate::source::vendor::{self};

crate::codes! {
    ENGINE_FAILED = "KILN-0131", Internal, "the engine that was just built fails",
        "After the build the engine writes a short text with its built-in model, and then tests its arithmetic. One of \
         the two failed on this machine. Please report it with the output above.";
}

/// Build the CPU engine, have it write a story, and test it; with --arch, build the GPU engine and its kernels
///
/// Reads the sources and, with --arch, everything that `doctor` lists. Writes target/ (target/device/ARCH with
/// --arch, target/device/ARCH-libnvvm with --llc libnvvm). Refuses with exit code 70 unless backend, patches, llc and
/// host config are what PROVENANCE says. After the build, every PTX file is checked: the asked .target, no leaked
/// intrinsic.
#[derive(Debug, Args)]
pub struct Build {
    #[command(flatten)]
    common: Common,

    /// Build for this GPU architecture; may be given several times. It wins over CUDA_OXIDE_TARGET and over
    /// default-arch in .cargo/cuda-oxide.toml
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Print one JSON document (schema kiln.build/1, described in docs/reference.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    builds: Vec<Binary>,
}

#[derive(Serialize)]
struct Binary {
    /// Null for the CPU engine.
    arch: Option<String>,
    binary: PathBuf,
    ptx: Vec<PtxFile>,
}

#[derive(Serialize)]
struct PtxFile {
    path: PathBuf,
    version: Option<String>,
    entries: usize,
}

impl Report {
    fn print(builds: Vec<Binary>) -> Result<u8> {
        output::json(&Report { schema: "kiln.build/1", builds })?;
        Ok(0)
    }
}

impl Build {
    /// Runs the verb.
    ///
    /// # Errors
    /// A refusal, or the child's failure with its own exit code.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        if self.arch.is_empty() { self.build_cpu(workspace, env) } else { self.build_gpu(workspace, env) }
    }

    /// The CPU engine, by the Cargo that runs us and with the user's own settings; then a story and its self-test.
    fn build_cpu(&self, workspace: &Path, env: &Env) -> Result<u8> {
        let quiet = self.common.quiet;
        let cargo = env.var("CARGO").unwrap_or("cargo".as_ref());
        let mut command = Command::new(cargo);
        command.args(["build", "--release", "--locked", "-p", "kiln-engine", "--bin", BINARY]);
        command.arg("--message-format=json-render-diagnostics");
        if quiet {
            command.arg("--quiet");
        }
        // Crates from a bundle serve without any network. Without a readable PROVENANCE or store there are none.
        let crates = Pin::load(workspace).and_then(|pin| {
            let store = store::locate(&self.common, workspace, env)?;
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
        progress::on_stderr("build", quiet).note(&format!("built {}", binary.display()));
        // A story of the built-in model first, the verdict last.
        for (arguments, what) in [(STORY, "kiln run"), (&["selftest"], "kiln selftest")] {
            let mut command = Command::new(&binary);
            command.args(arguments).stdin(Stdio::null());
            if self.json {
                command.stdout(Stdio::from(std::io::stderr()));
            }
            let status = command.status().map_err(|error| {
                Error::new(&ENGINE_FAILED, format!("cannot start {}", binary.display())).cause(error)
            })?;
            check(status, what, &ENGINE_FAILED)?;
        }
        if self.json {
            return Report::print(vec![Binary { arch: None, binary, ptx: Vec::new() }]);
        }
        Ok(0)
    }

    fn build_gpu(&self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("build", self.common.quiet);
        // Spelling first: it needs no tool.
        let archs: BTreeSet<Arch> = self.arch.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let gpu = GpuBuild::prepare(&plan, &archs, env, progress.as_ref())?;
        if let Some(target) = env.var("CUDA_OXIDE_TARGET") {
            let target = target.display();
            progress.warn(&format!("CUDA_OXIDE_TARGET={target} is ignored: --arch decides"));
        }
        let mut built = Vec::new();
        for arch in archs {
            built.push(gpu.build(&arch)?);
        }
        if self.json {
            return Report::print(built.into_iter().map(Binary::from).collect());
        }
        for built in built {
            output::line(&format!("{}  {}", built.arch, built.binary.display()))?;
            for (path, ptx) in &built.ptx {
                let version = ptx.version.map(|version| version.to_string()).unwrap_or_default();
                output::line(&format!(
                    "{}  {} (.version {version}, .target {}, {} entries)",
                    built.arch,
                    path.display(),
                    built.arch,
                    ptx.entries.len()
                ))?;
            }
        }
        Ok(0)
    }
}

impl From<Built> for Binary {
    fn from(built: Built) -> Self {
        let ptx = built.ptx.into_iter().map(|(path, ptx)| {
            let version = ptx.version.map(|version| version.to_string());
            PtxFile { path, version, entries: ptx.entries.len() }
        });
        Binary { arch: Some(built.arch.to_string()), binary: built.binary, ptx: ptx.collect() }
    }
}

/// The same story everywhere: the same seed gives the same bits.
const STORY: &[&str] = &["run", "-n", "96", "--seed", "1"];

/// The program that one of Cargo's JSON messages names.
fn executable(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == BINARY;
    if is_it { message["executable"].as_str().map(PathBuf::from) } else { None }
}
