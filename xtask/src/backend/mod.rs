//! The rustc codegen backend and cargo-oxide: how they are built from the patched source, and how a built one is
//! checked before every use.
//!
//! The recipe's inputs all go into the entry's key; its environment is listed ([`crate::machine::child`]). The bytes do not
//! depend on where the store is or where the crates come from: every path is remapped, each crate's to its name and
//! version, and Cargo runs in the root folder of the file system, so that no configuration file between there and the
//! source is found. [`compile`] takes the place as an argument, so that `verify --rebuild` follows the same recipe.

pub mod checkout;
pub mod host_config;

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use fs_err as fs;
use serde_json::json;

use crate::base::checkpoint;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::base::process::{self, Failure};
use crate::machine::arch::Arch;
use crate::machine::child;
use crate::machine::llc::Tools;
use crate::machine::toolchain::Toolchain;
use crate::pins::{Pin, PinnedPatch};
use crate::ptx::{self, Expectation, Ptx};
use crate::report::decision::{Decision, Resolved};
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source::Patched;
use crate::source::vendor::Vendored;
use crate::store::record::CHANGED;
use crate::store::record::{self, BuildDefinition, Builder, Metadata, Resource, RunDetails, Statement};
use crate::store::{self, Key, Kind, Store};

crate::codes! {
    MISSING = "KILN-0910", Machine, "the backend is not built",
        "The store has no backend for this combination of source, patches, lock file and rustc. Run `cargo \
         xtask setup`, which makes it.";
    FETCH_FAILED = "KILN-0912", Machine, "the crates of the backend cannot be fetched",
        "`cargo fetch --locked` failed for the patched source. With `--offline`, every crate must already be in \
         CARGO_HOME.";
    BUILD_FAILED = "KILN-0913", Machine, "the backend does not compile",
        "`cargo build` failed for the patched source. The compiler's messages stand above. Usual causes: a toolchain \
         without rustc-dev, no C linker, too little memory or disk.";
    NO_ARTIFACT = "KILN-0914", Internal, "the build did not say where its result is",
        "Cargo ended well but reported no dynamic library or program of the expected crate. Please report it \
         with the output of `cargo xtask setup`.";
    LOAD_CHECK = "KILN-0915", Refusal, "the backend fails its load check",
        "After the build, and before anything is published, a tiny kernel is compiled with the new backend \
         and the chosen llc, and its PTX is checked. That failed, so the backend is not published. Check the \
         llc, opt and rustc that `cargo xtask doctor` shows; the cause below the message is what the compiler \
         said.";
}

/// Version of the recipe; part of the key.
const RECIPE: u32 = 2;

/// The architecture of the load check's kernel: the lowest that every verified llc and the backend take.
const LOAD_CHECK_ARCH: &str = "sm_80";

/// The smallest kernel; see there.
const LOAD_CHECK_SOURCE: &str = include_str!("load_check.rs.txt");

/// The time that `cargo metadata` may take on a slow disk.
const METADATA_LIMIT: std::time::Duration = std::time::Duration::from_secs(300);

/// The time that the load check may take; it takes a second.
const LOAD_CHECK_LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

