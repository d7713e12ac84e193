//! The engine's backend on a card: the same operations in the same order as the CPU backend, and so the same bits.
//!
//! Weights are uploaded once; keys and values stay on the card. A batch is a sequence of launches; a step of one token that
//! wants logits is recorded once as a graph and replayed: token and position are read from a word array on the card,
//! so the same graph serves every step.

mod best;

use cuda_core::{CudaFunction, DeviceBuffer, PinnedHostBuffer, memory};
use kiln_engine::backend::{Backend, Column, LoadOptions, Output, Positions, Selection, Selector, Wanted};
use kiln_engine::error::{Error, Place};
use kiln_engine::model::{self, Activation, Model, Pairing, dense};

use crate::gpu::{Gpu, Graph, Result};
use crate::heads::HEAD_THREADS;
use crate::layout::{
    ActivateArgs, Activations, COLUMNS, EmbedArgs, HeadsArgs, Matrix, NO_FAULT, NormArgs, PART, PartMeta,
    PostArgs, RowsArgs, STAGE_EMBEDDING, STAGE_RANGE, THREADS, TILE, class, mode,
};
use crate::upload::{self, Uploaded};
use crate::{attend, fused, rows, tiles, wide_tiles};

/// Columns of a batch that only fills the cache, at least.
const PREFILL: usize = 512;

/// What a load takes on the card, term by term, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Weights.
    pub weights: u64,
    /// Keys and values of all positions.
    pub cache: u64,
    /// Activations, logits and tables.
    pub buffers: u64,
}

impl MemoryNeed {
    /// Computes the need before anything is allocated.
    pub fn of(model: &Model, options: &LoadOptions) -> MemoryNeed {
        let sizes = Sizes::of(model, options);
        let config = &model.config;
        let mut weights = upload::packed_bytes(&model.head);
        if !is_tied(model) {
            weights += upload::packed_bytes(&model.embedding);
        }
        for layer in &model.layers {
            for tensor in layer.matrices() {
                weights = weights.saturating_add(upload::packed_bytes(tensor));
            }
        }
        let floats = 2 * sizes.width + sizes.queries + 2 * sizes.keys + 2 * sizes.inner;
        let activations = (sizes.width + sizes.made) * 5 + (sizes.width + sizes.made) / PART * 8;
        let columns = (sizes.columns as u64).saturating_mul((4 * floats + activations) as u64);
        let logits = (sizes.logits as u64).saturating_mul(4 * model.vocabulary() as u64);
        let tables = if config.local_rope.is_some() { 2 } else { 1 };
        let table = options.context as u64 * 4 * config.rope.dimensions as u64 * tables;
        MemoryNeed {
            weights,
            cache: ((4 * config.layers * sizes.keys) as u64 * options.context as u64)
                .saturating_mul(options.sequences as u64),
            buffers: columns.saturating_add(logits).saturating_add(table),
        }
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.buffers)
    }
}

/// Elements of a column in each buffer, and columns.
#[derive(Clone, Copy)]
struct Sizes {
    width: usize,
    queries: usize,
    keys: usize,
    inner: usize,
    made: usize,
    columns: usize,
    logits: usize,
}

impl Sizes {
    fn of(model: &Model, options: &LoadOptions) -> Sizes {
        let config = &model.config;
        let queries = config.heads * config.head_width;
        Sizes {
            width: config.width,
            queries,
            keys: config.kv_heads * config.head_width,
            inner: config.feed_forward,
            made: queries.max(config.feed_forward),
            columns: options.batch.max(PREFILL.min(options.context)).next_multiple_of(TILE),
            logits: options.batch.next_multiple_of(TILE),
        }
    }
}

fn is_tied(model: &Model) -> bool {
    model.embedding.name == model.head.name
}

struct Entries {
    embed: CudaFunction,
    norm: CudaFunction,
    post_norm: CudaFunction,
    activate: CudaFunction,
    heads: CudaFunction,
    attend: CudaFunction,
    /// One column or eight; 32 or 8 threads a row.
    rows: [[CudaFunction; 2]; 2],
    /// 32 or 8 threads a row, and how many blocks the card holds at once.
    normed_rows: [(CudaFunction, usize); 2],
    /// As above.
    gated_rows: [(CudaFunction, usize); 2],
    /// One column, two rows a warp.
    pairs: CudaFunction,
    /// Many columns, on the tensor cores.
    tiles: CudaFunction,
    /// The same for large products, and how many blocks the card holds at once.
    wide_tiles: (CudaFunction, usize),
    argmax: CudaFunction,
}

