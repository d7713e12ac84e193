//! The recipe: how Cargo builds the backend and cargo-oxide, whatever the place.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;

use super::cost::{Cost, Meter};
use super::{
    BUILD_FAILED, FETCH_FAILED, METADATA_LIMIT, Making, NO_ARTIFACT, PROFILE, Place, cargo_oxide_name,
};
use crate::base::process::{self, Failure};
use crate::machine::child;
use crate::report::error::{Error, Result};

/// The workspace of the patched tree, with its manifest.
pub(super) fn manifest(making: &Making<'_>, place: &Place<'_>) -> PathBuf {
    making.pin.source.workspace(place.tree).join("Cargo.toml")
}

/// A cargo that sees no configuration but the one in its home.
pub(super) fn cargo(making: &Making<'_>, place: &Place<'_>) -> Result<Command> {
    let mut command = child::command(making.toolchain.cargo(making.env), making.toolchain, making.env)?;
    command.current_dir(root_of(place.target));
    command.env("CARGO_HOME", place.cargo_home);
    if let Some(home) = place.home {
        command.env("HOME", home);
    }
    command.envs(PROFILE.iter().copied());
    Ok(command)
}

/// The root of the file system that `path` is on: no Cargo configuration is above it.
pub(super) fn root_of(path: &Path) -> &Path {
    path.ancestors().last().unwrap_or(path)
}

/// Flags that keep this machine's paths out of the bits. Of several that match a path, rustc takes the last.
pub(super) fn remapping(making: &Making<'_>, place: &Place<'_>) -> Result<String> {
    let mut pairs = vec![
        (place.tree.to_owned(), "/kiln/source".to_owned()),
        (place.target.to_owned(), "/kiln/target".to_owned()),
        (place.cargo_home.to_owned(), "/kiln/cargo".to_owned()),
    ];
    // A crate from a mirror, a vendored one and one from the registry itself lie in folders of different names.
    pairs.extend(crate_folders(making, place)?);
    let mut flags = Vec::new();
    for (from, to) in pairs {
        let from = from.to_str().ok_or_else(|| {
            Error::new(&child::BAD_PATH_ELEMENT, format!("{} is not UTF-8", from.display()))
                .hint("choose a store whose path is UTF-8 with --store DIR")
        })?;
        flags.push(format!("--remap-path-prefix={from}={to}"));
    }
    Ok(flags.join("\u{1f}"))
}

/// The folder of every crate that is not upstream's own, and the name that stands for it.
pub(super) fn crate_folders(making: &Making<'_>, place: &Place<'_>) -> Result<Vec<(PathBuf, String)>> {
    let mut command = cargo(making, place)?;
    command.args(["metadata", "--format-version", "1", "--locked", "--offline"]);
    command.arg("--filter-platform").arg(&making.toolchain.version.host);
    command.arg("--manifest-path").arg(manifest(making, place));
    let failed = |cause: String| {
        Error::new(&FETCH_FAILED, "cargo metadata cannot say where the crates of the backend are")
            .cause(cause)
            .hint("run it again without --offline")
    };
    let output = process::output(&mut command, METADATA_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => failed(error.to_string()),
        Failure::TimedOut(limit) => failed(format!("no answer within {} s", limit.as_secs())),
    })?;
    if !output.status.success() {
        return Err(failed(output.stderr.trim().to_owned()));
    }
    let metadata: serde_json::Value =
        serde_json::from_str(&output.stdout).map_err(|error| failed(error.to_string()))?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let foreign = packages.filter(|package| package["source"].is_string()).filter_map(|package| {
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?;
        let (name, version) = (package["name"].as_str()?, package["version"].as_str()?);
        Some((folder.to_owned(), format!("/kiln/crates/{name}-{version}")))
    });
    let mut folders: Vec<_> = foreign.collect();
    // A crate may lie inside of another one's folder, as in a repository with several: the inner one comes last.
    folders.sort();
    Ok(folders)
}

