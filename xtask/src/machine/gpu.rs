//! The GPUs and driver of this machine, as far as `nvidia-smi` tells, and what that means for PTX.
//!
//! Nothing here can stop a build: kernels are built for a named architecture, on any machine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Serialize;

use crate::base::env::Env;
use crate::base::version::{self, CudaVersion, PtxIsa};
use crate::machine::arch::{Arch, Capability};
use crate::machine::probe::{self, first_line};
use crate::report::decision::{Decision, Resolved, Verdict};
use crate::report::error::Result;

/// How long `nvidia-smi` may take: it waits for the driver, which can hang.
pub const LIMIT: Duration = Duration::from_secs(5);

/// Where to ask.
#[derive(Clone, Debug)]
pub struct GpuRequest {
    /// How long each call of `nvidia-smi` may take.
    pub limit: Duration,
    /// Folders to search after PATH.
    pub folders: Vec<PathBuf>,
    /// The kernel driver's own version text.
    pub driver_file: PathBuf,
}

impl Default for GpuRequest {
    fn default() -> Self {
        GpuRequest {
            limit: LIMIT,
            folders: vec!["/usr/bin".into(), "/usr/lib/wsl/lib".into(), "/run/current-system/sw/bin".into()],
            driver_file: "/proc/driver/nvidia/version".into(),
        }
    }
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The product name.
    pub name: String,
    /// Its compute capability.
    pub capability: Capability,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (capability {})", self.name, self.capability)
    }
}

/// What is known of the machine's GPUs and driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gpus {
    /// All GPUs whose capability is known, in the driver's order.
    pub gpus: Vec<Gpu>,
    /// The driver's version, such as 580.65.06.
    pub driver: Option<String>,
    /// The highest CUDA version that the driver supports.
    pub cuda: Option<CudaVersion>,
}

impl Gpus {
    /// The capabilities, for suggestions.
    pub fn capabilities(&self) -> Vec<Capability> {
        self.gpus.iter().map(|gpu| gpu.capability).collect()
    }

    /// What a user should know who builds for `arch` on this machine: where its PTX does not run.
    pub fn notes_on(&self, arch: &Arch) -> Vec<String> {
        arch.lock_note().into_iter().chain(predict(self, *arch, arch.min_ptx())).collect()
    }
}

/// Asks for the GPUs. Never a problem: an unknown GPU is a fact that the decision tells.
pub fn find_gpus(request: &GpuRequest, env: &Env) -> Resolved<Gpus> {
    let mut decision = Decision::new("gpu");
    let mut gpus = Gpus::default();
    let folders = env.search_path().into_iter().chain(request.folders.iter().cloned());
    let tool = folders
        .filter_map(|folder| env.absolute(&folder.join("nvidia-smi")).ok())
        .find(|path| probe::is_there(path));
    match &tool {
        None => decision.why = "no GPU found (not needed to build): there is no nvidia-smi".into(),
        Some(tool) => ask(tool, request, env, &mut gpus, &mut decision),
    }
    if gpus.driver.is_none() {
        gpus.driver = fs_err::read_to_string(&request.driver_file).ok().and_then(|text| driver_of(&text));
    }
    if gpus.cuda.is_none() {
        gpus.cuda = gpus.driver.as_deref().and_then(cuda_of_driver);
    }
    if let Some(driver) = &gpus.driver {
        let cuda = gpus.cuda.map(|cuda| match cuda.max_ptx() {
            Some(max) if !cuda.is_later_than_known() => format!(", CUDA {cuda}, PTX up to {max}"),
            Some(max) => format!(", CUDA {cuda}, PTX {max} or later"),
            None => format!(", CUDA {cuda}"),
        });
        decision.notes.push(format!("driver {driver}{}", cuda.unwrap_or_default()));
    }
    decision.notes.extend(cache_note(env));
    Resolved { decision, value: Some(gpus) }
}

/// What will go wrong when PTX for `arch`, of version `ptx`, is run on this machine; empty when nothing is foreseen.
pub fn predict(gpus: &Gpus, arch: Arch, ptx: PtxIsa) -> Vec<String> {
    let mut warnings = Vec::new();
    for gpu in &gpus.gpus {
        if let Err(reason) = arch.runs_on(gpu.capability) {
            warnings.push(format!("{}: {reason}", gpu.name));
        }
    }
    if let Some(Err(reason)) = gpus.cuda.map(|driver| version::loads_on(ptx, driver)) {
        warnings.push(reason);
    }
    warnings
}

