//! The CUDA toolkit that bindings are made from and linked with, its `ptxas`, and the libclang that reads `cuda.h`.
//!
//! None of it is needed to run kernels, and no GPU is needed for it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::base::env::Env;
use crate::base::process::PROBE_LIMIT;
use crate::base::version::CudaVersion;
use crate::machine::probe;
use crate::report::decision::{Decision, Resolved, Verdict};
use crate::report::error::{Error, Result};

crate::codes! {
    NO_TOOLKIT = "KILN-0341", Machine, "no CUDA toolkit",
        "Device builds read cuda.h and link with libcuda.so. No toolkit with both was found by CUDA_TOOLKIT_PATH, \
         CUDA_HOME, nvcc or ptxas on PATH, or in the usual folders. Neither a GPU nor a driver is needed: the toolkit \
         has a stub to link with.";
    BAD_TOOLKIT = "KILN-0342", Machine, "the CUDA toolkit that was asked for cannot be used",
        "CUDA_TOOLKIT_PATH or CUDA_HOME names a folder that lacks cuda.h, or a libcuda.so to link with. It is not \
         skipped: the crates that read the variable would use that folder alone.";
    NO_LIBCLANG = "KILN-0343", Machine, "no libclang",
        "bindgen reads cuda.h through libclang, and no libclang shared library was found. On Debian and \
         Ubuntu the package libclang-dev has it. Install it, or set LIBCLANG_PATH to the folder that has it.";
    BAD_LIBCLANG = "KILN-0344", Machine, "LIBCLANG_PATH leads to no libclang",
        "LIBCLANG_PATH must be a libclang shared library or the folder that holds one. bindgen would fail \
         with it. Set it to such a folder, or unset it.";
}

/// Where to look for the toolkit and for libclang.
#[derive(Clone, Debug)]
pub struct CudaRequest {
    /// The `[env]` table of `.cargo/cuda-oxide.toml`, which a build also gets. The environment wins.
    pub settings: BTreeMap<String, String>,
    /// The toolkit in the store, which `setup --cuda wheels` lays; tried after the variables.
    pub laid: Option<PathBuf>,
    /// Toolkit roots to try last.
    pub roots: Vec<PathBuf>,
    /// System folders with shared libraries.
    pub libraries: Vec<PathBuf>,
    /// Folders that hold `llvm-NN/lib`.
    pub llvm_parents: Vec<PathBuf>,
}

impl CudaRequest {
    /// The usual places of this system.
    pub fn new(settings: BTreeMap<String, String>) -> Self {
        let folders = |names: &[&str]| names.iter().map(PathBuf::from).collect();
        CudaRequest {
            settings,
            laid: None,
            roots: folders(&["/usr/local/cuda", "/opt/cuda"]),
            libraries: folders(match TARGETS {
                ["x86_64-linux"] => &[
                    "/usr/lib/x86_64-linux-gnu",
                    "/usr/lib64",
                    "/usr/lib",
                    "/usr/local/lib",
                    "/usr/lib/wsl/lib",
                    "/run/opengl-driver/lib",
                ],
                _ => &["/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"],
            }),
            llvm_parents: folders(&["/usr/lib", "/usr/local/opt", "/opt/homebrew/opt"]),
        }
    }

    /// A variable's value and where it comes from.
    fn variable(&self, name: &str, env: &Env) -> Option<(OsString, String)> {
        if let Some(value) = env.var(name) {
            return Some((value.to_owned(), name.to_owned()));
        }
        let value = self.settings.get(name).filter(|value| !value.is_empty())?;
        Some((value.into(), format!("{name} in .cargo/cuda-oxide.toml")))
    }
}

/// A toolkit that a device build can use. All paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Toolkit {
    /// Its root: what CUDA_TOOLKIT_PATH must be for the build.
    pub root: PathBuf,
    /// The folder of cuda.h.
    pub include: PathBuf,
    /// By `CUDA_VERSION` in cuda.h.
    pub version: CudaVersion,
    /// The folder with the libcuda.so to link with, usually of stubs.
    pub link: PathBuf,
    /// libNVVM, where the toolkit has it.
    pub libnvvm: Option<PathBuf>,
    /// libdevice, where the toolkit has it.
    pub libdevice: Option<PathBuf>,
}

