//! What host and device agree on: matrices as they lie on the card, activations, and the arguments of the entries.
//!
//! A quantised matrix is repacked on upload so that every load is aligned and wide: 32 weights (a *part*) are 16 bytes of
//! nibbles or 32 signed bytes, and the small numbers of the parts lie in arrays of their own. The bits that a row's walk
//! multiplies are those of the file; only their places change.

use kiln_engine::gguf::TensorType;

/// Weights of a part.
pub const PART: usize = 32;
/// Columns that one warp takes at once in a batch of float rows.
pub const COLUMNS: usize = 8;
/// Rows and columns of a tile on the tensor cores; buffers of columns are padded to a multiple of it.
pub const TILE: usize = 32;
/// Threads of a block in every launch, and what the entries' launch bounds say.
pub const THREADS: usize = 256;

/// How a tensor's parts are packed; the device's dispatch is over these numbers.
pub mod class {
    /// Nibbles less 8, a scale.
    pub const Q4_0: u32 = 0;
    /// Nibbles, scale and minimum.
    pub const Q4_1: u32 = 1;
    /// Bytes, a scale: q5_0, q8_0 and iq4_nl.
    pub const BYTES: u32 = 2;
    /// Bytes, scale and minimum.
    pub const Q5_1: u32 = 3;
    /// Nibbles, factors and minimum factors of halves.
    pub const Q2K: u32 = 4;
    /// Nibbles less 4, factors of halves.
    pub const Q3K: u32 = 5;
    /// Nibbles, a factor and a minimum factor.
    pub const Q4K: u32 = 6;
    /// Bytes, a factor and a minimum factor.
    pub const Q5K: u32 = 7;
    /// Bytes, factors of halves.
    pub const Q6K: u32 = 8;
    /// f32 words.
    pub const F32: u32 = 9;
    /// Halves.
    pub const F16: u32 = 10;
    /// Upper halves of f32.
    pub const BF16: u32 = 11;
}

/// Where and how a matrix lies on the card. `Copy`, without a lifetime: its owner is [`crate::upload::Uploaded`].
///
/// For R rows of P parts: `quants` is 16 R P (nibbles) or 32 R P bytes; `factors` R P times 2 or 4 bytes, in classes that
/// have them; `scales` R P halves, R P pairs of halves, or a pair for every 8 parts. For floats `quants` is the tensor as
/// the file has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Quants, or floats.
    pub quants: *const u8,
    /// Integer factors.
    pub factors: *const u8,
    /// Scales, and minimums.
    pub scales: *const u8,
    /// Rows.
    pub rows: u32,
    /// Columns: 32 P.
    pub columns: u32,
    /// One of [`class`].
    pub class: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

// SAFETY: plain addresses on the card, which only the device follows.
unsafe impl Send for Matrix {}

impl Matrix {
    /// A matrix of no rows.
    pub const NONE: Matrix = Matrix {
        quants: std::ptr::null(),
        factors: std::ptr::null(),
        scales: std::ptr::null(),
        rows: 0,
        columns: 0,
        class: 0,
        reserved: 0,
    };
}

/// The class of a type.
pub fn class_of(kind: TensorType) -> u32 {
    match kind {
        TensorType::Q4_0 => class::Q4_0,
        TensorType::Q4_1 => class::Q4_1,
        TensorType::Q5_0 | TensorType::Q8_0 | TensorType::Iq4Nl => class::BYTES,
        TensorType::Q5_1 => class::Q5_1,
        TensorType::Q2K => class::Q2K,
        TensorType::Q3K => class::Q3K,
        TensorType::Q4K => class::Q4K,
        TensorType::Q5K => class::Q5K,
        TensorType::Q6K => class::Q6K,
        TensorType::F32 => class::F32,
        TensorType::F16 => class::F16,
        TensorType::Bf16 => class::BF16,
    }
}

/// Scale of a part of activations, and the sums of its halves: `low + (high << 16)`, wrapping.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct PartMeta {
    /// The scale.
    pub scale: f32,
    /// The two sums, each at most 16 * 127.
    pub sums: u32,
}

/// Columns of activations on the card: floats, and their 8 bit parts. Column `c` starts at `c * width`.
///
/// In a column the first 16 quants of all parts come first, then the second 16: so lanes that load 16 bytes of neighbouring
/// parts load neighbouring bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Activations {
    /// `columns * width` floats.
    pub values: *mut f32,
    /// `columns * width` bytes.
    pub quants: *mut i8,
    /// `columns * width / 32`.
    pub meta: *mut PartMeta,
}

