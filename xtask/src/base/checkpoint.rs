//! Named places of `setup` where a test can stop the process and kill it.
//!
//! With KILN_TEST_STOP_AT set to a checkpoint's name, the process prints `checkpoint NAME` on standard error when it
//! gets there and stops itself with SIGSTOP. Builds without debug assertions have none of this.

use crate::base::env::Env;

/// Every checkpoint, in the order in which a first `setup` from the repository passes them.
pub const ALL: &[&str] = &[
    "pristine-staged",
    "downloaded",
    "pristine-unpacked",
    "pristine-publishing",
    "pristine-published",
    "source-staged",
    "source-patched",
    "source-publishing",
    "source-published",
    "backend-built",
    "backend-staged",
    "backend-checked",
    "backend-publishing",
    "backend-published",
    "linking",
    "configuring",
    "selecting",
];

/// Stops here when the environment asks for it.
#[cfg(all(unix, debug_assertions))]
pub fn pass(name: &str, env: &Env) {
    debug_assert!(ALL.contains(&name), "{name} is not listed");
    if env.var("KILN_TEST_STOP_AT").is_some_and(|asked| asked == name) {
        // A test that has gone away will not read it.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("checkpoint {name}\n").as_bytes());
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
    }
}

/// Nothing: only tests stop here.
#[cfg(not(all(unix, debug_assertions)))]
pub fn pass(_: &str, _: &Env) {}