/// The build flags that decide bits; in the key and in the record.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_INCREMENTAL", "0"),
    ("CARGO_PROFILE_RELEASE_STRIP", "symbols"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "false"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ("CARGO_PROFILE_RELEASE_PANIC", "unwind"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
    ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false"),
    // The backend is written for a nightly: on the stable release of the same compiler this opens the same features.
    ("RUSTC_BOOTSTRAP", "1"),
];

/// The key of the backend for this source and toolchain.
pub fn key(pin: &Pin, source: &Key, toolchain: &Toolchain) -> Key {
    let mut key = Key::builder("backend", RECIPE)
        .field("source", &source.to_string())
        .field("lock", &pin.source.lock_sha256.to_string())
        .field("backend", pin.source.backend.as_str())
        .field("cargo-oxide", pin.source.cargo_oxide.as_str())
        .field("rustc", &toolchain.version.text);
    for (name, value) in PROFILE {
        key = key.field(name, value);
    }
    key.finish()
}

/// A built and checked backend.
#[derive(Clone, Debug)]
pub struct Backend {
    /// Its key.
    pub key: Key,
    /// Absolute path of the dynamic library.
    pub library: PathBuf,
    /// The library's sha256.
    pub library_sha256: Sha256,
    /// Absolute path of cargo-oxide.
    pub cargo_oxide: PathBuf,
    /// The record.
    pub record: Statement,
}

/// The file name of the dynamic library on this system.
pub fn library_name() -> String {
    format!("{}rustc_codegen_cuda{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

/// The file name of cargo-oxide on this system.
pub fn cargo_oxide_name() -> String {
    format!("cargo-oxide{}", std::env::consts::EXE_SUFFIX)
}

/// Finds the published backend and compares every file with the record.
///
/// # Errors
/// It is not there ([`MISSING`]) or is another one ([`CHANGED`]).
pub fn verify(store: &Store, key: &Key) -> Result<Backend> {
    verify_folder(&store.entry(Kind::Backend, key), key)
}

fn verify_folder(folder: &Path, key: &Key) -> Result<Backend> {
    let hint = "run: cargo xtask setup";
    let Some(record) = Statement::load(folder)? else {
        return Err(Error::new(
            &MISSING,
            format!("there is no backend for this source, rustc and recipe at {}", folder.display()),
        )
        .hint(hint));
    };
    if record.internal("key") != Some(&key.to_string()) {
        return Err(Error::new(
            &CHANGED,
            format!("the record in {} is of another backend: {:?}", folder.display(), record.internal("key")),
        )
        .hint(hint));
    }
    let check = |name: &str| -> Result<(PathBuf, Sha256)> {
        let path = folder.join(name);
        let recorded = record.subject_sha256(name);
        let found = match fs::File::open(&path) {
            Ok(file) => {
                Some(Sha256::of_reader(file).map_err(|error| Error::from(error).as_damage(&CHANGED, &path))?)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::from(error).as_damage(&CHANGED, &path)),
        };
        match (recorded, found) {
            (Some(recorded), Some(found)) if recorded == found => Ok((path, found)),
            (recorded, found) => {
                let show = |hash: Option<Sha256>| hash.map_or("none".to_owned(), |hash| hash.to_string());
                let (recorded, found) = (show(recorded), show(found));
                Err(Error::new(
                    &CHANGED,
                    format!(
                        "{} is not the file that setup built\n  recorded: {recorded}\n  found:    {found}",
                        path.display()
                    ),
                )
                .hint(hint))
            }
        }
    };
    let (library, library_sha256) = check(&library_name())?;
    let (cargo_oxide, _) = check(&cargo_oxide_name())?;
    Ok(Backend { key: key.clone(), library, library_sha256, cargo_oxide, record })
}

/// What making the backend needs.
pub struct Making<'a> {
    /// Where things go.
    pub store: &'a Store,
    /// The pins.
    pub pin: &'a Pin,
    /// The carried patches, for the record.
    pub patches: &'a [PinnedPatch],
    /// The verified source.
    pub source: &'a Patched,
    /// The compiler.
    pub toolchain: &'a Toolchain,
    /// The verified LLVM tools, for the load check.
    pub tools: &'a Tools,
    /// The crates, where the store has them; else Cargo's home has or fetches them.
    pub crates: Option<&'a Vendored>,
    /// Nothing may be downloaded.
    pub offline: bool,
    /// The process environment.
    pub env: &'a Env,
    /// Told what happens.
    pub progress: &'a dyn Progress,
}

/// The folders that one build uses. None of them leaves a trace in what is built.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The patched tree.
    pub tree: &'a Path,
    /// Cargo's target folder.
    pub target: &'a Path,
    /// CARGO_HOME.
    pub cargo_home: &'a Path,
    /// HOME, when it is not the user's.
    pub home: Option<&'a Path>,
}

/// Fetches the crates, builds, checks and publishes the backend, or returns the published one.
///
/// # Errors
/// Anything on the way; nothing half-done is published.
pub fn make(making: &Making<'_>) -> Result<Backend> {
    let store = making.store;
    let key = key(making.pin, &making.source.key, making.toolchain);
    let _lock = store.lock(&Kind::Backend.lock_name(&key), &|text| making.progress.note(text))?;
    if let Ok(backend) = verify(store, &key) {
        return Ok(backend);
    }
    let started = now();
    let target = store.build_folder(&key);
    fs::create_dir_all(&target)?;
    let cargo_home = match making.crates {
        Some(crates) => crates.cargo_home(&target.join("cargo-home"), making.env)?,
        None => child::cargo_home(making.env)?,
    };
    let place = Place { tree: &making.source.tree, target: &target, cargo_home: &cargo_home, home: None };
    let built = compile(making, &place)?;
    checkpoint::pass("backend-built", making.env);

    let staging = store.stage(Kind::Backend, &key)?;
    for (from, name) in [(&built.library, library_name()), (&built.cargo_oxide, cargo_oxide_name())] {
        fs::copy(from, staging.path().join(name))?;
    }
    checkpoint::pass("backend-staged", making.env);
    let scratch = tempfile::Builder::new().prefix("load-check-").tempdir_in(&target)?;
    let ptx = load_check(making, &staging.path().join(library_name()), scratch.path())?;
    checkpoint::pass("backend-checked", making.env);
    let record = statement(making, &key, staging.path(), &ptx, started)?;
    record.save(staging.path())?;
    checkpoint::pass("backend-publishing", making.env);
    staging.publish()?;
    checkpoint::pass("backend-published", making.env);
    // The build is published: its intermediate files serve nobody any more.
    fs::remove_dir_all(&target)?;
    verify(store, &key)
}

/// Takes a backend that was built elsewhere, after checking it against its own record and with the load check here.
///
/// A record proves nothing about who wrote it: the caller vouches for `folder`, by a hash that the user gave.
///
/// # Errors
/// It is a backend of other inputs, its files are not those of its record ([`CHANGED`]), or it fails the load check.
pub fn import(folder: &Path, making: &Making<'_>) -> Result<Backend> {
    let store = making.store;
    let key = key(making.pin, &making.source.key, making.toolchain);
    let _lock = store.lock(&format!("backend-{key}"), &|text| making.progress.note(text))?;
    if let Ok(backend) = verify(store, &key) {
        return Ok(backend);
    }
    verify_folder(folder, &key)?;
    let staging = store.stage(Kind::Backend, &key)?;
    for name in [library_name(), cargo_oxide_name(), record::FILE_NAME.to_owned()] {
        fs::copy(folder.join(&name), staging.path().join(&name))?;
    }
    let scratch = tempfile::Builder::new().prefix(".load-check-").tempdir_in(folder)?;
    load_check(making, &staging.path().join(library_name()), scratch.path())?;
    staging.publish()?;
    verify(store, &key)
}

/// The workspace of the patched tree, with its manifest.
fn manifest(making: &Making<'_>, place: &Place<'_>) -> PathBuf {
    making.pin.source.workspace(place.tree).join("Cargo.toml")
}

/// A cargo that sees no configuration but the one in its home.
fn cargo(making: &Making<'_>, place: &Place<'_>) -> Result<Command> {
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
fn root_of(path: &Path) -> &Path {
    path.ancestors().last().unwrap_or(path)
}

/// Flags that keep this machine's paths out of the bits. Of several that match a path, rustc takes the last.
fn remapping(making: &Making<'_>, place: &Place<'_>) -> Result<String> {
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
fn crate_folders(making: &Making<'_>, place: &Place<'_>) -> Result<Vec<(PathBuf, String)>> {
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

fn fetch(making: &Making<'_>, place: &Place<'_>) -> Result<()> {
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
    })
}

struct Artifact {
    package: String,
    files: Vec<PathBuf>,
}

/// Reads one line of Cargo's JSON messages.
fn artifact(line: &str) -> Option<Artifact> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str().map(PathBuf::from));
    Some(Artifact { package: package_name(manifest.parent()?).ok()?, files: files.collect() })
}

