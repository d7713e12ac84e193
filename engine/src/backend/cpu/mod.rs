//! The CPU backend: the walks of `kiln_kernels` over panels, on a pool of threads.
//!
//! Bits do not depend on the level of instructions, the number of threads or the batches: every number is made by one
//! chain of rounded operations that the walks define, and threads only share out whole numbers.

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod attend;
mod kernel;
mod matrix;
mod panel;
mod pool;
mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod vector;

pub use kernel::Level;

use kiln_kernels::{Arith, Host, LANES, attention, canonical, math};

use super::{Backend, Column, Output, Positions, Selection, Selector, SequenceId};
use crate::error::{Error, Place, Result};
use crate::model::{self, Activation, Block, Buffer, Config, Model, Op, Pairing};
use attend::{Heads, QUERIES};
use matrix::{Activations, Matrix, Store, multiply};
use panel::{Arena, Partials};
use pool::{Disjoint, Pool};

/// The largest number of threads that can be asked for.
pub const MAX_THREADS: usize = 512;

/// The largest context that can be asked for.
pub const MAX_CONTEXT: usize = 1 << 24;
/// The largest number of sequences that can be asked for.
pub const MAX_SEQUENCES: usize = 1 << 12;
/// The largest batch that can be asked for.
pub const MAX_BATCH: usize = 1 << 14;

/// How to run on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Positions of the cache for each sequence; at least 1.
    pub context: usize,
    /// Sequences that the cache holds, 1 to [`MAX_SEQUENCES`].
    pub sequences: usize,
    /// Threads, 1 to [`MAX_THREADS`].
    pub threads: usize,
    /// Columns of a batch; at least 1.
    pub batch: usize,
    /// The level of instructions.
    pub level: Level,
    /// Bytes that loading may take, if there is a limit.
    pub memory: Option<u64>,
}

impl Options {
    /// One sequence, the fastest level, a batch of 64, no limit on memory.
    pub fn new(context: usize, threads: usize) -> Options {
        Options { context, sequences: 1, threads, batch: 64, level: Level::fastest(), memory: None }
    }
}

/// What a load takes, term by term, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Weights, panels and the rest.
    pub weights: u64,
    /// Weights that are repacked into panels.
    pub panels: u64,
    /// Keys and values of all positions.
    pub cache: u64,
    /// Activations, logits, tables and scratch.
    pub buffers: u64,
}

impl MemoryNeed {
    /// Computes the need before anything is allocated; saturates rather than overflows.
    pub fn of(model: &Model, options: &Options) -> MemoryNeed {
        let config = &model.config;
        let matrices = model.layers.iter().flat_map(model::Layer::matrices).chain([&model.head]);
        let (mut weights, mut panels) = (0u64, 0u64);
        for tensor in matrices {
            let bytes = Matrix::load_bytes(tensor);
            weights = weights.saturating_add(bytes);
            if panel::Format::of(tensor.kind).is_some() {
                panels = panels.saturating_add(bytes.next_multiple_of(64));
            }
        }
        let (context, batch) = (options.context as u64, options.batch as u64);
        let keys = (config.kv_heads * config.head_width) as u64;
        let positions = context.saturating_mul(options.sequences as u64);
        let cache = positions.saturating_mul(keys * 4 * config.layers as u64);
        let queries = (config.heads * config.head_width) as u64;
        let (width, inner) = (config.width as u64, config.feed_forward as u64);
        let columns = 2 * width * 4
            + Activations::bytes(width.max(queries).max(inner))
            + (queries + 2 * keys + queries + 2 * inner) * 4
            + model.vocabulary() as u64 * 4;
        let scratch = QUERIES * LANES * config.head_width * 4 + size_of::<Partials>();
        let thread = (context * 4 * QUERIES as u64).saturating_add(scratch as u64);
        let tables = context * 8 * config.rope.dimensions as u64;
        let buffers = batch
            .saturating_mul(columns)
            .saturating_add((options.threads as u64).saturating_mul(thread))
            .saturating_add(tables);
        MemoryNeed { weights, panels, cache, buffers }
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.buffers)
    }
}

