//! Feed-forward blocks of which each token takes a few of many experts (see [`kiln_kernels::experts`] for the order of
//! their sums): two ways to the same bits.
//!
//! - **Selections one by one** ([`launch_selected`]), for few tokens: [`selected_gated`] makes and quantises the gated
//!   products of each selection, [`selected_down`] the down products of a token's selections and their combination.
//! - **Sorted by expert** ([`launch_grouped`]), for many: [`group`] gives each expert whole tiles of 32 columns, [`gather`]
//!   brings the activations there, [`grouped_gated`] and [`grouped_down`] multiply on the tensor cores, [`combine`] adds up
//!   what belongs to a token.
//!
//! A selection of an expert that there is not raises the range fault.

pub mod combine;
pub mod gather;
pub mod group;
pub mod grouped_down;
pub mod grouped_gated;
pub mod selected_down;
pub mod selected_gated;

use cuda_core::{CudaFunction, DeviceBuffer};
use cuda_device::thread;
use kiln_kernels::{Arith, canonical};

use crate::arith::Device;
use crate::block::{check, thread_index};
use crate::cuda::{expect_length, expect_room};
use crate::gpu::{Gpu, Result};
use crate::layout::{Activations, ExpertsArgs, Matrix, PART, PartMeta, RowsArgs, THREADS, TILE, class, mode};
use crate::tiles::{self, CREW};
use crate::upload::Uploaded;
use crate::{row, rows};

/// Experts that a block may have at most: their counts lie in shared memory.
pub const MOST_EXPERTS: usize = 4096;
/// The largest second dimension of a grid.
const MOST_IN_Y: usize = 65_535;

/// Tiles that `selections` of `experts` experts need at most: an expert's last tile may be almost empty.
pub const fn most_tiles(selections: usize, experts: usize) -> usize {
    let taken = if selections < experts { selections } else { experts };
    (selections - taken) / TILE + taken
}

/// The entries.
pub struct Entries {
    /// 32 or 8 threads a row.
    gated: [CudaFunction; 2],
    /// 32 or 8 threads a row.
    down: [CudaFunction; 2],
    group: CudaFunction,
    gather: CudaFunction,
    grouped_gated: CudaFunction,
    grouped_down: CudaFunction,
    combine: CudaFunction,
}

impl Entries {
    /// Finds them in this binary.
    ///
    /// # Errors
    /// One is missing.
    pub fn of(gpu: &Gpu) -> Result<Entries> {
        Ok(Entries {
            gated: [gpu.entry("kiln_selected_gated_wide")?, gpu.entry("kiln_selected_gated_narrow")?],
            down: [gpu.entry("kiln_selected_down_wide")?, gpu.entry("kiln_selected_down_narrow")?],
            group: gpu.entry("kiln_group")?,
            gather: gpu.entry("kiln_gather")?,
            grouped_gated: gpu.entry("kiln_grouped_gated")?,
            grouped_down: gpu.entry("kiln_grouped_down")?,
            combine: gpu.entry("kiln_combine")?,
        })
    }
}

/// The matrices of a block, an expert's after another's.
#[derive(Clone, Copy)]
pub struct Stacks<'a> {
    /// Gate rows: experts times `inner`.
    pub gate: &'a Uploaded,
    /// Up rows: as many.
    pub up: &'a Uploaded,
    /// Down rows: experts times the rows of the result.
    pub down: &'a Uploaded,
    /// Experts.
    pub experts: usize,
}

/// Columns of activations.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    /// Floats.
    pub values: &'a DeviceBuffer<f32>,
    /// Quants.
    pub quants: &'a DeviceBuffer<i8>,
    /// What goes with each part ([`PartMeta`]).
    pub meta: &'a DeviceBuffer<u64>,
}

