//! Local memory of entries as the driver's own compiler says, on a machine with a card.
//!
//! ptxas and the driver compile the same PTX, and may spill differently; what runs is the driver's. libcuda is opened when
//! it is asked and never linked, so that this program runs everywhere.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::{Library, Symbol};

use crate::machine::arch::Capability;
use crate::report::error::{Error, Result};

crate::codes! {
    DRIVER_FAILED = "KILN-0359", Machine, "the driver does not load the PTX",
        "With `--driver`, `ptx` also loads the PTX with the driver, to read how much local memory each entry \
         uses. The driver refused: the PTX is newer than it, or for another architecture.";
    NO_CARD = "KILN-0155", Machine, "there is no card to ask",
        "With `--driver` the PTX is loaded by the driver, to read how much local memory each entry gets from its \
         compiler. That needs a card. Everything else works without: run it without `--driver`.";
}

/// The driver's library, as every driver package names it.
const LIBRARY: &str = "libcuda.so.1";

/// CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES.
const LOCAL_SIZE_BYTES: c_int = 3;
/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
const CAPABILITY: [c_int; 2] = [75, 76];

/// The first card, with its primary context retained and current on this thread.
pub struct Card {
    library: Library,
    device: c_int,
    /// What it is.
    pub capability: Capability,
}

impl Card {
    /// Opens the first card where it is `wanted`.
    ///
    /// # Errors
    /// It is, and there is none ([`NO_CARD`]).
    pub fn open(wanted: bool) -> Result<Option<Self>> {
        if !wanted {
            return Ok(None);
        }
        let card = Self::first().ok_or_else(|| {
            Error::new(&NO_CARD, "there is no NVIDIA driver or no card here").hint("run without --driver")
        })?;
        Ok(Some(card))
    }

    /// Opens the first card; `None` where there is no driver or no card.
    pub fn first() -> Option<Self> {
        // SAFETY: loading the driver runs its initialisers, as linking it would.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        let mut capability = [0; 2];
        // SAFETY: the signatures are those of cuda.h; every pointer is to a live local of the right type.
        unsafe {
            let init: Symbol<'_, unsafe extern "C" fn(c_uint) -> c_int> = library.get(b"cuInit\0").ok()?;
            succeeded(init(0))?;
            let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
                library.get(b"cuDeviceGet\0").ok()?;
            succeeded(get(&mut device, 0))?;
            let attribute: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int> =
                library.get(b"cuDeviceGetAttribute\0").ok()?;
            for (value, which) in capability.iter_mut().zip(CAPABILITY) {
                succeeded(attribute(value, which, device))?;
            }
            let retain: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int> =
                library.get(b"cuDevicePrimaryCtxRetain\0").ok()?;
            succeeded(retain(&mut context, device))?;
            let set: Symbol<'_, unsafe extern "C" fn(*mut c_void) -> c_int> =
                library.get(b"cuCtxSetCurrent\0").ok()?;
            succeeded(set(context))?;
        }
        let [major, minor] = capability.map(|value| u32::try_from(value).unwrap_or(0));
        Some(Card { library, device, capability: Capability { major, minor } })
    }

    /// Loads `ptx` and reads the local memory of each of `entries`, bytes of a thread.
    ///
    /// # Errors
    /// The driver refuses the PTX, or does not know an entry ([`DRIVER_FAILED`]).
    pub fn local_bytes<'a>(
        &self,
        ptx: &str,
        entries: impl IntoIterator<Item = &'a str>,
    ) -> Result<BTreeMap<String, u32>> {
        let text = CString::new(ptx).map_err(|_| failed("the PTX holds a zero byte".to_owned()))?;
        let mut module = ptr::null_mut();
        // SAFETY: the signatures are those of cuda.h; `text` ends in a zero byte, as the driver expects of PTX.
        unsafe {
            let load: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> c_int> =
                self.function(b"cuModuleLoadData\0")?;
            told("cuModuleLoadData", load(&mut module, text.as_ptr().cast()))?;
        }
        let found = entries.into_iter().map(|name| Ok((name.to_owned(), self.local_of(module, name)?)));
        let found: Result<BTreeMap<_, _>> = found.collect();
        // SAFETY: the module was loaded above, and nothing of it is used any more.
        unsafe {
            let unload: Symbol<'_, unsafe extern "C" fn(*mut c_void) -> c_int> =
                self.function(b"cuModuleUnload\0")?;
            told("cuModuleUnload", unload(module))?;
        }
        found
    }

    fn local_of(&self, module: *mut c_void, name: &str) -> Result<u32> {
        let entry = CString::new(name).map_err(|_| failed(format!("{name:?} is no name")))?;
        let (mut function, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the signatures are those of cuda.h; `module` is loaded.
        unsafe {
            let get: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int> =
                self.function(b"cuModuleGetFunction\0")?;
            told(&format!("cuModuleGetFunction({name})"), get(&mut function, module, entry.as_ptr()))?;
            let attribute: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int, *mut c_void) -> c_int> =
                self.function(b"cuFuncGetAttribute\0")?;
            told(&format!("cuFuncGetAttribute({name})"), attribute(&mut bytes, LOCAL_SIZE_BYTES, function))?;
        }
        u32::try_from(bytes).map_err(|_| failed(format!("{name} has {bytes} bytes of local memory")))
    }

    /// SAFETY: `T` must be the function's type.
    unsafe fn function<T>(&self, name: &[u8]) -> Result<Symbol<'_, T>> {
        // SAFETY: the caller's.
        unsafe { self.library.get(name) }.map_err(|error| failed(format!("{LIBRARY}: {error}")))
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        // SAFETY: the signature is that of cuda.h; the context was retained when the card was opened.
        unsafe {
            let release: Result<Symbol<'_, unsafe extern "C" fn(c_int) -> c_int>, _> =
                self.library.get(b"cuDevicePrimaryCtxRelease_v2\0");
            if let Ok(release) = release {
                release(self.device);
            }
        }
    }
}

fn succeeded(result: c_int) -> Option<()> {
    (result == 0).then_some(())
}

fn told(what: &str, result: c_int) -> Result<()> {
    if result == 0 { Ok(()) } else { Err(failed(format!("{what} gives CUDA error {result}"))) }
}

fn failed(what: String) -> Error {
    Error::new(&DRIVER_FAILED, what)
        .hint("compare the PTX version with what the driver accepts: cargo xtask doctor")
}
