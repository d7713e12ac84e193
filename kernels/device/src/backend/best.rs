//! Steps that end in the best next token instead of logits: the token stays on the card, where the next step takes it from.
//!
//! One graph for all of them, without the copies of the state to the card and of the logits from it: a step moves two words
//! to the host, the token and the fault.

use cuda_core::{DeviceBuffer, PinnedHostBuffer, memory};
use kiln_engine::backend::Column;
use kiln_engine::error::Error;

use super::Cuda;
use crate::argmax;
use crate::gpu::{Gpu, Graph, Result};

/// What these steps need besides.
pub(super) struct Best {
    /// The largest logit so far: zero between launches.
    word: DeviceBuffer<u64>,
    /// Blocks that are done: zero between launches.
    done: DeviceBuffer<u32>,
    token: DeviceBuffer<u32>,
    host_token: PinnedHostBuffer<u32>,
    /// A graph for each sequence.
    steps: Vec<Option<Graph>>,
    /// The position and token that the state on the card holds, if a step left it ready for the next one.
    ready: Option<(usize, u32)>,
}

impl Best {
    pub(super) fn new(gpu: &Gpu, sequences: usize) -> Result<Best> {
        Ok(Best {
            word: gpu.zeros(1)?,
            done: gpu.zeros(1)?,
            token: gpu.zeros(1)?,
            host_token: PinnedHostBuffer::zeroed(&gpu.context, 1)?,
            steps: (0..sequences).map(|_| None).collect(),
            ready: None,
        })
    }

    /// Another step writes the state.
    pub(super) fn state_changes(&mut self) {
        self.ready = None;
    }

    /// The entries of a step are others from now on.
    pub(super) fn forget(&mut self) {
        self.steps.fill_with(|| None);
        self.ready = None;
    }
}

/// Runs a checked column and returns the token of its largest logit; there are no logits on the host then.
pub(super) fn run(cuda: &mut Cuda, column: &Column) -> kiln_engine::Result<u32> {
    let (token, position) = (column.token, column.position);
    cuda.sequence = column.sequence.0 as usize;
    let index = cuda.gpu.index;
    step(cuda, token, position).map_err(|error| Error::Request(format!("cuda:{index}: {error}")))?;
    cuda.take_fault(position)?;
    let next = cuda.best.host_token.as_slice()[0];
    cuda.best.ready = Some((position + 1, next));
    cuda.positions.advance(std::slice::from_ref(column));
    Ok(next)
}

fn step(cuda: &mut Cuda, token: u32, position: usize) -> Result<()> {
    if cuda.best.ready.take() != Some((position, token)) {
        let state = cuda.host_state.as_mut_slice();
        state[0] = u32::try_from(position)?;
        state[1] = token;
        let (from, to) = (cuda.host_state.as_ptr(), cuda.state.cu_deviceptr());
        // SAFETY: both hold two words, and live until the wait below.
        unsafe { memory::memcpy_htod_async(to, from, 4 * 2, cuda.gpu.stream.cu_stream())? };
    }
    if cuda.eager {
        enqueue(cuda)?;
    } else {
        let sequence = cuda.sequence;
        if cuda.best.steps[sequence].is_none() {
            cuda.best.steps[sequence] = Some(cuda.gpu.record(|| enqueue(cuda))?);
        }
        if let Some(step) = &cuda.best.steps[sequence] {
            cuda.gpu.replay(step)?;
        }
    }
    cuda.gpu.wait()
}

/// Enqueues a step of the position and token that are on the card, to the copies of the token and of the fault.
fn enqueue(cuda: &Cuda) -> Result<()> {
    cuda.embed(1)?;
    for (index, layer) in cuda.layers.iter().enumerate() {
        cuda.attention(index, layer, 1)?;
        cuda.feed_forward(index, layer, 1)?;
    }
    cuda.head(1, 0)?;
    let best = &cuda.best;
    let buffers = argmax::Buffers {
        logits: &cuda.logits,
        best: &best.word,
        done: &best.done,
        tokens: &best.token,
        state: Some(&cuda.state),
        fault: &cuda.fault,
    };
    argmax::launch(
        &cuda.gpu,
        &cuda.entries.argmax,
        &buffers,
        cuda.model.vocabulary(),
        1,
        cuda.logits_stage(),
    )?;
    let stream = cuda.gpu.stream.cu_stream();
    // SAFETY: the buffers hold a word each, and live until the caller waits.
    unsafe {
        let token = best.host_token.as_ptr().cast_mut();
        memory::memcpy_dtoh_async(token, best.token.cu_deviceptr(), 4, stream)?;
        let fault = cuda.host_fault.as_ptr().cast_mut();
        memory::memcpy_dtoh_async(fault, cuda.fault.cu_deviceptr(), 4, stream)?;
    }
    Ok(())
}