impl Entries {
    /// `width`: of the widest activations that are made in shared memory.
    fn of(gpu: &Gpu, width: usize) -> Result<Entries> {
        let shared = fused::shared_bytes(width);
        let resident = |name: &str| -> Result<_> {
            let entry = gpu.entry(name)?;
            gpu.allow_shared(&entry, shared)?;
            let blocks = gpu.resident_blocks(&entry, fused::TEAM, shared)?;
            Ok((entry, blocks))
        };
        let wide_tiles = gpu.entry("kiln_wide_tiles")?;
        gpu.allow_shared(&wide_tiles, wide_tiles::SHARED_BYTES)?;
        let blocks = gpu.resident_blocks(&wide_tiles, wide_tiles::CREW, wide_tiles::SHARED_BYTES)?;
        Ok(Entries {
            embed: gpu.entry("kiln_embed")?,
            norm: gpu.entry("kiln_norm")?,
            post_norm: gpu.entry("kiln_post_norm")?,
            activate: gpu.entry("kiln_activate")?,
            heads: gpu.entry("kiln_heads")?,
            attend: gpu.entry("kiln_attend")?,
            rows: [
                [gpu.entry("kiln_rows_wide")?, gpu.entry("kiln_rows_narrow")?],
                [gpu.entry("kiln_batch_wide")?, gpu.entry("kiln_batch_narrow")?],
            ],
            normed_rows: [resident("kiln_normed_rows_wide")?, resident("kiln_normed_rows_narrow")?],
            pairs: gpu.entry("kiln_pairs")?,
            tiles: gpu.entry("kiln_tiles")?,
            wide_tiles: (wide_tiles, blocks),
            argmax: gpu.entry("kiln_argmax")?,
            gated_rows: [resident("kiln_gated_rows_wide")?, resident("kiln_gated_rows_narrow")?],
        })
    }
}

struct Layer {
    query: Uploaded,
    key: Uploaded,
    value: Uploaded,
    output: Uploaded,
    gate: Uploaded,
    up: Uploaded,
    down: Uploaded,
    attention_norm: DeviceBuffer<f32>,
    feed_forward_norm: DeviceBuffer<f32>,
    query_bias: Option<DeviceBuffer<f32>>,
    key_bias: Option<DeviceBuffer<f32>>,
    value_bias: Option<DeviceBuffer<f32>>,
    query_norm: Option<DeviceBuffer<f32>>,
    key_norm: Option<DeviceBuffer<f32>>,
    post_attention_norm: Option<DeviceBuffer<f32>>,
    post_feed_forward_norm: Option<DeviceBuffer<f32>>,
}

impl Layer {
    fn matrices(&self) -> [&Uploaded; 7] {
        [&self.query, &self.key, &self.value, &self.output, &self.gate, &self.up, &self.down]
    }
}

/// Room for columns of activations.
struct Room {
    values: DeviceBuffer<f32>,
    quants: DeviceBuffer<i8>,
    meta: DeviceBuffer<u64>,
}

impl Room {
    fn new(gpu: &Gpu, elements: usize) -> Result<Room> {
        Ok(Room {
            values: gpu.zeros(elements)?,
            quants: gpu.zeros(elements)?,
            meta: gpu.zeros(elements.div_ceil(PART))?,
        })
    }

    fn whole(&self) -> Activations {
        Activations {
            values: self.values.cu_deviceptr() as *mut f32,
            quants: self.quants.cu_deviceptr() as *mut i8,
            meta: self.meta.cu_deviceptr() as *mut PartMeta,
        }
    }
}

/// A model on a card.
pub struct Cuda {
    gpu: Gpu,
    entries: Entries,
    model: Model,
    options: LoadOptions,
    sizes: Sizes,
    layers: Vec<Layer>,
    embedding: Option<Uploaded>,
    head: Uploaded,
    output_norm: DeviceBuffer<f32>,
    global_angles: DeviceBuffer<f32>,
    local_angles: DeviceBuffer<f32>,
    /// Halves: sequence, layer, head, position, element.
    keys: DeviceBuffer<u16>,
    values: DeviceBuffer<u16>,
    /// The first position, then tokens.
    state: DeviceBuffer<u32>,
    fault: DeviceBuffer<u32>,
    residual: DeviceBuffer<f32>,
    query: DeviceBuffer<f32>,
    key: DeviceBuffer<f32>,
    value: DeviceBuffer<f32>,
    added: DeviceBuffer<f32>,
    gate: DeviceBuffer<f32>,
    up: DeviceBuffer<f32>,
    normed: Room,
    made: Room,
    logits: DeviceBuffer<f32>,
    host_state: PinnedHostBuffer<u32>,
    host_fault: PinnedHostBuffer<u32>,
    host_logits: PinnedHostBuffer<f32>,
    positions: Positions,
    wanted: usize,
    /// Logits of all pieces, if a step has several pieces with outputs.
    gathered: Vec<f32>,
    selector: Selector,
    /// The sequence whose place in the cache is launched with.
    sequence: usize,
    /// A graph for each sequence.
    steps: Vec<Option<Graph>>,
    best: best::Best,
    /// How many rows of each part of the gated pair are ready: zeros between launches.
    ready: DeviceBuffer<u32>,
    /// Take the entries of batches for single columns too: for comparisons.
    unfused: bool,
    /// All matrices are quantised.
    tiled: bool,
    /// A planted defect.
    stale: bool,
    /// Launch one by one, without the graph: for comparisons.
    eager: bool,
}