impl Columns<'_> {
    fn expect_room(&self, name: &str, elements: usize) -> Result<()> {
        expect_room(&format!("{name} values"), self.values.len(), elements)?;
        expect_room(&format!("{name} quants"), self.quants.len(), elements)?;
        expect_room(&format!("{name} parts"), self.meta.len(), elements / PART)
    }

    fn on_card(&self) -> Activations {
        Activations {
            values: self.values.cu_deviceptr() as *mut f32,
            quants: self.quants.cu_deviceptr() as *mut i8,
            meta: self.meta.cu_deviceptr() as *mut PartMeta,
        }
    }
}

/// What both ways work on, for T tokens of U selections each. Gate and up have rows of W elements, down N rows an expert.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The matrices.
    pub stacks: Stacks<'a>,
    /// The expert of each selection: exactly T U.
    pub chosen: &'a DeviceBuffer<u32>,
    /// The weight of each selection: exactly T U.
    pub weights: &'a DeviceBuffer<f32>,
    /// The tokens' columns, as single columns take them: at least T W.
    pub x: Columns<'a>,
    /// Room for gated products: at least `inner` for each selection, or for each column of the tiles.
    pub made: Columns<'a>,
    /// Result: exactly T N.
    pub out: &'a DeviceBuffer<f32>,
    /// The fault word.
    pub fault: &'a DeviceBuffer<u32>,
    /// T.
    pub tokens: usize,
    /// U.
    pub used: usize,
    /// 0: silu, 1: gelu.
    pub activation: u32,
    /// The clamp of the gated pair; infinity: none.
    pub limit: f32,
    /// One of [`mode`].
    pub mode: u32,
    /// The stage that a fault names.
    pub stage: u32,
}

/// What the sorted way needs besides, for tiles of [`most_tiles`].
#[derive(Clone, Copy)]
pub struct Sorted<'a> {
    /// The selection of each column: at least 32 for each tile.
    pub order: &'a DeviceBuffer<u32>,
    /// The expert of each tile: at least as many.
    pub tile_expert: &'a DeviceBuffer<u32>,
    /// Sorted columns: at least 32 W for each tile.
    pub x: Columns<'a>,
    /// Down products: at least N for each selection.
    pub products: &'a DeviceBuffer<f32>,
}

impl Call<'_> {
    fn selections(&self) -> usize {
        self.tokens * self.used
    }

    /// The arguments of the entries, when all that both ways share has been checked.
    fn checked(&self) -> Result<ExpertsArgs> {
        let (gate, up, down) = (self.stacks.gate.matrix, self.stacks.up.matrix, self.stacks.down.matrix);
        let (experts, width, inner) = (self.stacks.experts, gate.columns as usize, down.columns as usize);
        if experts == 0 || experts > MOST_EXPERTS {
            return Err(format!("{experts} experts, expected 1 to {MOST_EXPERTS}").into());
        }
        if self.tokens == 0 || self.used == 0 || self.tokens.max(self.selections()) > MOST_IN_Y {
            let problem = format!(
                "{} tokens of {} selections, expected at least one of each and at most {MOST_IN_Y} in all",
                self.tokens, self.used
            );
            return Err(problem.into());
        }
        let rows = down.rows as usize / experts;
        for (name, elements) in [("rows of gate and up", inner), ("columns", width), ("rows of down", rows)] {
            if elements == 0 || !elements.is_multiple_of(PART) {
                return Err(format!("{elements} {name} of an expert, expected a multiple of {PART}").into());
            }
        }
        expect_length("gate rows", gate.rows as usize, experts * inner)?;
        expect_length("up rows", up.rows as usize, experts * inner)?;
        expect_length("up columns", up.columns as usize, width)?;
        expect_length("down rows", down.rows as usize, experts * rows)?;
        expect_length("chosen", self.chosen.len(), self.selections())?;
        expect_length("weights", self.weights.len(), self.selections())?;
        self.x.expect_room("x", self.tokens * width)?;
        expect_length("out", self.out.len(), self.tokens * rows)?;
        expect_length("fault", self.fault.len(), 1)?;
        if self.limit.is_nan() || self.limit <= 0.0 {
            return Err(format!("a clamp of {}, expected a positive number or infinity", self.limit).into());
        }
        let nothing = Activations {
            values: std::ptr::null_mut(),
            quants: std::ptr::null_mut(),
            meta: std::ptr::null_mut(),
        };
        Ok(ExpertsArgs {
            gate,
            up,
            down,
            chosen: self.chosen.cu_deviceptr() as *const u32,
            weights: self.weights.cu_deviceptr() as *const f32,
            x: self.x.on_card(),
            made: self.made.on_card(),
            sorted: nothing,
            order: std::ptr::null_mut(),
            tile_expert: std::ptr::null_mut(),
            products: std::ptr::null_mut(),
            out: self.out.cu_deviceptr() as *mut f32,
            fault: self.fault.cu_deviceptr() as *mut u32,
            experts: u32::try_from(experts)?,
            inner: u32::try_from(inner)?,
            rows: u32::try_from(rows)?,
            tokens: u32::try_from(self.tokens)?,
            used: u32::try_from(self.used)?,
            tiles: 0,
            activation: self.activation,
            limit: self.limit,
            mode: self.mode,
            stage: self.stage,
        })
    }
}