/// Chooses the toolkit. Never fails: a problem is part of the decision.
pub fn find_toolkit(request: &CudaRequest, env: &Env) -> Resolved<Toolkit> {
    let mut decision = Decision::new("cuda_toolkit");
    decision.change = Some("set CUDA_TOOLKIT_PATH=/absolute/path/of/the/toolkit".into());
    let mut value = None;
    let (candidates, explicit) = toolkit_candidates(request, env);
    for (root, from) in candidates {
        let verdict = if value.is_some() {
            Verdict::NotTried("an earlier candidate qualifies".into())
        } else if explicit && decision.problem.is_some() {
            Verdict::NotTried("the first variable that is set decides alone".into())
        } else {
            match judge(&root, request, env) {
                Ok(toolkit) => {
                    decision.chosen = Some(format!("{} (CUDA {})", root.display(), toolkit.version));
                    decision.why = format!(
                        "the first candidate, from {from}, with cuda.h and a libcuda.so to link with"
                    );
                    value = Some(toolkit);
                    Verdict::Chosen
                }
                Err(reason) => {
                    if explicit {
                        let error =
                            Error::new(&BAD_TOOLKIT, format!("{from} is {}, which {reason}", root.display()));
                        decision.why = format!("{from} decides alone, and does not qualify");
                        decision.problem = Some(error.hint(format!("mend or unset {from}")).into());
                    }
                    Verdict::Rejected(reason)
                }
            }
        };
        decision.consider(root.display(), from, verdict);
    }
    if value.is_none() && decision.problem.is_none() {
        decision.why = "no candidate qualifies".into();
        let mut error = Error::new(
            &NO_TOOLKIT,
            "no CUDA toolkit with cuda.h and a libcuda.so to link with was found",
        )
        .hint("install the CUDA toolkit and set CUDA_TOOLKIT_PATH to its root, or run: cargo xtask setup --cuda wheels; a GPU is not needed to build");
        for candidate in &decision.candidates {
            if let Verdict::Rejected(reason) = &candidate.verdict {
                error = error.cause(format!("{} {reason}", candidate.what));
            }
        }
        decision.problem = Some(error.into());
    }
    if let Some(toolkit) = &value
        && (toolkit.libnvvm.is_none() || toolkit.libdevice.is_none())
    {
        decision.notes.push("it has no libNVVM or no libdevice; kernels on the llc path need neither".into());
    }
    Resolved { decision, value }
}

/// A `ptxas` and what it accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ptxas {
    /// Its absolute path.
    pub path: PathBuf,
    /// Its release.
    pub version: CudaVersion,
    /// The version as printed, such as `V13.0.88`.
    pub full: String,
}

/// Chooses `ptxas`: the toolkit's own, else the first on PATH that runs. A build needs none, so that its absence is no
/// problem.
pub fn find_ptxas(toolkit: Option<&Toolkit>, env: &Env) -> Resolved<Ptxas> {
    let mut decision = Decision::new("ptxas");
    decision.change = Some("set CUDA_TOOLKIT_PATH to the root of another toolkit".into());
    let own = toolkit.map(|toolkit| (toolkit.root.join("bin/ptxas"), "the toolkit"));
    let on_path = env.search_path().into_iter().filter_map(|folder| env.absolute(&folder.join("ptxas")).ok());
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut value: Option<Ptxas> = None;
    for (path, from) in own.into_iter().chain(on_path.map(|path| (path, "PATH"))) {
        let target = probe::realpath(&path);
        if !probe::is_there(&path) || seen.contains(&target) {
            continue;
        }
        seen.push(target);
        let verdict = match (ask_ptxas(&path, env), &value) {
            (Err(error), _) => Verdict::Rejected(error.to_string().replace("\n  caused by: ", "; ")),
            (Ok(ptxas), None) => {
                decision.chosen = Some(format!("{} ({})", path.display(), describe(&ptxas)));
                decision.why = format!("the first that runs, from {from}");
                value = Some(ptxas);
                Verdict::Chosen
            }
            (Ok(ptxas), Some(first)) => {
                Verdict::Rejected(format!("{}; {} comes first", describe(&ptxas), first.path.display()))
            }
        };
        decision.consider(path.display(), from, verdict);
    }
    if value.is_none() {
        decision.why = "none was found; a build does not need it, the driver compiles the PTX".into();
    }
    Resolved { decision, value }
}

