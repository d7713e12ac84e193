//! One open card: its context, a stream, and the entries of this binary; launches and graphs.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_void;
use std::sync::Arc;

use cuda_core::{CudaContext, CudaFunction, CudaModule, CudaStream, DeviceBuffer, DriverError, sys};
use kiln_engine::selftest::RunError;

use crate::contract::{Contract, Reach};
use crate::driver;
#[cfg(not(other_ptx))]
use crate::q8_0_row;

/// The result of an operation on the card.
pub type Result<T> = std::result::Result<T, RunError>;

/// An open card.
pub struct Gpu {
    /// Which one.
    pub index: usize,
    /// Its context.
    pub context: Arc<CudaContext>,
    /// Where everything is enqueued.
    pub stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
    /// Whether a launch may begin while the one before it ends (Hopper and later).
    overlap: bool,
    /// Names of the entries that were asked for, by their handles.
    names: RefCell<HashMap<usize, String>>,
    /// What launches reached and the driver said is there: asked once for each buffer and length.
    reached: RefCell<HashSet<(u64, usize)>>,
    /// For tests of the contracts: of every entry's buffers, the least that an allocation was longer than stated.
    slack: Option<RefCell<Slack>>,
}

/// Bytes by entry and buffer.
pub type Slack = BTreeMap<(String, &'static str), usize>;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const OVERLAP: u32 = sys::CUlaunchAttributeID_enum_CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;

#[repr(C, align(8))]
struct Attribute {
    kind: u32,
    padding: u32,
    value: [u8; 64],
}

/// Loads the entries that are embedded in this binary.
///
/// # Errors
/// They do not run on the context's card.
pub fn entries(context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
    // SAFETY: the entries that are loaded are those embedded in this binary. This also keeps the linker from dropping
    // what they are embedded in.
    #[cfg(not(other_ptx))]
    let module = unsafe { q8_0_row::entries::load(context) }
        .map_err(RunError::from)
        .and_then(|_anchor| Ok(cuda_core::embedded::load_embedded_module(context, env!("CARGO_PKG_NAME"))?));
    // The backend embeds its IR then, which is of no use where nothing can compile it.
    #[cfg(other_ptx)]
    let module = context.load_module_from_image(include_bytes!(env!("KILN_DEVICE_PTX"))).map_err(in_words);
    module
}

impl Gpu {
    /// Opens card `index` and loads this binary's entries.
    ///
    /// # Errors
    /// There is no driver or no such card, or the entries do not run on it.
    pub fn open(index: usize) -> Result<Gpu> {
        driver::open()?;
        let context = CudaContext::new(index).map_err(in_words)?;
        let stream = context.new_stream().map_err(in_words)?;
        let module = entries(&context)?;
        let overlap = cfg!(overlap) && context.compute_capability()? >= (9, 0);
        let (names, reached) = (RefCell::default(), RefCell::default());
        Ok(Gpu { index, context, stream, module, overlap, names, reached, slack: None })
    }

    /// The card's name.
    pub fn name(&self) -> String {
        self.context.device_name().unwrap_or_else(|_| "unknown card".to_owned())
    }

    /// An entry of this binary.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn entry(&self, name: &str) -> Result<CudaFunction> {
        let entry =
            self.module.load_function(name).map_err(|error| format!("entry {name}: {}", in_words(error)))?;
        self.names.borrow_mut().insert(entry_key(&entry), name.to_owned());
        Ok(entry)
    }

    /// Free bytes on the card.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_bytes(&self) -> Result<u64> {
        self.context.bind_to_thread()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Lets an entry use this much dynamic shared memory.
    ///
    /// # Errors
    /// The card has less.
    pub fn allow_shared(&self, entry: &CudaFunction, bytes: usize) -> Result<()> {
        let most = self.context.max_opt_in_shared_memory_per_block()? as usize;
        if bytes > most {
            return Err(format!(
                "{bytes} bytes of shared memory are needed and a block has {most}: ask for a smaller context"
            )
            .into());
        }
        let attribute = sys::CUfunction_attribute_enum_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: sets a number on a live entry.
        check(unsafe { sys::cuFuncSetAttribute(entry.cu_function(), attribute, i32::try_from(bytes)?) })
    }

    /// How many blocks of an entry the card holds at once.
    ///
    /// # Errors
    /// The driver's, or that it holds none.
    pub fn resident_blocks(&self, entry: &CudaFunction, threads: usize, shared: usize) -> Result<usize> {
        let each = entry.max_active_blocks_per_multiprocessor(threads as u32, shared as u32)?;
        if each == 0 {
            return Err("an entry does not fit a multiprocessor of this card".into());
        }
        Ok(each as usize * self.context.multiprocessor_count()? as usize)
    }

    /// Refuses a launch that would reach beyond the buffers of its arguments.
    ///
    /// # Errors
    /// It would, or these are not the arguments of that entry.
    pub fn check_contract<A: Contract>(
        &self,
        entry: &CudaFunction,
        grid: (usize, usize),
        args: &A,
    ) -> Result<()> {
        let names = self.names.borrow();
        let name = names.get(&entry_key(entry)).map_or("an entry of another card", String::as_str);
        let reaches = args
            .reaches(name, grid)
            .ok_or_else(|| format!("{name} is launched with the arguments of another entry"))?;
        for reach in reaches {
            let known = (reach.address, reach.bytes);
            if self.slack.is_none() && self.reached.borrow().contains(&known) {
                continue;
            }
            self.check_reach(name, &reach)?;
            self.reached.borrow_mut().insert(known);
        }
        Ok(())
    }

    fn check_reach(&self, entry: &str, reach: &Reach) -> Result<()> {
        let Reach { buffer, address, bytes } = *reach;
        let (mut base, mut size) = (0, 0);
        // SAFETY: both are written; the address is only looked up.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, address) } == 0;
        let room =
            if found { (base as usize).saturating_add(size).saturating_sub(address as usize) } else { 0 };
        if bytes <= room {
            if let Some(slack) = &self.slack {
                let mut slack = slack.borrow_mut();
                let least = slack.entry((entry.to_owned(), buffer)).or_insert(usize::MAX);
                *least = (*least).min(room - bytes);
            }
            return Ok(());
        }
        Err(format!("{entry}: buffer `{buffer}` has {room} bytes on the card, expected at least {bytes}")
            .into())
    }

    /// Notes from now on how much longer the buffers are than stated, and asks the driver at every launch.
    pub fn note_slack(&mut self) {
        self.slack = Some(RefCell::default());
    }

    /// What was noted.
    pub fn slack(&self) -> Slack {
        self.slack.as_ref().map(|slack| slack.borrow().clone()).unwrap_or_default()
    }

    /// Enqueues an entry that takes one argument by value.
    ///
    /// # Safety
    /// `A` is the entry's parameter, and the grid is what the entry's module says.
    ///
    /// # Errors
    /// A buffer is shorter than the entry's [`Contract`] says, or the driver's.
    pub unsafe fn launch<A: Contract>(
        &self,
        entry: &CudaFunction,
        grid: (usize, usize),
        threads: usize,
        shared: usize,
        args: &A,
    ) -> Result<()> {
        let mut params = [args as *const A as *mut c_void];
        let grid = (u32::try_from(grid.0)?, u32::try_from(grid.1)?, 1);
        // The layout of `CUlaunchAttribute`, which the bindings keep opaque: the kind, 4 bytes of padding, the value.
        let mut overlap = Attribute { kind: OVERLAP, padding: 0, value: [0; 64] };
        overlap.value[0] = 1;
        const _: () = assert!(size_of::<Attribute>() == size_of::<sys::CUlaunchAttribute_st>());
        let config = sys::CUlaunchConfig_st {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: self.stream.cu_stream(),
            attrs: (&raw mut overlap).cast(),
            numAttrs: u32::from(self.overlap),
        };
        self.context.bind_to_thread()?;
        self.check_contract(entry, (grid.0 as usize, grid.1 as usize), args)?;
        // SAFETY: the caller's promise; every entry waits for the launches before it.
        check(unsafe {
            sys::cuLaunchKernelEx(&config, entry.cu_function(), params.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    /// Waits for everything that was enqueued.
    ///
    /// # Errors
    /// What went wrong meanwhile.
    pub fn wait(&self) -> Result<()> {
        self.stream.synchronize().map_err(in_words)
    }

    /// Zeros on the card.
    ///
    /// # Errors
    /// The driver's.
    pub fn zeros<T: cuda_core::DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        Ok(DeviceBuffer::zeroed(&self.stream, len.max(1))?)
    }

    /// Records what `enqueue` enqueues, to be replayed.
    ///
    /// # Errors
    /// The driver's, or that of `enqueue`.
    pub fn record(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.context.bind_to_thread()?;
        let stream = self.stream.cu_stream();
        let mode = sys::CUstreamCaptureMode_enum_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not capturing.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let enqueued = enqueue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what began above, also after an error.
        let ended = check(unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
        enqueued?;
        ended?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is complete; it is not needed once it is instantiated.
        unsafe {
            let made = check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            check(sys::cuGraphDestroy(graph))?;
            made?;
        }
        Ok(Graph { exec })
    }

    /// Enqueues a recorded graph.
    ///
    /// # Errors
    /// The driver's.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.context.bind_to_thread()?;
        // SAFETY: the graph is live, and so is all that it was recorded with: they have one owner.
        check(unsafe { sys::cuGraphLaunch(graph.exec, self.stream.cu_stream()) })
    }
}

/// What tells one entry of a module from another.
fn entry_key(entry: &CudaFunction) -> usize {
    // SAFETY: the handle is only compared.
    unsafe { entry.cu_function() as usize }
}

/// A recorded sequence of launches and copies.
pub struct Graph {
    exec: sys::CUgraphExec,
}

// SAFETY: the driver's handle may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// The driver's result as ours.
///
/// # Errors
/// Anything but success.
pub fn check(code: sys::CUresult) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(in_words(DriverError(code))) }
}

/// The driver's own words for its error.
pub fn in_words(error: DriverError) -> RunError {
    let code = error.0;
    match error.error_string() {
        Ok(words) => format!("{} (CUDA error {code})", words.to_string_lossy()).into(),
        Err(_) => format!("CUDA error {code}").into(),
    }
}