/// The name of the package in `folder`.
fn package_name(folder: &Path) -> Result<String> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path)?;
    let name = text
        .parse::<toml::Table>()
        .ok()
        .and_then(|table| table.get("package")?.as_table()?.get("name")?.as_str().map(str::to_owned));
    name.ok_or_else(|| Error::new(&NO_ARTIFACT, format!("{} names no package", path.display())))
}

/// Compiles the load check's kernel in `scratch` and returns its PTX.
fn load_check(making: &Making<'_>, library: &Path, scratch: &Path) -> Result<String> {
    making.progress.note("load check: compiling a kernel with the new backend");
    let file = scratch.join("load_check.rs");
    fs::write(&file, LOAD_CHECK_SOURCE)?;
    let arch: Arch = LOAD_CHECK_ARCH.parse()?;
    let mut command = compiler(making, library)?;
    command.env("CUDA_OXIDE_TARGET", arch.to_string()).env("CUDA_OXIDE_PTX_DIR", scratch);
    command.args(["--edition", "2024", "--crate-type", "lib", "--crate-name", "kiln_load_check"]);
    command.arg("--out-dir").arg(scratch).arg(&file).current_dir(scratch);
    let refuse = |message: String| {
        Error::new(&LOAD_CHECK, message).hint(
            "`cargo xtask doctor` shows the llc, opt and rustc that were used; report it if they are right",
        )
    };
    let output = process::output(&mut command, LOAD_CHECK_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => refuse(format!("cannot start {}: {error}", command.get_program().display())),
        Failure::TimedOut(limit) => {
            refuse(format!("the kernel did not compile within {} s", limit.as_secs()))
        }
    })?;
    if !output.status.success() {
        return Err(refuse(format!("rustc with the new backend ended with {}", output.status))
            .cause(output.stderr.trim()));
    }
    let path = scratch.join("kiln_load_check.ptx");
    let text = fs::read_to_string(&path)
        .map_err(|error| refuse(format!("the backend wrote no PTX: {error}")).cause(output.stderr.trim()))?;
    let ptx = Ptx::parse(&text);
    let contraction_off = !making.pin.kernels.contraction;
    let llc = &making.tools.llc;
    ptx::check(
        &ptx,
        &Expectation { arch, contraction_off },
        "the load check's PTX",
        &llc.path.display().to_string(),
    )?;
    // The kernel is one product and one sum: with contraction off they must still be two operations.
    let operations: Vec<_> = ptx.float_ops.keys().map(String::as_str).collect();
    if contraction_off && operations != ["add.rn.f32", "mul.rn.f32"] {
        return Err(refuse(format!("contraction is off, but `a * b + c` became {operations:?}")));
    }
    Ok(text)
}