impl Cuda {
    /// Loads a model onto card `index`.
    ///
    /// # Errors
    /// There is no such card, or the model does not fit it, with the terms.
    pub fn load(index: usize, model: Model, options: &LoadOptions) -> Result<Cuda> {
        if options.context == 0 || options.batch == 0 || options.sequences == 0 {
            return Err("the context, the batch and the sequences must be at least 1".into());
        }
        let config = &model.config;
        if !config.head_width.is_multiple_of(8) {
            return Err(
                format!("heads of {} elements: a card takes multiples of 8", config.head_width).into()
            );
        }
        for (number, layer) in model.layers.iter().enumerate() {
            let refused = |problem: String| format!("{} on a card: layer {number}: {problem}", config.spec);
            dense::check(layer.ops()).map_err(refused)?;
        }
        let gpu = Gpu::open(index)?;
        let need = MemoryNeed::of(&model, options);
        let free = gpu.free_bytes()?;
        if need.total() > free {
            return Err(does_not_fit(&need, free, &model, options).into());
        }
        let entries = Entries::of(&gpu, widest_fused(&model))?;
        gpu.allow_shared(&entries.attend, attend::shared_bytes(config.head_width, options.context))?;
        let sizes = Sizes::of(&model, options);
        let stream = &gpu.stream;
        let matrix = |tensor| upload::upload(stream, &model.file, tensor, options.threads);
        let vector = |values: &[f32]| -> Result<_> { Ok(DeviceBuffer::from_host(stream, values)?) };
        let mut layers = Vec::with_capacity(model.layers.len());
        for layer in &model.layers {
            use model::{Matrix, Vector};
            let matrix = |role| layer.matrix(role).map(matrix).expect("the form has all matrices");
            let optional = |role| layer.vector(role).map(vector).transpose();
            layers.push(Layer {
                query: matrix(Matrix::Query)?,
                key: matrix(Matrix::Key)?,
                value: matrix(Matrix::Value)?,
                output: matrix(Matrix::Output)?,
                gate: matrix(Matrix::Gate)?,
                up: matrix(Matrix::Up)?,
                down: matrix(Matrix::Down)?,
                attention_norm: vector(layer.weight(Vector::AttentionNorm))?,
                feed_forward_norm: vector(layer.weight(Vector::FeedForwardNorm))?,
                query_bias: optional(Vector::QueryBias)?,
                key_bias: optional(Vector::KeyBias)?,
                value_bias: optional(Vector::ValueBias)?,
                query_norm: optional(Vector::QueryNorm)?,
                key_norm: optional(Vector::KeyNorm)?,
                post_attention_norm: optional(Vector::PostAttentionNorm)?,
                post_feed_forward_norm: optional(Vector::PostFeedForwardNorm)?,
            });
        }
        let angles = |global| -> Result<_> {
            let table = model.rope_table(global, options.context);
            Ok(DeviceBuffer::from_host(stream, table.as_flattened())?)
        };
        let local_angles = if config.local_rope.is_some() { angles(false)? } else { gpu.zeros(1)? };
        let matrices = model.layers.iter().flat_map(model::Layer::matrices).chain([&model.head]);
        let tiled = matrices.map(|tensor| tensor.kind).all(upload::is_quantised);
        let cache = options.sequences * config.layers * sizes.keys * options.context;
        let vocabulary = model.vocabulary();
        Ok(Cuda {
            embedding: if is_tied(&model) { None } else { Some(matrix(&model.embedding)?) },
            head: matrix(&model.head)?,
            output_norm: vector(&model.output_norm)?,
            global_angles: angles(true)?,
            local_angles,
            keys: gpu.zeros(cache)?,
            values: gpu.zeros(cache)?,
            state: gpu.zeros(1 + sizes.columns)?,
            fault: DeviceBuffer::from_host(stream, &[NO_FAULT])?,
            residual: gpu.zeros(sizes.columns * sizes.width)?,
            query: gpu.zeros(sizes.columns * sizes.queries)?,
            key: gpu.zeros(sizes.columns * sizes.keys)?,
            value: gpu.zeros(sizes.columns * sizes.keys)?,
            added: gpu.zeros(sizes.columns * sizes.width)?,
            gate: gpu.zeros(sizes.columns * sizes.inner)?,
            up: gpu.zeros(sizes.columns * sizes.inner)?,
            normed: Room::new(&gpu, sizes.columns * sizes.width)?,
            made: Room::new(&gpu, sizes.columns * sizes.made)?,
            logits: gpu.zeros(sizes.logits * vocabulary)?,
            host_state: PinnedHostBuffer::zeroed(&gpu.context, 1 + sizes.columns)?,
            host_fault: PinnedHostBuffer::from_slice(&gpu.context, &[NO_FAULT])?,
            host_logits: PinnedHostBuffer::zeroed(&gpu.context, sizes.logits * vocabulary)?,
            positions: Positions::new(options.sequences, options.context),
            wanted: 0,
            gathered: Vec::new(),
            selector: Selector::default(),
            sequence: 0,
            steps: (0..options.sequences).map(|_| None).collect(),
            best: best::Best::new(&gpu, options.sequences)?,
            ready: gpu.zeros(sizes.inner.div_ceil(PART))?,
            unfused: false,
            stale: false,
            tiled,
            eager: false,
            options: *options,
            sizes,
            layers,
            entries,
            model,
            gpu,
        })
    }

