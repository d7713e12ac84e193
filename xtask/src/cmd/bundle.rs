//! `bundle`: writes everything that `setup` needs into one file, for machines without network and for CI caches.

use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::base::interrupt::Folder;
use crate::cmd::cli::Common;
use crate::plan::Plan;
use crate::report::decision::Thoroughness;
use crate::report::error::{Error, Result};
use crate::report::output;
use crate::report::progress;
use crate::source;
use crate::source::bundle::{self, Content, Manifest};
use crate::source::vendor::{self, Collecting, Locks};
use crate::store::Kind;
use crate::store::inventory;

/// Write the source, the patches and all crates into one file, from which `setup --bundle` needs no network
///
/// Reads the store, the lock files and Cargo's home, into which missing crates are fetched. Writes FILE. The same inputs
/// give the same bytes. Also prints the key and the paths that a CI should save.
#[derive(Debug, Args)]
pub struct Bundle {
    #[command(flatten)]
    common: Common,

    /// Where to write it, by convention NAME.tar.gz; an older file is replaced
    file: PathBuf,

    /// Also pack the built backend, which `setup --bundle FILE --bundle-sha256 HASH` takes instead of building one
    #[arg(long)]
    with_backend: bool,

    /// Use no network: all crates must be in the store or in CARGO_HOME [also: KILN_OFFLINE=1]
    #[arg(long)]
    offline: bool,

    /// Print one JSON document (schema kiln.bundle-report/1, described in docs/hermetic.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    file: &'a Path,
    bytes: u64,
    sha256: Sha256,
    cache_key: String,
    cache_paths: &'a [PathBuf],
}

impl Bundle {
    /// Runs the verb.
    ///
    /// # Errors
    /// The checkout is not set up, or a crate cannot be had.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let progress = progress::on_stderr("bundle", self.common.quiet);
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let toolchain = plan.rustc.require()?;
        let source = plan.source.require()?;
        let backend = plan.backend.require()?;
        let file = env.absolute(&self.file)?;
        let _in_use = store.lock_shared(inventory::GC_LOCK, &|text| progress.note(text))?;
        let (pristine, _) = source::verify_pristine(store, &pins.pin.source)?.ok_or_else(|| {
            Error::new(&source::MISSING, "upstream's unpatched tree is not in the store")
                .hint("run: cargo xtask setup")
        })?;

        let upstream = pins.pin.source.workspace(&source.tree);
        let locks = Locks::read(&pins.pin, &upstream, workspace)?;
        let parent = store.root().join("build");
        fs::create_dir_all(&parent)?;
        let scratch = Folder::within(&parent, ".bundle-")?;
        let collecting = Collecting {
            store,
            pin: &pins.pin,
            upstream: &upstream,
            workspace,
            toolchain,
            offline: env.is_offline(self.offline),
            env,
            progress: progress.as_ref(),
        };
        vendor::collect(&locks, scratch.path(), &collecting)?;
        let manifest =
            Manifest::new(pins, locks.key().clone(), self.with_backend.then(|| backend.key.clone()));
        let entry = store.entry(Kind::Backend, &backend.key);
        progress.note(&format!("packing {}", file.display()));
        let sha256 = bundle::write(
            &file,
            &Content {
                manifest: &manifest,
                workspace,
                pins,
                pristine: &pristine,
                crates: scratch.path(),
                backend: self.with_backend.then_some(entry.as_path()),
            },
        )?;

        let bytes = fs::metadata(&file)?.len();
        let key = bundle::cache_key(&pins.source_key(), locks.key(), &backend.key);
        let paths = bundle::cache_paths(store, pins, locks.key(), &backend.key);
        if self.json {
            output::json(&Report {
                schema: "kiln.bundle-report/1",
                file: &file,
                bytes,
                sha256,
                cache_key: format!("kiln-{key}"),
                cache_paths: &paths,
            })?;
            return Ok(0);
        }
        output::line(&format!("bundle      {} ({})", file.display(), HumanBytes(bytes)))?;
        output::line(&format!("sha256      {sha256}"))?;
        output::line(&format!("cache key   kiln-{key}"))?;
        for path in paths {
            output::line(&format!("cache path  {}", path.display()))?;
        }
        Ok(0)
    }
}
