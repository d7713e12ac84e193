//! The plan: every decision that a GPU build rests on, resolved once and used by all verbs.
//!
//! `doctor` prints it, `setup` makes what it lacks, `build` refuses unless it is good. A decision is made in one place
//! only, so the three can never disagree. Resolving reads files and asks tools for their versions; it writes nothing,
//! builds nothing and opens no connection.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::backend::checkout;
use crate::backend::host_config::{self};
use crate::backend::{self, Backend};
use crate::base::env::Env;
use crate::machine::arch::{self, Arch, LlcCpus};
use crate::machine::cargo_config::{CargoConfig, HostFlags};
use crate::machine::cuda::{self, CudaRequest, LibClang, Ptxas, Toolkit};
use crate::machine::gpu::{self, GpuRequest, Gpus};
use crate::machine::llc::{self, Explicit, LlcRequest, Tools};
use crate::machine::nvvm::{self, LibNvvm};
use crate::machine::toolchain::{self, Toolchain};
use crate::pins::{PATCH_FOLDER, Pin, PtxCompiler};
use crate::report::decision::{Decision, Problem, Resolved, Thoroughness, Verdict};
use crate::report::error::{BUG, Error, Result};
use crate::source::cuda_wheels;
use crate::source::pinned::Pins;
use crate::source::{self, Patched};
use crate::store::Store;
use crate::store::selection::Selection;

crate::codes! {
    NEEDS_LLC = "KILN-0397", Machine, "libNVVM cannot take llc's place in this",
        "`--llc libnvvm` makes the PTX of the kernels with libNVVM. What builds or checks the backend itself compiles one \
         kernel with llc, so that it needs an llc in any case.";
}

/// What the user asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// `--store`.
    pub store: Option<PathBuf>,
    /// `--toolchain`.
    pub toolchain: Option<OsString>,
    /// `--llc`: a path, a major or [`nvvm::WORD`].
    pub llc: Option<OsString>,
    /// `--lock-timeout`.
    pub lock_limit: Option<Duration>,
    /// Whether to stop at the first good candidate or to explain all of them.
    pub thoroughness: Thoroughness,
}

impl Request {
    /// Says whether the PTX is to be made by libNVVM and not by llc.
    pub fn asks_for_libnvvm(&self) -> bool {
        self.llc.as_ref().is_some_and(|value| value == nvvm::WORD)
    }

    /// The store alone, for what needs no plan.
    ///
    /// # Errors
    /// Nothing names a folder, or the last setup's choice cannot be read.
    pub fn locate_store(&self, workspace: &Path, env: &Env) -> Result<Store> {
        let remembered = Selection::load(workspace)?.map(|selection| selection.store);
        let store = Store::locate(self.store.as_deref(), remembered.as_deref(), workspace, env)?;
        Ok(store.with_patience(self.lock_limit))
    }
}

/// What makes PTX of the backend's IR.
#[derive(Clone, Copy, Debug)]
pub enum Lowering<'a> {
    /// llc, after its opt.
    Llc(&'a Tools),
    /// libNVVM, which optimises itself.
    LibNvvm(&'a LibNvvm),
}

impl Lowering<'_> {
    /// How PROVENANCE calls it.
    pub fn key(&self) -> PtxCompiler {
        match self {
            Lowering::Llc(tools) => PtxCompiler::Llc(tools.llc.version.major),
            Lowering::LibNvvm(libnvvm) => PtxCompiler::LibNvvm(libnvvm.cuda),
        }
    }
}

impl std::fmt::Display for Lowering<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lowering::Llc(tools) => write!(f, "{} ({})", tools.llc.path.display(), tools.llc.line),
            Lowering::LibNvvm(libnvvm) => write!(f, "{libnvvm}"),
        }
    }
}

/// Everything that a GPU build rests on.
#[derive(Debug)]
pub struct Plan {
    /// The physical root of the workspace.
    pub workspace: PathBuf,
    /// PROVENANCE and the patches.
    pub pins: Resolved<Pins>,
    /// Where built things are.
    pub store: Resolved<Store>,
    /// The compiler.
    pub rustc: Resolved<Toolchain>,
    /// llc, with its opt.
    pub llc: Resolved<Tools>,
    /// The opt that goes with llc.
    pub opt: Decision,
    /// libNVVM; a build needs it only where it takes the place of llc.
    pub libnvvm: Resolved<LibNvvm>,
    /// It takes the place of llc.
    pub by_libnvvm: bool,
    /// The patched source.
    pub source: Resolved<Patched>,
    /// The built backend.
    pub backend: Resolved<Backend>,
    /// Whether rustc loads it; asked only when everything is explained.
    pub backend_load: Option<Decision>,
    /// The flags that Cargo would use on this host.
    pub host_flags: Resolved<HostFlags>,
    /// What setup writes into the checkout, as it should be.
    pub checkout: Resolved<checkout::Expected>,
    /// The CUDA toolkit.
    pub cuda: Resolved<Toolkit>,
    /// The assembler that can check PTX; a build needs none.
    pub ptxas: Resolved<Ptxas>,
    /// The libclang that reads cuda.h.
    pub libclang: Resolved<LibClang>,
    /// The driver and its cards; a build needs none.
    pub gpu: Resolved<Gpus>,
}