/// The matrices of a layer by their role.
type Layer = [Option<Matrix>; model::Matrix::ALL.len()];

/// Where the cache has its rows: halves by sequence, layer, head, position, element.
#[derive(Clone, Copy)]
struct CacheView {
    layers: usize,
    kv_heads: usize,
    head_width: usize,
    context: usize,
}

impl CacheView {
    /// The first element of the row of a column's position, or of one before it.
    fn row(&self, column: &Column, layer: usize, head: usize, position: usize) -> usize {
        let sequence = column.sequence.0 as usize;
        let head = (sequence * self.layers + layer) * self.kv_heads + head;
        (head * self.context + position) * self.head_width
    }

    /// Elements of a sequence.
    fn sequence(&self) -> usize {
        self.layers * self.kv_heads * self.context * self.head_width
    }
}

struct ThreadScratch {
    scores: Vec<f32>,
    values: Vec<f32>,
}

/// A model on the CPU.
pub struct Cpu {
    model: Model,
    store: Store,
    options: Options,
    pool: Pool,
    layers: Vec<Layer>,
    head: Matrix,
    global_table: Vec<[f32; 2]>,
    local_table: Vec<[f32; 2]>,
    /// As [`CacheView`] says.
    keys: Vec<u16>,
    values: Vec<u16>,
    positions: Positions,
    residual: Vec<f32>,
    activations: Activations,
    /// By [`Buffer`].
    buffers: [Vec<f32>; Buffer::ALL.len()],
    attended: Vec<f32>,
    logits: Vec<f32>,
    /// Columns of the batch that logits are wanted of.
    outputs: Vec<usize>,
    /// Columns of logits that the step has made.
    made: usize,
    selector: Selector,
    partials: Vec<Box<Partials>>,
    scratch: Vec<ThreadScratch>,
}

impl Cpu {
    /// Loads a model.
    ///
    /// # Errors
    /// [`Error::Request`] if an option is out of range or the memory would not suffice, with the terms.
    pub fn load(model: Model, options: Options) -> Result<Cpu> {
        if options.context == 0 || options.batch == 0 {
            return Err(Error::Request("the context and the batch must be at least 1".into()));
        }
        if options.context > MAX_CONTEXT || options.batch > MAX_BATCH {
            return Err(Error::Request(format!(
                "a context of {} in batches of {}, expected at most {MAX_CONTEXT} and {MAX_BATCH}",
                options.context, options.batch
            )));
        }
        if options.sequences == 0 || options.sequences > MAX_SEQUENCES {
            let problem = format!("{} sequences, expected 1 to {MAX_SEQUENCES}", options.sequences);
            return Err(Error::Request(problem));
        }
        if options.threads == 0 || options.threads > MAX_THREADS {
            return Err(Error::Request(format!("{} threads, expected 1 to {MAX_THREADS}", options.threads)));
        }
        let need = MemoryNeed::of(&model, &options);
        if let Some(limit) = options.memory
            && need.total() > limit
        {
            return Err(Error::Request(does_not_fit(&need, limit, &model, &options)));
        }
        let mut pool = Pool::new(options.threads)
            .map_err(|error| Error::Request(format!("cannot start threads: {error}")))?;
        let panels = usize::try_from(need.panels).unwrap_or(usize::MAX);
        let arena = Arena::new(panels).map_err(|error| {
            Error::Request(format!("cannot take {panels} bytes for the weights: {error}"))
        })?;
        let mut store = Store { file: model.file.clone(), arena };
        let mut load = |tensor| Matrix::load(&mut store, tensor, &mut pool);
        let layers = model
            .layers
            .iter()
            .map(|layer| model::Matrix::ALL.map(|matrix| layer.matrix(matrix).map(&mut load)))
            .collect();
        let head = load(&model.head);
        let config = &model.config;
        let (context, batch) = (options.context, options.batch);
        let queries = config.heads * config.head_width;
        let keys = config.kv_heads * config.head_width;
        let widest = config.width.max(queries).max(config.feed_forward);
        let cache = options.sequences * config.layers * keys * context;
        let local_table =
            if config.local_rope.is_some() { model.rope_table(false, context) } else { Vec::new() };
        Ok(Cpu {
            layers,
            head,
            global_table: model.rope_table(true, context),
            local_table,
            keys: vec![0; cache],
            values: vec![0; cache],
            positions: Positions::new(options.sequences, context),
            residual: vec![0.0; batch * config.width],
            activations: Activations::new(batch * widest),
            buffers: Buffer::ALL.map(|buffer| vec![0.0; batch * buffer.size().of(config)]),
            attended: vec![0.0; batch * queries],
            logits: vec![0.0; batch * model.vocabulary()],
            outputs: Vec::with_capacity(batch),
            made: 0,
            selector: Selector::default(),
            partials: (0..options.threads).map(|_| Partials::boxed()).collect(),
            scratch: (0..options.threads)
                .map(|_| ThreadScratch {
                    scores: vec![0.0; QUERIES * context],
                    values: vec![0.0; QUERIES * LANES * config.head_width],
                })
                .collect(),
            store,
            pool,
            options,
            model,
        })
    }

