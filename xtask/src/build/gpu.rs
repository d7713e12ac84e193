//! The GPU engine and its kernels: built by the verified backend, every PTX file read back and checked.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use fs_err as fs;

use crate::backend::Backend;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::machine::arch::Arch;
use crate::machine::child;
use crate::machine::cuda::{LibClang, Ptxas, Toolkit};
use crate::machine::nvvm::{self, LibNvvm};
use crate::machine::toolchain::Toolchain;
use crate::plan::{self, Lowering, Plan};
use crate::ptx::build_record::{self, PtxRecord};
use crate::ptx::{self, Expectation, Ptx, scan, usage};
use crate::report::error::{Error, Exit, Result};
use crate::report::progress::Progress;
use crate::source::pinned::Pins;
use crate::source::vendor::{self, Vendored};
use crate::store::Key;

crate::codes! {
    CARGO_FAILED = "KILN-0130", Machine, "cargo cannot build the engine",
        "The child's messages stand above, and its exit code is this command's. Mend what the first of them \
         says.";
    OTHER_BACKEND = "KILN-0132", Refusal, "CUDA_OXIDE_BACKEND names another backend",
        "The variable would make cargo-oxide load another library than the one that setup built and verified.";
    NO_PTX = "KILN-0133", Refusal, "the build wrote no PTX",
        "cargo-oxide ended well, but no PTX file is where it was told to write them, so nothing can be checked and \
         nothing may be used.";
    NOT_EMBEDDED = "KILN-0134", Internal, "the program does not hold the PTX that was made for it",
        "With libNVVM the device crate is built twice: first for the IR, then with the PTX that libNVVM made of it. The \
         second build gave other IR, or a program without that PTX. Please report it.";
}

/// A GPU build whose inputs are all verified.
pub struct GpuBuild<'a> {
    quiet: bool,
    workspace: &'a Path,
    env: &'a Env,
    pins: &'a Pins,
    toolchain: &'a Toolchain,
    lowering: Lowering<'a>,
    backend: &'a Backend,
    cuda: &'a Toolkit,
    libclang: &'a LibClang,
    /// Where there is one, it must accept what libNVVM makes.
    ptxas: Option<&'a Ptxas>,
    /// The crates, where the store has them.
    crates: Option<Vendored>,
}

/// What a GPU build made.
#[derive(Debug)]
pub struct Built {
    /// For which architecture.
    pub arch: Arch,
    /// The program.
    pub binary: PathBuf,
    /// Every PTX file, as it was read and checked.
    pub ptx: Vec<(PathBuf, Ptx)>,
}

/// The program that a build for `arch` makes in `workspace`, whether or not it is there: with llc, or with libNVVM.
pub fn binary(workspace: &Path, arch: &Arch, by_libnvvm: bool) -> PathBuf {
    program(&target(workspace, arch, by_libnvvm))
}

fn program(target: &Path) -> PathBuf {
    target.join("release").join(format!("{BINARY}{}", std::env::consts::EXE_SUFFIX))
}

/// Apart, so that the one cannot be taken for the other.
fn target(workspace: &Path, arch: &Arch, by_libnvvm: bool) -> PathBuf {
    let end = if by_libnvvm { "-libnvvm" } else { "" };
    workspace.join("target/device").join(format!("{arch}{end}"))
}

/// The device workspace's manifest.
const MANIFEST: &str = "kernels/device/Cargo.toml";

/// The device workspace's package and binary.
const PACKAGE: &str = "kiln-device";
/// The program that a build makes.
pub const BINARY: &str = "kiln";

impl<'a> GpuBuild<'a> {
    /// Refuses unless everything in the plan is good and what makes its PTX knows `archs`; tells `progress` where their
    /// PTX does not run. Builds nothing.
    ///
    /// # Errors
    /// The first reason why a build would not start.
    pub fn prepare(
        plan: &'a Plan,
        archs: &BTreeSet<Arch>,
        env: &'a Env,
        progress: &dyn Progress,
    ) -> Result<Self> {
        for arch in archs {
            let arch =
                plan::resolve_arch(&arch.to_string(), plan.lowering().ok(), plan.gpu.value.as_ref(), env);
            arch.require()?;
            for note in &arch.decision.notes {
                progress.warn(note);
            }
        }
        if let Some(problem) = plan.problem() {
            return Err(problem.clone().into());
        }
        let pins = plan.pins.require()?;
        let gpu = GpuBuild {
            quiet: progress.is_quiet(),
            workspace: &plan.workspace,
            env,
            pins,
            toolchain: plan.rustc.require()?,
            lowering: plan.lowering()?,
            backend: plan.backend.require()?,
            cuda: plan.cuda.require()?,
            libclang: plan.libclang.require()?,
            ptxas: plan.ptxas.value.as_ref(),
            crates: vendor::find(plan.store.require()?, &pins.pin, &plan.workspace)?,
        };
        gpu.refuse_other_backend()?;
        Ok(gpu)
    }

