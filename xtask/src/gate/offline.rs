//! A bundle on a machine without network: a bare checkout with an empty store and an empty home, in a network namespace
//! that has no route.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use super::scratch::{self, Extent};
use super::{Defect, Outcome, World, built, one_arch, tail, unprepared};
use crate::base::interrupt::Folder;
use crate::base::process;
use crate::report::error::{BUG, Error, Result};

/// The time that one verb may take on a busy machine.
const VERB_LIMIT: Duration = Duration::from_secs(3600);

/// Enters a network namespace of its own, whose only interface is down.
const UNSHARE: [&str; 3] = ["-r", "-n", "--"];

pub(super) fn bundle(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    if world.plan().by_libnvvm {
        return Ok(Outcome::Skipped {
            reason: "--llc libnvvm is given, and the load check of a setup needs an llc".to_owned(),
            run: "cargo xtask gate toolchain/bundle-offline".to_owned(),
        });
    }
    if let Some(why) = no_namespace() {
        let run = "cargo xtask gate toolchain/bundle-offline on a machine that allows `unshare -rn true`";
        return Ok(Outcome::Skipped { reason: why, run: run.to_owned() });
    }
    let arch = one_arch(world)?;
    let expected = contents(built(world.plan(), arch, world)?.ptx.iter().map(|(path, _)| path.clone()))?;
    let bare = Bare::new(world).map_err(|error| unprepared("a bare checkout", error))?;
    let file = bare.root.join("bundle.tar.gz");
    let report = bare.here(world, &["bundle".into(), "--with-backend".into(), file.clone().into()])?;
    let report = match report {
        Ok(report) => report,
        Err(said) => return Ok(Outcome::red(said)),
    };
    if defect == Defect::Seeded {
        let mut bytes = fs::read(&file)?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&file, bytes)?;
    }
    let sha256: OsString = report["sha256"].as_str().unwrap_or_default().into();
    let verb = |arguments: &[OsString]| bare.offline(world, arguments);
    let mut done = Vec::new();
    let setup = ["setup".into(), "--bundle".into(), file.into(), "--bundle-sha256".into(), sha256];
    let mut verbs: Vec<Vec<OsString>> = vec![setup.into(), vec!["verify".into()]];
    // The CPU engine belongs to the root workspace, which the synthetic checkouts of tests do not have.
    if bare.workspace.join("engine/Cargo.toml").is_file() {
        verbs.push(vec!["build".into()]);
    }
    let mut found = BTreeMap::new();
    verbs.push(vec!["build".into(), "--arch".into(), arch.to_string().into()]);
    for arguments in verbs {
        let line: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
        match verb(&arguments)? {
            Ok(report) => {
                let ptx = report["builds"][0]["ptx"].as_array().into_iter().flatten();
                found = contents(ptx.filter_map(|file| file["path"].as_str()).map(PathBuf::from))?;
            }
            Err(said) => return Ok(Outcome::red(format!("without network: {said}"))),
        }
        done.push(line[..line.len().min(1)].join(" "));
    }
    if found != expected {
        return Ok(Outcome::red(format!("for {arch}, the PTX is not the one that is built here")));
    }
    let bytes = report["bytes"].as_u64().unwrap_or_default();
    Ok(Outcome::green(format!(
        "{}; the same {} PTX files for {arch}, from a bundle of {}",
        done.join(", "),
        found.len(),
        indicatif::HumanBytes(bytes)
    )))
}

/// Why this machine lets no process have a network of its own, if it does not.
fn no_namespace() -> Option<String> {
    let mut command = Command::new("unshare");
    command.args(UNSHARE).arg("true");
    match process::output(&mut command, process::PROBE_LIMIT) {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!("no network namespace can be made here: {}", output.stderr.trim())),
        Err(failure) => Some(format!("no network namespace can be made here: unshare: {failure:?}")),
    }
}