/// A rustc that compiles device code with `library` and exactly the chosen tools.
fn compiler(making: &Making<'_>, library: &Path) -> Result<Command> {
    let Making { toolchain, tools, env, .. } = making;
    let mut command = child::command(toolchain.rustc(), toolchain, env)?;
    command.env("RUSTC_BOOTSTRAP", "1");
    if !making.pin.kernels.contraction {
        command.env("CUDA_OXIDE_NO_FMA", "1");
    }
    command.env("CUDA_OXIDE_LLC", &tools.llc.path).env("CUDA_OXIDE_OPT", &tools.opt.path);
    let mut backend = OsString::from("-Zcodegen-backend=");
    backend.push(library);
    command.arg(backend);
    command.args(["-Copt-level=3", "-Cdebug-assertions=off", "-Zmir-enable-passes=-JumpThreading"]);
    command.arg("-Csymbol-mangling-version=v0");
    Ok(command)
}

/// Loads the published backend into rustc, which proves that the two fit; nothing is compiled.
pub fn load(backend: &Resolved<Backend>, toolchain: &Resolved<Toolchain>, env: &Env) -> Decision {
    let mut decision = Decision::new("backend_load");
    decision.change = Some("cargo xtask setup".to_owned());
    let (Some(backend), Some(toolchain)) = (&backend.value, &toolchain.value) else {
        decision.why = "not checked: it depends on the backend and rustc".to_owned();
        return decision;
    };
    match loaded_version(backend, toolchain, env) {
        Ok(version) => {
            decision.chosen = Some(version);
            decision.why = format!("{} loads it", toolchain.rustc().display());
        }
        Err(error) => {
            decision.why = "rustc does not load it".to_owned();
            decision.problem = Some(error.into());
        }
    }
    decision
}