    /// What makes the kernels' PTX.
    pub fn lowering(&self) -> Lowering<'a> {
        self.lowering
    }

    fn by_libnvvm(&self) -> bool {
        matches!(self.lowering, Lowering::LibNvvm(_))
    }

    fn refuse_other_backend(&self) -> Result<()> {
        let Some(named) = self.env.path("CUDA_OXIDE_BACKEND")? else { return Ok(()) };
        let same = fs::canonicalize(&named)
            .is_ok_and(|real| fs::canonicalize(&self.backend.library).is_ok_and(|verified| real == verified));
        if same {
            return Ok(());
        }
        Err(Error::new(
            &OTHER_BACKEND,
            format!(
                "CUDA_OXIDE_BACKEND names {}, the verified backend is {}",
                named.display(),
                self.backend.library.display()
            ),
        )
        .hint("run: unset CUDA_OXIDE_BACKEND"))
    }

    /// Builds for `arch` and checks every PTX file.
    ///
    /// # Errors
    /// The child fails, or its PTX is refused.
    pub fn build(&self, arch: &Arch) -> Result<Built> {
        let target = target(self.workspace, arch, self.by_libnvvm());
        let files = self.ptx_in(arch, &target)?;
        let mut checked = Vec::new();
        for path in files {
            let ptx = self.check(arch, &path, &fs::read_to_string(&path)?)?;
            checked.push((path, ptx));
        }
        if let Some(folder) = checked.first().and_then(|(path, _)| path.parent()) {
            let files: Vec<PathBuf> = checked.iter().map(|(path, _)| path.clone()).collect();
            PtxRecord::write(folder, &arch.to_string(), self.backend.library_sha256, &files)?;
        }
        Ok(Built { arch: *arch, binary: program(&target), ptx: checked })
    }

    /// Builds in the target folder `target` and returns the PTX files, which are not checked yet.
    ///
    /// # Errors
    /// The child fails, or there are none.
    pub(crate) fn ptx_in(&self, arch: &Arch, target: &Path) -> Result<Vec<PathBuf>> {
        let ptx_folder = target.join(format!("ptx-{}", self.inputs(arch)?));
        fs::create_dir_all(&ptx_folder)?;
        for path in build_record::drop_changed(&ptx_folder)? {
            eprintln!("warning: {} was changed since it was built: it is made again", path.display());
        }
        if let Lowering::LibNvvm(libnvvm) = self.lowering {
            return Ok(vec![self.ptx_by(libnvvm, arch, target, &ptx_folder)?]);
        }
        self.run(arch, target, &ptx_folder)?;
        let mut files = scan::in_folder(&ptx_folder)?;
        if files.is_empty() {
            // Cargo found everything fresh, but the PTX of that build was removed since: compile once more.
            self.clean(target)?;
            self.run(arch, target, &ptx_folder)?;
            files = scan::in_folder(&ptx_folder)?;
        }
        if files.is_empty() {
            return Err(Error::new(&NO_PTX, format!("there is no .ptx file in {}", ptx_folder.display()))
                .hint(format!("run: rm -r {}, and build again", target.display())));
        }
        Ok(files)
    }

    /// Builds for the IR, has libNVVM make PTX of it, and builds again with that PTX in the program.
    fn ptx_by(&self, libnvvm: &LibNvvm, arch: &Arch, target: &Path, folder: &Path) -> Result<PathBuf> {
        let (ir_path, ptx_path) = (ir_folder(folder).join(format!("{BINARY}.ll")), embedded(folder));
        self.run(arch, target, folder)?;
        if !ir_path.is_file() {
            self.clean(target)?;
            self.run(arch, target, folder)?;
        }
        let read = || match fs::read_to_string(&ir_path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(Error::new(&NO_PTX, format!("there is no {}", ir_path.display()))
                    .hint(format!("run: rm -r {}, and build again", target.display())))
            }
            result => Ok(result?),
        };
        let ir = read()?;
        let contraction = self.pins.pin.kernels.contraction;
        // Compiling takes longer than reading; the first line says of what the PTX was made.
        let options = nvvm::options(*arch, contraction).join(" ");
        let origin =
            format!("// By {}, {options}, of IR sha256:{}", libnvvm.identity()?, Sha256::of(ir.as_bytes()));
        let present = fs::read_to_string(&ptx_path).unwrap_or_default();
        if present.lines().next() != Some(&origin) {
            let ptx = libnvvm.compile(&nvvm::ir::complete(&ir)?, BINARY, *arch, contraction)?;
            let text = format!("{origin}\n{ptx}");
            // A program with this PTX comes only from PTX that is good.
            let checked = self.check(arch, &ptx_path, &text)?;
            crate::base::atomic::write_atomic(&ptx_path, text.as_bytes(), None)?;
            if let Some(ptxas) = self.ptxas {
                let entries = checked.entries.iter().map(String::as_str);
                if let Err(error) = usage::assemble(ptxas, &ptx_path, &arch.to_string(), entries, self.env) {
                    fs::remove_file(&ptx_path)?;
                    return Err(error);
                }
            }
            self.run(arch, target, folder)?;
        }
        let ptx = fs::read(&ptx_path)?;
        let program = program(target);
        if read()? != ir {
            return Err(Error::new(
                &NOT_EMBEDDED,
                format!("{} was another one after the second build", ir_path.display()),
            )
            .hint(format!("run: rm -r {}, and build again", target.display())));
        }
        if !holds(&fs::read(&program)?, &ptx) {
            let (program, ptx) = (program.display(), ptx_path.display());
            return Err(Error::new(&NOT_EMBEDDED, format!("{program} does not hold {ptx}"))
                .hint(format!("run: rm -r {}, and build again", target.display())));
        }
        Ok(ptx_path)
    }

    /// Reads and checks `text`, the content of the PTX file `path`.
    ///
    /// # Errors
    /// It is not what a build for `arch` must give.
    pub fn check(&self, arch: &Arch, path: &Path, text: &str) -> Result<Ptx> {
        let expectation = Expectation { arch: *arch, contraction_off: !self.pins.pin.kernels.contraction };
        let ptx = Ptx::parse(text);
        ptx::check(&ptx, &expectation, &path.display().to_string(), &self.lowering.to_string())?;
        Ok(ptx)
    }

    /// A hash of everything but the sources that decides the PTX. It names the PTX folder, which cargo-oxide hashes into
    /// the flags: so a change of any of it compiles again, although no source changed.
    fn inputs(&self, arch: &Arch) -> Result<Key> {
        let key = Key::builder("ptx", 1)
            .field("arch", &arch.to_string())
            .field("backend", &self.backend.library_sha256.to_string())
            .field("rustc", &self.toolchain.version.text);
        let key = match self.lowering {
            Lowering::Llc(tools) => {
                key.field("llc", &tools.llc.identity()).field("opt", &tools.opt.identity())
            }
            Lowering::LibNvvm(libnvvm) => key.field("libnvvm", &libnvvm.identity()?),
        };
        Ok(key.field("contraction", &self.pins.pin.kernels.contraction.to_string()).finish())
    }

    fn command(&self, program: &Path) -> Result<Command> {
        let mut command = child::command(program, self.toolchain, self.env)?;
        command.current_dir(self.workspace).stdin(Stdio::null());
        command.env("RUSTC_BOOTSTRAP", "1");
        command.env("CUDA_TOOLKIT_PATH", &self.cuda.root).env("LIBCLANG_PATH", &self.libclang.folder);
        command.env("LIBRARY_PATH", library_path(&self.cuda.link, self.env)?);
        if let Some(crates) = &self.crates {
            let home = self.workspace.join("target/device/cargo-home");
            command.env("CARGO_HOME", crates.cargo_home(&home, self.env)?);
        }
        Ok(command)
    }

    fn run(&self, arch: &Arch, target: &Path, ptx_folder: &Path) -> Result<()> {
        let mut command = self.command(&self.backend.cargo_oxide)?;
        command.env("CUDA_OXIDE_BACKEND", &self.backend.library);
        command.env("CUDA_OXIDE_PTX_DIR", ptx_folder);
        command.arg("build").arg("--arch").arg(arch.to_string());
        match self.lowering {
            Lowering::Llc(tools) => {
                command.env("CUDA_OXIDE_LLC", &tools.llc.path).env("CUDA_OXIDE_OPT", &tools.opt.path);
            }
            Lowering::LibNvvm(_) => {
                command.env("CUDA_OXIDE_PTX_DIR", ir_folder(ptx_folder));
                command.arg("--emit-nvvm-ir").env("KILN_DEVICE_PTX", embedded(ptx_folder));
            }
        }
        if !self.pins.pin.kernels.contraction {
            command.arg("--no-fmad").env("CUDA_OXIDE_NO_FMA", "1");
        }
        command.arg("--cargo-target-dir").arg(target);
        command.args(["--", "--manifest-path", MANIFEST, "--release", "--locked"]);
        if self.quiet {
            command.arg("--quiet");
        }
        // Its banner is for people; standard output is for our own result.
        command.stdout(Stdio::from(std::io::stderr()));
        succeed(&mut command, "cargo oxide build")
    }

    fn clean(&self, target: &Path) -> Result<()> {
        let mut command = self.command(&self.toolchain.cargo(self.env))?;
        command.args(["clean", "--quiet", "--release", "-p", PACKAGE, "--manifest-path", MANIFEST]);
        command.arg("--target-dir").arg(target);
        succeed(&mut command, "cargo clean")
    }
}

