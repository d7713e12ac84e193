//! The rustc codegen backend and cargo-oxide: how they are built from the patched source, and how a built one is
//! checked before every use.
//!
//! The recipe's inputs all go into the entry's key; its environment is listed ([`crate::machine::child`]). The bytes do not
//! depend on where the store is or where the crates come from: every path is remapped, each crate's to its name and
//! version, and Cargo runs in the root folder of the file system, so that no configuration file between there and the
//! source is found. [`compile`] takes the place as an argument, so that `verify --rebuild` follows the same recipe.

pub mod checkout;
pub mod cost;
pub mod host_config;
mod load_check;
mod recipe;
mod statement;

use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::base::checkpoint;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::machine::child;
use crate::machine::llc::Tools;
use crate::machine::toolchain::Toolchain;
use crate::pins::outputs::{Output, Recorded};
use crate::pins::{Pin, PinnedPatch};
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source::Patched;
use crate::source::vendor::Vendored;
use crate::store::record::CHANGED;
use crate::store::record::{self, Statement};
use crate::store::{Key, Kind, Store};

use self::cost::Cost;
pub use self::load_check::load;
use self::load_check::load_check;
pub use self::recipe::{Built, compile};
use self::statement::{now, statement};

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
    OTHER_OUTPUT = "KILN-0916", Refusal, "the build gave another backend than PROVENANCE records",
        "PROVENANCE records the sha256 of what these very inputs (source, patches, lock file, rustc, recipe) gave elsewhere. \
         This build gave something else, so that something which decides bits is not among the inputs: a damaged rustc or \
         crate, a disk or memory error, or a fault of kiln. `cargo xtask verify --rebuild` builds once more in another \
         folder and says what differs; compare record.json with that of a machine which gives the recorded bytes. Where the other result is meant, \
         `cargo xtask setup --accept` records it beside.";
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

impl Backend {
    /// What it is, as PROVENANCE records it.
    pub fn output(&self, toolchain: &Toolchain) -> Result<Output> {
        output(&self.key, &self.record, toolchain)
    }

    /// What its build took, where that was recorded.
    pub fn cost(&self) -> Option<Cost> {
        Cost::of(&self.record)
    }
}

fn output(key: &Key, record: &Statement, toolchain: &Toolchain) -> Result<Output> {
    let subject = |name: &str| {
        let missing = || Error::new(&CHANGED, format!("the record has no sha256 of {name}"));
        record.subject_sha256(name).ok_or_else(|| missing().hint("run: cargo xtask setup"))
    };
    Ok(Output {
        host: toolchain.version.host.clone(),
        rustc: toolchain.version.commit_hash.clone(),
        key: key.to_string(),
        backend_sha256: subject(&library_name())?,
        cargo_oxide_sha256: subject(&cargo_oxide_name())?,
    })
}

/// Refuses what is not the recorded output of its inputs. Says whether there is a record.
///
/// # Errors
/// [`OTHER_OUTPUT`]
pub fn check_output(pin: &Pin, built: &Output) -> Result<bool> {
    let recorded = match pin.recorded(built) {
        Recorded::Same => return Ok(true),
        Recorded::Nothing => return Ok(false),
        Recorded::Other(recorded) => recorded,
    };
    let mut what = format!("the backend of key {} is not the one that PROVENANCE records", built.key);
    for (name, recorded, found) in [
        (library_name(), recorded.backend_sha256, built.backend_sha256),
        (cargo_oxide_name(), recorded.cargo_oxide_sha256, built.cargo_oxide_sha256),
    ] {
        if recorded != found {
            what.push_str(&format!("\n  {name}\n    recorded: {recorded}\n    found:    {found}"));
        }
    }
    Err(Error::new(&OTHER_OUTPUT, what).hint(
        "find what differs with: cargo xtask verify --rebuild; to record this result beside the other: cargo xtask setup --accept",
    ))
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
    /// Another result than the recorded one is taken, too.
    pub accept: bool,
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
        refuse_other(&backend.record, &key, making)?;
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
    let record = statement(making, &key, staging.path(), &ptx, &built.cost, started)?;
    refuse_other(&record, &key, making)?;
    record.save(staging.path())?;
    checkpoint::pass("backend-publishing", making.env);
    staging.publish()?;
    checkpoint::pass("backend-published", making.env);
    // The build is published: its intermediate files serve nobody any more.
    fs::remove_dir_all(&target)?;
    verify(store, &key)
}

fn refuse_other(record: &Statement, key: &Key, making: &Making<'_>) -> Result<()> {
    if !making.accept {
        check_output(making.pin, &output(key, record, making.toolchain)?)?;
    }
    Ok(())
}

/// Takes a backend that was built elsewhere, after checking it against its own record and with the load check here.
///
/// A record proves nothing about who wrote it: the caller vouches for `folder`, by a hash that the user gave.
///
/// # Errors
/// It is a backend of other inputs, its files are not those of its record ([`CHANGED`]), it is not the one that PROVENANCE
/// records ([`OTHER_OUTPUT`]), or it fails the load check.
pub fn import(folder: &Path, making: &Making<'_>) -> Result<Backend> {
    let store = making.store;
    let key = key(making.pin, &making.source.key, making.toolchain);
    let _lock = store.lock(&format!("backend-{key}"), &|text| making.progress.note(text))?;
    if let Ok(backend) = verify(store, &key) {
        return Ok(backend);
    }
    refuse_other(&verify_folder(folder, &key)?.record, &key, making)?;
    let staging = store.stage(Kind::Backend, &key)?;
    for name in [library_name(), cargo_oxide_name(), record::FILE_NAME.to_owned()] {
        fs::copy(folder.join(&name), staging.path().join(&name))?;
    }
    let scratch = tempfile::Builder::new().prefix(".load-check-").tempdir_in(folder)?;
    load_check(making, &staging.path().join(library_name()), scratch.path())?;
    staging.publish()?;
    verify(store, &key)
}
