//! The environment of the compilers that we start: what is passed on is listed, everything else is dropped.
//!
//! `cargo xtask` itself runs under Cargo and perhaps rustup, whose variables would steer the builds below it; a user's
//! flags, wrappers and target folders would change the bits or the place of what is built. So nothing gets through
//! that is not named here.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::base::env::Env;
use crate::machine::toolchain::Toolchain;
use crate::report::error::{Error, Result};

crate::codes! {
    BAD_PATH_ELEMENT = "KILN-0110", Machine, "a folder cannot be put on PATH",
        "A folder whose name holds the separator of PATH (a colon on Unix) cannot be searched for programs.";
}

/// Passed on as they are.
const KEPT: &[&str] = &[
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "TERM",
    "LANG",
    "TZ",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "XDG_CONFIG_HOME",
    // Certificates, proxies and credentials, for `cargo fetch`.
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "SSH_AUTH_SOCK",
    "GIT_SSH_COMMAND",
    "GIT_CONFIG_GLOBAL",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    // Where the linker looks: a Nix or Guix machine has its libraries nowhere else.
    "LIBRARY_PATH",
    "SDKROOT",
    "SYSTEMROOT",
    "NO_COLOR",
];

/// Passed on when the name begins so.
const KEPT_PREFIXES: &[&str] =
    &["LC_", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTRY_", "CARGO_REGISTRIES_", "CARGO_TERM_", "NIX_"];

/// A command for `program` in the listed environment, with the toolchain's programs first on PATH.
///
/// `RUSTUP_TOOLCHAIN` is dropped and not needed: programs of a sysroot are no proxies.
///
/// # Errors
/// The sysroot's path cannot be put on PATH.
pub fn command(program: impl AsRef<OsStr>, toolchain: &Toolchain, env: &Env) -> Result<Command> {
    let mut command = Command::new(program);
    command.env_clear();
    command.envs(env.vars().filter(|(name, value)| is_kept(name) && !value.is_empty()));
    command.env("PATH", search_path(toolchain, env)?);
    if let Some(path) = crate::machine::probe::child_library_path(env) {
        command.env("LD_LIBRARY_PATH", path);
    }
    command.env("CARGO_HOME", cargo_home(env)?);
    command.env("RUSTC", toolchain.rustc());
    // An empty value also switches off a wrapper from the configuration in CARGO_HOME.
    command.env("RUSTC_WRAPPER", "").env("RUSTC_WORKSPACE_WRAPPER", "");
    Ok(command)
}

/// Cargo's home, absolute: CARGO_HOME, or `.cargo` in HOME.
///
/// # Errors
/// Neither is there.
pub fn cargo_home(env: &Env) -> Result<PathBuf> {
    if let Some(home) = env.path("CARGO_HOME")? {
        // Cargo would make a folder of that name in the working folder.
        crate::base::env::refuse_tilde(Path::new(env.var("CARGO_HOME").unwrap_or_default()), "CARGO_HOME")?;
        return Ok(home);
    }
    match env.var("HOME") {
        Some(home) => env.absolute(&Path::new(home).join(".cargo")),
        None => Err(Error::new(&crate::base::env::NO_ROOT, "neither CARGO_HOME nor HOME is set")
            .hint("set CARGO_HOME to an absolute path")),
    }
}

fn is_kept(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn search_path(toolchain: &Toolchain, env: &Env) -> Result<OsString> {
    let bin = toolchain.sysroot.join("bin");
    let folders = std::iter::once(bin.clone()).chain(env.search_path());
    std::env::join_paths(folders).map_err(|error| {
        Error::new(&BAD_PATH_ELEMENT, format!("cannot put {} on PATH: {error}", bin.display()))
            .hint("move the toolchain to a folder without this character")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::machine::toolchain::RustcVersion;

    #[test]
    fn b3_b4_b15_g3_variables_that_steer_cargo_are_dropped() {
        let steering = [
            "RUSTUP_TOOLCHAIN",
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_BUILD_RUSTFLAGS",
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "CARGO_BUILD_RUSTC",
            "CARGO_INCREMENTAL",
            "CARGO_PROFILE_RELEASE_LTO",
            "RUSTC_BOOTSTRAP",
            "RUSTDOCFLAGS",
            "CUDA_OXIDE_TARGET",
            "GIT_DIR",
            "GIT_WORK_TREE",
            "CARGO_MANIFEST_DIR",
        ];
        let passed = [("HOME", "/h"), ("CARGO_NET_OFFLINE", "true"), ("https_proxy", "p"), ("LC_ALL", "C")];
        let env = Env::of(
            steering.iter().map(|name| (*name, "x")).chain(passed).chain([("PATH", "/bin:/usr/bin")]),
            "/",
        );
        let toolchain = Toolchain {
            sysroot: "/sysroot".into(),
            version: RustcVersion::parse("release: 1\ncommit-hash: 2\nhost: 3").unwrap(),
        };
        let command = command("cargo", &toolchain, &env).unwrap();
        let got: BTreeMap<_, _> = command
            .get_envs()
            .map(|(key, value)| (key.to_str().unwrap(), value.unwrap().to_str().unwrap()))
            .collect();
        let expected = BTreeMap::from([
            ("HOME", "/h"),
            ("CARGO_NET_OFFLINE", "true"),
            ("https_proxy", "p"),
            ("LC_ALL", "C"),
            ("PATH", "/sysroot/bin:/bin:/usr/bin"),
            ("CARGO_HOME", "/h/.cargo"),
            ("RUSTC", "/sysroot/bin/rustc"),
            ("RUSTC_WRAPPER", ""),
            ("RUSTC_WORKSPACE_WRAPPER", ""),
        ]);
        assert_eq!(got, expected);
    }

    #[test]
    fn g2_an_empty_cargo_home_counts_as_unset_and_a_relative_one_is_made_absolute_once() {
        let home = |pairs: &[(&str, &str)]| cargo_home(&Env::of(pairs.iter().copied(), "/here"));
        assert_eq!(home(&[("CARGO_HOME", ""), ("HOME", "/h")]).unwrap(), Path::new("/h/.cargo"));
        assert_eq!(home(&[("CARGO_HOME", "rel"), ("HOME", "/h")]).unwrap(), Path::new("/here/rel"));
        assert_eq!(home(&[]).unwrap_err().code().id, "KILN-0901");
    }
}