/// Enqueues a block, selections one by one; `narrow`: 8 threads a row instead of 32.
///
/// # Errors
/// A shape that the entries do not take, a buffer of another length than [`Call`] says, or the driver's.
pub fn launch_selected(gpu: &Gpu, entries: &Entries, call: &Call<'_>, narrow: bool) -> Result<()> {
    let args = call.checked()?;
    let (inner, rows) = (args.inner as usize, args.rows as usize);
    call.made.expect_room("made", call.selections() * inner)?;
    let span = if narrow { 8 } else { 32 };
    let down = (rows::blocks([rows, 0, 0], span), call.tokens);
    // SAFETY: the lengths were checked; the grids and the shared memory are what the modules say.
    unsafe {
        let grid = (inner / PART, call.selections());
        gpu.launch(&entries.gated[usize::from(narrow)], grid, THREADS, selected_gated::SHARED_BYTES, &args)?;
        gpu.launch(&entries.down[usize::from(narrow)], down, THREADS, 0, &args)
    }
}

/// Enqueues a block, selections sorted by expert, on the tensor cores: quantised matrices alone.
///
/// # Errors
/// A shape or type that the entries do not take, a buffer of another length than [`Call`] and [`Sorted`] say, or the
/// driver's.
pub fn launch_grouped(gpu: &Gpu, entries: &Entries, call: &Call<'_>, sorted: &Sorted<'_>) -> Result<()> {
    let mut args = call.checked()?;
    for (name, matrix) in [("gate", args.gate), ("up", args.up), ("down", args.down)] {
        if matrix.class >= class::F32 {
            return Err(format!("{name} is not quantised: the tensor cores take 8 bit products").into());
        }
    }
    let (width, inner, rows) = (args.gate.columns as usize, args.inner as usize, args.rows as usize);
    let tiles = most_tiles(call.selections(), call.stacks.experts);
    expect_room("order", sorted.order.len(), tiles * TILE)?;
    expect_room("tile experts", sorted.tile_expert.len(), tiles)?;
    sorted.x.expect_room("sorted", tiles * TILE * width)?;
    call.made.expect_room("made", tiles * TILE * inner)?;
    expect_room("products", sorted.products.len(), call.selections() * rows)?;
    args.order = sorted.order.cu_deviceptr() as *mut u32;
    args.tile_expert = sorted.tile_expert.cu_deviceptr() as *mut u32;
    args.sorted = sorted.x.on_card();
    args.products = sorted.products.cu_deviceptr() as *mut f32;
    args.tiles = u32::try_from(tiles)?;
    let (one, combined) = ((1, 1), (rows.div_ceil(THREADS), call.tokens));
    // SAFETY: the lengths were checked; the grids and the shared memory are what the modules say.
    unsafe {
        gpu.launch(&entries.group, one, THREADS, group::shared_bytes(call.stacks.experts), &args)?;
        gpu.launch(&entries.gather, (tiles * TILE, 1), THREADS, 0, &args)?;
        let gated = (inner / TILE * tiles, 1);
        gpu.launch(&entries.grouped_gated, gated, CREW, tiles::SHARED_BYTES, &args)?;
        let down = (rows / TILE * tiles, 1);
        gpu.launch(&entries.grouped_down, down, CREW, tiles::SHARED_BYTES, &args)?;
        gpu.launch(&entries.combine, combined, THREADS, 0, &args)
    }
}