impl Plan {
    /// Resolves everything. Never fails: what is wrong is part of the decisions.
    pub fn resolve(request: &Request, workspace: &Path, env: &Env) -> Self {
        let pins = guarded("provenance", || resolve_pins(workspace));
        let (selection, selection_error) = match Selection::load(workspace) {
            Ok(selection) => (selection, None),
            Err(error) => (None, Some(error)),
        };
        let store =
            guarded("store", || resolve_store(request, selection.as_ref(), selection_error, workspace, env));
        // The user's own variables for cargo-oxide count as settings; a broken file is reported by the checkout.
        let settings = host_config::environment(&checkout::host_config_path(workspace)).unwrap_or_default();

        let (source, cuda, gpu, rustc, (llc, opt), host_flags, backend, backend_load) =
            thread::scope(|scope| {
                let source = scope.spawn(|| guarded("source", || resolve_source(&pins, &store)));
                let cuda = scope.spawn(|| {
                    let mut request = CudaRequest::new(settings.clone());
                    if let (Some(pins), Some(store)) = (&pins.value, &store.value) {
                        request.laid = cuda_wheels::find(store, &pins.pin).map(|parts| parts.root);
                    }
                    let toolkit = guarded("cuda_toolkit", || cuda::find_toolkit(&request, env));
                    let ptxas = guarded("ptxas", || cuda::find_ptxas(toolkit.value.as_ref(), env));
                    let libclang = guarded("libclang", || cuda::find_libclang(&request, env));
                    (toolkit, ptxas, libclang)
                });
                let gpu = scope.spawn(|| guarded("gpu", || gpu::find_gpus(&GpuRequest::default(), env)));
                let rustc = guarded("rustc", || resolve_rustc(&pins, request, selection.as_ref(), env));
                let toolchain = rustc.value.as_ref();
                let (llc, host_flags, backend, backend_load) = thread::scope(|scope| {
                    let llc = scope.spawn(|| resolve_llc(&pins, toolchain, &settings, request, env));
                    let host_flags = scope
                        .spawn(|| guarded("host_flags", || resolve_host_flags(toolchain, workspace, env)));
                    let backend = guarded("backend", || resolve_backend(&pins, &store, toolchain));
                    // A build loads it anyway; to explain, it is worth a start of rustc.
                    let backend_load = (request.thoroughness == Thoroughness::All).then(|| {
                        guarded("backend_load", || Resolved {
                            decision: backend::load(&backend, &rustc, env),
                            value: Some(()),
                        })
                        .decision
                    });
                    (
                        llc.join().unwrap_or_else(|_| (crashed("llc"), Decision::new("opt"))),
                        host_flags.join().unwrap_or_else(|_| crashed("host_flags")),
                        backend,
                        backend_load,
                    )
                });
                let cuda = cuda
                    .join()
                    .unwrap_or_else(|_| (crashed("cuda_toolkit"), crashed("ptxas"), crashed("libclang")));
                let gpu = gpu.join().unwrap_or_else(|_| crashed("gpu"));
                (
                    source.join().unwrap_or_else(|_| crashed("source")),
                    cuda,
                    gpu,
                    rustc,
                    llc,
                    host_flags,
                    backend,
                    backend_load,
                )
            });
        let by_libnvvm = request.asks_for_libnvvm();
        let libnvvm = match &pins.value {
            None => depends("libnvvm", "provenance"),
            // Opening the library takes longer than all else here: not where nobody asks.
            Some(_) if !by_libnvvm && request.thoroughness == Thoroughness::First => {
                depends("libnvvm", "--llc libnvvm")
            }
            Some(pins) => {
                guarded("libnvvm", || nvvm::find(cuda.0.value.as_ref(), &pins.pin.libnvvm, by_libnvvm))
            }
        };
        let (cuda, ptxas, libclang) = cuda;
        let checkout = guarded("checkout", || {
            let (pins, toolchain) = (pins.value.as_ref(), rustc.value.as_ref());
            checkout::resolve(workspace, pins, toolchain, &source, &backend, &host_flags)
        });
        Plan {
            workspace: workspace.to_owned(),
            pins,
            store,
            rustc,
            llc,
            opt,
            libnvvm,
            by_libnvvm,
            source,
            backend,
            backend_load,
            host_flags,
            checkout,
            cuda,
            ptxas,
            libclang,
            gpu,
        }
    }