pub(super) fn fetch(making: &Making<'_>, place: &Place<'_>) -> Result<()> {
    making.progress.note("fetching the crates of the backend");
    let mut command = cargo(making, place)?;
    command.arg("fetch").arg("--locked").arg("--manifest-path").arg(manifest(making, place));
    command.arg("--target").arg(&making.toolchain.version.host);
    if making.offline {
        command.arg("--offline");
    }
    if making.progress.is_quiet() {
        command.arg("--quiet");
    }
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status().map_err(|error| {
        Error::new(&FETCH_FAILED, format!("cannot start {}", command.get_program().display())).cause(error)
    })?;
    if status.success() {
        return Ok(());
    }
    let offline = if making.offline { " --offline" } else { "" };
    Err(Error::new(
        &FETCH_FAILED,
        format!("cargo fetch --locked{offline} ended with {status} for {}", manifest(making, place).display()),
    )
    .hint("check the network, the proxy variables and the registry settings in CARGO_HOME; what is missing stands above"))
}

/// What [`compile`] made, in the target folder.
#[derive(Debug)]
pub struct Built {
    /// The dynamic library.
    pub library: PathBuf,
    /// The program.
    pub cargo_oxide: PathBuf,
    /// What the build took.
    pub cost: Cost,
}

/// The recipe: fetches the crates and builds, in `place`. Publishes nothing.
///
/// # Errors
/// [`FETCH_FAILED`], [`BUILD_FAILED`] or [`NO_ARTIFACT`].
pub fn compile(making: &Making<'_>, place: &Place<'_>) -> Result<Built> {
    if making.crates.is_none() {
        fetch(making, place)?;
    }
    let workspace = making.pin.source.workspace(place.tree);
    let backend = package_name(&making.pin.source.backend.under(&workspace))?;
    let cargo_oxide = package_name(&making.pin.source.cargo_oxide.under(&workspace))?;
    making.progress.note(&format!("building {backend} and {cargo_oxide} (minutes, once for these inputs)"));
    let mut command = cargo(making, place)?;
    command.env("CARGO_ENCODED_RUSTFLAGS", remapping(making, place)?);
    command.args(["build", "--release", "--locked", "--offline", "--message-format=json-render-diagnostics"]);
    command.args(["-p", &backend, "-p", &cargo_oxide]);
    command.arg("--manifest-path").arg(manifest(making, place)).arg("--target-dir").arg(place.target);
    if making.progress.is_quiet() {
        command.arg("--quiet");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let meter = Meter::start();
    let mut child = command.spawn().map_err(|error| {
        Error::new(&BUILD_FAILED, format!("cannot start {}", command.get_program().display())).cause(error)
    })?;
    let mut artifacts = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            artifacts.extend(artifact(&line?));
        }
    }
    let status = child.wait()?;
    if !status.success() {
        return Err(Error::new(&BUILD_FAILED, format!("cargo build ended with {status}")).hint(
            "read the first error above; what is built already is kept, so the next run goes on from there",
        ));
    }
    let fresh = artifacts.iter().filter(|artifact| artifact.fresh).count();
    let cost = meter.finish(artifacts.len() - fresh, fresh > 0);
    let of = |package: &str, is_it: &dyn Fn(&Path) -> bool| {
        let files = artifacts.iter().filter(|artifact| artifact.package == package);
        files.flat_map(|artifact| &artifact.files).find(|file| is_it(file)).cloned().ok_or_else(|| {
            Error::new(&NO_ARTIFACT, format!("cargo build reported no result of the package {package}"))
        })
    };
    Ok(Built {
        library: of(&backend, &|file| {
            file.extension().is_some_and(|end| end == &std::env::consts::DLL_SUFFIX[1..])
        })?,
        cargo_oxide: of(&cargo_oxide, &|file| {
            file.file_name().is_some_and(|name| name == cargo_oxide_name().as_str())
        })?,
        cost,
    })
}

pub(super) struct Artifact {
    pub(super) package: String,
    pub(super) files: Vec<PathBuf>,
    /// It was there before.
    fresh: bool,
}

/// Reads one line of Cargo's JSON messages.
pub(super) fn artifact(line: &str) -> Option<Artifact> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str().map(PathBuf::from));
    let fresh = message["fresh"] == true;
    Some(Artifact { package: package_name(manifest.parent()?).ok()?, files: files.collect(), fresh })
}

/// The name of the package in `folder`.
pub(super) fn package_name(folder: &Path) -> Result<String> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path)?;
    let name = text
        .parse::<toml::Table>()
        .ok()
        .and_then(|table| table.get("package")?.as_table()?.get("name")?.as_str().map(str::to_owned));
    name.ok_or_else(|| Error::new(&NO_ARTIFACT, format!("{} names no package", path.display())))
}
