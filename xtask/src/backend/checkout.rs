//! What setup writes into a checkout: the link to the patched source, the host config of cargo-oxide, and what setup
//! chose. All three are git-ignored and belong to this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;

use crate::backend::Backend;
use crate::backend::host_config::{self, HostConfig};
use crate::base::lock::{self, Failure, Mode};
use crate::machine::cargo_config::HostFlags;
use crate::machine::toolchain::Toolchain;
use crate::report::decision::{Decision, Resolved};
use crate::report::error::{Error, Result};
use crate::report::progress::Progress;
use crate::source::Patched;
use crate::source::pinned::Pins;

crate::codes! {
    NO_LINK = "KILN-0810", Refusal, "the link to the patched source is not the right one",
        "The device crates take upstream's crates through the link upstream, which setup owns. It is \
         missing, or leads to another tree than the verified one, so other crates would be compiled.";
    LINK_IN_THE_WAY = "KILN-0811", Machine, "something that setup did not make stands where its link belongs",
        "upstream must be a symbolic link that setup makes. A real file or folder is there; setup does \
         not remove what it did not make.";
    NOT_SET_UP = "KILN-0812", Machine, "this checkout has not been set up",
        "The store has the pinned backend, from a setup of another checkout, and this one has neither the host config \
         nor the link to the patched source. `cargo xtask setup` writes both in moments; nothing is built again.";
}

/// The link's place in the checkout.
pub const LINK: &str = "upstream";

/// Begins the name of the folder in which the link is made.
const LINK_STAGING: &str = ".upstream-";

/// What setup writes.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The content of the host config.
    pub host_config: HostConfig,
    /// Where [`LINK`] leads: the workspace of the patched source.
    pub link: PathBuf,
}

/// The host config's place in the checkout.
pub fn host_config_path(workspace: &Path) -> PathBuf {
    workspace.join(host_config::FILE_NAME)
}

/// What `.cargo/cuda-oxide.toml` must say.
pub fn host_config_of(backend: &Backend, flags: &HostFlags, toolchain: &Toolchain) -> HostConfig {
    HostConfig {
        backend: backend.library.clone(),
        extra_rustflags: flags.flags.clone(),
        triple: toolchain.version.host.clone(),
        env: BTreeMap::new(),
    }
}

/// Lets one setup at a time write into the checkout, for as long as the result lives, and removes what a killed one
/// left half-written. `None` where folders cannot be locked: then each file is still replaced in one step. Another
/// setup is waited for no longer than `limit`.
///
/// # Errors
/// The checkout is not writable, or the wait was too long.
pub fn lock(
    workspace: &Path,
    limit: Option<Duration>,
    progress: &dyn Progress,
) -> Result<Option<std::fs::File>> {
    let folder = host_config_path(workspace).parent().unwrap_or(workspace).to_owned();
    fs::create_dir_all(&folder)?;
    let file = fs::File::open(&folder)?.into_file();
    let why = "a setup of the same checkout";
    match lock::take(&file, &folder, Mode::Alone, why, limit, &|text| progress.note(text)) {
        Ok(()) => {}
        Err(Failure::System(_)) => return Ok(None),
        Err(Failure::TimedOut(error)) => return Err(error),
    }
    let link = workspace.join(LINK);
    let half_written =
        |name: &str| name.starts_with('.') && name.ends_with(".tmp") && name.contains(".toml.");
    sweep(&folder, &half_written);
    sweep(link.parent().unwrap_or(workspace), &|name| name.starts_with(LINK_STAGING));
    Ok(Some(file))
}

/// Removes what a killed setup left; what cannot be removed now stays for the next one.
fn sweep(folder: &Path, is_leftover: &dyn Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_leftover) {
            continue;
        }
        let _ = match entry.file_type() {
            Ok(kind) if kind.is_dir() => fs::remove_dir_all(entry.path()),
            _ => fs::remove_file(entry.path()),
        };
    }
}