/// Where quant `i` of a column of `width` elements lies in that column.
#[inline(always)]
pub const fn place(i: usize, width: usize) -> usize {
    (i % PART / 16) * (width / 2) + i / PART * 16 + i % 16
}

/// Where quant `i` of column `column` lies among all columns of `width` elements.
///
/// For the tensor cores (`tiled`) 8 columns of a part lie together, in the order in which a warp's lanes take them: lane
/// `4 g + t` has quants 4 t to 4 t + 3 of both halves of column `g`.
#[inline(always)]
pub const fn quant_place(tiled: bool, column: usize, i: usize, width: usize) -> usize {
    if tiled {
        let lane = column % 8 * 4 + i % 16 / 4;
        ((column / 8 * (width / PART) + i / PART) * 32 + lane) * 8 + i % PART / 16 * 4 + i % 4
    } else {
        column * width + place(i, width)
    }
}

/// Where a part's [`PartMeta`] lies among those of all columns of `parts` parts.
#[inline(always)]
pub const fn meta_place(tiled: bool, column: usize, part: usize, parts: usize) -> usize {
    if tiled { (column / 8 * parts + part) * 8 + column % 8 } else { column * parts + part }
}

/// Arguments of the norm entry.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NormArgs {
    /// `columns * width`.
    pub x: *const f32,
    /// `width`.
    pub weight: *const f32,
    /// Result.
    pub out: Activations,
    /// A multiple of 32, or the parts are left out.
    pub width: u32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// The result is for the tensor cores: see [`quant_place`].
    pub tiled: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// What a row product is for.
pub mod mode {
    /// Written.
    pub const STORE: u32 = 0;
    /// Added to what is there, and checked.
    pub const ADD: u32 = 1;
    /// Written, and checked.
    pub const CHECK: u32 = 2;
}

/// Arguments of the row entries: up to three matrices of as many columns times the same activations.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsArgs {
    /// The matrices; those not used have no rows.
    pub first: Matrix,
    /// As above.
    pub second: Matrix,
    /// As above.
    pub third: Matrix,
    /// `columns * rows` of each.
    pub first_out: *mut f32,
    /// As above.
    pub second_out: *mut f32,
    /// As above.
    pub third_out: *mut f32,
    /// `columns` columns, padded to a multiple of [`COLUMNS`].
    pub x: Activations,
    /// The norm's weight, in the entry that makes its own activations.
    pub norm: *const f32,
    /// What the norm reads there.
    pub residual: *const f32,
    /// The fault word.
    pub fault: *mut u32,
    /// Columns to write.
    pub columns: u32,
    /// One of [`mode`].
    pub mode: u32,
    /// The stage that a fault names.
    pub stage: u32,
    /// The number of the first column, in faults.
    pub first_column: u32,
    /// The norm's.
    pub epsilon: f32,
    /// 0: silu, 1: gelu.
    pub activation: u32,
    /// The clamp of the gated pair ([`kiln_kernels::math::gated`]); infinity: none.
    pub limit: f32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// Arguments of the entry that readies heads, and of attention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HeadsArgs {
    /// `columns * heads * width`.
    pub query: *mut f32,
    /// `columns * kv_heads * width`.
    pub key: *const f32,
    /// As `key`.
    pub value: *const f32,
    /// Biases, or null.
    pub query_bias: *const f32,
    /// As above.
    pub key_bias: *const f32,
    /// As above.
    pub value_bias: *const f32,
    /// Norms of a head, or null.
    pub query_norm: *const f32,
    /// As above.
    pub key_norm: *const f32,
    /// Cosine and sine of each pair at each position.
    pub angles: *const f32,
    /// The layer's cache: head, position, element.
    pub keys: *mut u16,
    /// As above.
    pub values: *mut u16,
    /// The first position, then tokens.
    pub state: *const u32,
    /// The fault word.
    pub fault: *mut u32,
    /// Result of attention: `columns * heads * width`.
    pub out: Activations,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a head, a multiple of 8.
    pub width: u32,
    /// Positions of the cache.
    pub context: u32,
    /// Rotated pairs.
    pub pairs: u32,
    /// 1: elements i and i + pairs; 0: 2i and 2i + 1.
    pub halves: u32,
    /// Positions that a query sees, its own included.
    pub window: u32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Attention readies its heads itself (one column).
    pub fused: u32,
    /// The result is for the tensor cores: see [`quant_place`].
    pub tiled: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// Arguments of the entry that turns floats into activations.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ActivateArgs {
    /// `columns * width`.
    pub gate: *const f32,
    /// As above; null: `gate` is taken as it is.
    pub up: *const f32,
    /// Result.
    pub out: Activations,
    /// Elements of a column.
    pub width: u32,
    /// 0: silu, 1: gelu.
    pub activation: u32,
    /// The result is for the tensor cores: see [`quant_place`].
    pub tiled: u32,
    /// The clamp of the gated pair ([`kiln_kernels::math::gated`]); infinity: none.
    pub limit: f32,
}

