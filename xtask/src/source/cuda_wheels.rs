//! CUDA toolkit parts from NVIDIA's Python wheels, for machines without a toolkit: `cuda.h`, `ptxas`, libNVVM, libdevice,
//! and a library to link with in place of the driver's.
//!
//! PROVENANCE pins each wheel by name, version and sha256 (`[[cuda]]`). pip fetches them, from wherever it is configured
//! to; nothing of NVIDIA's is part of this repository or of a bundle. The stub library is made here, by the C compiler,
//! from the functions that `cuda.h` declares: programs that link with it load the real driver.
//!
//! ```text
//! cuda/<key>/toolkit/       include/, bin/ptxas, lib/, nvvm/, lib64/stubs/libcuda.so
//! cuda/<key>/entry.json     the hash of toolkit/, the wheels and their licence
//! ```

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::env::Env;
use crate::base::hash::{Sha256, TreeHash};
use crate::base::interrupt::Folder;
use crate::pins::{CudaWheel, Pin};
use crate::report::error::{BUG, Error, Result};
use crate::report::progress::Progress;
use crate::source::nar;
use crate::store::{Key, Kind, Store};

crate::codes! {
    NO_WHEELS = "KILN-0345", Machine, "no CUDA wheels are pinned for this machine",
        "PROVENANCE pins wheels in [[cuda]] tables for some kinds of machines, and this one is not among them. Install a \
         CUDA toolkit instead, and set CUDA_TOOLKIT_PATH to it.";
    PIP_FAILED = "KILN-0346", Machine, "pip cannot fetch the CUDA wheels",
        "`python3 -m pip download` failed; its messages stand above. pip asks the index that it is configured for; with \
         --offline it looks only where PIP_FIND_LINKS says.";
    WRONG_WHEEL = "KILN-0347", Refusal, "a CUDA wheel is not the pinned one",
        "The sha256 of a wheel is not the one in PROVENANCE. pip found another file under the same name and version, for \
         example in a folder that PIP_FIND_LINKS names. Nothing of it was unpacked.";
    BAD_WHEEL = "KILN-0348", Machine, "a CUDA wheel cannot be unpacked",
        "A wheel is damaged, is larger than a wheel may be, or holds a name that leads outside.";
    NO_STUB = "KILN-0349", Machine, "the library to link with cannot be made",
        "Programs link with libcuda, which only a driver has. A stub is made from the functions in cuda.h by the C \
         compiler `cc`, which Rust needs for linking as well.";
    CHANGED = "KILN-0350", Refusal, "the CUDA toolkit parts in the store were changed",
        "They have another hash than when setup laid them. `cargo xtask setup --cuda wheels` lays them anew.";
}

/// Version of what is laid; part of the key.
const RECIPE: u32 = 1;

/// Bytes of all files of a wheel at most; the largest has 140 MB.
const MOST_BYTES: u64 = 1 << 30;

/// Members of a wheel at most.
const MOST_MEMBERS: usize = 20_000;

const TOOLKIT: &str = "toolkit";
const ENTRY_FILE: &str = "entry.json";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    toolkit: TreeHash,
    wheels: Vec<String>,
    licence: String,
}

/// Laid toolkit parts.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The root of the toolkit.
    pub root: PathBuf,
    /// The licence that the wheels name.
    pub licence: String,
    hash: TreeHash,
}

/// The name of this kind of machine in `[[cuda]]` tables.
pub fn target() -> String {
    format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
}

fn wheels(pin: &Pin) -> Vec<&CudaWheel> {
    let target = target();
    pin.cuda.iter().filter(|wheel| wheel.target == target).collect()
}

/// The key of the parts, where PROVENANCE pins some for this machine.
pub fn key(pin: &Pin) -> Option<Key> {
    let wheels = wheels(pin);
    let key = Key::builder("cuda", RECIPE);
    let key = wheels.iter().fold(key, |key, wheel| key.field(&wheel.package, &wheel.sha256.to_string()));
    (!wheels.is_empty()).then(|| key.finish())
}

/// The parts, where the store has them. Their content is not hashed here.
pub fn find(store: &Store, pin: &Pin) -> Option<Parts> {
    let folder = store.entry(Kind::Cuda, &key(pin)?);
    let entry: Entry = serde_json::from_slice(&fs::read(folder.join(ENTRY_FILE)).ok()?).ok()?;
    Some(Parts { root: folder.join(TOOLKIT), licence: entry.licence, hash: entry.toolkit })
}

