//! A world for tests of the whole program: a checkout, a store, a small upstream that really compiles, a sysroot whose
//! rustc pretends to load the backend, and LLVM tools that pretend to lower.

// Every test program compiles this module for itself and uses a part of it.
#![allow(dead_code)]

pub mod server;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use flate2::write::GzEncoder;
use tempfile::TempDir;
use xtask::base::hash::Sha256;

/// The compiler that runs the tests, which is the pinned release.
static RUSTC: LazyLock<(PathBuf, String)> = LazyLock::new(|| {
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output().unwrap();
    let rustc = Path::new(String::from_utf8(sysroot.stdout).unwrap().trim()).join("bin/rustc");
    let version = Command::new(&rustc).arg("-vV").output().unwrap();
    (rustc, String::from_utf8(version.stdout).unwrap())
});

/// The revision that the synthetic upstream claims to be.
pub const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";

/// Everything that a run needs, in one temporary folder.
pub struct World {
    _folder: TempDir,
    root: PathBuf,
    /// Set for every run.
    pub variables: Vec<(String, String)>,
    /// The patches that [`World::pin`] lists, in order.
    pub patches: Vec<&'static str>,
}

/// A finished run.
pub struct Run {
    /// The exit status.
    pub status: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Run {
    /// Asserts the exit status and returns the run.
    #[track_caller]
    pub fn exits(self, status: i32) -> Self {
        assert_eq!(self.status, status, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Asserts that standard error holds `text`.
    #[track_caller]
    pub fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "expected {text:?} in stderr:\n{}", self.stderr);
        self
    }
}

impl World {
    /// A world in which `setup` would succeed and has not run.
    pub fn new() -> Self {
        Self::below("")
    }

    /// As [`World::new`], all of it below a folder called `name`.
    pub fn below(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join(name);
        fs::create_dir_all(&root).unwrap();
        let world =
            World { _folder: folder, root, variables: Vec::new(), patches: vec!["0001-change.patch"] };
        copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/synthetic"), &world.path("upstream"));
        fs::remove_file(world.path("upstream/change.patch")).unwrap();
        for folder in ["work/kernels/device", "work/backend-patches", "work/.cargo", "home/.cargo", "bin"] {
            fs::create_dir_all(world.path(folder)).unwrap();
        }
        world.lay_sysroot();
        world.lay_llvm("22.1.8");
        world.lay_cuda();
        let patch = include_bytes!("../synthetic/change.patch");
        fs::write(world.path("work/backend-patches/0001-change.patch"), patch).unwrap();
        world.pin();
        world
    }

    /// Writes PROVENANCE for the upstream and the patches as they are now.
    pub fn pin(&self) {
        let tree = xtask::source::nar::hash_tree(&self.path("upstream")).unwrap();
        let lock = Sha256::of(&fs::read(self.path("upstream/Cargo.lock")).unwrap());
        let patches: String = self
            .patches
            .iter()
            .map(|file| {
                let bytes = fs::read(self.path(&format!("work/backend-patches/{file}"))).unwrap();
                let sha256 = Sha256::of(&bytes);
                format!("[[patch]]\nfile = \"{file}\"\nsha256 = \"{sha256}\"\nreason = \"a test\"\n\n")
            })
            .collect();
        let field = |name: &str| {
            let prefix = format!("{name}: ");
            RUSTC.1.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap().to_owned()
        };
        let text = format!(
            r#"[source]
repository = "https://example.invalid/upstream"
revision = "{REVISION}"
tree = "{tree}"
backend = "crates/rustc-codegen-cuda"
cargo-oxide = "crates/cargo-oxide"
lock = "Cargo.lock"
lock-sha256 = "{lock}"

{patches}[toolchain]
channel = "{}"
commit-hash = "{}"
components = ["rustc-dev"]

[llvm]
preferred = 22
verified = [22]

[kernels]
contraction = false
"#,
            field("release"),
            field("commit-hash")
        );
        fs::write(self.path("work/PROVENANCE"), text).unwrap();
    }