/// Where the backend writes its IR: it removes PTX that it finds there.
fn ir_folder(ptx_folder: &Path) -> PathBuf {
    ptx_folder.join("ir")
}

/// The PTX that the program embeds in place of what the backend embeds.
fn embedded(ptx_folder: &Path) -> PathBuf {
    ptx_folder.join(format!("{BINARY}.ptx"))
}

/// Says whether `part` is in `whole`.
fn holds(whole: &[u8], part: &[u8]) -> bool {
    let Some(first) = part.first() else { return true };
    let mut rest = whole;
    while let Some(at) = rest.iter().position(|byte| byte == first) {
        let Some(from) = rest.get(at..) else { return false };
        if from.starts_with(part) {
            return true;
        }
        rest = from.get(1..).unwrap_or_default();
    }
    false
}

/// Where the linker looks: the user's own folders first, the toolkit's stubs last.
fn library_path(link: &Path, env: &Env) -> Result<OsString> {
    let own = env.var("LIBRARY_PATH").map(std::env::split_paths).into_iter().flatten();
    let folders = own.filter(|folder| !folder.as_os_str().is_empty()).chain([link.to_owned()]);
    std::env::join_paths(folders).map_err(|error| {
        Error::new(
            &child::BAD_PATH_ELEMENT,
            format!("cannot search {} for libraries: {error}", link.display()),
        )
        .hint("move the toolkit to a folder without this character")
    })
}

fn succeed(command: &mut Command, what: &str) -> Result<()> {
    let program = command.get_program().display().to_string();
    let status = command
        .status()
        .map_err(|error| Error::new(&CARGO_FAILED, format!("cannot start {program}")).cause(error))?;
    check(status, what, &CARGO_FAILED)
}

/// The child is the point here: its exit code is passed on.
pub fn check(status: ExitStatus, what: &str, code: &'static crate::report::error::Code) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let exit = status.code().and_then(|code| u8::try_from(code).ok()).map_or(Exit::Internal, Exit::Child);
    Err(Error::new(code, format!("{what} ended with {status}"))
        .with_exit(exit)
        .hint("read the first error above"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_found_at_either_end_and_after_false_starts() {
        let whole = b"\x7fELF aab aabab end";
        for part in [&b"\x7fELF"[..], b"aabab", b"end", b"", whole] {
            assert!(holds(whole, part), "{part:?}");
        }
        for part in [&b"aabb"[..], b"end ", b"x"] {
            assert!(!holds(whole, part), "{part:?}");
        }
        assert!(!holds(b"", b"x"));
    }
}