    /// The halves of the cache, keys then values, for comparisons.
    ///
    /// # Errors
    /// The driver's.
    pub fn cache(&self) -> Result<(Vec<u16>, Vec<u16>)> {
        Ok((self.keys.to_host_vec(&self.gpu.stream)?, self.values.to_host_vec(&self.gpu.stream)?))
    }

    /// Launch steps one by one instead of replaying the graph.
    pub fn set_eager(&mut self, eager: bool) {
        self.eager = eager;
    }

    /// A planted defect: replay without the new token and position.
    pub fn set_stale(&mut self, stale: bool) {
        self.stale = stale;
    }

    /// A planted defect: one bit of the first key.
    ///
    /// # Errors
    /// The driver's.
    pub fn flip_cache_bit(&mut self) -> Result<()> {
        let mut keys = self.keys.to_host_vec(&self.gpu.stream)?;
        keys[0] ^= 1;
        Ok(self.keys.copy_from_host(&self.gpu.stream, &keys)?)
    }

    /// A planted defect: one bit of the last norm's weight.
    ///
    /// # Errors
    /// The driver's.
    pub fn flip_weight_bit(&mut self) -> Result<()> {
        let mut weights = self.output_norm.to_host_vec(&self.gpu.stream)?;
        weights[0] = f32::from_bits(weights[0].to_bits() ^ 1 << 16);
        Ok(self.output_norm.copy_from_host(&self.gpu.stream, &weights)?)
    }

    /// Take the entries of batches for single columns too.
    pub fn set_unfused(&mut self, unfused: bool) {
        self.unfused = unfused;
        self.steps.fill_with(|| None);
        self.best.forget();
    }

    /// Runs columns of one sequence at consecutive positions.
    fn run_batch(&mut self, columns: &[Column], wanted: Wanted) -> Result<()> {
        let (count, position) = (columns.len(), columns[0].position);
        self.sequence = columns[0].sequence.0 as usize;
        self.best.state_changes();
        let first = match wanted {
            Wanted::Nothing => count,
            Wanted::Last => count - 1,
            Wanted::All => 0,
        };
        let state = self.host_state.as_mut_slice();
        if !(self.stale && position == self.options.context - 1) {
            state[0] = u32::try_from(position)?;
            for (word, column) in state[1..=count].iter_mut().zip(columns) {
                *word = column.token;
            }
        }
        if count == 1 && first == 0 && !self.eager {
            if self.steps[self.sequence].is_none() {
                let step = self.gpu.record(|| self.enqueue(1, 0))?;
                self.steps[self.sequence] = Some(step);
            }
            if let Some(step) = &self.steps[self.sequence] {
                self.gpu.replay(step)?;
            }
        } else {
            self.enqueue(count, first)?;
        }
        self.gpu.wait()?;
        Ok(())
    }

