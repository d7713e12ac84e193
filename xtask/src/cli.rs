//! The command line: what can be asked for. Each verb is a module of [`crate::cmd`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::cmd;
use crate::env::Env;
use crate::error::{Error, Result};

/// Makes kiln's CUDA-Rust toolchain reproducible, explains it, and builds with it.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, max_term_width = 110, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 you or the machine must change something; 2 a bug or an I/O failure; 70 something is there and is \
not what PROVENANCE says; a child's own code where the child is the point.";

#[derive(Debug, Subcommand)]
enum Verb {
    Setup(cmd::setup::Setup),
    Build(cmd::build::Build),
    Doctor(cmd::doctor::Doctor),
    Explain(cmd::explain::Explain),
    Verify(cmd::verify::Verify),
    Bundle(cmd::bundle::Bundle),
    Pin(cmd::pin::Repin),
    Attest(cmd::attest::Attest),
    Store(cmd::store::List),
    Gc(cmd::gc::Gc),
}

/// Options that every verb takes.
#[derive(Clone, Debug, Default, Args)]
pub struct Common {
    /// Folder of the content-keyed store; a relative one starts at the workspace root
    /// [default: KILN_STORE, else the last setup's, else $XDG_CACHE_HOME/kiln or ~/.cache/kiln]
    #[arg(long, value_name = "DIR", global = true)]
    pub store: Option<PathBuf>,

    /// The Rust toolchain that the backend belongs to: rustup's name for it, or a sysroot
    /// [default: KILN_TOOLCHAIN, else the last setup's, else the pinned release in rustup or on PATH]
    #[arg(long, value_name = "NAME|SYSROOT", global = true)]
    pub toolchain: Option<OsString>,
}

impl Cli {
    /// Runs the verb and returns the exit status.
    ///
    /// # Errors
    /// Whatever the verb reports.
    pub fn run(self, env: &Env) -> Result<u8> {
        let workspace = workspace_root(env)?;
        match self.verb {
            Verb::Setup(verb) => verb.run(&workspace, env),
            Verb::Build(verb) => verb.run(&workspace, env),
            Verb::Doctor(verb) => verb.run(&workspace, env),
            Verb::Explain(verb) => verb.run(),
            Verb::Verify(verb) => verb.run(&workspace, env),
            Verb::Bundle(verb) => verb.run(&workspace, env),
            Verb::Pin(verb) => verb.run(&workspace, env),
            Verb::Attest(verb) => verb.run(&workspace, env),
            Verb::Store(verb) => verb.run(&workspace, env),
            Verb::Gc(verb) => verb.run(&workspace, env),
        }
    }
}

/// The physical path of the workspace: above xtask's manifest where Cargo ran us, else the nearest folder upwards
/// that holds PROVENANCE.
fn workspace_root(env: &Env) -> Result<PathBuf> {
    let above_manifest = env.var("CARGO_MANIFEST_DIR").and_then(|manifest| Path::new(manifest).parent());
    let is_root = |folder: &&Path| folder.join(crate::pin::FILE_NAME).is_file();
    let found = match above_manifest.filter(|folder| is_root(folder)) {
        Some(root) => Some(root),
        None => env.cwd()?.ancestors().find(is_root),
    };
    let root = found.or(above_manifest).ok_or_else(|| {
        Error::new(&crate::pin::PIN_MISSING, "no folder from here upwards holds PROVENANCE")
            .hint("run it inside of a checkout of kiln: cargo xtask ...")
    })?;
    // Cargo looks for its configuration in the physical parents, so this path must be physical too.
    Ok(fs_err::canonicalize(root)?)
}