    /// Every decision, in the order in which a build needs them.
    pub fn decisions(&self) -> Vec<&Decision> {
        let mut decisions = vec![
            &self.pins.decision,
            &self.store.decision,
            &self.rustc.decision,
            &self.llc.decision,
            &self.opt,
            &self.source.decision,
            &self.backend.decision,
        ];
        decisions.extend(&self.backend_load);
        decisions.extend([
            &self.host_flags.decision,
            &self.checkout.decision,
            &self.cuda.decision,
            &self.libnvvm.decision,
            &self.ptxas.decision,
            &self.libclang.decision,
            &self.gpu.decision,
        ]);
        decisions
    }

    /// What makes PTX.
    ///
    /// # Errors
    /// The problem of llc, or of libNVVM where it is asked for.
    pub fn lowering(&self) -> Result<Lowering<'_>> {
        Ok(if self.by_libnvvm {
            Lowering::LibNvvm(self.libnvvm.require()?)
        } else {
            Lowering::Llc(self.llc.require()?)
        })
    }

    /// llc and opt, for what libNVVM cannot take their place in.
    ///
    /// # Errors
    /// libNVVM was asked for ([`NEEDS_LLC`]), or llc has a problem.
    pub fn tools(&self) -> Result<&Tools> {
        if self.by_libnvvm {
            return Err(Error::new(
                &NEEDS_LLC,
                "--llc libnvvm was given, and the load check of the backend needs an llc",
            )
            .hint("leave out --llc, or name an llc or a verified LLVM major"));
        }
        self.llc.require()
    }

    /// The first reason why a GPU build would not start.
    pub fn problem(&self) -> Option<&Problem> {
        self.decisions().into_iter().find_map(|decision| decision.problem.as_ref())
    }
}

/// Runs a resolver; if it panics, the panic becomes the decision's problem and the other checks go on.
fn guarded<T>(subject: &'static str, resolve: impl FnOnce() -> Resolved<T>) -> Resolved<T> {
    panic::catch_unwind(AssertUnwindSafe(resolve)).unwrap_or_else(|_| crashed(subject))
}

fn crashed<T>(subject: &'static str) -> Resolved<T> {
    failed(Decision::new(subject), Error::new(&BUG, format!("the check of {subject} crashed")))
}

fn failed<T>(mut decision: Decision, error: Error) -> Resolved<T> {
    if decision.why.is_empty() {
        decision.why = error.message().lines().next().unwrap_or_default().to_owned();
    }
    decision.problem = Some(error.into());
    Resolved { decision, value: None }
}

/// A decision that cannot be made because an earlier one failed; the earlier one carries the problem.
fn depends<T>(subject: &'static str, on: &str) -> Resolved<T> {
    let mut decision = Decision::new(subject);
    decision.why = format!("not checked: it depends on {on}");
    Resolved { decision, value: None }
}

fn resolve_pins(workspace: &Path) -> Resolved<Pins> {
    let mut decision = Decision::new("provenance");
    decision.change = Some("git checkout -- PROVENANCE backend-patches".to_owned());
    let read = || -> Result<Pins> {
        let pin = Pin::load(workspace)?;
        let patches = pin.check_patches(&workspace.join(PATCH_FOLDER))?;
        Ok(Pins { pin, patches })
    };
    match read() {
        Ok(pins) => {
            decision.chosen = Some(format!(
                "{} at {} with {} patches",
                pins.pin.source.repository,
                pins.pin.source.revision,
                pins.patches.len()
            ));
            decision.why = "PROVENANCE says so, and every patch has its recorded sha256".to_owned();
            for patch in &pins.patches {
                decision.notes.push(format!("{}: {}", patch.file, patch.reason));
            }
            Resolved { decision, value: Some(pins) }
        }
        Err(error) => failed(decision, error),
    }
}