    /// Enqueues a batch of `count` columns, with logits of those from `first` on, from copy to copy.
    fn enqueue(&self, count: usize, first: usize) -> Result<()> {
        let stream = self.gpu.stream.cu_stream();
        // SAFETY: the buffers are as long as the copies, and live until the caller waits.
        unsafe {
            let state = self.host_state.as_ptr();
            memory::memcpy_htod_async(self.state.cu_deviceptr(), state, 4 * (1 + count), stream)?;
        }
        self.embed(count)?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(index, layer, count)?;
            self.feed_forward(index, layer, count)?;
        }
        if first < count {
            self.head(count, first)?;
            self.bring_logits(count - first)?;
        }
        // SAFETY: as above.
        unsafe {
            let fault = self.host_fault.as_ptr().cast_mut();
            memory::memcpy_dtoh_async(fault, self.fault.cu_deviceptr(), 4, stream)?;
        }
        Ok(())
    }

    fn embed(&self, count: usize) -> Result<()> {
        let args = EmbedArgs {
            table: self.embedding.as_ref().unwrap_or(&self.head).matrix,
            state: self.state.cu_deviceptr() as *const u32,
            out: self.residual.cu_deviceptr() as *mut f32,
            fault: self.fault(),
            scale: self.model.config.embedding_scale,
            context: self.options.context as u32,
        };
        // SAFETY: a block a column, and the buffers hold `count` columns.
        unsafe { self.gpu.launch(&self.entries.embed, (count, 1), THREADS, 0, &args) }
    }

    fn norm(
        &self,
        x: &DeviceBuffer<f32>,
        first: usize,
        weight: &DeviceBuffer<f32>,
        count: usize,
    ) -> Result<()> {
        let width = self.sizes.width;
        let args = NormArgs {
            x: (x.cu_deviceptr() + (4 * first * width) as u64) as *const f32,
            weight: weight.cu_deviceptr() as *const f32,
            out: self.normed.whole(),
            width: width as u32,
            epsilon: self.model.config.epsilon,
            tiled: self.is_tiled(count),
            reserved: 0,
        };
        // SAFETY: a block a column, and the buffers hold `first + count` columns.
        unsafe { self.gpu.launch(&self.entries.norm, (count, 1), THREADS, 0, &args) }
    }

    fn attention(&self, index: usize, layer: &Layer, count: usize) -> Result<()> {
        let matrices = [(&layer.query, &self.query), (&layer.key, &self.key), (&layer.value, &self.value)];
        self.normed_rows(&matrices, &layer.attention_norm, count, 0, mode::STORE, 0)?;
        let config = &self.model.config;
        let cache = (self.sequence * self.layers.len() + index) * self.sizes.keys * self.options.context;
        let global = config.is_global(index);
        let angles = if global { &self.global_angles } else { &self.local_angles };
        let args = HeadsArgs {
            query: self.query.cu_deviceptr() as *mut f32,
            key: self.key.cu_deviceptr() as *const f32,
            value: self.value.cu_deviceptr() as *const f32,
            query_bias: optional(&layer.query_bias),
            key_bias: optional(&layer.key_bias),
            value_bias: optional(&layer.value_bias),
            query_norm: optional(&layer.query_norm),
            key_norm: optional(&layer.key_norm),
            angles: angles.cu_deviceptr() as *const f32,
            keys: (self.keys.cu_deviceptr() + 2 * cache as u64) as *mut u16,
            values: (self.values.cu_deviceptr() + 2 * cache as u64) as *mut u16,
            state: self.state.cu_deviceptr() as *const u32,
            fault: self.fault(),
            out: self.made.whole(),
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            width: config.head_width as u32,
            context: self.options.context as u32,
            pairs: (config.rope.dimensions / 2) as u32,
            halves: u32::from(config.pairing == Pairing::Halves),
            window: if global { u32::MAX } else { u32::try_from(config.window).unwrap_or(u32::MAX) },
            epsilon: config.epsilon,
            scale: config.attention_scale,
            fused: u32::from(self.is_fused(count)),
            tiled: self.is_tiled(count),
            reserved: 0,
        };
        let shared = attend::shared_bytes(config.head_width, self.options.context);
        // SAFETY: the grids are what the modules say.
        unsafe {
            if !self.is_fused(count) {
                let heads = (config.heads + config.kv_heads, count);
                self.gpu.launch(&self.entries.heads, heads, HEAD_THREADS, 8 * config.head_width, &args)?;
            }
            self.gpu.launch(&self.entries.attend, (config.heads, count), THREADS, shared, &args)?;
        }
        if !config.head_width.is_multiple_of(PART) {
            let values = self.made.values.cu_deviceptr() as *const f32;
            self.activate(values, std::ptr::null(), self.sizes.queries, count)?;
        }
        let stage = STAGE_EMBEDDING + 1 + 2 * index as u32;
        self.add(&layer.output, &layer.post_attention_norm, stage, count, false)
    }

    fn feed_forward(&self, index: usize, layer: &Layer, count: usize) -> Result<()> {
        let stage = STAGE_EMBEDDING + 2 + 2 * index as u32;
        if self.is_fused(count) && self.sizes.inner.is_multiple_of(PART) {
            self.gated_rows(layer)?;
            return self.add(
                &layer.down,
                &layer.post_feed_forward_norm,
                stage,
                count,
                is_small(self.sizes.inner),
            );
        }
        let matrices = [(&layer.gate, &self.gate), (&layer.up, &self.up)];
        self.normed_rows(&matrices, &layer.feed_forward_norm, count, 0, mode::STORE, 0)?;
        let (gate, up) = (self.gate.cu_deviceptr() as *const f32, self.up.cu_deviceptr() as *const f32);
        self.activate(gate, up, self.sizes.inner, count)?;
        self.add(&layer.down, &layer.post_feed_forward_norm, stage, count, false)
    }

    /// The stage that a fault among the logits names.
    fn logits_stage(&self) -> u32 {
        STAGE_EMBEDDING + 1 + 2 * self.layers.len() as u32
    }

    /// Logits of the columns from `first` on.
    fn head(&self, count: usize, first: usize) -> Result<()> {
        let wanted = count - first;
        let matrices = [(&self.head, &self.logits)];
        self.normed_rows(&matrices, &self.output_norm, wanted, first, mode::CHECK, self.logits_stage())
    }

    /// Enqueues the copy of the first `wanted` columns of logits to the host.
    fn bring_logits(&self, wanted: usize) -> Result<()> {
        let bytes = 4 * wanted * self.model.vocabulary();
        let target = self.host_logits.as_ptr().cast_mut();
        // SAFETY: the buffers hold the wanted columns, and live until the caller waits.
        unsafe {
            memory::memcpy_dtoh_async(
                target,
                self.logits.cu_deviceptr(),
                bytes,
                self.gpu.stream.cu_stream(),
            )?;
        }
        Ok(())
    }

    /// Matrices times the norms of the residual stream's columns from `first` on.
    fn normed_rows(
        &self,
        matrices: &[(&Uploaded, &DeviceBuffer<f32>)],
        norm: &DeviceBuffer<f32>,
        count: usize,
        first: usize,
        mode: u32,
        stage: u32,
    ) -> Result<()> {
        if !self.is_fused(count) {
            self.norm(&self.residual, first, norm, count)?;
            return self.rows(matrices, &self.normed, count, mode, stage, first);
        }
        let args = self.row_args(matrices, &self.normed, count, mode, stage, first);
        let residual = self.residual.cu_deviceptr() + (4 * first * self.sizes.width) as u64;
        self.prepared_rows(args, norm.cu_deviceptr() as *const f32, residual as *const f32)
    }

    /// Rows times one column that each block makes for itself from `source`, through the norm if there is one.
    fn prepared_rows(&self, mut args: RowsArgs, norm: *const f32, source: *const f32) -> Result<()> {
        args.norm = norm;
        args.residual = source;
        let narrow = is_narrow(&[args.first, args.second, args.third]);
        let each = [args.first, args.second, args.third].map(|m| m.rows as usize);
        let needed = (rows::blocks(each, span(narrow)) * THREADS).div_ceil(fused::TEAM);
        let (entry, resident) = &self.entries.normed_rows[usize::from(narrow)];
        let shared = fused::shared_bytes(args.first.columns as usize);
        // SAFETY: any grid covers the rows; the shared memory is what the module says.
        unsafe { self.gpu.launch(entry, (needed.min(*resident), 1), fused::TEAM, shared, &args) }
    }

    /// The gated pair of one column into `made`.
    fn gated_rows(&self, layer: &Layer) -> Result<()> {
        let matrices = [(&layer.gate, &self.gate), (&layer.up, &self.up)];
        let mut args = self.row_args(&matrices, &self.made, 1, mode::STORE, 0, 0);
        args.norm = layer.feed_forward_norm.cu_deviceptr() as *const f32;
        args.residual = self.residual.cu_deviceptr() as *const f32;
        if !is_small(self.sizes.inner) {
            args.third_out = self.ready.cu_deviceptr() as *mut f32;
        }
        let narrow = is_narrow(&[args.first, args.second]);
        let needed = (args.first.rows as usize * span(narrow)).div_ceil(fused::TEAM);
        let (entry, resident) = &self.entries.gated_rows[usize::from(narrow)];
        let shared = fused::shared_bytes(self.sizes.width);
        // SAFETY: any grid covers the rows; the shared memory and the counters are what the module says.
        unsafe { self.gpu.launch(entry, (needed.min(*resident), 1), fused::TEAM, shared, &args) }
    }

    /// Whether a batch is multiplied on the tensor cores, as the entries take it.
    fn is_tiled(&self, count: usize) -> u32 {
        u32::from(count > 1 && self.tiled)
    }

    /// Whether a batch takes the entries that do several operations at once.
    fn is_fused(&self, count: usize) -> bool {
        count == 1 && !self.unfused
    }

    /// `residual += matrix * made`, through a norm if there is one; `raw`: `made` is not quantised yet.
    fn add(
        &self,
        matrix: &Uploaded,
        norm: &Option<DeviceBuffer<f32>>,
        stage: u32,
        count: usize,
        raw: bool,
    ) -> Result<()> {
        let (out, mode) =
            if norm.is_some() { (&self.added, mode::STORE) } else { (&self.residual, mode::ADD) };
        let matrices = [(matrix, out)];
        if raw {
            let args = self.row_args(&matrices, &self.made, count, mode, stage, 0);
            self.prepared_rows(args, std::ptr::null(), self.made.values.cu_deviceptr() as *const f32)?;
        } else {
            self.rows(&matrices, &self.made, count, mode, stage, 0)?;
        }
        let Some(norm) = norm else { return Ok(()) };
        let args = PostArgs {
            added: self.added.cu_deviceptr() as *const f32,
            weight: norm.cu_deviceptr() as *const f32,
            residual: self.residual.cu_deviceptr() as *mut f32,
            fault: self.fault(),
            width: self.sizes.width as u32,
            epsilon: self.model.config.epsilon,
            stage,
            reserved: 0,
        };
        // SAFETY: a block a column.
        unsafe { self.gpu.launch(&self.entries.post_norm, (count, 1), THREADS, 0, &args) }
    }

    fn activate(&self, gate: *const f32, up: *const f32, width: usize, count: usize) -> Result<()> {
        let args = ActivateArgs {
            gate,
            up,
            out: self.made.whole(),
            width: width as u32,
            activation: self.activation(),
            tiled: self.is_tiled(count),
            limit: f32::INFINITY,
        };
        let grid = (width.div_ceil(THREADS), count);
        // SAFETY: the grid covers the columns, and the buffers hold them.
        unsafe { self.gpu.launch(&self.entries.activate, grid, THREADS, 0, &args) }
    }

    fn rows(
        &self,
        matrices: &[(&Uploaded, &DeviceBuffer<f32>)],
        x: &Room,
        count: usize,
        mode: u32,
        stage: u32,
        first_column: usize,
    ) -> Result<()> {
        let args = self.row_args(matrices, x, count, mode, stage, first_column);
        let narrow = is_narrow(&[args.first, args.second, args.third]);
        let each = [args.first, args.second, args.third].map(|m| m.rows as usize);
        if self.is_fused(count) && !narrow && matrices.len() == 1 {
            let grid = (each[0].div_ceil(2).div_ceil(THREADS / 32), 1);
            // SAFETY: the grid covers the pairs of rows.
            return unsafe { self.gpu.launch(&self.entries.pairs, grid, THREADS, 0, &args) };
        }
        if self.is_tiled(count) != 0 {
            let (entry, resident) = &self.entries.wide_tiles;
            let tiles =
                each.into_iter().map(wide_tiles::tiles).sum::<usize>() * count.div_ceil(wide_tiles::SIDE);
            let parts = args.first.columns as usize / PART;
            // Too few large tiles would leave multiprocessors idle.
            if parts <= wide_tiles::MAX_PARTS && 2 * tiles >= *resident {
                let (crew, shared) = (wide_tiles::CREW, wide_tiles::SHARED_BYTES);
                // SAFETY: the grid covers the tiles of rows and columns; columns are padded.
                return unsafe { self.gpu.launch(entry, (tiles, 1), crew, shared, &args) };
            }
            let tiles = each.into_iter().map(tiles::tiles).sum::<usize>() * count.div_ceil(TILE);
            // SAFETY: the grid covers the tiles of rows and columns; columns are padded.
            return unsafe {
                self.gpu.launch(&self.entries.tiles, (tiles, 1), tiles::CREW, tiles::SHARED_BYTES, &args)
            };
        }
        let (batch, groups) = if count == 1 { (0, 1) } else { (1, count.div_ceil(COLUMNS)) };
        let entry = &self.entries.rows[batch][usize::from(narrow)];
        // SAFETY: the grid covers the rows and columns; columns are padded.
        unsafe { self.gpu.launch(entry, (rows::blocks(each, span(narrow)), groups), THREADS, 0, &args) }
    }

    fn row_args(
        &self,
        matrices: &[(&Uploaded, &DeviceBuffer<f32>)],
        x: &Room,
        count: usize,
        mode: u32,
        stage: u32,
        first_column: usize,
    ) -> RowsArgs {
        let matrix = |i: usize| matrices.get(i).map_or(Matrix::NONE, |(m, _)| m.matrix);
        let out =
            |i: usize| matrices.get(i).map_or(std::ptr::null_mut(), |(_, o)| o.cu_deviceptr() as *mut f32);
        RowsArgs {
            first: matrix(0),
            second: matrix(1),
            third: matrix(2),
            first_out: out(0),
            second_out: out(1),
            third_out: out(2),
            x: x.whole(),
            norm: std::ptr::null(),
            residual: std::ptr::null(),
            fault: self.fault(),
            columns: count as u32,
            mode,
            stage,
            first_column: first_column as u32,
            epsilon: self.model.config.epsilon,
            activation: self.activation(),
            limit: f32::INFINITY,
            reserved: 0,
        }
    }

    fn activation(&self) -> u32 {
        u32::from(self.model.config.activation == Activation::GeluTanh)
    }

    fn fault(&self) -> *mut u32 {
        self.fault.cu_deviceptr() as *mut u32
    }

    /// The fault that the last batch raised, which is then cleared.
    fn take_fault(&mut self, position: usize) -> std::result::Result<(), Error> {
        let fault = self.host_fault.as_slice()[0];
        if fault == NO_FAULT {
            return Ok(());
        }
        if let Err(error) = self.fault.copy_from_host(&self.gpu.stream, &[NO_FAULT]) {
            return Err(Error::Request(crate::gpu::in_words(error).to_string()));
        }
        let (stage, column) = (fault >> 16, (fault & 0xffff) as usize);
        let position = position + column;
        if stage == STAGE_RANGE {
            return Err(Error::Request(format!("position {position} or its token is out of range")));
        }
        let layers = self.layers.len() as u32;
        let place = match stage - STAGE_EMBEDDING {
            0 => Place::Embedding,
            n if n > 2 * layers => Place::Logits,
            n if n % 2 == 1 => Place::Attention((n / 2) as usize),
            n => Place::FeedForward((n / 2 - 1) as usize),
        };
        Err(Error::NotFinite { place, position })
    }
}

