//! CUDA devices: opening one, and the self-test's runner on it.

use std::sync::Arc;

use cuda_core::{CudaContext, CudaStream, DeviceBuffer, DriverError};
use kiln_engine::backend::{Backend, LoadOptions};
use kiln_engine::model::Model;
use kiln_engine::selftest::{DeviceKind, RunError, Runner};

use crate::{backend, driver, gpu, q8_0_row, quantize_q8, rms_norm};

/// Threads of a block, in every launch contract.
pub const THREADS: usize = 256;

/// The kind of device that `--device cuda[:N]` names.
pub struct Kind;

impl DeviceKind for Kind {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn open(&self, index: usize) -> Result<Box<dyn Runner>, RunError> {
        Ok(Box::new(Cuda::open(index)?))
    }

    fn load(&self, index: usize, model: Model, options: &LoadOptions) -> Result<Box<dyn Backend>, RunError> {
        Ok(Box::new(backend::Cuda::load(index, model, options)?))
    }
}

/// One open CUDA device with this binary's entries loaded.
struct Cuda {
    label: String,
    stream: Arc<CudaStream>,
    q8_0_row: q8_0_row::entries::LoadedModule,
    rms_norm: rms_norm::entries::LoadedModule,
    quantize_q8: quantize_q8::entries::LoadedModule,
}

impl Cuda {
    fn open(index: usize) -> Result<Self, RunError> {
        driver::open()?;
        let context = CudaContext::new(index).map_err(in_words)?;
        let module = gpu::entries(&context)?;
        // SAFETY: the entries that are loaded are those embedded in this binary, compiled from these modules; every entry
        // name is unique by its prefix and operation.
        let (q8_0_row, rms_norm, quantize_q8) = unsafe {
            (
                q8_0_row::entries::from_module(module.clone()).map_err(in_words)?,
                rms_norm::entries::from_module(module.clone()).map_err(in_words)?,
                quantize_q8::entries::from_module(module).map_err(in_words)?,
            )
        };
        Ok(Self {
            label: format!("cuda:{index}"),
            stream: context.default_stream(),
            q8_0_row,
            rms_norm,
            quantize_q8,
        })
    }
}

impl Runner for Cuda {
    fn name(&self) -> &str {
        &self.label
    }

    fn q8_0_rows(
        &mut self,
        weights: &[u8],
        quants: &[i8],
        scales: &[f32],
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let stream = &self.stream;
        let weights = DeviceBuffer::from_host(stream, weights)?;
        let quants = DeviceBuffer::from_host(stream, quants)?;
        let scales = DeviceBuffer::from_host(stream, scales)?;
        // What `out` holds goes along, so that an element that the device does not write shows.
        let mut device_out = DeviceBuffer::from_host(stream, out)?;
        q8_0_row::launch(&self.q8_0_row, stream, &weights, &quants, &scales, &mut device_out)?;
        device_out.copy_to_host(stream, out)?;
        Ok(())
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), RunError> {
        let stream = &self.stream;
        let x = DeviceBuffer::from_host(stream, x)?;
        let weight = DeviceBuffer::from_host(stream, weight)?;
        let mut device_out = DeviceBuffer::from_host(stream, out)?;
        rms_norm::launch(&self.rms_norm, stream, &x, &weight, eps, &mut device_out)?;
        device_out.copy_to_host(stream, out)?;
        Ok(())
    }

    fn quantize_q8(&mut self, x: &[f32], quants: &mut [i8], scales: &mut [f32]) -> Result<(), RunError> {
        let stream = &self.stream;
        let x = DeviceBuffer::from_host(stream, x)?;
        let mut device_quants = DeviceBuffer::from_host(stream, quants)?;
        let mut device_scales = DeviceBuffer::from_host(stream, scales)?;
        quantize_q8::launch(&self.quantize_q8, stream, &x, &mut device_quants, &mut device_scales)?;
        device_quants.copy_to_host(stream, quants)?;
        device_scales.copy_to_host(stream, scales)?;
        Ok(())
    }
}

/// The driver's own words for its error.
fn in_words(error: DriverError) -> RunError {
    let code = error.0;
    match error.error_string() {
        Ok(words) => format!("{} (CUDA error {code})", words.to_string_lossy()).into(),
        Err(_) => format!("CUDA error {code}").into(),
    }
}

/// Checks a length that a launch contract states.
///
/// # Errors
/// The lengths differ.
pub fn expect_length(buffer: &str, found: usize, expected: usize) -> Result<(), RunError> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("buffer `{buffer}` has {found} elements, expected {expected}").into())
    }
}

/// Checks that a buffer holds at least what a launch contract states.
///
/// # Errors
/// It is shorter.
pub fn expect_room(buffer: &str, found: usize, expected: usize) -> Result<(), RunError> {
    if found >= expected {
        Ok(())
    } else {
        Err(format!("buffer `{buffer}` has {found} elements, expected at least {expected}").into())
    }
}
