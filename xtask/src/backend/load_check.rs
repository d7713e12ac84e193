//! The load check: rustc must load the backend, and a kernel must come out as it was written.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use fs_err as fs;

use super::{Backend, LOAD_CHECK, LOAD_CHECK_ARCH, LOAD_CHECK_LIMIT, LOAD_CHECK_SOURCE, Making};
use crate::base::env::Env;
use crate::base::process::{self, Failure};
use crate::machine::arch::Arch;
use crate::machine::child;
use crate::machine::toolchain::Toolchain;
use crate::ptx::{self, Expectation, Ptx};
use crate::report::decision::{Decision, Resolved};
use crate::report::error::{Error, Result};

/// Compiles the load check's kernel in `scratch` and returns its PTX.
pub(super) fn load_check(making: &Making<'_>, library: &Path, scratch: &Path) -> Result<String> {
    making.progress.note("load check: compiling a kernel with the new backend");
    let file = scratch.join("load_check.rs");
    fs::write(&file, LOAD_CHECK_SOURCE)?;
    let arch: Arch = LOAD_CHECK_ARCH.parse()?;
    let mut command = compiler(making, library)?;
    command.env("CUDA_OXIDE_TARGET", arch.to_string()).env("CUDA_OXIDE_PTX_DIR", scratch);
    command.args(["--edition", "2024", "--crate-type", "lib", "--crate-name", "kiln_load_check"]);
    command.arg("--out-dir").arg(scratch).arg(&file).current_dir(scratch);
    let refuse = |message: String| {
        Error::new(&LOAD_CHECK, message).hint(
            "`cargo xtask doctor` shows the llc, opt and rustc that were used; report it if they are right",
        )
    };
    let output = process::output(&mut command, LOAD_CHECK_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => refuse(format!("cannot start {}: {error}", command.get_program().display())),
        Failure::TimedOut(limit) => {
            refuse(format!("the kernel did not compile within {} s", limit.as_secs()))
        }
    })?;
    if !output.status.success() {
        return Err(refuse(format!("rustc with the new backend ended with {}", output.status))
            .cause(output.stderr.trim()));
    }
    let path = scratch.join("kiln_load_check.ptx");
    let text = fs::read_to_string(&path)
        .map_err(|error| refuse(format!("the backend wrote no PTX: {error}")).cause(output.stderr.trim()))?;
    let ptx = Ptx::parse(&text);
    let contraction_off = !making.pin.kernels.contraction;
    let llc = &making.tools.llc;
    ptx::check(
        &ptx,
        &Expectation { arch, contraction_off },
        "the load check's PTX",
        &llc.path.display().to_string(),
    )?;
    // The kernel is one product and one sum: with contraction off they must still be two operations.
    let operations: Vec<_> = ptx.float_ops.keys().map(String::as_str).collect();
    if contraction_off && operations != ["add.rn.f32", "mul.rn.f32"] {
        return Err(refuse(format!("contraction is off, but `a * b + c` became {operations:?}")));
    }
    Ok(text)
}

/// A rustc that compiles device code with `library` and exactly the chosen tools.
pub(super) fn compiler(making: &Making<'_>, library: &Path) -> Result<Command> {
    let Making { toolchain, tools, env, .. } = making;
    let mut command = child::command(toolchain.rustc(), toolchain, env)?;
    command.env("RUSTC_BOOTSTRAP", "1");
    if !making.pin.kernels.contraction {
        command.env("CUDA_OXIDE_NO_FMA", "1");
    }
    command.env("CUDA_OXIDE_LLC", &tools.llc.path).env("CUDA_OXIDE_OPT", &tools.opt.path);
    let mut backend = OsString::from("-Zcodegen-backend=");
    backend.push(library);
    command.arg(backend);
    command.args(["-Copt-level=3", "-Cdebug-assertions=off", "-Zmir-enable-passes=-JumpThreading"]);
    command.arg("-Csymbol-mangling-version=v0");
    Ok(command)
}

/// Loads the published backend into rustc, which proves that the two fit; nothing is compiled.
pub fn load(backend: &Resolved<Backend>, toolchain: &Resolved<Toolchain>, env: &Env) -> Decision {
    let mut decision = Decision::new("backend_load");
    decision.change = Some("cargo xtask setup".to_owned());
    let (Some(backend), Some(toolchain)) = (&backend.value, &toolchain.value) else {
        decision.why = "not checked: it depends on the backend and rustc".to_owned();
        return decision;
    };
    match loaded_version(backend, toolchain, env) {
        Ok(version) => {
            decision.chosen = Some(version);
            decision.why = format!("{} loads it", toolchain.rustc().display());
        }
        Err(error) => {
            decision.why = "rustc does not load it".to_owned();
            decision.problem = Some(error.into());
        }
    }
    decision
}

pub(super) fn loaded_version(backend: &Backend, toolchain: &Toolchain, env: &Env) -> Result<String> {
    let mut flag = OsString::from("-Zcodegen-backend=");
    flag.push(&backend.library);
    let mut command = child::command(toolchain.rustc(), toolchain, env)?;
    command.env("RUSTC_BOOTSTRAP", "1").arg("-vV").arg(flag);
    let refuse = |what: String| {
        Error::new(
            &LOAD_CHECK,
            format!("{} cannot load {}: {what}", toolchain.rustc().display(), backend.library.display()),
        )
        .hint("run: cargo xtask setup")
    };
    let output = process::output(&mut command, process::PROBE_LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => refuse(error.to_string()),
        Failure::TimedOut(limit) => refuse(format!("no answer within {} s", limit.as_secs())),
    })?;
    if !output.status.success() {
        return Err(refuse(output.status.to_string()).cause(output.stderr.trim()));
    }
    // rustc prints its own lines first; what the backend says of itself comes instead of LLVM's version.
    let own = output.stdout.lines().find(|line| !toolchain.version.text.lines().any(|known| known == *line));
    own.map(str::to_owned).ok_or_else(|| refuse(format!("it does not name itself among {:?}", output.stdout)))
}
