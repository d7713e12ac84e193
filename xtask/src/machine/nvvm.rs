//! libNVVM, the compiler from NVVM IR to PTX in NVIDIA's CUDA toolkit: the other road to PTX than llc.
//!
//! The library is opened when it is asked for and never linked. libdevice is not added: kernels spell their arithmetic.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

use crate::base::hash::Sha256;
use crate::base::version::CudaVersion;
use crate::machine::arch::Arch;
use crate::machine::cuda::Toolkit;
use crate::report::decision::{Decision, Resolved, Verdict};
use crate::report::error::{Error, Result};

pub mod ir;

crate::codes! {
    NO_LIBNVVM = "KILN-0391", Machine, "there is no libNVVM",
        "`--llc libnvvm` makes PTX with libNVVM of the CUDA toolkit, nvvm/lib64/libnvvm.so below its root. The toolkit \
         that was chosen has none. `cargo xtask setup --cuda wheels` lays one that has.";
    UNVERIFIED = "KILN-0392", Refusal, "the toolkit's libNVVM is not verified",
        "`--llc libnvvm` was given, and PROVENANCE does not list the CUDA release of this libNVVM as verified. Another \
         release may give other bits without any message. Use a toolkit of a verified release, or leave out `--llc`.";
    UNUSABLE = "KILN-0393", Machine, "libNVVM cannot be used",
        "The library is there, and it cannot be opened, lacks a function of nvvm.h, or one of its functions fails. It \
         may be of another machine or damaged. Install the toolkit anew, or name another by CUDA_TOOLKIT_PATH.";
    IR_REFUSED = "KILN-0394", Machine, "libNVVM does not compile the IR",
        "libNVVM refused the NVVM IR that the backend wrote; its own words are above. It knows the IR of LLVM 7, and \
         from sm_100 on that of a newer LLVM. The kernel uses something that it does not know.";
    UNKNOWN_ARCH = "KILN-0395", Machine, "libNVVM does not know the architecture",
        "libNVVM was asked for `-arch=compute_NN` and says that it has no such option. It is older than the \
         architecture, or so new that it dropped it. Use another toolkit, or leave out `--llc`.";
}

/// What `--llc` says to ask for libNVVM.
pub const WORD: &str = "libnvvm";

/// A libNVVM that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibNvvm {
    /// The library, absolute.
    pub path: PathBuf,
    /// The release of the toolkit that it is part of.
    pub cuda: CudaVersion,
    /// What `nvvmVersion` says: major, minor.
    pub version: (i32, i32),
    /// The NVVM IR that it reads, by `nvvmIRVersion`: major, minor.
    pub ir: (i32, i32),
}

/// Looks at the toolkit's libNVVM. Its absence is a problem only where `asked` says that it is needed.
///
/// `verified` are the CUDA releases whose libNVVM may be used.
pub fn find(toolkit: Option<&Toolkit>, verified: &[CudaVersion], asked: bool) -> Resolved<LibNvvm> {
    let mut decision = Decision::new("libnvvm");
    decision.change = Some(if asked {
        "leave out --llc to use llc".to_owned()
    } else {
        format!("--llc {WORD} makes the PTX with it")
    });
    let Some(toolkit) = toolkit else {
        decision.why = "not checked: it depends on the CUDA toolkit".to_owned();
        return Resolved { decision, value: None };
    };
    match judge(toolkit, verified) {
        Ok(found) => {
            decision.chosen = Some(found.to_string());
            let asks = if asked { "--llc asks for it" } else { "not used without --llc libnvvm" };
            decision.why = format!("the CUDA toolkit has it, and PROVENANCE verifies its release; {asks}");
            decision.consider(found.path.display(), "the CUDA toolkit", Verdict::Chosen);
            Resolved { decision, value: Some(found) }
        }
        Err(error) => {
            decision.why = if asked {
                "--llc asks for it, and it does not qualify".to_owned()
            } else {
                "none that qualifies; a build with llc needs none".to_owned()
            };
            let path = toolkit.libnvvm.as_ref().unwrap_or(&toolkit.root);
            let reason = error.to_string().replace("\n  caused by: ", "; ");
            decision.consider(path.display(), "the CUDA toolkit", Verdict::Rejected(reason));
            decision.problem = asked.then(|| error.into());
            Resolved { decision, value: None }
        }
    }
}