/// Arguments of the embedding entry.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EmbedArgs {
    /// A row for each token.
    pub table: Matrix,
    /// The first position, then tokens.
    pub state: *const u32,
    /// `columns * width`.
    pub out: *mut f32,
    /// The fault word.
    pub fault: *mut u32,
    /// Values are multiplied by this, unless it is 1.
    pub scale: f32,
    /// Positions of the cache.
    pub context: u32,
}

/// Arguments of the entry that normalises what a block made and adds it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PostArgs {
    /// `columns * width`.
    pub added: *const f32,
    /// The norm's weight.
    pub weight: *const f32,
    /// Added to.
    pub residual: *mut f32,
    /// The fault word.
    pub fault: *mut u32,
    /// Elements of a column.
    pub width: u32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// The stage that a fault names.
    pub stage: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// Arguments of the entry that finds the largest logit of each column.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArgmaxArgs {
    /// `columns * count`.
    pub logits: *const f32,
    /// A word for each column, zero before and after.
    pub best: *mut u64,
    /// Blocks that are done with each column, zero before and after.
    pub done: *mut u32,
    /// Result, for each column.
    pub tokens: *mut u32,
    /// Position and token of the next step, or null.
    pub state: *mut u32,
    /// The fault word.
    pub fault: *mut u32,
    /// Logits of a column.
    pub count: u32,
    /// The stage that a fault names.
    pub stage: u32,
    /// The number of the first column, in faults.
    pub first_column: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
}

/// Arguments of the entries of a feed-forward block of which a token takes a few of many experts.
///
/// For T tokens with U selections each and S = T U: selection `s` is number `s % U` of token `s / U`. Sorted by expert,
/// the selections are columns in tiles of [`TILE`], each of one expert.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertsArgs {
    /// `experts * inner` rows.
    pub gate: Matrix,
    /// As above.
    pub up: Matrix,
    /// `experts * rows` rows of `inner` columns.
    pub down: Matrix,
    /// The expert of each selection: S.
    pub chosen: *const u32,
    /// The weight of each selection: S.
    pub weights: *const f32,
    /// Columns of the tokens: T columns of the gate's width.
    pub x: Activations,
    /// Gated products: S columns of `inner`, or as many as the tiles have.
    pub made: Activations,
    /// The tokens' columns in the order of the tiles.
    pub sorted: Activations,
    /// The selection of each column of the tiles, or [`NO_SELECTION`].
    pub order: *mut u32,
    /// The expert of each tile, or [`NO_SELECTION`].
    pub tile_expert: *mut u32,
    /// Down products: S columns of `rows`.
    pub products: *mut f32,
    /// Result: T columns of `rows`.
    pub out: *mut f32,
    /// The fault word.
    pub fault: *mut u32,
    /// Experts.
    pub experts: u32,
    /// Gate rows of an expert, a multiple of 32.
    pub inner: u32,
    /// Down rows of an expert, a multiple of 32.
    pub rows: u32,
    /// T.
    pub tokens: u32,
    /// U.
    pub used: u32,
    /// Tiles that there is room for.
    pub tiles: u32,
    /// 0: silu, 1: gelu.
    pub activation: u32,
    /// The clamp of the gated pair; infinity: none.
    pub limit: f32,
    /// One of [`mode`].
    pub mode: u32,
    /// The stage that a fault names.
    pub stage: u32,
}

/// A column of a tile that no selection is in, or a tile of none.
pub const NO_SELECTION: u32 = u32::MAX;

/// The fault word: 16 bits of stage, 16 bits of column; the smallest one wins, as on the CPU.
pub const NO_FAULT: u32 = u32::MAX;
/// The stage of a position or token out of range: checked before all others.
pub const STAGE_RANGE: u32 = 0;
/// The stage of the embedding; two a layer follow, then the logits.
pub const STAGE_EMBEDDING: u32 = 1;