impl Parts {
    /// Hashes all of them.
    ///
    /// # Errors
    /// [`CHANGED`].
    pub fn verify(&self) -> Result<TreeHash> {
        let found = nar::hash_tree(&self.root)?;
        if found == self.hash {
            return Ok(found);
        }
        Err(Error::new(
            &CHANGED,
            format!(
                "{} was changed since setup laid it\n  recorded: {}\n  found:    {found}",
                self.root.display(),
                self.hash
            ),
        )
        .hint("run: cargo xtask setup --cuda wheels"))
    }
}

/// Fetches, verifies and lays the parts, or returns those that are there.
///
/// # Errors
/// One of [`CODES`]; nothing half-done is left in the store.
pub fn make(pin: &Pin, store: &Store, offline: bool, env: &Env, progress: &dyn Progress) -> Result<Parts> {
    let wheels = wheels(pin);
    let Some(key) = key(pin) else {
        return Err(Error::new(
            &NO_WHEELS,
            format!("PROVENANCE has no [[cuda]] table with target = {:?}", target()),
        )
        .hint("install a CUDA toolkit and set CUDA_TOOLKIT_PATH to it"));
    };
    let _lock = store.lock(&format!("cuda-{key}"), &|text| progress.note(text))?;
    if let Some(parts) = find(store, pin)
        && parts.verify().is_ok()
    {
        return Ok(parts);
    }
    let parent = store.root().join("build");
    fs::create_dir_all(&parent)?;
    let scratch = Folder::within(&parent, ".wheels-")?;
    let files = download(&wheels, scratch.path(), offline, env, progress)?;

    let staging = store.stage(Kind::Cuda, &key)?;
    let toolkit = staging.path().join(TOOLKIT);
    fs::create_dir(&toolkit)?;
    let mut licences = BTreeSet::new();
    for file in &files {
        progress.note(&format!("unpacking {}", file.file_name().unwrap_or_default().display()));
        licences.extend(unpack(file, &toolkit)?);
    }
    make_stub(&toolkit, scratch.path(), env)?;
    link_libnvvm(&toolkit)?;
    let licence = licences.into_iter().collect::<Vec<_>>().join(", ");
    let entry = Entry {
        toolkit: nar::hash_tree(&toolkit)?,
        wheels: wheels
            .iter()
            .map(|wheel| format!("{} {} {}", wheel.package, wheel.version, wheel.sha256))
            .collect(),
        licence,
    };
    let mut text = serde_json::to_vec_pretty(&entry)
        .map_err(|error| Error::new(&BUG, format!("cannot write an entry: {error}")))?;
    text.push(b'\n');
    fs::write(staging.path().join(ENTRY_FILE), text)?;
    staging.publish()?;
    find(store, pin).ok_or_else(|| Error::new(&BUG, "the toolkit parts are not where they were published"))
}

/// Has pip fetch the wheels, and checks each one again.
fn download(
    wheels: &[&CudaWheel],
    scratch: &Path,
    offline: bool,
    env: &Env,
    progress: &dyn Progress,
) -> Result<Vec<PathBuf>> {
    let requirements: String = wheels
        .iter()
        .map(|wheel| format!("{}=={} --hash=sha256:{}\n", wheel.package, wheel.version, wheel.sha256))
        .collect();
    let list = scratch.join("requirements.txt");
    fs::write(&list, requirements)?;
    let folder = scratch.join("wheels");
    progress.note(&format!("pip download of {} wheels of NVIDIA (about 100 MB)", wheels.len()));
    let mut command = Command::new("python3");
    command.env_clear().envs(env.vars());
    command.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]);
    if offline {
        command.arg("--no-index");
    }
    command.arg("-r").arg(&list).arg("-d").arg(&folder);
    // Its messages are for people; standard output is for our own result.
    command.stdin(Stdio::null()).stdout(Stdio::from(std::io::stderr()));
    let failed = |what: String| {
        Error::new(&PIP_FAILED, format!("python3 -m pip download {what}"))
            .hint("install python3 with pip, check its index settings and the network; or install a CUDA toolkit and set CUDA_TOOLKIT_PATH")
    };
    let status = command.status().map_err(|error| failed(format!("cannot be started: {error}")))?;
    if !status.success() {
        return Err(failed(format!("ended with {status}")));
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let sha256 = Sha256::of_reader(fs::File::open(&path)?)?;
        found.push((sha256, path));
    }
    let mut files = Vec::new();
    for wheel in wheels {
        match found.iter().find(|(sha256, _)| *sha256 == wheel.sha256) {
            Some((_, path)) => files.push(path.clone()),
            None => {
                let have: Vec<_> = found
                    .iter()
                    .map(|(sha256, path)| {
                        format!("{} {sha256}", path.file_name().unwrap_or_default().display())
                    })
                    .collect();
                return Err(Error::new(
                    &WRONG_WHEEL,
                    format!(
                        "{} {} has not the pinned sha256\n  pinned: {}\n  found:  {}",
                        wheel.package,
                        wheel.version,
                        wheel.sha256,
                        have.join(", ")
                    ),
                )
                .hint("look at PIP_FIND_LINKS and pip's index: another file stands there"));
            }
        }
    }
    Ok(files)
}

