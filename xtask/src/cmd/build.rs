//! `build`: the CPU engine, a sample of its text and its self-test, on any machine; with `--arch`, the GPU engine with the verified toolchain.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::build::cpu::{self, CpuBuild};
use crate::build::gpu::{Built, GpuBuild};
use crate::cmd::cli::Common;
use crate::machine::arch::Arch;
use crate::plan::Plan;
use crate::report::decision::Thoroughness;
use crate::report::error::Result;
use crate::report::output;
use crate::report::progress;

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

    fn build_cpu(&self, workspace: &Path, env: &Env) -> Result<u8> {
        let quiet = self.common.quiet;
        let progress = progress::on_stderr("build", quiet);
        let request = self.common.request(Thoroughness::First);
        let cpu = CpuBuild { request: &request, workspace, env, quiet };
        let binary = cpu.build()?;
        progress.note(&format!("built {}", binary.display()));
        cpu::try_out(&binary, self.json)?;
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