    /// The level of instructions in use.
    pub fn level(&self) -> Level {
        self.options.level
    }

    /// The halves of the cache, keys then values, for comparisons.
    pub fn cache(&self) -> (&[u16], &[u16]) {
        (&self.keys, &self.values)
    }

    /// The halves of a sequence in the cache, keys then values.
    pub fn cache_of(&self, sequence: SequenceId) -> (&[u16], &[u16]) {
        let size = self.cache_view().sequence();
        let range = sequence.0 as usize * size..(sequence.0 as usize + 1) * size;
        (&self.keys[range.clone()], &self.values[range])
    }

    /// Runs a batch and adds the logits of its outputs to those that the step has made.
    fn run_batch(&mut self, columns: &[Column]) -> Result<()> {
        self.embed(columns)?;
        for index in 0..self.layers.len() {
            self.layer(index, columns)?;
        }
        self.outputs.clear();
        self.outputs.extend((0..columns.len()).filter(|index| columns[*index].output));
        let count = self.outputs.len();
        if count == 0 {
            return Ok(());
        }
        let (level, width) = (self.options.level, self.model.config.width);
        let (residual, model, store, outputs) = (&self.residual, &self.model, &self.store, &self.outputs);
        self.activations.fill(level, &mut self.pool, count, width, |output, out| {
            let column = outputs[output];
            let x = &residual[column * width..(column + 1) * width];
            kernel::rms_norm(level, x, &model.output_norm, model.config.epsilon, out);
        });
        let scratch = Disjoint::new(&mut self.partials);
        let vocabulary = self.model.vocabulary();
        let logits = &mut self.logits[self.made * vocabulary..];
        let matrices = [(&self.head, &mut *logits)];
        multiply(store, level, &mut self.pool, &scratch, &self.activations, count, matrices);
        for (logits, output) in logits.chunks_exact(vocabulary).zip(&self.outputs) {
            check_finite(logits, Place::Logits, columns[*output].position)?;
        }
        self.made += count;
        Ok(())
    }

    fn embed(&mut self, columns: &[Column]) -> Result<()> {
        let model = &self.model;
        let width = model.config.width;
        let table = model.file.data(&model.embedding);
        let row_bytes = table.len() / model.embedding.rows();
        for (column, out) in columns.iter().zip(self.residual.chunks_exact_mut(width)) {
            let row = column.token as usize * row_bytes;
            kernel::decode(model.embedding.kind, &table[row..row + row_bytes], out);
            if model.config.embedding_scale != 1.0 {
                for value in &mut *out {
                    *value = Host.mul(*value, model.config.embedding_scale);
                }
            }
            check_finite(out, Place::Embedding, column.position)?;
        }
        Ok(())
    }