/// Unpacks what a build needs of a wheel into `toolkit`; returns the licence that the wheel names.
fn unpack(wheel: &Path, toolkit: &Path) -> Result<Option<String>> {
    let bad = |what: String| {
        Error::new(&BAD_WHEEL, format!("{}: {what}", wheel.file_name().unwrap_or_default().display()))
            .hint("remove pip's cache with `python3 -m pip cache purge`, and run it again")
    };
    let file = fs::File::open(wheel)?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| bad(error.to_string()))?;
    if archive.len() > MOST_MEMBERS {
        return Err(bad(format!("{} members", archive.len())));
    }
    let (mut licence, mut left) = (None, MOST_BYTES);
    for index in 0..archive.len() {
        let member = archive.by_index(index).map_err(|error| bad(error.to_string()))?;
        let Some(name) = member.enclosed_name() else {
            return Err(bad(format!("the member {:?} leads outside", member.name())));
        };
        if member.is_dir() {
            continue;
        }
        if member.is_symlink() {
            return Err(bad(format!("the member {:?} is a link", member.name())));
        }
        let is_metadata =
            name.parent().is_some_and(|folder| folder.extension().is_some_and(|end| end == "dist-info"))
                && name.file_name().is_some_and(|name| name == "METADATA");
        let place = inside_toolkit(&name);
        if place.is_none() && !is_metadata {
            continue;
        }
        let size = member.size();
        let mut bytes = Vec::new();
        // The size in the header is a claim; what is read is what counts.
        member.take(left + 1).read_to_end(&mut bytes).map_err(|error| bad(error.to_string()))?;
        left = left
            .checked_sub(bytes.len() as u64)
            .ok_or_else(|| bad(format!("more than {MOST_BYTES} bytes, a member claims {size}")))?;
        match place {
            Some(place) => write_member(&toolkit.join(place), &bytes)?,
            None => licence = licence.or_else(|| licence_of(&String::from_utf8_lossy(&bytes))),
        }
    }
    Ok(licence)
}

/// The place in the toolkit of a member that a build needs: below `nvidia/cuNN/`, headers, ptxas and libNVVM.
fn inside_toolkit(name: &Path) -> Option<PathBuf> {
    let parts: Vec<&str> = name
        .components()
        .map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let rest = match parts.as_slice() {
        ["nvidia", toolkit, rest @ ..] if toolkit.starts_with("cu") => rest,
        _ => return None,
    };
    let needed = match rest {
        ["include", ..] | ["bin", "ptxas"] | ["nvvm", "libdevice", ..] => true,
        ["lib" | "lib64", name] | ["nvvm", "lib" | "lib64", name] => name.starts_with("libnvvm"),
        _ => false,
    };
    needed.then(|| rest.iter().collect())
}

fn write_member(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let executable = path.parent().and_then(Path::file_name).is_some_and(|folder| folder == "bin");
    fs::write(path, bytes)?;
    set_mode(path, if executable { 0o755 } else { 0o644 })
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?)
}

fn licence_of(metadata: &str) -> Option<String> {
    let headers = metadata.lines().take_while(|line| !line.is_empty());
    let mut found = headers.filter_map(|line| {
        line.strip_prefix("License-Expression: ").or_else(|| line.strip_prefix("License: "))
    });
    found.next().map(|licence| licence.trim().to_owned())
}

