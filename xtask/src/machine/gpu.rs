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
mod tests {
    use super::*;
    use crate::machine::probe::tests::script;

    const BANNER: &str =
        "| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |";

    fn with(body: &str) -> Resolved<Gpus> {
        let folder = tempfile::tempdir().unwrap();
        script(folder.path(), "nvidia-smi", body);
        let request = GpuRequest {
            limit: Duration::from_millis(80),
            folders: Vec::new(),
            driver_file: folder.path().join("none"),
        };
        let resolved = find_gpus(&request, &Env::of([("PATH", folder.path())], "/"));
        assert!(resolved.decision.is_good());
        let mut resolved = resolved;
        resolved.decision.why =
            resolved.decision.why.replace(&folder.path().join("nvidia-smi").display().to_string(), "SMI");
        resolved
    }

    fn listing(lines: &str) -> Resolved<Gpus> {
        // The limit above is for the case that hangs; a shell starts within any limit here.
        let folder = tempfile::tempdir().unwrap();
        script(
            folder.path(),
            "nvidia-smi",
            &format!("case \"$1\" in --query-gpu*) printf '%s\\n' '{lines}';; *) echo '{BANNER}';; esac"),
        );
        let request = GpuRequest { folders: Vec::new(), ..GpuRequest::default() };
        find_gpus(&request, &Env::of([("PATH", folder.path())], "/"))
    }

    #[test]
    fn f7_several_gpus_are_listed() {
        let resolved = listing("NVIDIA RTX A6000, 8.6, 550.54.15\nOdd, name, 12.0, 550.54.15");
        let gpus = resolved.value.unwrap();
        assert_eq!(
            resolved.decision.chosen.unwrap(),
            "NVIDIA RTX A6000 (capability 8.6), Odd, name (capability 12.0)"
        );
        assert_eq!(gpus.cuda.unwrap().to_string(), "12.4");
        assert_eq!(resolved.decision.notes, ["driver 550.54.15, CUDA 12.4, PTX up to 8.4"]);
        assert_eq!(resolved.decision.change.unwrap(), "cargo xtask build --arch sm_86 --arch sm_120");
    }

    #[test]
    fn f7_errors_on_standard_output_are_not_taken_for_gpus() {
        let sentence = "Failed to initialize NVML: Driver/library version mismatch";
        for (status, why) in [
            (0, format!("GPU unknown (not needed to build): SMI said: {sentence}")),
            (
                18,
                format!(
                    "GPU unknown (not needed to build): SMI: ended with an error (exit status: 18): {sentence}"
                ),
            ),
        ] {
            // Both inputs end at once, so the short limit of the fake does not matter: start it without.
            let folder = tempfile::tempdir().unwrap();
            let tool = script(folder.path(), "nvidia-smi", &format!("echo '{sentence}'; exit {status}"));
            let request = GpuRequest {
                folders: Vec::new(),
                driver_file: folder.path().join("none"),
                ..GpuRequest::default()
            };
            let resolved = find_gpus(&request, &Env::of([("PATH", folder.path())], "/"));
            assert_eq!(resolved.decision.why.replace(&tool.display().to_string(), "SMI"), why);
            assert_eq!(resolved.value.unwrap(), Gpus::default());
        }
        for line in [
            "NVIDIA H200, [N/A], 580.1",
            "NVIDIA H200, 9.0, [N/A]",
            "name, compute_cap, driver_version",
            "8.6",
            ", 8.6, 550.1",
            "x",
        ] {
            let resolved = listing(line);
            assert!(resolved.value.unwrap().gpus.is_empty(), "{line}");
            assert!(resolved.decision.why.ends_with(line), "{}", resolved.decision.why);
        }
    }

    #[test]
    fn f7_a_hanging_or_absent_nvidia_smi_is_told() {
        let resolved = with("while :; do read line < /dev/zero; done");
        assert_eq!(
            resolved.decision.why,
            "GPU unknown (not needed to build): SMI gave no answer within 0.08 s"
        );
        let request = GpuRequest { folders: Vec::new(), driver_file: "/none".into(), limit: LIMIT };
        let resolved = find_gpus(&request, &Env::of::<&str, &str>([], "/"));
        assert_eq!(resolved.decision.why, "no GPU found (not needed to build): there is no nvidia-smi");
        assert_eq!(resolved.value, Some(Gpus::default()));
    }

    #[test]
    fn the_kernel_drivers_file_tells_the_driver() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("version");
        fs_err::write(
            &file,
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12.2\n",
        )
        .unwrap();
        let request = GpuRequest { folders: Vec::new(), driver_file: file, limit: LIMIT };
        let resolved = find_gpus(&request, &Env::of::<&str, &str>([], "/"));
        assert_eq!(resolved.decision.notes, ["driver 580.65.06, CUDA 13.0, PTX up to 9.0"]);
    }

    fn gpus(capability: &str, cuda: &str) -> Gpus {
        let capability = Capability::parse(capability).unwrap();
        let gpu = Gpu { name: "GPU".into(), capability };
        Gpus { gpus: vec![gpu], driver: None, cuda: CudaVersion::parse(cuda) }
    }

    #[test]
    fn f4_an_artifact_for_another_gpu_is_predicted() {
        let warnings = predict(&gpus("8.6", "13.0"), "sm_90a".parse().unwrap(), PtxIsa::new(8, 0));
        assert_eq!(
            warnings,
            [
                "GPU: sm_90a is locked to capability 9.0, and the GPU has 8.6; PTX for an `a` architecture runs on no other"
            ]
        );
        assert_eq!(
            gpus("8.6", "12.0").notes_on(&"sm_120a".parse().unwrap()),
            [
                "sm_120a is locked to capability 12.0: it runs on no other GPU",
                "GPU: sm_120a is locked to capability 12.0, and the GPU has 8.6; PTX for an `a` architecture runs on \
                 no other",
                "the driver supports CUDA 12.0, which accepts PTX up to 8.0; PTX 8.7 would fail with \
                 CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            ]
        );
        assert!(predict(&gpus("8.6", "13.0"), "sm_86".parse().unwrap(), PtxIsa::new(7, 1)).is_empty());
    }

    #[test]
    fn f5_unsupported_ptx_is_predicted_from_the_driver() {
        let resolved = listing("NVIDIA H200, 9.0, 550.54.15");
        let warnings = predict(&resolved.value.unwrap(), "sm_90".parse().unwrap(), PtxIsa::new(9, 0));
        assert_eq!(
            warnings,
            ["the driver supports CUDA 12.4, which accepts PTX up to 8.4; PTX 9.0 would fail with \
              CUDA_ERROR_UNSUPPORTED_PTX_VERSION"]
        );
    }

    #[test]
    fn f12_the_drivers_cache_is_mentioned() {
        let note = |name, value| cache_note(&Env::of([(name, value)], "/"));
        assert!(note("CUDA_CACHE_PATH", "/home/shared/cache").unwrap().contains("/home/shared/cache"));
        assert!(note("CUDA_CACHE_DISABLE", "1").unwrap().contains("off"));
        assert_eq!(note("CUDA_CACHE_PATH", ""), None);
    }
}