    /// Executes the operations of a layer.
    fn layer(&mut self, index: usize, columns: &[Column]) -> Result<()> {
        let (level, count) = (self.options.level, columns.len());
        let view = self.cache_view();
        let Cpu { model, store, pool, activations, residual, buffers, .. } = self;
        let (config, layer) = (&model.config, &model.layers[index]);
        let (width, epsilon) = (config.width, config.epsilon);
        // What concerns each column alone goes through the threads at once.
        for ops in layer.ops().chunk_by(|a, b| is_by_column(*a) && is_by_column(*b)) {
            match ops[0] {
                Op::Norm(weight) => {
                    let weight = layer.weight(weight);
                    activations.fill(level, pool, count, width, |column, out| {
                        let x = &residual[column * width..(column + 1) * width];
                        kernel::rms_norm(level, x, weight, epsilon, out);
                    });
                }
                Op::Multiply(products) => {
                    let scratch = Disjoint::new(&mut self.partials);
                    let mut outs = buffers.each_mut().map(|buffer| &mut buffer[..]);
                    let mut product = |(matrix, buffer): (model::Matrix, Buffer)| {
                        let out = std::mem::take(&mut outs[buffer as usize]);
                        self.layers[index][matrix as usize].as_ref().map(|matrix| (matrix, out))
                    };
                    for products in products.chunks(3) {
                        let mut product = |i: usize| products.get(i).and_then(|p| product(*p));
                        match (product(0), product(1), product(2)) {
                            (Some(a), Some(b), Some(c)) => {
                                multiply(store, level, pool, &scratch, activations, count, [a, b, c]);
                            }
                            (Some(a), Some(b), None) => {
                                multiply(store, level, pool, &scratch, activations, count, [a, b]);
                            }
                            (a, b, c) => {
                                for matrix in [a, b, c].into_iter().flatten() {
                                    multiply(store, level, pool, &scratch, activations, count, [matrix]);
                                }
                            }
                        }
                    }
                }
                Op::Bias(..) | Op::HeadNorm(..) | Op::Rope(_) | Op::Store => {
                    let table = if config.is_global(index) { &self.global_table } else { &self.local_table };
                    let cache = (&mut self.keys[..], &mut self.values[..]);
                    let work = ByColumn { level, config, layer, ops, table, view, index };
                    work.run(pool, columns, buffers, cache);
                }
                Op::Attend => {
                    let queries = &buffers[Buffer::Query as usize];
                    let attention = Attention { level, config, view, index };
                    let cache = (&self.keys[..], &self.values[..]);
                    attention.run(pool, columns, queries, cache, &mut self.scratch, &mut self.attended);
                    let (attended, size) = (&self.attended, config.heads * config.head_width);
                    activations.fill(level, pool, count, size, |column, out| {
                        out.copy_from_slice(&attended[column * size..(column + 1) * size]);
                    });
                }
                Op::GatedActivation => {
                    let (gate, up) = (&buffers[Buffer::Gate as usize], &buffers[Buffer::Up as usize]);
                    let inner = config.feed_forward;
                    activations.fill(level, pool, count, inner, |column, out| {
                        let range = column * inner..(column + 1) * inner;
                        out.copy_from_slice(&gate[range.clone()]);
                        match config.activation {
                            Activation::Silu => kernel::silu_times(level, out, &up[range]),
                            Activation::GeluTanh => kernel::gelu_times(level, out, &up[range]),
                        }
                    });
                }
                Op::PostNorm(weight) => {
                    let added = &mut buffers[Buffer::Added as usize];
                    for added in added.chunks_exact_mut(width).take(count) {
                        norm_in_place(level, added, layer.weight(weight), epsilon);
                    }
                }
                Op::Add(block) => {
                    let place = match block {
                        Block::Attention => Place::Attention(index),
                        Block::FeedForward => Place::FeedForward(index),
                    };
                    let added = buffers[Buffer::Added as usize].chunks_exact(width);
                    for ((column, residual), added) in
                        columns.iter().zip(residual.chunks_exact_mut(width)).zip(added)
                    {
                        for (value, added) in residual.iter_mut().zip(added) {
                            *value = Host.add(*value, *added);
                        }
                        check_finite(residual, place, column.position)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn cache_view(&self) -> CacheView {
        let config = &self.model.config;
        CacheView {
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_width: config.head_width,
            context: self.options.context,
        }
    }
}

/// Whether an operation reads and writes nothing but its own column and that column's place in the cache.
fn is_by_column(op: Op) -> bool {
    matches!(op, Op::Bias(..) | Op::HeadNorm(..) | Op::Rope(_) | Op::Store)
}

/// Operations that concern each column alone.
struct ByColumn<'a> {
    level: Level,
    config: &'a Config,
    layer: &'a model::Layer,
    ops: &'a [Op],
    table: &'a [[f32; 2]],
    view: CacheView,
    index: usize,
}

impl ByColumn<'_> {
    fn run(
        &self,
        pool: &mut Pool,
        columns: &[Column],
        buffers: &mut [Vec<f32>; Buffer::ALL.len()],
        (keys, values): (&mut [u16], &mut [u16]),
    ) {
        let (config, head) = (self.config, self.config.head_width);
        let pairs = config.rope.dimensions / 2;
        let buffers = buffers.each_mut().map(|buffer| Disjoint::new(&mut buffer[..]));
        let (keys, values) = (Disjoint::new(keys), Disjoint::new(values));
        pool.for_each(columns.len(), 4, |_, range| {
            for index in range {
                let column = &columns[index];
                let position = column.position;
                let part = |buffer: Buffer| {
                    let size = buffer.size().of(config);
                    // SAFETY: a column's part of a buffer is its own, and each operation takes it once.
                    unsafe { buffers[buffer as usize].part(index * size..(index + 1) * size) }
                };
                for op in self.ops {
                    match *op {
                        Op::Bias(buffer, bias) => add_bias(part(buffer), self.layer.weight(bias)),
                        Op::HeadNorm(buffer, weight) => {
                            for head in part(buffer).chunks_exact_mut(head) {
                                norm_in_place(self.level, head, self.layer.weight(weight), config.epsilon);
                            }
                        }
                        Op::Rope(buffer) => {
                            let angles = &self.table[position * pairs..(position + 1) * pairs];
                            for head in part(buffer).chunks_exact_mut(head) {
                                rotate(head, angles, config.pairing);
                            }
                        }
                        Op::Store => {
                            let (key, value) = (part(Buffer::Key), part(Buffer::Value));
                            let heads = key.chunks_exact(head).zip(value.chunks_exact(head));
                            for (number, (key, value)) in heads.enumerate() {
                                let start = self.view.row(column, self.index, number, position);
                                // SAFETY: a column's place in the cache is its own.
                                let (keys, values) = unsafe {
                                    (keys.part(start..start + head), values.part(start..start + head))
                                };
                                for i in 0..head {
                                    keys[i] = math::to_f16(key[i]);
                                    values[i] = math::to_f16(value[i]);
                                }
                            }
                        }
                        _ => {}
                    }
                }
            }
        });
    }
}

/// Attention of columns over the cache.
struct Attention<'a> {
    level: Level,
    config: &'a Config,
    view: CacheView,
    index: usize,
}

impl Attention<'_> {
    fn run(
        &self,
        pool: &mut Pool,
        columns: &[Column],
        query: &[f32],
        (keys, values): (&[u16], &[u16]),
        scratch: &mut [ThreadScratch],
        attended: &mut [f32],
    ) {
        let (config, head) = (self.config, self.config.head_width);
        let queries = config.heads * head;
        let group = config.heads / config.kv_heads;
        // An item is up to four query heads of a column that share keys and values.
        let sets = group.div_ceil(QUERIES);
        let (threads, attended) = (Disjoint::new(scratch), Disjoint::new(attended));
        let per_column = config.kv_heads * sets;
        pool.for_each(columns.len() * per_column, 1, |thread, range| {
            // SAFETY: each thread has its own scratch.
            let scratch = &mut unsafe { threads.part(thread..thread + 1) }[0];
            for item in range {
                let (column, shared, set) = (item / per_column, item % per_column / sets, item % sets);
                let at = columns[column].position;
                let first = config.first_visible(self.index, at);
                let visible = at + 1 - first;
                let start = self.view.row(&columns[column], self.index, shared, first);
                let rows = start..start + visible * head;
                let number = shared * group + set * QUERIES;
                let heads = (group - set * QUERIES).min(QUERIES);
                let start = column * queries + number * head;
                // SAFETY: each head of each column is its own part.
                let out = unsafe { attended.part(start..start + heads * head) };
                kernel::attend(
                    self.level,
                    Heads {
                        queries: &query[start..start + heads * head],
                        keys: &keys[rows.clone()],
                        values: &values[rows],
                        width: head,
                        scale: config.attention_scale,
                    },
                    visible,
                    &mut scratch.scores[..heads * visible],
                    &mut scratch.values[..heads * LANES * head],
                    out,
                );
            }
        });
    }
}

impl Backend for Cpu {
    fn description(&self) -> String {
        let threads = self.options.threads;
        format!("cpu, {}, {threads} thread{}", self.options.level, if threads == 1 { "" } else { "s" })
    }