impl Backend for Cuda {
    fn description(&self) -> String {
        format!("cuda:{}, {}", self.gpu.index, self.gpu.name())
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
        self.sizes.columns
    }

    fn step(&mut self, columns: &[Column], selection: Selection) -> kiln_engine::Result<Output<'_>> {
        self.wanted = 0;
        self.gathered.clear();
        let vocabulary = self.model.vocabulary();
        self.positions.check(columns, selection, vocabulary, self.options.batch)?;
        self.positions.begin(columns);
        if let ([column], Selection::Greedy) = (columns, selection)
            && column.output
        {
            let token = best::run(self, column)?;
            return Ok(self.selector.selected(token));
        }
        let outputs = columns.iter().filter(|column| column.output).count();
        let mut rest = columns;
        while !rest.is_empty() {
            let (count, wanted) = Column::leading_run(rest, self.sizes.columns);
            let (piece, after) = rest.split_at(count);
            self.run_batch(piece, wanted)
                .map_err(|error| Error::Request(format!("cuda:{}: {error}", self.gpu.index)))?;
            self.take_fault(piece[0].position)?;
            self.positions.advance(piece);
            let made = piece.iter().filter(|column| column.output).count();
            if made > 0 && made < outputs {
                self.gathered.extend_from_slice(&self.host_logits.as_slice()[..made * vocabulary]);
            }
            rest = after;
        }
        self.wanted = outputs;
        let logits = if self.gathered.is_empty() {
            &self.host_logits.as_slice()[..outputs * vocabulary]
        } else {
            &self.gathered[..]
        };
        Ok(self.selector.select(logits, vocabulary, selection))
    }

    fn logits(&self) -> &[f32] {
        if self.wanted == 0 || self.gathered.is_empty() {
            &self.host_logits.as_slice()[..self.wanted * self.model.vocabulary()]
        } else {
            &self.gathered
        }
    }

    fn weight_bytes(&self) -> u64 {
        let layers = self.layers.iter().flat_map(Layer::matrices);
        layers.chain([&self.head]).map(Uploaded::bytes).sum()
    }
}