fn loaded_version(backend: &Backend, toolchain: &Toolchain, env: &Env) -> Result<String> {
    let mut flag = OsString::from("-Zcodegen-backend=");
    flag.push(&backend.library);
    let mut command = child::command(toolchain.rustc(), toolchain, env)?;
    command.env("RUSTC_BOOTSTRAP", "1").arg("-vV").arg(flag);
    let refuse = |what: String| {
        Error::new(
            &LOAD_CHECK,
            format!("{} cannot load {}: {what}", toolchain.rustc().display(), backend.library.display()),
        )
        .hint("run: cargo xtask setup")
    };
    let output = process::output(&mut command, process::PROBE_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => refuse(error.to_string()),
        Failure::TimedOut(limit) => refuse(format!("no answer within {} s", limit.as_secs())),
    })?;
    if !output.status.success() {
        return Err(refuse(output.status.to_string()).cause(output.stderr.trim()));
    }
    // rustc prints its own lines first; what the backend says of itself comes instead of LLVM's version.
    let own = output.stdout.lines().find(|line| !toolchain.version.text.lines().any(|known| known == *line));
    own.map(str::to_owned).ok_or_else(|| refuse(format!("it does not name itself among {:?}", output.stdout)))
}

fn statement(making: &Making<'_>, key: &Key, staged: &Path, ptx: &str, started: String) -> Result<Statement> {
    let pin = making.pin;
    let file = |name: &str| -> Result<Resource> {
        Ok(Resource::file(name, &Sha256::of_reader(fs::File::open(staged.join(name))?)?))
    };
    let dependency = |name: Option<&str>, uri: Option<String>, algorithm: &str, digest: String| Resource {
        name: name.map(str::to_owned),
        uri,
        digest: [(algorithm.to_owned(), digest)].into(),
        annotations: Default::default(),
    };
    let uri = format!("git+{}@{}", pin.source.repository, pin.source.revision);
    let mut dependencies = vec![
        dependency(None, Some(uri), "gitCommit", pin.source.revision.to_string()),
        dependency(Some("tree"), None, "narSha256Sri", pin.source.tree.to_string()),
        dependency(Some("patched tree"), None, "narSha256Sri", making.source.hash.to_string()),
        Resource::file(pin.source.lock.as_str(), &pin.source.lock_sha256),
    ];
    dependencies
        .extend(making.patches.iter().map(|patch| Resource::file(patch.file.as_str(), &patch.sha256)));
    let flags: serde_json::Map<String, serde_json::Value> =
        PROFILE.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let definition = BuildDefinition {
        build_type: record::BUILD_TYPE.to_owned(),
        external_parameters: [
            ("repository".to_owned(), json!(pin.source.repository.as_str())),
            ("revision".to_owned(), json!(pin.source.revision.as_str())),
            ("backend".to_owned(), json!(pin.source.backend.as_str())),
            ("cargoOxide".to_owned(), json!(pin.source.cargo_oxide.as_str())),
        ]
        .into(),
        internal_parameters: [
            ("key".to_owned(), json!(key.to_string())),
            ("recipe".to_owned(), json!(RECIPE)),
            ("rustc".to_owned(), json!(making.toolchain.version.text)),
            ("environment".to_owned(), json!(flags)),
        ]
        .into(),
        resolved_dependencies: dependencies,
    };
    let tool =
        |tool: &crate::machine::llc::Tool| format!("LLVM {} sha256 {}", tool.version.full, tool.sha256);
    let mut load_check = Resource::file("load-check.ptx", &Sha256::of(ptx.as_bytes()));
    load_check.annotations = [
        ("arch".to_owned(), LOAD_CHECK_ARCH.to_owned()),
        ("llc".to_owned(), tool(&making.tools.llc)),
        ("opt".to_owned(), tool(&making.tools.opt)),
    ]
    .into();
    let run = RunDetails {
        builder: Builder {
            id: "urn:kiln:xtask".to_owned(),
            version: [("xtask".to_owned(), env!("CARGO_PKG_VERSION").to_owned())].into(),
        },
        metadata: Metadata { started_on: started, finished_on: now() },
        byproducts: vec![load_check],
    };
    Ok(Statement::new(vec![file(&library_name())?, file(&cargo_oxide_name())?], definition, run))
}

fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    format!("{}Z", store::utc(seconds))
}