    fn context(&self) -> usize {
        self.options.context
    }

    fn batch_size(&self) -> usize {
        self.options.batch
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn sequences(&self) -> usize {
        self.positions.sequences()
    }

    fn preferred_columns(&self) -> usize {
        self.options.batch
    }

    fn step(&mut self, columns: &[Column], selection: Selection) -> Result<Output<'_>> {
        self.made = 0;
        if self.pool.is_poisoned() {
            return Err(Error::Poisoned);
        }
        let vocabulary = self.model.vocabulary();
        self.positions.check(columns, selection, vocabulary, self.options.batch)?;
        self.positions.begin(columns);
        for batch in columns.chunks(self.options.batch) {
            if let Err(error) = self.run_batch(batch) {
                self.made = 0;
                return Err(error);
            }
            self.positions.advance(batch);
        }
        let logits = &self.logits[..self.made * vocabulary];
        Ok(self.selector.select(logits, vocabulary, selection))
    }

    fn logits(&self) -> &[f32] {
        &self.logits[..self.made * self.model.vocabulary()]
    }

    fn weight_bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().chain([&self.head]).map(Matrix::bytes).sum()
    }
}

fn add_bias(vector: &mut [f32], bias: &[f32]) {
    for (value, bias) in vector.iter_mut().zip(bias) {
        *value = canonical(Host.add(*value, *bias));
    }
}