/// The tile's columns as the tiles of plain rows take them.
#[inline(always)]
fn columns_of(x: Activations) -> RowsArgs {
    RowsArgs {
        first: Matrix::NONE,
        second: Matrix::NONE,
        third: Matrix::NONE,
        first_out: std::ptr::null_mut(),
        second_out: std::ptr::null_mut(),
        third_out: std::ptr::null_mut(),
        x,
        norm: std::ptr::null(),
        residual: std::ptr::null(),
        fault: std::ptr::null_mut(),
        columns: 0,
        mode: mode::STORE,
        stage: 0,
        first_column: 0,
        epsilon: 0.0,
        activation: 0,
        limit: f32::INFINITY,
        reserved: 0,
    }
}

/// The products of 32 rows from `row` with 32 columns from `column`, two for each thread of a block: row `item % 32` and
/// column `item / 32` of the items `thread` and `thread + CREW`.
///
/// # Safety
/// The rows are in the matrix, which is quantised, and `row` is a multiple of 32; the columns are in `x`; the whole block
/// calls it, with [`tiles::SHARED_BYTES`] of shared memory.
#[inline(always)]
unsafe fn tile_products(m: &Matrix, row: usize, x: Activations, column: usize, shared: *mut f32) -> [f32; 2] {
    let args = &columns_of(x);
    let base = row + thread_index() / 256 * 16;
    // SAFETY: the caller's promise.
    unsafe {
        match m.class {
            class::Q4_0 => tiles::partials::<row::Q4_0>(args, m, base, column, shared),
            class::Q4_1 => tiles::partials::<row::Q4_1>(args, m, base, column, shared),
            class::BYTES => tiles::partials::<row::Bytes>(args, m, base, column, shared),
            class::Q5_1 => tiles::partials::<row::Q5_1>(args, m, base, column, shared),
            class::Q2K => tiles::partials::<row::Q2K>(args, m, base, column, shared),
            class::Q3K => tiles::partials::<row::Q3K>(args, m, base, column, shared),
            class::Q4K => tiles::partials::<row::Q4K>(args, m, base, column, shared),
            class::Q5K => tiles::partials::<row::Q5K>(args, m, base, column, shared),
            _ => tiles::partials::<row::Q6K>(args, m, base, column, shared),
        }
        thread::sync_threads();
        let a = Device;
        let sum = |item: usize| {
            let p = (shared as *const f32).add(item % TILE * TILE + item / TILE);
            let part = |w: usize| *p.add(w * TILE * TILE);
            let four = |w: usize| a.add(part(w), part(w + 4));
            let two = |w: usize| a.add(four(w), four(w + 2));
            canonical(a.add(two(0), two(1)))
        };
        let sums = [sum(thread_index()), sum(thread_index() + CREW)];
        // Nobody writes the next tile's partials before all have read these.
        thread::sync_threads();
        sums
    }
}

/// Stores an element of a token's result as the mode says.
///
/// # Safety
/// `args.out` has it.
#[inline(always)]
unsafe fn finish(args: &ExpertsArgs, token: usize, row: usize, sum: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let at = args.out.add(token * args.rows as usize + row);
        let mut value = sum;
        if args.mode == mode::ADD {
            value = Device.add(*at, value);
        }
        if args.mode != mode::STORE {
            check(value, args.fault, args.stage, token as u32);
        }
        *at = value;
    }
}

const _: () = assert!(TILE == PART, "a column of a tile of gated products is a part");
const _: () = assert!(TILE * TILE == 2 * CREW, "a thread has two elements of a tile");