    fn lay_sysroot(&self) {
        let host = RUSTC.1.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
        let lib = self.path(&format!("sysroot/lib/rustlib/{host}/lib"));
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("librustc_codegen_ssa-0.rmeta"), "").unwrap();
        fs::create_dir_all(self.path("sysroot/bin")).unwrap();
        symlink(RUSTC.0.with_file_name("cargo"), self.path("sysroot/bin/cargo")).unwrap();
        let rustc = format!(
            r#"#!/bin/sh
for argument in "$@"; do
    case $argument in -Zcodegen-backend=*) backend=${{argument#*=}} ;; esac
done
[ -n "$backend" ] || exec '{rustc}' "$@"
[ -f "$backend" ] || {{ echo "error: couldn't load codegen backend $backend" >&2; exit 1; }}
case " $* " in
    *" -vV "*) '{rustc}' -vV && echo "synthetic backend" ;;
    *) exec "$CUDA_OXIDE_LLC" "-mcpu=$CUDA_OXIDE_TARGET" -o "$CUDA_OXIDE_PTX_DIR/kiln_load_check.ptx" ;;
esac
"#,
            rustc = RUSTC.0.display()
        );
        self.script("sysroot/bin/rustc", &rustc);
    }

    /// Puts an llc and an opt of `version` on PATH, under their plain and their numbered names.
    pub fn lay_llvm(&self, version: &str) {
        let major = version.split('.').next().unwrap();
        for name in [format!("llc-{major}"), format!("opt-{major}"), "llc".to_owned(), "opt".to_owned()] {
            self.script(&format!("bin/{name}"), &llvm_tool(version));
        }
    }

    /// Gives the machine one card.
    pub fn lay_card(&self) {
        let smi = "#!/bin/sh\ncase $1 in\n--query-gpu*) echo 'NVIDIA H200, 9.0, 580.65.06' ;;\n*) echo 'CUDA Version: 13.0 ' ;;\nesac\n";
        self.script("bin/nvidia-smi", smi);
    }

    /// Gives the CUDA toolkit a libNVVM that knows sm_86 and sm_90 and writes functions with the operations `body`, or, where
    /// that is `refuse`, refuses all IR that has functions.
    pub fn lay_libnvvm(&self, body: &str) {
        let source = self.path("libnvvm.rs");
        fs::write(
            &source,
            include_str!("libnvvm.rs.txt").replace("BODY", &body.escape_default().to_string()),
        )
        .unwrap();
        let library = self.path("cuda/nvvm/lib64/libnvvm.so");
        fs::create_dir_all(library.parent().unwrap()).unwrap();
        let mut command = Command::new(&RUSTC.0);
        command.args(["--crate-type=cdylib", "--edition=2024", "-Cpanic=abort", "-o"]);
        let output = command.arg(&library).arg(&source).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Writes `releases` of CUDA into PROVENANCE, as those whose libNVVM is verified.
    pub fn verify_libnvvm(&self, releases: &str) {
        self.edit(
            "work/PROVENANCE",
            "\n[kernels]\n",
            &format!("\n[libnvvm]\nverified = [{releases}]\n\n[kernels]\n"),
        );
    }

    fn lay_cuda(&self) {
        fs::create_dir_all(self.path("cuda/include")).unwrap();
        fs::write(self.path("cuda/include/cuda.h"), "#define CUDA_VERSION 13000\n").unwrap();
        fs::create_dir_all(self.path("cuda/lib64/stubs")).unwrap();
        fs::write(self.path("cuda/lib64/stubs/libcuda.so"), "").unwrap();
        self.script("cuda/bin/ptxas", PTXAS);
        // The machine's own card must not count.
        self.script("bin/nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n");
        fs::write(self.path("cuda/libclang.so"), "").unwrap();
    }

    /// Writes an executable script.
    pub fn script(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Written aside and renamed: a script that another process is just starting must not be open for writing.
        let fresh = path.with_extension("fresh");
        fs::write(&fresh, text).unwrap();
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(fresh, path).unwrap();
    }

    /// Replaces text in a file; it must be there.
    #[track_caller]
    pub fn edit(&self, path: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(path)).unwrap();
        assert!(text.contains(from), "{path} does not hold {from:?}:\n{text}");
        fs::write(self.path(path), text.replace(from, to)).unwrap();
    }

    /// The upstream as its host would pack it: below one folder, with the revision as the global comment.
    pub fn archive(&self, comment: &str, level: u32) -> Vec<u8> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), flate2::Compression::new(level)));
        tar.follow_symlinks(false);
        // `52 comment=<revision>`: the length counts itself.
        let record = format!("{} comment={comment}\n", comment.len() + 12);
        let mut global = tar::Header::new_ustar();
        global.set_path("pax_global_header").unwrap();
        global.set_entry_type(tar::EntryType::XGlobalHeader);
        global.set_size(record.len() as u64);
        global.set_cksum();
        tar.append(&global, record.as_bytes()).unwrap();
        tar.append_dir_all(format!("upstream-{REVISION}"), self.path("upstream")).unwrap();
        tar.into_inner().unwrap().finish().unwrap()
    }

    /// A path in this world.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The command `cargo xtask ARGUMENTS` in the checkout, in an environment that holds nothing of this machine.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(arguments).current_dir(self.path("work")).env_clear();
        let search = std::env::join_paths([self.path("bin"), "/usr/bin".into(), "/bin".into()]).unwrap();
        command.env("PATH", search).env("HOME", self.path("home"));
        command.env("KILN_TOOLCHAIN", self.path("sysroot")).env("KILN_STORE", self.path("store"));
        command.env("CUDA_TOOLKIT_PATH", self.path("cuda")).env("LIBCLANG_PATH", self.path("cuda"));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs `cargo xtask ARGUMENTS`.
    pub fn run(&self, arguments: &[&str]) -> Run {
        finished(self.command(arguments).output().unwrap())
    }

    /// Runs `setup` from the synthetic upstream and asserts that it succeeds.
    #[track_caller]
    pub fn setup(&self) -> Run {
        let upstream = self.path("upstream").display().to_string();
        self.run(&["setup", "--offline", "--source", &upstream]).exits(0)
    }

    /// The built backend.
    pub fn backend(&self) -> PathBuf {
        let mut entries = fs::read_dir(self.path("store/backends")).unwrap();
        entries.next().unwrap().unwrap().path().join(xtask::backend::library_name())
    }
}

