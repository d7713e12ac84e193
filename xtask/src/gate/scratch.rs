//! A second checkout with a store of its own, in a temporary folder, in which a gate may break things.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::{World, unprepared};
use crate::backend::Backend;
use crate::backend::checkout;
use crate::backend::host_config;
use crate::base::env::Env;
use crate::base::interrupt::Folder;
use crate::build::gpu::GpuBuild;
use crate::machine::arch::Arch;
use crate::plan::{Plan, Request};
use crate::report::error::{Error, Result};
use crate::report::progress::Silent;
use crate::store::{Kind, Store};

/// How much of the checkout is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What a plan reads: PROVENANCE, the patches, Cargo's configuration.
    Plan,
    /// All but build results, so that it can be built.
    Whole,
}

/// The copy; it removes itself.
pub struct Scratch<'a> {
    _folder: Folder,
    /// The copied checkout, set up.
    pub workspace: PathBuf,
    /// Its store.
    pub store: PathBuf,
    request: Request,
    env: &'a Env,
}

impl<'a> Scratch<'a> {
    /// Copies the checkout and its entries of the store, and sets the copy up. A build of the copy would start.
    ///
    /// # Errors
    /// The world's own plan is not good, or the file system fails.
    pub fn new(world: &World<'a>, extent: Extent) -> Result<Self> {
        Self::prepare(world, extent).map_err(|error| unprepared("a copy of the checkout", error))
    }

    fn prepare(world: &World<'a>, extent: Extent) -> Result<Self> {
        let (plan, env) = (world.plan(), world.env);
        let (pins, store) = (plan.pins.require()?, plan.store.require()?);
        let (source, backend) = (plan.source.require()?, plan.backend.require()?);
        // Outside of the checkout, whose Cargo configuration would count for a folder inside of it.
        let parent: PathBuf = env.path("TMPDIR")?.unwrap_or_else(|| "/tmp".into());
        let folder = Folder::within(&parent, "kiln-gate-")?;
        let root = fs::canonicalize(folder.path())?;
        let (workspace, copied) = (root.join("checkout"), root.join("store"));
        copy_checkout(world.workspace, &workspace, extent)?;
        copy_entry(&store.entry(Kind::Source, &source.key), &copied, Kind::Source)?;
        copy_entry(&store.entry(Kind::Backend, &backend.key), &copied, Kind::Backend)?;

        let request = Request {
            store: Some(copied.clone()),
            toolchain: Some(plan.rustc.require()?.sysroot.clone().into_os_string()),
            ..world.request.clone()
        };
        let own = Plan::resolve(&request, &workspace, env);
        let tree = &own.source.require()?.tree;
        checkout::write_link(&workspace, &pins.pin.source.workspace(tree))?;
        let config =
            checkout::host_config_of(own.backend.require()?, own.host_flags.require()?, own.rustc.require()?);
        host_config::write(&checkout::host_config_path(&workspace), &config)?;
        let scratch = Scratch { _folder: folder, workspace, store: copied, request, env };
        // A refusal counts only if nothing was refused before.
        scratch.start(&BTreeSet::new(), None)?;
        Ok(scratch)
    }

    /// The copied backend.
    ///
    /// # Errors
    /// It is not the recorded one any more.
    pub fn backend(&self, world: &World<'_>) -> Result<Backend> {
        let store = Store::locate(Some(&self.store), None, &self.workspace, self.env)?;
        crate::backend::verify(&store, &world.plan().backend.require()?.key)
    }

    /// Resolves the copy's plan, with another llc if one is named, and does all that comes before a build for `archs`.
    ///
    /// # Errors
    /// The reason why the build would not start.
    pub fn start(&self, archs: &BTreeSet<Arch>, llc: Option<&Path>) -> Result<()> {
        let plan = self.plan(llc);
        GpuBuild::prepare(&plan, archs, self.env, &Silent).map(|_| ())
    }

    /// The copy's plan.
    pub fn plan(&self, llc: Option<&Path>) -> Plan {
        let mut request = self.request.clone();
        if let Some(llc) = llc {
            request.llc = Some(llc.into());
        }
        Plan::resolve(&request, &self.workspace, self.env)
    }
}

/// What setup, Cargo and git make is left out, and so are links.
pub(super) fn copy_checkout(from: &Path, to: &Path, extent: Extent) -> Result<()> {
    match extent {
        Extent::Whole => copy(from, to, &|name| !matches!(name, "target" | ".git"))?,
        Extent::Plan => {
            fs::create_dir_all(to)?;
            for name in [crate::pins::FILE_NAME, "Cargo.toml"] {
                if from.join(name).is_file() {
                    fs::copy(from.join(name), to.join(name))?;
                }
            }
            for name in [crate::pins::PATCH_FOLDER, ".cargo"] {
                if from.join(name).is_dir() {
                    copy(&from.join(name), &to.join(name), &|_| true)?;
                }
            }
        }
    }
    for name in [host_config::FILE_NAME, crate::store::selection::FILE_NAME] {
        match fs::remove_file(to.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    fs::create_dir_all(to.join(".cargo"))?;
    Ok(())
}

fn copy_entry(entry: &Path, store: &Path, kind: Kind) -> Result<()> {
    let name = entry.file_name().ok_or_else(|| {
        Error::new(&crate::report::error::BUG, format!("{} is no store entry", entry.display()))
    })?;
    copy_with_links(entry, &store.join(kind.folder()).join(name))
}

fn copy(from: &Path, to: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let (path, target) = (entry.path(), to.join(&name));
        let kind = entry.file_type()?;
        if kind.is_dir() && wanted(&name.to_string_lossy()) {
            copy(&path, &target, wanted)?;
        } else if kind.is_file() {
            fs::copy(path, target)?;
        }
    }
    Ok(())
}

/// Everything below `from`: a source tree is compared to the last link.
fn copy_with_links(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_with_links(&path, &target)?;
        } else if kind.is_symlink() {
            fs::os::unix::fs::symlink(fs::read_link(&path)?, target)?;
        } else {
            fs::copy(path, target)?;
        }
    }
    Ok(())
}
