//! The command line: what can be asked for. Each verb is a module of [`crate::cmd`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::base::env::Env;
use crate::cmd;
use crate::plan::Request;
use crate::report::decision::Thoroughness;
use crate::report::error::{Error, Result};
use crate::store::Store;

/// Makes kiln's CUDA-Rust toolchain reproducible, explains it, and builds with it.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, max_term_width = 110, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

crate::codes! {
    USAGE = "KILN-0105", Machine, "the command line is not understood",
        "A verb, an option or a value is unknown or missing. `cargo xtask --help` lists the verbs, and `cargo xtask VERB \
         --help` the options of one.";
}

/// The error for a command line that clap refuses.
pub fn usage_error(error: &clap::Error) -> Error {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let text = text.split("\n\nFor more information").next().unwrap_or(text);
    Error::new(&USAGE, text.trim_end()).hint("run: cargo xtask --help, or cargo xtask VERB --help")
}

/// Whether a command line asks for JSON. Looked for in the arguments themselves, since one that clap refuses asks, too.
pub fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 you or the machine must change something; 2 a bug or an I/O failure; 70 something is there and is \
not what PROVENANCE says; a child's own code where the child is the point.";

#[derive(Debug, Subcommand)]
enum Verb {
    Setup(cmd::setup::Setup),
    Build(cmd::build::Build),
    Doctor(cmd::doctor::Doctor),
    Gate(cmd::gate::Gate),
    Ptx(cmd::ptx::Ptx),
    Model(cmd::model::Model),
    Explain(cmd::explain::Explain),
    Verify(cmd::verify::Verify),
    Bundle(cmd::bundle::Bundle),
    Pin(cmd::pin::Repin),
    Attest(cmd::attest::Attest),
    Store(cmd::store::List),
    Gc(cmd::gc::Gc),
    Completions(cmd::completions::Completions),
    Man(cmd::man::Man),
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

    /// Lower the kernels with this llc: its path, or a verified LLVM major, of which kiln finds one; or with libNVVM of the
    /// CUDA toolkit [default: CUDA_OXIDE_LLC, else the preferred major]
    #[arg(long, value_name = "PATH|MAJOR|libnvvm", global = true)]
    pub llc: Option<OsString>,

    /// Wait no longer than this for another command that works on the same thing; 0 fails at once
    /// [default: as long as it takes]
    #[arg(long, value_name = "SECONDS", global = true)]
    pub lock_timeout: Option<u64>,

    /// Say nothing but warnings and errors on standard error, and let Cargo do the same
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

impl Common {
    /// What the plan is asked for.
    pub fn request(&self, thoroughness: Thoroughness) -> Request {
        Request {
            store: self.store.clone(),
            toolchain: self.toolchain.clone(),
            llc: self.llc.clone(),
            lock_limit: self.lock_limit(),
            thoroughness,
        }
    }

    /// The store alone, for verbs that need no plan.
    ///
    /// # Errors
    /// As [`Request::locate_store`].
    pub fn store(&self, workspace: &Path, env: &Env) -> Result<Store> {
        self.request(Thoroughness::First).locate_store(workspace, env)
    }

    /// How long locks are waited for.
    pub fn lock_limit(&self) -> Option<Duration> {
        self.lock_timeout.map(Duration::from_secs)
    }
}

impl Cli {
    /// Runs the verb and returns the exit status.
    ///
    /// # Errors
    /// Whatever the verb reports.
    pub fn run(self, env: &Env) -> Result<u8> {
        match self.verb {
            Verb::Gate(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Ptx(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Model(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Setup(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Build(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Doctor(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Explain(verb) => verb.run(),
            Verb::Verify(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Bundle(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Pin(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Attest(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Store(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Gc(verb) => verb.run(&workspace_root(env)?, env),
            Verb::Completions(verb) => verb.run(),
            Verb::Man(verb) => verb.run(env),
        }
    }
}

/// The physical path of the workspace: above xtask's manifest where Cargo ran us, else the nearest folder upwards
/// that holds PROVENANCE.
fn workspace_root(env: &Env) -> Result<PathBuf> {
    let above_manifest = env.var("CARGO_MANIFEST_DIR").and_then(|manifest| Path::new(manifest).parent());
    let is_root = |folder: &&Path| folder.join(crate::pins::FILE_NAME).is_file();
    let found = match above_manifest.filter(|folder| is_root(folder)) {
        Some(root) => Some(root),
        None => env.cwd()?.ancestors().find(is_root),
    };
    let root = found.or(above_manifest).ok_or_else(|| {
        Error::new(&crate::pins::PIN_MISSING, "no folder from here upwards holds PROVENANCE")
            .hint("run it inside of a checkout of kiln: cargo xtask ...")
    })?;
    // Cargo looks for its configuration in the physical parents, so this path must be physical too.
    Ok(fs_err::canonicalize(root)?)
}