/// The ptxas of the toolkit or on PATH, without a plan: a scan of files needs nothing else.
pub fn find_ptxas_alone(env: &Env) -> Option<Ptxas> {
    let toolkit = find_toolkit(&CudaRequest::new(BTreeMap::new()), env).value;
    find_ptxas(toolkit.as_ref(), env).value
}

/// A libclang for bindgen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LibClang {
    /// The folder: what LIBCLANG_PATH must be for the build.
    pub folder: PathBuf,
    /// The shared library.
    pub file: PathBuf,
}

/// Chooses libclang: LIBCLANG_PATH alone when it is set, else the newest in the usual LLVM folders, else one where the
/// system's loader looks.
pub fn find_libclang(request: &CudaRequest, env: &Env) -> Resolved<LibClang> {
    let mut decision = Decision::new("libclang");
    decision.change = Some("set LIBCLANG_PATH=/absolute/folder/of/libclang".into());
    if let Some((value, from)) = request.variable("LIBCLANG_PATH", env) {
        let found = env.absolute(Path::new(&value)).map(|path| (libclang_at(&path), path));
        return match found {
            Ok((Some(libclang), path)) => {
                decision.chosen = Some(libclang.file.display().to_string());
                decision.why = format!("{from} names it");
                decision.consider(path.display(), from, Verdict::Chosen);
                decision.notes.extend(headers_note(&libclang));
                Resolved { decision, value: Some(libclang) }
            }
            Ok((None, path)) => {
                let reason = "holds no libclang shared library";
                decision.why = format!("{from} decides alone, and does not qualify");
                let error =
                    Error::new(&BAD_LIBCLANG, format!("{from} is {}, which {reason}", path.display()))
                        .hint(format!("unset {from}, or set it to the folder of libclang.so"));
                decision.consider(path.display(), from, Verdict::Rejected(reason.into()));
                decision.problem = Some(error.into());
                Resolved { decision, value: None }
            }
            Err(error) => {
                decision.problem = Some(error.into());
                Resolved { decision, value: None }
            }
        };
    }
    let mut folders: Vec<(PathBuf, &str)> =
        llvm_folders(request).into_iter().map(|folder| (folder, "LLVM folders")).collect();
    let loader =
        env.var("LD_LIBRARY_PATH").map(|value| std::env::split_paths(value).collect()).unwrap_or_default();
    let loader: Vec<PathBuf> = loader;
    let loader =
        loader.into_iter().filter(|folder| folder.is_absolute()).map(|folder| (folder, "LD_LIBRARY_PATH"));
    folders.extend(loader);
    folders.extend(request.libraries.iter().map(|folder| (folder.clone(), "system libraries")));
    let found: Vec<(LibClang, &str)> =
        folders.into_iter().filter_map(|(folder, from)| Some((libclang_at(&folder)?, from))).collect();
    // One with its own headers can read cuda.h; the others depend on a `clang` that bindgen may find.
    let best = found.iter().position(|(one, _)| has_headers(one)).or((!found.is_empty()).then_some(0));
    let mut value = None;
    for (at, (libclang, from)) in found.into_iter().enumerate() {
        let verdict = if Some(at) == best {
            Verdict::Chosen
        } else if has_headers(&libclang) || value.is_some() {
            Verdict::NotTried("an earlier candidate qualifies".into())
        } else {
            Verdict::Rejected("its own headers (stddef.h) are not beside it".into())
        };
        decision.consider(libclang.file.display(), from, verdict);
        if Some(at) == best {
            decision.chosen = Some(libclang.file.display().to_string());
            decision.why = "LIBCLANG_PATH is not set; the first that was found with its headers".into();
            decision.notes.extend(headers_note(&libclang));
            value = Some(libclang);
        }
    }
    if value.is_none() {
        decision.why = "none was found".into();
        let error = Error::new(
            &NO_LIBCLANG,
            "no libclang shared library was found, and LIBCLANG_PATH is not set",
        )
        .hint("install it (Debian, Ubuntu: apt install libclang-dev), or set LIBCLANG_PATH to its folder");
        decision.problem = Some(error.into());
    }
    Resolved { decision, value }
}