fn judge(toolkit: &Toolkit, verified: &[CudaVersion]) -> Result<LibNvvm> {
    let Some(path) = &toolkit.libnvvm else {
        let what = format!("the CUDA toolkit {} has no libNVVM", toolkit.root.display());
        return Err(Error::new(&NO_LIBNVVM, what)
            .hint("set CUDA_TOOLKIT_PATH to a whole toolkit, or run: cargo xtask setup --cuda wheels"));
    };
    let library = Opened::new(path)?;
    let found = LibNvvm {
        path: path.clone(),
        cuda: toolkit.version,
        version: library.version()?,
        ir: library.ir_version()?,
    };
    if !verified.contains(&found.cuda) {
        let releases: Vec<String> = verified.iter().map(ToString::to_string).collect();
        let releases = if releases.is_empty() { "none".to_owned() } else { releases.join(", ") };
        let what = format!("{found}: PROVENANCE verifies that of CUDA {releases}");
        return Err(Error::new(&UNVERIFIED, what)
            .hint("leave out --llc, or set CUDA_TOOLKIT_PATH to a toolkit of a verified release"));
    }
    Ok(found)
}

impl std::fmt::Display for LibNvvm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ((major, minor), (ir_major, ir_minor)) = (self.version, self.ir);
        let (path, cuda) = (self.path.display(), self.cuda);
        write!(f, "{path} (libNVVM {major}.{minor} of CUDA {cuda}, NVVM IR {ir_major}.{ir_minor})")
    }
}

impl LibNvvm {
    /// What a build key holds: another library at the same path is another identity. The path itself is left out.
    ///
    /// # Errors
    /// The library cannot be read.
    pub fn identity(&self) -> Result<String> {
        let sha256 = Sha256::of(&fs_err::read(&self.path)?);
        let ((major, minor), cuda) = (self.version, self.cuda);
        Ok(format!("libNVVM {major}.{minor} of CUDA {cuda}, sha256:{sha256}"))
    }

    /// Refuses an architecture that the library does not know.
    ///
    /// # Errors
    /// It does not know `arch` ([`UNKNOWN_ARCH`]), or cannot be used.
    pub fn require_known(&self, arch: Arch) -> Result<()> {
        let library = Opened::new(&self.path)?;
        let program = Program::new(&library)?;
        program.add(EMPTY, "arch")?;
        let result = program.verify(&[architecture(arch)]);
        result.map_err(|log| {
            Error::new(&UNKNOWN_ARCH, format!("{self} does not know {arch}"))
                .cause(log)
                .hint("name an architecture that it knows, or leave out --llc")
        })
    }

    /// Compiles `ir`, the NVVM IR of the module `name`, to PTX.
    ///
    /// # Errors
    /// The library refuses it ([`IR_REFUSED`]) or cannot be used.
    pub fn compile(&self, ir: &str, name: &str, arch: Arch, contraction: bool) -> Result<String> {
        let library = Opened::new(&self.path)?;
        let program = Program::new(&library)?;
        program.add(ir, name)?;
        let options = options(arch, contraction);
        program.verify(&options).and_then(|()| program.compile(&options)).map_err(|log| {
            Error::new(&IR_REFUSED, format!("{self} refuses the IR of {name} with {}", options.join(" ")))
                .cause(log)
                .hint("build without --llc libnvvm, or mend the kernel")
        })?;
        program.result()
    }
}