fn ask(tool: &Path, request: &GpuRequest, env: &Env, gpus: &mut Gpus, decision: &mut Decision) {
    let run = |arguments: &[&str]| probe::run(tool, arguments, env, request.limit);
    // Each call waits for the driver: ask both at once.
    let (listing, banner) = thread::scope(|scope| {
        let banner = scope.spawn(|| run(&[]));
        let listing = run(&["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]);
        (listing, banner.join().ok().and_then(Result::ok))
    });
    gpus.cuda = banner.as_ref().and_then(|banner| cuda_of_banner(&banner.stdout));
    let from = "nvidia-smi";
    let listing = match listing {
        Ok(listing) => listing.stdout,
        Err(error) => {
            decision.why = format!("GPU unknown (not needed to build): {}", error.message());
            decision.consider(tool.display(), from, Verdict::Rejected(error.message().to_owned()));
            return;
        }
    };
    for line in listing.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match gpu_of(line) {
            Some((gpu, driver)) => {
                decision.consider(&gpu, from, Verdict::Chosen);
                gpus.gpus.push(gpu);
                gpus.driver.get_or_insert(driver);
            }
            None => decision.consider(
                line,
                from,
                Verdict::Rejected("no name, capability and driver version".into()),
            ),
        }
    }
    if gpus.gpus.is_empty() {
        let said = first_line(&listing).unwrap_or("nothing");
        decision.why = format!("GPU unknown (not needed to build): {} said: {said}", tool.display());
    } else {
        let names: Vec<String> = gpus.gpus.iter().map(Gpu::to_string).collect();
        decision.chosen = Some(names.join(", "));
        decision.why = format!("{} lists {}", tool.display(), if names.len() == 1 { "it" } else { "them" });
        let archs: Vec<String> =
            gpus.gpus.iter().filter_map(|gpu| gpu.capability.arch()).map(|a| a.to_string()).collect();
        decision.change =
            (!archs.is_empty()).then(|| format!("cargo xtask build --arch {}", archs.join(" --arch ")));
    }
}

/// `NVIDIA H200, 9.0, 580.65.06`; a name may hold commas.
fn gpu_of(line: &str) -> Option<(Gpu, String)> {
    let mut fields = line.rsplitn(3, ',').map(str::trim);
    let driver = fields.next()?;
    let capability = Capability::parse(fields.next()?)?;
    let name = fields.next().filter(|name| !name.is_empty())?;
    is_driver(driver).then(|| (Gpu { name: name.to_owned(), capability }, driver.to_owned()))
}

/// `| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |`
fn cuda_of_banner(text: &str) -> Option<CudaVersion> {
    text.lines().find_map(|line| {
        let (_, after) = line.split_once("CUDA Version:").or_else(|| line.split_once("CUDA UMD Version:"))?;
        CudaVersion::parse(after.split_whitespace().next()?)
    })
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun ...`
fn driver_of(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace().find(|word| is_driver(word)).map(str::to_owned)
}

fn is_driver(word: &str) -> bool {
    word.contains('.')
        && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// The CUDA version of the driver's branch, when nvidia-smi does not tell.
fn cuda_of_driver(driver: &str) -> Option<CudaVersion> {
    let branch: u32 = driver.split('.').next()?.parse().ok()?;
    let (_, cuda) = CUDA_OF_BRANCH.iter().rev().find(|(first, _)| *first <= branch)?;
    Some(CudaVersion { major: cuda.0, minor: cuda.1 })
}

/// The first driver branch that supports each CUDA version. Source: the driver table in NVIDIA's CUDA release notes.
static CUDA_OF_BRANCH: &[(u32, (u32, u32))] = &[
    (450, (11, 0)),
    (455, (11, 1)),
    (460, (11, 2)),
    (465, (11, 3)),
    (470, (11, 4)),
    (495, (11, 5)),
    (510, (11, 6)),
    (515, (11, 7)),
    (520, (11, 8)),
    (525, (12, 0)),
    (530, (12, 1)),
    (535, (12, 2)),
    (545, (12, 3)),
    (550, (12, 4)),
    (555, (12, 5)),
    (560, (12, 6)),
    (565, (12, 7)),
    (570, (12, 8)),
    (575, (12, 9)),
    (580, (13, 0)),
    (590, (13, 1)),
    (595, (13, 2)),
];

/// Where the driver keeps what it compiled from PTX: a reason for timings that do not repeat.
fn cache_note(env: &Env) -> Option<String> {
    if env.var("CUDA_CACHE_DISABLE").is_some_and(|value| value == "1") {
        return Some("the driver's cache of compiled PTX is off (CUDA_CACHE_DISABLE=1)".into());
    }
    let folder = env.path("CUDA_CACHE_PATH").ok().flatten()?;
    Some(format!(
        "the driver keeps compiled PTX in {} (CUDA_CACHE_PATH); on a shared file system use a folder for each machine, \
         and CUDA_CACHE_DISABLE=1 to time the first load",
        folder.display()
    ))
}

#[cfg(test)]
mod tests;