/// Works out what the checkout must hold and compares. The value is there even when the checkout differs.
pub fn resolve(
    workspace: &Path,
    pins: Option<&Pins>,
    toolchain: Option<&Toolchain>,
    source: &Resolved<Patched>,
    backend: &Resolved<Backend>,
    flags: &Resolved<HostFlags>,
) -> Resolved<Expected> {
    let mut decision = Decision::new("checkout");
    decision.change = Some("cargo xtask setup".to_owned());
    let (Some(pins), Some(toolchain), Some(source), Some(backend), Some(flags)) =
        (pins, toolchain, &source.value, &backend.value, &flags.value)
    else {
        decision.why = "not checked: it depends on the source, the backend and the host flags".to_owned();
        return Resolved { decision, value: None };
    };
    let expected = Expected {
        host_config: host_config_of(backend, flags, toolchain),
        link: pins.pin.source.workspace(&source.tree),
    };
    let path = host_config_path(workspace);
    let check = || -> Result<()> {
        if [&path, &workspace.join(LINK)].into_iter().all(|path| fs::symlink_metadata(path).is_err()) {
            let message = format!("{} has no {} and no {LINK}", workspace.display(), host_config::FILE_NAME);
            return Err(Error::new(&NOT_SET_UP, message).hint("run: cargo xtask setup"));
        }
        let drifts = host_config::compare(&path, &expected.host_config)?;
        if !drifts.is_empty() {
            return Err(host_config::drift_error(&path, &drifts, flags));
        }
        check_link(workspace, &expected.link)
    };
    match check() {
        Ok(()) => {
            decision.chosen = Some(path.display().to_string());
            decision.why = "it names this backend and exactly the flags that Cargo would use".to_owned();
        }
        Err(error) => {
            decision.why = error.message().lines().next().unwrap_or_default().to_owned();
            decision.problem = Some(error.into());
        }
    }
    Resolved { decision, value: Some(expected) }
}

fn check_link(workspace: &Path, target: &Path) -> Result<()> {
    let link = workspace.join(LINK);
    let found = match fs::read_link(&link) {
        Ok(found) if found == target => return Ok(()),
        Ok(found) => format!("leads to {}", found.display()),
        Err(_) if fs::symlink_metadata(&link).is_ok() => "is no link".to_owned(),
        Err(_) => "is missing".to_owned(),
    };
    Err(Error::new(&NO_LINK, format!("{} {found}, expected a link to {}", link.display(), target.display()))
        .hint("run: cargo xtask setup"))
}

/// Makes the link, replacing an older one in one step.
///
/// # Errors
/// Something other than a link is in the way, or the file system has no links.
pub fn write_link(workspace: &Path, target: &Path) -> Result<()> {
    let link = workspace.join(LINK);
    if check_link(workspace, target).is_ok() {
        return Ok(());
    }
    if fs::symlink_metadata(&link).is_ok_and(|metadata| !metadata.is_symlink()) {
        return Err(Error::new(&LINK_IN_THE_WAY, format!("{} is not a link", link.display()))
            .hint(format!("move it away: mv {0} {0}.old", link.display())));
    }
    let parent = link.parent().unwrap_or(workspace);
    // Made under a name of its own and renamed, so that two setups cannot meet half-way.
    let staging = tempfile::Builder::new().prefix(LINK_STAGING).tempdir_in(parent)?;
    let fresh = staging.path().join("link");
    symlink(target, &fresh)?;
    fs::rename(&fresh, &link)?;
    Ok(())
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> Result<()> {
    Ok(fs::os::unix::fs::symlink(target, link)?)
}

#[cfg(not(unix))]
fn symlink(target: &Path, link: &Path) -> Result<()> {
    Err(Error::new(
        &LINK_IN_THE_WAY,
        format!("{} must link to {}, and links need Unix", link.display(), target.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_made_replaced_and_never_takes_a_folder_away() {
        let root = tempfile::tempdir().unwrap();
        let first = root.path().join("first");
        let second = root.path().join("second");
        assert_eq!(check_link(root.path(), &first).unwrap_err().code().id, "KILN-0810");
        write_link(root.path(), &first).unwrap();
        check_link(root.path(), &first).unwrap();
        let error = check_link(root.path(), &second).unwrap_err();
        assert!(error.message().contains(&format!("leads to {}", first.display())), "{error}");
        write_link(root.path(), &second).unwrap();
        check_link(root.path(), &second).unwrap();

        let link = root.path().join(LINK);
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        fs::write(link.join("mine"), "x").unwrap();
        assert_eq!(write_link(root.path(), &first).unwrap_err().code().id, "KILN-0811");
        assert_eq!(fs::read_to_string(link.join("mine")).unwrap(), "x");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "no leftovers");
    }

    #[test]
    fn eight_writers_of_the_link_all_succeed() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for index in 0..8 {
                let (root, target) = (root.path(), root.path().join(format!("t{index}")));
                scope.spawn(move || write_link(root, &target).unwrap());
            }
        });
        assert!(fs::read_link(root.path().join(LINK)).is_ok());
    }
}
