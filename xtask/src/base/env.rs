//! The process environment as a value: read once in `main`, injected everywhere else.
//!
//! [`VARIABLES`] lists every variable that the product reads; a variable that is set but empty counts as unset.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::report::error::{Error, Result};

crate::codes! {
    NO_ROOT = "KILN-0901", Machine, "no folder for the store can be found",
        "None of `--store`, KILN_STORE, XDG_CACHE_HOME and HOME names a folder. Give one with `--store DIR`.";
    BAD_ROOT = "KILN-0904", Machine, "the store cannot be there",
        "The store's path goes into the compiler's and the linker's flags and into TOML files, so it must be UTF-8 without \
         a colon (it separates search paths), a percent sign (lld makes other letters of it) or a control character. A `~` that the shell did not expand (it does not in quotes) is \
         refused, since it would make a folder of that name. Choose another folder with `--store DIR`.";
}

/// Every environment variable that kiln reads, with what it does.
pub static VARIABLES: &[(&str, &str)] = &[
    (
        "KILN_STORE",
        "folder of the content-keyed store; `--store` wins; relative paths start at the workspace root",
    ),
    ("KILN_TOOLCHAIN", "rustup toolchain name or sysroot that builds the backend; `--toolchain` wins"),
    ("KILN_OFFLINE", "`1` or `true`: as `--offline`"),
    ("CUDA_OXIDE_LLC", "path of the llc to use; refused, never skipped, when it does not qualify"),
    ("CUDA_OXIDE_OPT", "path of the opt to use; its LLVM major must be llc's"),
    ("CUDA_OXIDE_TARGET", "ignored with a warning by `build`: `--arch` decides"),
    ("CUDA_OXIDE_BACKEND", "refused by `build` when it names another backend than the verified one"),
    ("CUDA_TOOLKIT_PATH", "root of the CUDA toolkit (holds include/cuda.h)"),
    ("CUDA_HOME", "root of the CUDA toolkit, after CUDA_TOOLKIT_PATH"),
    (
        "LIBCLANG_PATH",
        "libclang for bindgen: the library or its folder; refused, never skipped, when it is not there",
    ),
    ("LIBRARY_PATH", "further folders with a libcuda.so to link with"),
    ("CUDA_CACHE_PATH", "reported by doctor: where the driver keeps what it compiled from PTX"),
    ("CUDA_CACHE_DISABLE", "reported by doctor: `1` turns that cache off"),
    ("CARGO_HOME", "Cargo's home; empty counts as unset"),
    ("RUSTUP_HOME", "rustup's home, where toolchains are looked up"),
    ("RUSTUP_TOOLCHAIN", "reported by doctor; never decides which toolchain builds the backend"),
    ("RUSTFLAGS", "host flags, with Cargo's own precedence"),
    ("CARGO_ENCODED_RUSTFLAGS", "host flags, separated by 0x1f; wins over RUSTFLAGS as in Cargo"),
    ("CARGO_TARGET_<TRIPLE>_RUSTFLAGS", "host flags, added to those of the triple's table as in Cargo"),
    ("CARGO_BUILD_RUSTFLAGS", "host flags, added to those of `[build]` as in Cargo"),
    ("RUSTC", "reported by doctor with CARGO_BUILD_RUSTC; cleared for every build"),
    ("RUSTC_WRAPPER", "reported by doctor with CARGO_BUILD_RUSTC_WRAPPER; cleared for every build"),
    (
        "RUSTC_WORKSPACE_WRAPPER",
        "reported by doctor with CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER; cleared for every build",
    ),
    ("XDG_CACHE_HOME", "parent of the default store; ignored when relative, as the XDG specification says"),
    ("HOME", "parent of `.cache` and `.cargo` when the variables above are unset"),
    ("PATH", "where llc-NN, opt-NN, git, ptxas and nvidia-smi are looked up"),
    ("LD_LIBRARY_PATH", "passed to probed tools without the folders that `cargo run` puts in front"),
    ("NO_COLOR", "no colour in the output"),
    (
        "KILN_TEST_STOP_AT",
        "for tests, in builds with debug assertions: the checkpoint of `setup` at which to stop",
    ),
];

/// A snapshot of the environment and the invocation folder.
#[derive(Clone, Debug, Default)]
pub struct Env {
    variables: BTreeMap<OsString, OsString>,
    cwd: Option<PathBuf>,
}

impl Env {
    /// Whether the network must not be used: by the flag of a verb, or by KILN_OFFLINE.
    pub fn is_offline(&self, flag: bool) -> bool {
        flag || self.var("KILN_OFFLINE").is_some_and(|value| matches!(value.to_str(), Some("1" | "true")))
    }

    /// The environment of this process.
    pub fn of_process() -> Self {
        Env { variables: std::env::vars_os().collect(), cwd: std::env::current_dir().ok() }
    }

    /// An environment made of `variables` and a working folder, for tests.
    pub fn of<K: AsRef<OsStr>, V: AsRef<OsStr>>(
        variables: impl IntoIterator<Item = (K, V)>,
        cwd: impl Into<PathBuf>,
    ) -> Self {
        let variables = variables
            .into_iter()
            .map(|(key, value)| (key.as_ref().to_owned(), value.as_ref().to_owned()))
            .collect();
        Env { variables, cwd: Some(cwd.into()) }
    }

    /// The variable's value; `None` when it is unset or empty.
    pub fn var(&self, name: &str) -> Option<&OsStr> {
        self.variables.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// As [`Env::var`], made an absolute path against the invocation folder.
    pub fn path(&self, name: &str) -> Result<Option<PathBuf>> {
        self.var(name).map(|value| self.absolute(Path::new(value))).transpose()
    }

    /// All variables, for building a child's environment.
    pub fn vars(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.variables.iter().map(|(key, value)| (key.as_os_str(), value.as_os_str()))
    }

    /// The invocation folder.
    ///
    /// # Errors
    /// It was deleted or cannot be read.
    pub fn cwd(&self) -> Result<&Path> {
        self.cwd.as_deref().ok_or_else(|| {
            Error::new(&crate::report::error::ACCESS, "the working folder does not exist or cannot be read")
                .hint("change to an existing folder and run the command again")
        })
    }

    /// `path` made absolute against the invocation folder, without touching the file system.
    pub fn absolute(&self, path: &Path) -> Result<PathBuf> {
        if path.is_absolute() { Ok(path.to_owned()) } else { Ok(self.cwd()?.join(path)) }
    }

    /// The folders on PATH, empty elements left out.
    pub fn search_path(&self) -> Vec<PathBuf> {
        let Some(path) = self.var("PATH") else { return Vec::new() };
        std::env::split_paths(path).filter(|folder| !folder.as_os_str().is_empty()).collect()
    }
}

/// Refuses a path that begins with a `~` that no shell has expanded.
///
/// # Errors
/// [`BAD_ROOT`], naming `from`.
pub fn refuse_tilde(path: &Path, from: &str) -> Result<()> {
    if path.components().next().is_some_and(|first| first.as_os_str().as_encoded_bytes().starts_with(b"~")) {
        return Err(Error::new(
            &BAD_ROOT,
            format!("{from} is {}, which begins with a literal `~`", path.display()),
        )
        .hint("write the path out, or leave the quotes away so that the shell expands it"));
    }
    Ok(())
}