/// Candidates in order, and whether variables alone decide.
fn toolkit_candidates(request: &CudaRequest, env: &Env) -> (Vec<(PathBuf, String)>, bool) {
    let explicit: Vec<(PathBuf, String)> = ["CUDA_TOOLKIT_PATH", "CUDA_HOME"]
        .iter()
        .filter_map(|name| request.variable(name, env))
        .filter_map(|(value, from)| Some((env.absolute(Path::new(&value)).ok()?, from)))
        .collect();
    if !explicit.is_empty() {
        return (explicit, true);
    }
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    found
        .extend(request.laid.iter().map(|root| (root.clone(), "the store (setup --cuda wheels)".to_owned())));
    for tool in ["nvcc", "ptxas"] {
        for folder in env.search_path() {
            let Ok(path) = env.absolute(&folder.join(tool)) else { continue };
            if !probe::is_there(&path) {
                continue;
            }
            // A link in /usr/local/bin leads to the toolkit; `/usr/bin/nvcc` of a distribution has its root in /usr.
            let target = probe::realpath(&path);
            if let Some(root) = target.parent().and_then(Path::parent) {
                found.push((root.to_owned(), format!("{tool} on PATH")));
            }
        }
    }
    found.extend(request.roots.iter().map(|root| (root.clone(), "usual install folders".to_owned())));
    let mut seen: Vec<PathBuf> = Vec::new();
    found.retain(|(root, _)| {
        let real = probe::realpath(root);
        let new = !seen.contains(&real);
        seen.push(real);
        new
    });
    (found, false)
}

fn judge(root: &Path, request: &CudaRequest, env: &Env) -> Result<Toolkit, String> {
    if !root.is_dir() {
        return Err("is not a folder".into());
    }
    let places: Vec<PathBuf> = std::iter::once(root.to_owned())
        .chain(TARGETS.iter().map(|target| root.join("targets").join(target)))
        .collect();
    let headers = places.iter().map(|place| place.join("include"));
    let Some(include) = headers.into_iter().find(|include| include.join("cuda.h").is_file()) else {
        let inside = ["cuda", "usr/local/cuda"].iter().map(|name| root.join(name));
        let meant = inside.into_iter().find(|inside| inside.join("include/cuda.h").is_file());
        let meant = meant.map(|meant| format!("; did you mean {}?", meant.display())).unwrap_or_default();
        return Err(format!("has no include/cuda.h{meant}"));
    };
    let header = fs_err::read(include.join("cuda.h")).map_err(|error| error.to_string())?;
    let Some(version) = cuda_version(&String::from_utf8_lossy(&header)) else {
        return Err("has an include/cuda.h without a CUDA_VERSION".into());
    };
    let stubs = places.iter().flat_map(|place| [place.join("lib64/stubs"), place.join("lib/stubs")]);
    let named =
        env.var("LIBRARY_PATH").map(|value| std::env::split_paths(value).collect()).unwrap_or_default();
    let named: Vec<PathBuf> = named;
    let named = named.into_iter().filter(|folder| !folder.as_os_str().is_empty());
    let named = named.filter_map(|folder| env.absolute(&folder).ok());
    let link = stubs.chain(named).chain(request.libraries.iter().cloned());
    let Some(link) = link.into_iter().find(|folder| folder.join("libcuda.so").is_file()) else {
        return Err(
            "has no stub of libcuda.so to link with (lib64/stubs), and the system has no libcuda.so".into()
        );
    };
    let file = |names: &[&str]| names.iter().map(|name| root.join(name)).find(|path| path.is_file());
    Ok(Toolkit {
        root: root.to_owned(),
        include,
        version,
        link,
        libnvvm: file(&["nvvm/lib64/libnvvm.so", "nvvm/lib64/libnvvm.so.4", "lib/libnvvm.so.4"]),
        libdevice: file(&["nvvm/libdevice/libdevice.10.bc"]),
    })
}