/// Makes `lib64/stubs/libcuda.so`, which has every function of cuda.h and does nothing.
fn make_stub(toolkit: &Path, scratch: &Path, env: &Env) -> Result<()> {
    let header = fs::read(toolkit.join("include/cuda.h")).map_err(|error| {
        Error::new(&NO_STUB, "no wheel has include/cuda.h")
            .cause(error)
            .hint("pin nvidia-cuda-runtime in [[cuda]]")
    })?;
    let header = String::from_utf8_lossy(&header);
    let names = functions(&header);
    let source = scratch.join("stub.c");
    // CUDA_ERROR_UNKNOWN: a program that runs with the stub hears that from every call.
    fs::write(
        &source,
        names.iter().map(|name| format!("int {name}(void) {{ return 999; }}\n")).collect::<String>(),
    )?;
    let folder = toolkit.join("lib64/stubs");
    fs::create_dir_all(&folder)?;
    let mut command = Command::new("cc");
    command.env_clear().envs(env.vars());
    command.args([
        "-shared",
        "-fPIC",
        "-w",
        "-nostdlib",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,--build-id=none",
        "-o",
    ]);
    command.arg(folder.join("libcuda.so")).arg(&source);
    command.stdin(Stdio::null()).stdout(Stdio::from(std::io::stderr()));
    let failed = |what: String| {
        Error::new(&NO_STUB, format!("cc {what}"))
            .hint("install a C compiler (Debian, Ubuntu: apt install gcc)")
    };
    let status = command.status().map_err(|error| failed(format!("cannot be started: {error}")))?;
    if status.success() { Ok(()) } else { Err(failed(format!("ended with {status}"))) }
}

/// The functions that `cuda.h` declares, and the versioned names that its macros lead to.
fn functions(header: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut names = BTreeSet::new();
    let (mut rest, mut previous) = (header, "");
    while let Some(start) = rest.find(is_part) {
        rest = &rest[start..];
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        let is_function =
            word.strip_prefix("cu").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_uppercase()));
        let is_versioned = word.rsplit_once("_v").is_some_and(|(_, version)| {
            !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit())
        });
        let is_declared = previous == "CUDAAPI" && after.trim_start().starts_with('(');
        if is_function && (is_declared || is_versioned) {
            names.insert(word);
        }
        previous = word;
    }
    names
}

/// Puts libNVVM where a toolkit has it.
#[cfg(unix)]
fn link_libnvvm(toolkit: &Path) -> Result<()> {
    let folder = toolkit.join("nvvm/lib64");
    let Ok(entries) = fs::read_dir(toolkit.join("lib")) else { return Ok(()) };
    for entry in entries {
        let name = entry?.file_name();
        if name.as_encoded_bytes().starts_with(b"libnvvm.so") && !folder.join("libnvvm.so").exists() {
            fs::create_dir_all(&folder)?;
            fs::os::unix::fs::symlink(Path::new("../../lib").join(name), folder.join("libnvvm.so"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_build_needs_is_unpacked() {
        let place = |name: &str| inside_toolkit(Path::new(name)).map(|place| place.display().to_string());
        assert_eq!(place("nvidia/cu13/bin/ptxas").as_deref(), Some("bin/ptxas"));
        assert_eq!(place("nvidia/cu13/include/crt/x.h").as_deref(), Some("include/crt/x.h"));
        assert_eq!(
            place("nvidia/cu13/nvvm/libdevice/libdevice.10.bc").as_deref(),
            Some("nvvm/libdevice/libdevice.10.bc")
        );
        assert_eq!(place("nvidia/cu13/lib/libnvvm.so.4").as_deref(), Some("lib/libnvvm.so.4"));
        for not in
            ["nvidia/cu13/bin/nvcc", "nvidia/other/include/x.h", "include/cuda.h", "../nvidia/cu13/bin/ptxas"]
        {
            assert_eq!(place(not), None, "{not}");
        }
    }

    #[test]
    fn functions_are_those_that_are_declared_or_versioned() {
        let header = "#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuInit(unsigned int Flags);\n\
                      typedef CUresult (CUDAAPI *cuFn)(int); CUresult CUDAAPI\ncuMemAlloc (void);\ncustom_v2 cuda_v1";
        assert_eq!(
            functions(header).into_iter().collect::<Vec<_>>(),
            ["cuInit", "cuMemAlloc", "cuMemAlloc_v2"]
        );
    }

    #[test]
    fn a_wheel_that_leads_outside_or_holds_a_link_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("a.whl");
        let make = |add: &dyn Fn(&mut zip::ZipWriter<fs::File>)| {
            let mut writer = zip::ZipWriter::new(fs::File::create(&wheel).unwrap());
            add(&mut writer);
            writer.finish().unwrap();
            unpack(&wheel, &folder.path().join("toolkit")).unwrap_err()
        };
        let options = zip::write::SimpleFileOptions::default();
        let outside = make(&|writer| writer.start_file("nvidia/cu13/../../../x", options).unwrap());
        assert!(outside.message().ends_with("leads outside"), "{outside}");
        let link = make(&|writer| writer.add_symlink("nvidia/cu13/include/x", "/etc", options).unwrap());
        assert!(link.message().ends_with("is a link"), "{link}");
        fs::write(&wheel, "no zip").unwrap();
        assert_eq!(unpack(&wheel, folder.path()).unwrap_err().code().id, "KILN-0348");
    }
}