/// The options of a compilation: division, square root and denormals as IEEE 754 says, so that contraction is all that
/// may differ.
pub fn options(arch: Arch, contraction: bool) -> Vec<String> {
    let fma = format!("-fma={}", u8::from(contraction));
    let exact = ["-prec-div=1", "-prec-sqrt=1", "-ftz=0"].map(str::to_owned);
    [architecture(arch), fma].into_iter().chain(exact).collect()
}

fn architecture(arch: Arch) -> String {
    format!("-arch={}", arch.to_string().replace("sm_", "compute_"))
}

/// The smallest module, in the dialect that every release reads.
const EMPTY: &str = r#"target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
!nvvmir.version = !{!0}
!0 = !{i32 2, i32 0}
"#;

type Handle = *mut c_void;
type Query = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Fetch = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type Run = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;

/// The open library; the signatures are those of nvvm.h.
struct Opened {
    path: PathBuf,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    ir_version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(*mut Handle) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    add: unsafe extern "C" fn(Handle, *const c_char, usize, *const c_char) -> c_int,
    verify: Run,
    compile: Run,
    result_size: Query,
    result: Fetch,
    log_size: Query,
    log: Fetch,
    // Last, so that it is closed after everything that points into it is gone.
    _library: Library,
}

impl Opened {
    fn new(path: &Path) -> Result<Self> {
        let unusable = |error: libloading::Error| {
            Error::new(&UNUSABLE, format!("{} cannot be opened", path.display()))
                .cause(error)
                .hint("install the CUDA toolkit anew, or set CUDA_TOOLKIT_PATH to another")
        };
        // SAFETY: opening the library runs its initialisers, which are NVIDIA's own.
        let library = unsafe { Library::new(path) }.map_err(unusable)?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field's type is the function's in nvvm.h, and the library is kept beside it.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(unusable)?
            };
        }
        Ok(Opened {
            path: path.to_owned(),
            version: function!("nvvmVersion"),
            ir_version: function!("nvvmIRVersion"),
            error_string: function!("nvvmGetErrorString"),
            create: function!("nvvmCreateProgram"),
            destroy: function!("nvvmDestroyProgram"),
            add: function!("nvvmAddModuleToProgram"),
            verify: function!("nvvmVerifyProgram"),
            compile: function!("nvvmCompileProgram"),
            result_size: function!("nvvmGetCompiledResultSize"),
            result: function!("nvvmGetCompiledResult"),
            log_size: function!("nvvmGetProgramLogSize"),
            log: function!("nvvmGetProgramLog"),
            _library: library,
        })
    }

    fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are written.
        self.check("nvvmVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    fn ir_version(&self) -> Result<(i32, i32)> {
        let [mut major, mut minor, mut debug_major, mut debug_minor] = [0; 4];
        // SAFETY: all four are written.
        let result = unsafe { (self.ir_version)(&mut major, &mut minor, &mut debug_major, &mut debug_minor) };
        self.check("nvvmIRVersion", result)?;
        Ok((major, minor))
    }

    fn check(&self, function: &str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let what = format!("{}: {function} gives {}", self.path.display(), self.words(result));
        Err(Error::new(&UNUSABLE, what).hint("set CUDA_TOOLKIT_PATH to another toolkit, or leave out --llc"))
    }

    fn words(&self, result: c_int) -> String {
        // SAFETY: takes any number, and returns a constant text or null.
        let text = unsafe { (self.error_string)(result) };
        if text.is_null() {
            return result.to_string();
        }
        // SAFETY: not null, and a constant that ends in a zero byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program of an open library.
struct Program<'a> {
    library: &'a Opened,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(library: &'a Opened) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle.
        library.check("nvvmCreateProgram", unsafe { (library.create)(&mut handle) })?;
        Ok(Program { library, handle })
    }

    fn add(&self, ir: &str, name: &str) -> Result<()> {
        let shown = CString::new(name.replace('\0', "")).unwrap_or_default();
        // SAFETY: the text is as long as said, and the name ends in a zero byte; both are copied.
        let result = unsafe { (self.library.add)(self.handle, ir.as_ptr().cast(), ir.len(), shown.as_ptr()) };
        self.library.check("nvvmAddModuleToProgram", result)
    }

    /// `Err`: what the library says.
    fn verify(&self, options: &[String]) -> Result<(), String> {
        self.run(self.library.verify, options)
    }

    /// `Err`: what the library says.
    fn compile(&self, options: &[String]) -> Result<(), String> {
        self.run(self.library.compile, options)
    }

    fn run(&self, function: Run, options: &[String]) -> Result<(), String> {
        let options: Vec<CString> =
            options.iter().map(|option| CString::new(option.as_str()).unwrap_or_default()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(0);
        // SAFETY: as many pointers as said, each to text that ends in a zero byte and lives until the call returns.
        let result = unsafe { function(self.handle, count, pointers.as_ptr()) };
        if result == 0 {
            return Ok(());
        }
        let log = self.text(self.library.log_size, self.library.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let words = self.library.words(result);
        Err(if log.trim().is_empty() { words } else { format!("{words}: {}", log.trim_end()) })
    }

    fn result(&self) -> Result<String> {
        let bytes = self.text(self.library.result_size, self.library.result).map_err(|result| {
            let what = self.library.words(result);
            Error::new(&UNUSABLE, format!("{}: no result: {what}", self.library.path.display()))
                .hint("build again without --llc libnvvm")
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A text that the library holds, without its zero byte.
    fn text(&self, size: Query, fetch: Fetch) -> Result<Vec<u8>, c_int> {
        let mut length = 0;
        // SAFETY: writes the length.
        match unsafe { size(self.handle, &mut length) } {
            0 => {}
            result => return Err(result),
        }
        let mut bytes = vec![0_u8; length];
        if length > 0 {
            // SAFETY: the buffer has the length that the library asks for.
            match unsafe { fetch(self.handle, bytes.as_mut_ptr().cast()) } {
                0 => {}
                result => return Err(result),
            }
        }
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { (self.library.destroy)(&mut self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolkit(libnvvm: Option<PathBuf>) -> Toolkit {
        Toolkit {
            root: "/cuda".into(),
            include: "/cuda/include".into(),
            version: CudaVersion { major: 13, minor: 0 },
            link: "/cuda/lib64/stubs".into(),
            libnvvm,
            libdevice: None,
        }
    }

    #[test]
    fn its_absence_is_a_problem_only_where_it_is_asked_for() {
        let none = find(Some(&toolkit(None)), &[], false);
        assert!(none.value.is_none() && none.decision.is_good());
        assert_eq!(none.decision.why, "none that qualifies; a build with llc needs none");
        let error = find(Some(&toolkit(None)), &[], true).require().unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0391", 1));
        // The toolkit's own decision has the problem then.
        assert!(find(None, &[], true).decision.is_good());
    }

    #[test]
    fn something_else_at_its_place_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvvm.so");
        fs_err::write(&path, "no library").unwrap();
        let resolved = find(Some(&toolkit(Some(path.clone()))), &[], true);
        let error = resolved.require().unwrap_err();
        assert_eq!(error.code().id, "KILN-0393");
        assert_eq!(error.message(), format!("{} cannot be opened", path.display()));
        assert!(find(Some(&toolkit(Some(path))), &[], false).decision.is_good());
    }

    #[test]
    fn options_name_the_virtual_architecture_and_exact_arithmetic() {
        let exact = "-prec-div=1 -prec-sqrt=1 -ftz=0";
        assert_eq!(
            options("sm_90".parse().unwrap(), false).join(" "),
            format!("-arch=compute_90 -fma=0 {exact}")
        );
        assert_eq!(
            options("sm_120a".parse().unwrap(), true).join(" "),
            format!("-arch=compute_120a -fma=1 {exact}")
        );
    }
}
