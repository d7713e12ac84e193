//! libcuda, opened when a device is: so the binary starts on machines without a driver and can say what is missing.
//!
//! Linked as usual, `libcuda.so.1` would have to be there before `main`. This module defines all driver functions that the
//! host crates mention, each a jump through a slot, so that the linker has no use for `-lcuda` and drops it
//! (`--as-needed`); [`open`] fills the slots from the library. A function missing from the list below is no error: the
//! linker takes it from libcuda, and the binary needs the driver at its start again (`objdump -p kiln` tells).

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use kiln_engine::selftest::RunError;
use libloading::Library;

/// The driver's library, as every driver package names it.
const LIBRARY: &str = "libcuda.so.1";

/// Opens the driver's library, once for the process.
///
/// # Errors
/// There is no such library.
pub fn open() -> Result<(), RunError> {
    static OPENED: OnceLock<Result<(), String>> = OnceLock::new();
    OPENED.get_or_init(try_open).clone().map_err(RunError::from)
}

fn try_open() -> Result<(), String> {
    // SAFETY: loading the driver runs its initialisers, as linking it would.
    let library = unsafe { Library::new(LIBRARY) }
        .map_err(|error| format!("the NVIDIA driver's library cannot be opened: {error}"))?;
    fill(&library);
    // Its functions are called until the process ends.
    std::mem::forget(library);
    Ok(())
}

/// What a function returns while its slot is empty, or that this driver is too old for: CUDA_ERROR_NOT_SUPPORTED.
extern "C" fn not_supported() -> u32 {
    801
}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    ($slot:path) => {
        core::arch::naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym $slot)
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    ($slot:path) => {
        // x16 is the register that the calling convention leaves to such jumps.
        core::arch::naked_asm!(
            "adrp x16, {slot}",
            "ldr x16, [x16, :lo12:{slot}]",
            "br x16",
            slot = sym $slot
        )
    };
}

macro_rules! driver_functions {
    ($($name:ident)*) => {
        #[allow(non_upper_case_globals)]
        mod slots {
            use super::*;
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(not_supported as *mut c_void);)*
        }

        $(
            /// Jumps to the driver's function of this name with all registers and the stack as they are, so its
            /// arguments and result are the driver's, whatever they may be.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            extern "C" fn $name() {
                jump!(slots::$name)
            }
        )*

        fn fill(library: &Library) {
            $(
                // SAFETY: only the address is taken; the callers' declarations come from the driver's own header.
                if let Ok(function) = unsafe { library.get::<*mut c_void>(concat!(stringify!($name), "\0").as_bytes()) } {
                    slots::$name.store(*function, Ordering::Release);
                }
            )*
        }
    };
}

driver_functions! {
    cuCtxDisablePeerAccess
    cuCtxEnablePeerAccess
    cuCtxGetCurrent
    cuCtxSetCurrent
    cuCtxSynchronize
    cuDeviceCanAccessPeer
    cuDeviceGet
    cuDeviceGetAttribute
    cuDeviceGetName
    cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxRetain
    cuEventCreate
    cuEventDestroy_v2
    cuEventElapsedTime_v2
    cuEventQuery
    cuEventRecord
    cuEventSynchronize
    cuFuncGetAttribute
    cuFuncSetAttribute
    cuGetErrorName
    cuGetErrorString
    cuGraphDestroy
    cuGraphExecDestroy
    cuGraphInstantiateWithFlags
    cuGraphLaunch
    cuInit
    cuLaunchHostFunc
    cuLaunchKernel
    cuLaunchKernelEx
    cuMemAddressFree
    cuMemAddressReserve
    cuMemAllocAsync
    cuMemAllocHost_v2
    cuMemAlloc_v2
    cuMemCreate
    cuMemFreeAsync
    cuMemFreeHost
    cuMemFree_v2
    cuMemGetAddressRange_v2
    cuMemGetInfo_v2
    cuMemGetAllocationGranularity
    cuMemMap
    cuMemRelease
    cuMemSetAccess
    cuMemUnmap
    cuMemcpyDtoDAsync_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpyHtoDAsync_v2
    cuMemcpyHtoD_v2
    cuMemsetD8Async
    cuModuleGetFunction
    cuModuleGetGlobal_v2
    cuModuleLoad
    cuModuleLoadData
    cuModuleUnload
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialClusterSize
    cuStreamBeginCapture_v2
    cuStreamCreate
    cuStreamDestroy_v2
    cuStreamEndCapture
    cuStreamSynchronize
    cuStreamWaitEvent
}
