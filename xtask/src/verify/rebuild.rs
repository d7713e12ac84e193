//! The backend and the kernels, built again from a copy of the source, with another target folder, HOME and CARGO_HOME, and
//! compared byte for byte.

use std::path::{Path, PathBuf};

use fs_err as fs;

use super::{Check, NO_PTX, records};
use crate::backend::{self, Place};
use crate::base::binary_diff;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::base::interrupt::Folder;
use crate::build::gpu::GpuBuild;
use crate::machine::arch::Arch;
use crate::plan::Plan;
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source;
use crate::source::vendor::{self, Collecting, Locks};
use crate::store::inventory;

/// What to build again, and how.
pub struct Rebuild<'a> {
    /// A plan in which everything is in place.
    pub plan: &'a Plan,
    /// The architectures of the kernels.
    pub archs: &'a [Arch],
    /// The workspace.
    pub workspace: &'a Path,
    /// Use no network.
    pub offline: bool,
    /// Keep the folder in which it was built.
    pub keep: bool,
    /// The environment.
    pub env: &'a Env,
    /// Where notes go.
    pub progress: &'a dyn Progress,
}

impl Rebuild<'_> {
    /// Builds the backend, and the kernels for every one of `archs`.
    ///
    /// # Errors
    /// The plan lacks something, or a build fails. A difference is no error.
    pub fn run(&self) -> Result<Vec<Check>> {
        let Rebuild { plan, workspace, env, progress, .. } = *self;
        let pins = plan.pins.require()?;
        let store = plan.store.require()?;
        let (source, toolchain) = (plan.source.require()?, plan.rustc.require()?);
        let published = plan.backend.require()?;
        let _in_use = store.lock_shared(inventory::GC_LOCK, &|text| progress.note(text))?;
        let parent = store.root().join("build");
        fs::create_dir_all(&parent)?;
        let elsewhere = Folder::within(&parent, ".verify-")?;
        let place = elsewhere.path().to_owned();
        // Until the end of this function it removes itself.
        let _elsewhere = if self.keep {
            elsewhere.keep();
            None
        } else {
            Some(elsewhere)
        };
        let at = |name: &str| place.join(name);

        progress.note(&format!("building again in {}", place.display()));
        let tree = at("a/copy/of/the/source");
        fs::create_dir_all(tree.parent().unwrap_or(&tree))?;
        source::copy_tree(&source.tree, &tree)?;
        let upstream = pins.pin.source.workspace(&source.tree);
        let locks = Locks::upstream(&pins.pin, &upstream, workspace)?;
        let collecting = Collecting {
            store,
            pin: &pins.pin,
            upstream: &upstream,
            workspace,
            toolchain,
            offline: self.offline,
            env,
            progress,
        };
        vendor::collect(&locks, &at("collected"), &collecting)?;
        let crates = vendor::lay_at(&locks, &at("collected"), &pins.pin, &at("vendored"))?;
        let home = at("home-of-another-user");
        let cargo_home = crates.cargo_home(&home.join("cargo"), env)?;
        let making = backend::Making {
            store,
            pin: &pins.pin,
            patches: &pins.patches,
            source,
            toolchain,
            tools: plan.tools()?,
            crates: Some(&crates),
            offline: true,
            accept: false,
            env,
            progress,
        };
        let place =
            Place { tree: &tree, target: &at("built/here"), cargo_home: &cargo_home, home: Some(&home) };
        let built = backend::compile(&making, &place)?;
        let mut checks = Vec::new();
        let pairs = [(&published.library, &built.library), (&published.cargo_oxide, &built.cargo_oxide)];
        for (published, again) in pairs {
            checks.push(compare(published, again)?);
        }
        for arch in self.archs {
            checks.extend(self.kernels(arch, &at("device"))?);
        }
        Ok(checks)
    }

    fn kernels(&self, arch: &Arch, target: &Path) -> Result<Vec<Check>> {
        let Rebuild { plan, workspace, env, progress, .. } = *self;
        progress.note(&format!("building the kernels again for {arch}"));
        let again = GpuBuild::prepare(plan, &[*arch].into(), env, progress)?
            .ptx_in(arch, &target.join(arch.to_string()))?;
        let published: Vec<PathBuf> =
            records(workspace, &arch.to_string())?.into_iter().map(|(folder, _)| folder).collect();
        let mut checks = Vec::new();
        for path in again {
            let name = path.file_name().unwrap_or_default();
            // The folder of the same inputs has the same name.
            let inputs = path.parent().and_then(Path::file_name).unwrap_or_default();
            match published.iter().find(|folder| folder.file_name() == Some(inputs)) {
                Some(folder) => checks.push(compare(&folder.join(name), &path)?),
                None => checks.push(Check::error(
                    &format!("{arch} again"),
                    &Error::new(&NO_PTX, format!("nothing was built for {arch} from these inputs"))
                        .hint(format!("run: cargo xtask build --arch {arch}")),
                )),
            }
        }
        Ok(checks)
    }
}

/// Compares a published file with the same one, built again.
fn compare(published: &Path, again: &Path) -> Result<Check> {
    let (one, other) = (fs::read(published)?, fs::read(again)?);
    let name = published.file_name().unwrap_or_default().to_string_lossy();
    let mut check =
        Check::same(&format!("{name} again"), published, &Sha256::of(&one), Some(&Sha256::of(&other)));
    check.details = binary_diff::describe(&one, &other);
    Ok(check)
}