/// The result of a finished command.
pub fn finished(output: Output) -> Run {
    Run {
        status: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A script that answers as an llc or opt of `version` and writes plausible PTX.
pub fn llvm_tool(version: &str) -> String {
    format!(
        r#"#!/bin/sh
case " $* " in
    *" --version "*)
        echo "Debian LLVM version {version}"
        echo "  Registered Targets:"
        echo "    nvptx64    - NVIDIA PTX 64-bit"
        exit 0 ;;
    *" -mcpu=help "*)
        printf 'Available CPUs for this target:\n\n  sm_80 - Select the sm_80 processor.\n' >&2
        printf '  sm_86 - Select the sm_86 processor.\n  sm_90 - Select the sm_90 processor.\n' >&2
        exit 0 ;;
esac
for argument in "$@"; do
    case $argument in -mcpu=*) arch=${{argument#*=}} ;; esac
    [ "$previous" = -o ] && out=$argument
    previous=$argument
done
cat > "$out" <<PTX
// LLVM {version}
.version 7.8
.target $arch
.address_size 64

.visible .entry kernel()
{{
	mul.rn.f32 	%r3, %r1, %r2;
	add.rn.f32 	%r5, %r3, %r4;
	ret;
}}
PTX
"#
    )
}

/// Answers as ptxas 13.0: every entry needs 12 registers, and spills as many bytes as `spill` beside `bin` says.
const PTXAS: &str = r#"#!/bin/sh
case $1 in
    --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit 0 ;;
    -v) ;;
    *) exit 1 ;;
esac
spill=$(cat "${0%/bin/ptxas}/spill" 2>/dev/null || echo 0)
sed -n 's/^[.]visible [.]entry \([^(]*\)(.*/\1/p' "$3" | while read -r entry; do
    echo "ptxas info    : Compiling entry function '$entry' for '${2#-arch=}'"
    echo "ptxas info    : Function properties for $entry"
    echo "    0 bytes stack frame, $spill bytes spill stores, $spill bytes spill loads"
    echo "ptxas info    : Used 12 registers, used 0 barriers"
done >&2
"#;
/// Whether a process may have a network of its own, without any route.
pub fn has_network_namespaces() -> bool {
    Command::new("unshare").args(["-rn", "true"]).output().is_ok_and(|output| output.status.success())
}

/// Says on the real standard error, which the test harness does not keep back, that a test was skipped and why.
pub fn skipped(test: &str, why: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("SKIPPED {test}: {why}\n").as_bytes());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