/// Whether 8 threads a row serve these matrices better than 32.
fn is_narrow(matrices: &[Matrix]) -> bool {
    matrices.iter().filter(|m| m.rows > 0).all(|m| m.class < class::F32 && (m.columns as usize) < 96 * PART)
}

/// Whether every block may quantise all of a column for itself.
fn is_small(width: usize) -> bool {
    width <= 4096
}

/// The widest activations that are made in shared memory.
fn widest_fused(model: &Model) -> usize {
    let inner = model.config.feed_forward;
    if is_small(inner) { inner.max(model.config.width) } else { model.config.width }
}

/// Threads a row.
fn span(narrow: bool) -> usize {
    if narrow { 8 } else { 32 }
}

fn optional(buffer: &Option<DeviceBuffer<f32>>) -> *const f32 {
    buffer.as_ref().map_or(std::ptr::null(), |buffer| buffer.cu_deviceptr() as *const f32)
}

fn does_not_fit(need: &MemoryNeed, free: u64, model: &Model, options: &LoadOptions) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    format!(
        "a context of {} does not fit the card: weights {} MiB + keys and values {} MiB + buffers {} MiB = {} MiB, and {} MiB are free ({} was trained for {})",
        options.context,
        mib(need.weights),
        mib(need.cache),
        mib(need.buffers),
        mib(need.total()),
        free >> 20,
        model.file.name(),
        model.config.trained_context,
    )
}