/// `#define CUDA_VERSION 13000` in the text of cuda.h.
fn cuda_version(header: &str) -> Option<CudaVersion> {
    let number = header.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == "#define" && words.next()? == "CUDA_VERSION")
            .then(|| words.next()?.parse::<u32>().ok())?
    })?;
    (number >= 1000).then_some(CudaVersion { major: number / 1000, minor: number % 1000 / 10 })
}

fn ask_ptxas(path: &Path, env: &Env) -> Result<Ptxas> {
    let output = probe::run(path, &["--version"], env, PROBE_LIMIT)?;
    // Cuda compilation tools, release 13.0, V13.0.88
    let parsed = output.stdout.lines().find_map(|line| {
        let (_, after) = line.split_once("release ")?;
        let (release, full) = after.split_once(',')?;
        Some((CudaVersion::parse(release.trim())?, full.trim().to_owned()))
    });
    let Some((version, full)) = parsed else {
        let said = probe::first_line(&output.stdout).unwrap_or("nothing");
        let what = format!("{} --version names no release; it printed {said:?}", path.display());
        return Err(Error::new(&probe::TOOL_CANNOT_RUN, what));
    };
    Ok(Ptxas { path: path.to_owned(), version, full })
}

fn describe(ptxas: &Ptxas) -> String {
    match ptxas.version.max_ptx() {
        Some(max) => format!("{}, accepts PTX up to {max}", ptxas.full),
        None => ptxas.full.clone(),
    }
}

/// `lib` folders of LLVM installs, newest first.
fn llvm_folders(request: &CudaRequest) -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for parent in &request.llvm_parents {
        let Ok(entries) = fs_err::read_dir(parent) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // Homebrew's plain `llvm` is its newest.
            let major = match name.strip_prefix("llvm") {
                Some("") => u32::MAX,
                Some(rest) => match rest.strip_prefix(['-', '@']).and_then(|major| major.parse().ok()) {
                    Some(major) => major,
                    None => continue,
                },
                None => continue,
            };
            found.push((major, entry.path().join("lib")));
        }
    }
    found.sort_by_key(|(major, path)| (Reverse(*major), path.clone()));
    found.into_iter().map(|(_, folder)| folder).collect()
}

/// The library that `path` is or holds, by the names that bindgen's loader accepts.
fn libclang_at(path: &Path) -> Option<LibClang> {
    if path.is_file() {
        let file = is_libclang(&path.file_name()?.to_string_lossy()).then(|| path.to_owned())?;
        return Some(LibClang { folder: path.parent()?.to_owned(), file });
    }
    let entries = fs_err::read_dir(path).ok()?;
    let files = entries.flatten().map(|entry| entry.path()).filter(|file| {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        is_libclang(&name) && file.is_file()
    });
    // `libclang.so` where there is one, else the same each time.
    let file = files.min_by_key(|file| (file.as_os_str().len(), file.clone()))?;
    Some(LibClang { folder: path.to_owned(), file })
}

fn is_libclang(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("libclang") else { return false };
    if rest == ".so" || rest.starts_with(".so.") || rest == ".dylib" {
        return true;
    }
    let Some(version) = rest.strip_prefix('-') else { return false };
    version.starts_with(|c: char| c.is_ascii_digit()) && version.contains(".so")
}

fn has_headers(libclang: &LibClang) -> bool {
    let real = probe::realpath(&libclang.file);
    [real.parent(), Some(libclang.folder.as_path())].into_iter().flatten().any(|folder| {
        let Ok(versions) = fs_err::read_dir(folder.join("clang")) else { return false };
        versions.flatten().any(|version| version.path().join("include/stddef.h").is_file())
    })
}

fn headers_note(libclang: &LibClang) -> Option<String> {
    let missing = "clang's own headers (stddef.h) are not beside it; bindgen needs them or a `clang` on PATH \
                   (Debian, Ubuntu: apt install libclang-dev)";
    (!has_headers(libclang)).then(|| missing.to_owned())
}

/// The folder below `targets/` that fits this machine, in redistributable layouts.
#[cfg(target_arch = "aarch64")]
const TARGETS: &[&str] = &["sbsa-linux", "aarch64-linux"];
#[cfg(not(target_arch = "aarch64"))]
const TARGETS: &[&str] = &["x86_64-linux"];

#[cfg(test)]
mod tests;