fn resolve_store(
    request: &Request,
    selection: Option<&Selection>,
    selection_error: Option<Error>,
    workspace: &Path,
    env: &Env,
) -> Resolved<Store> {
    let mut decision = Decision::new("store");
    decision.change = Some("--store DIR, or KILN_STORE".to_owned());
    if let Some(error) = selection_error {
        return failed(decision, error);
    }
    let remembered = selection.map(|selection| selection.store.as_path());
    match Store::locate(request.store.as_deref(), remembered, workspace, env) {
        Ok(store) => {
            let store = store.with_patience(request.lock_limit);
            if let Err(error) = store.check_root() {
                return failed(decision, error);
            }
            decision.chosen = Some(store.root().display().to_string());
            decision.why = format!("{} names it", store.from);
            let foreign = store.foreign();
            if let Some((path, owner)) = foreign.first() {
                let more = match foreign.len() - 1 {
                    0 => String::new(),
                    more => format!(", and {more} more of another user"),
                };
                decision.notes.push(format!(
                    "{} belongs to user {owner}{more}; if setup may not write there: sudo chown -R \"$(id -u)\" {}",
                    path.display(),
                    store.root().display()
                ));
            }
            Resolved { decision, value: Some(store) }
        }
        Err(error) => failed(decision, error),
    }
}

fn resolve_rustc(
    pins: &Resolved<Pins>,
    request: &Request,
    selection: Option<&Selection>,
    env: &Env,
) -> Resolved<Toolchain> {
    let Some(pins) = &pins.value else { return depends("rustc", "provenance") };
    let toolchain = toolchain::Request {
        flag: request.toolchain.clone(),
        remembered: selection.map(|selection| selection.toolchain.clone()),
    };
    let mut resolved = toolchain::resolve(&pins.wanted(), &toolchain, env, request.thoroughness);
    if let Some(name) = env.var("RUSTUP_TOOLCHAIN") {
        let source = env.var("RUSTUP_TOOLCHAIN_SOURCE").map(|source| format!(" (from {})", source.display()));
        resolved.decision.notes.push(format!(
            "RUSTUP_TOOLCHAIN is {}{}: it runs xtask itself and decides nothing here",
            name.display(),
            source.unwrap_or_default()
        ));
    }
    resolved
}

fn resolve_llc(
    pins: &Resolved<Pins>,
    toolchain: Option<&Toolchain>,
    settings: &BTreeMap<String, String>,
    asked: &Request,
    env: &Env,
) -> (Resolved<Tools>, Decision) {
    let Some(pins) = &pins.value else { return (depends("llc", "provenance"), Decision::new("opt")) };
    if asked.asks_for_libnvvm() {
        let unused = |subject| {
            let mut decision = Decision::new(subject);
            decision.why = "not looked for: --llc libnvvm makes PTX with libNVVM".to_owned();
            decision
        };
        return (Resolved { decision: unused("llc"), value: None }, unused("opt"));
    }
    let llvm = &pins.pin.llvm;
    let mut request = LlcRequest::new(llvm.preferred, &llvm.verified, env);
    request.llc = Explicit::of("CUDA_OXIDE_LLC", env, settings);
    request.opt = Explicit::of("CUDA_OXIDE_OPT", env, settings);
    request.thoroughness = asked.thoroughness;
    if let Some(value) = &asked.llc
        && let Err(error) = request.narrow(value)
    {
        let mut decision = Decision::new("llc");
        decision.change = Some("leave out --llc to let kiln choose".to_owned());
        return (failed(decision, error), Decision::new("opt"));
    }
    request.toolchain = toolchain.map(|toolchain| llc::Toolchain {
        name: Some(pins.pin.toolchain.channel.to_string()),
        sysroot: toolchain.sysroot.clone(),
        host: toolchain.version.host.clone(),
        llvm: toolchain.version.llvm.as_deref().and_then(|version| version.parse().ok()),
    });
    let choice = llc::find_llc(&request, env);
    (choice.llc, choice.opt)
}

fn resolve_source(pins: &Resolved<Pins>, store: &Resolved<Store>) -> Resolved<Patched> {
    let (Some(pins), Some(store)) = (&pins.value, &store.value) else {
        return depends("source", "provenance and the store");
    };
    let mut decision = Decision::new("source");
    decision.change = Some("cargo xtask setup".to_owned());
    match source::verify(store, &pins.source_key()) {
        Ok(source) => {
            decision.chosen = Some(source.tree.display().to_string());
            decision.why = format!("its tree hash is the published one, {}", source.hash);
            Resolved { decision, value: Some(source) }
        }
        Err(error) => failed(decision, error),
    }
}