fn norm_in_place(level: Level, vector: &mut [f32], weight: &[f32], epsilon: f32) {
    const LARGEST: usize = 1024;
    let mut copy = [0.0; LARGEST];
    if let Some(copy) = copy.get_mut(..vector.len()) {
        copy.copy_from_slice(vector);
        kernel::rms_norm(level, copy, weight, epsilon, vector);
    } else {
        let copy = vector.to_vec();
        kernel::rms_norm(level, &copy, weight, epsilon, vector);
    }
}

fn rotate(head: &mut [f32], angles: &[[f32; 2]], pairing: Pairing) {
    for (pair, [cos, sin]) in angles.iter().enumerate() {
        let (i, j) = match pairing {
            Pairing::Adjacent => (2 * pair, 2 * pair + 1),
            Pairing::Halves => (pair, pair + angles.len()),
        };
        (head[i], head[j]) = attention::rotate(Host, head[i], head[j], *cos, *sin);
    }
}

fn check_finite(values: &[f32], place: Place, position: usize) -> Result<()> {
    const EXPONENT: u32 = 0x7f80_0000;
    let bad = values.iter().fold(false, |bad, value| bad | (value.to_bits() & EXPONENT == EXPONENT));
    if bad { Err(Error::NotFinite { place, position }) } else { Ok(()) }
}

fn does_not_fit(need: &MemoryNeed, limit: u64, model: &Model, options: &Options) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    format!(
        "a context of {} does not fit: weights {} MiB + keys and values {} MiB + buffers {} MiB = {} MiB, and {} MiB are available ({} was trained for {})",
        options.context,
        mib(need.weights),
        mib(need.cache),
        mib(need.buffers),
        mib(need.total()),
        limit >> 20,
        model.file.name(),
        model.config.trained_context,
    )
}