/// The bytes of files, by their names.
fn contents(files: impl Iterator<Item = PathBuf>) -> Result<BTreeMap<OsString, Vec<u8>>> {
    files.map(|path| Ok((path.file_name().unwrap_or_default().to_owned(), fs::read(&path)?))).collect()
}

/// A checkout as git would leave it, with nothing else; it removes itself.
struct Bare {
    _folder: Folder,
    root: PathBuf,
    workspace: PathBuf,
    program: PathBuf,
}

impl Bare {
    fn new(world: &World<'_>) -> Result<Self> {
        let parent: PathBuf = world.env.path("TMPDIR")?.unwrap_or_else(|| "/tmp".into());
        let folder = Folder::within(&parent, "kiln-gate-")?;
        let root = fs::canonicalize(folder.path())?;
        let workspace = root.join("checkout");
        scratch::copy_checkout(world.workspace, &workspace, Extent::Whole)?;
        for name in ["home", "tmp"] {
            fs::create_dir(root.join(name))?;
        }
        let program = std::env::current_exe()?;
        Ok(Bare { _folder: folder, root, workspace, program })
    }

    /// Runs a verb in the user's own checkout and environment. The inner result is what it printed, or what went wrong.
    fn here(&self, world: &World<'_>, arguments: &[OsString]) -> Result<Result<serde_json::Value, String>> {
        let mut command = Command::new(&self.program);
        command.env_clear().envs(world.env.vars());
        command
            .args(arguments)
            .current_dir(world.workspace)
            .env("CARGO_MANIFEST_DIR", world.workspace.join("xtask"));
        run(command, arguments, world.plan().store.require()?.root(), world)
    }

    /// Runs a verb in the bare checkout: empty home and store, and no network.
    fn offline(
        &self,
        world: &World<'_>,
        arguments: &[OsString],
    ) -> Result<Result<serde_json::Value, String>> {
        let plan = world.plan();
        let toolchain = plan.rustc.require()?;
        let mut command = Command::new("unshare");
        command.args(UNSHARE).arg(&self.program).args(arguments).current_dir(&self.workspace).env_clear();
        let kept = |name: &str| {
            matches!(name, "LIBRARY_PATH" | "LD_LIBRARY_PATH" | "LANG" | "TERM") || name.starts_with("NIX_")
        };
        command.envs(world.env.vars().filter(|(name, _)| name.to_str().is_some_and(kept)));
        let folders = [toolchain.sysroot.join("bin")].into_iter().chain(world.env.search_path());
        let search = std::env::join_paths(folders)
            .map_err(|error| Error::new(&BUG, format!("cannot put the toolchain on PATH: {error}")))?;
        command.env("PATH", search).env("CARGO", toolchain.cargo(world.env));
        command.env("HOME", self.root.join("home")).env("TMPDIR", self.root.join("tmp"));
        command.env("CUDA_TOOLKIT_PATH", &plan.cuda.require()?.root);
        command.env("LIBCLANG_PATH", &plan.libclang.require()?.folder);
        run(command, arguments, &self.root.join("store"), world)
    }
}

/// Runs a verb with `--json` and the choices of the user's plan.
fn run(
    mut command: Command,
    arguments: &[OsString],
    store: &Path,
    world: &World<'_>,
) -> Result<Result<serde_json::Value, String>> {
    let plan = world.plan();
    command.arg("--json").arg("--store").arg(store);
    command.arg("--toolchain").arg(&plan.rustc.require()?.sysroot);
    command.arg("--llc").arg(&plan.tools()?.llc.path);
    let line: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    let line = line.join(" ");
    Ok(match process::output(&mut command, VERB_LIMIT) {
        Ok(output) if output.status.success() => serde_json::from_str(&output.stdout)
            .map_err(|error| format!("`{line}` printed no JSON: {error}\n{}", tail(&output.stdout))),
        Ok(output) => Err(format!("`{line}` ended with {}\n{}", output.status, tail(&output.stderr))),
        Err(failure) => Err(format!("`{line}`: {failure:?}")),
    })
}