fn resolve_backend(
    pins: &Resolved<Pins>,
    store: &Resolved<Store>,
    toolchain: Option<&Toolchain>,
) -> Resolved<Backend> {
    let (Some(pins), Some(store), Some(toolchain)) = (&pins.value, &store.value, toolchain) else {
        return depends("backend", "provenance, the store and rustc");
    };
    let mut decision = Decision::new("backend");
    decision.change = Some("cargo xtask setup".to_owned());
    let key = backend::key(&pins.pin, &pins.source_key(), toolchain);
    match backend::verify(store, &key) {
        Ok(backend) => {
            decision.chosen = Some(backend.library.display().to_string());
            decision.why = format!(
                "it was built from this source, these patches and this rustc (key {key}), and its sha256 is the recorded {}",
                backend.library_sha256
            );
            decision.notes.extend(backend.cost().map(|cost| format!("its build took {cost}")));
            match backend.output(toolchain).and_then(|output| backend::check_output(&pins.pin, &output)) {
                Ok(true) => decision.notes.push("its bytes are those that PROVENANCE records".to_owned()),
                Ok(false) => decision.notes.push(
                    "PROVENANCE does not record what these inputs give with this rustc on this host"
                        .to_owned(),
                ),
                Err(error) => {
                    let rejected = Verdict::Rejected(error.message().to_owned());
                    decision.consider(backend.library.display(), "the store", rejected);
                    decision.why.clear();
                    return failed(decision, error);
                }
            }
            decision.consider(backend.library.display(), "the store", Verdict::Chosen);
            Resolved { decision, value: Some(backend) }
        }
        Err(error) => {
            let entry = store.entry(crate::store::Kind::Backend, &key);
            decision.consider(entry.display(), "the store", Verdict::Rejected(error.message().to_owned()));
            failed(decision, error)
        }
    }
}

fn resolve_host_flags(toolchain: Option<&Toolchain>, workspace: &Path, env: &Env) -> Resolved<HostFlags> {
    let Some(toolchain) = toolchain else { return depends("host_flags", "rustc") };
    let mut decision = Decision::new("host_flags");
    decision.change =
        Some("edit the Cargo configuration named above, then run: cargo xtask setup".to_owned());
    let read = || -> Result<(HostFlags, Vec<String>)> {
        let config = CargoConfig::load(workspace, env)?;
        let flags = config.host_flags(&toolchain.rustc(), &toolchain.version.host)?;
        let overrides =
            config.overrides().iter().map(|found| format!("cleared for our builds: {found}")).collect();
        Ok((flags, overrides))
    };
    match read() {
        Ok((flags, overrides)) => {
            decision.chosen = Some(if flags.flags.is_empty() {
                "none".to_owned()
            } else {
                // As an array, since a flag may hold spaces.
                format!("{:?}", flags.flags)
            });
            decision.why = if flags.origin.is_empty() {
                "no Cargo configuration and no variable sets any".to_owned()
            } else {
                let origins: Vec<_> = flags.origin.iter().map(ToString::to_string).collect();
                format!("Cargo itself would use them: {}", origins.join("; "))
            };
            decision.notes.clone_from(&flags.warnings);
            decision.notes.extend(overrides);
            Resolved { decision, value: Some(flags) }
        }
        Err(error) => failed(decision, error),
    }
}

/// Reads an architecture and checks it against what makes PTX; compares it with the cards that are there.
pub fn resolve_arch(
    text: &str,
    lowering: Option<Lowering<'_>>,
    gpus: Option<&Gpus>,
    env: &Env,
) -> Resolved<Arch> {
    let mut decision = Decision::new("arch");
    decision.change = Some("--arch sm_NN[a|f]".to_owned());
    let checked = || -> Result<Arch> {
        let capabilities = gpus.map(Gpus::capabilities).unwrap_or_default();
        let arch = arch::parse(text, &capabilities)?;
        match lowering {
            Some(Lowering::Llc(tools)) => arch.require_known_to(&LlcCpus::ask(&tools.llc.path, env)?)?,
            Some(Lowering::LibNvvm(libnvvm)) => libnvvm.require_known(arch)?,
            None => {}
        }
        Ok(arch)
    };
    match checked() {
        Ok(arch) => {
            decision.chosen = Some(arch.to_string());
            decision.why = match lowering {
                Some(Lowering::Llc(tools)) => format!("{} knows it", tools.llc.path.display()),
                Some(Lowering::LibNvvm(libnvvm)) => format!("{} knows it", libnvvm.path.display()),
                None => "it is well spelt; no llc was chosen that could be asked".to_owned(),
            };
            decision.notes.extend(arch.lock_note());
            decision.notes.extend(gpus.into_iter().flat_map(|gpus| gpu::predict(gpus, arch, arch.min_ptx())));
            Resolved { decision, value: Some(arch) }
        }
        Err(error) => failed(decision, error),
    }
}
