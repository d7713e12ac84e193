//! Quantised weights repacked for vectors: panels of 16 rows.
//!
//! In a panel the 16 rows of a part (32 columns) lie together: four bytes of row 0, four of row 1, ... so that a vector
//! lane is a row. Each row's chain of rounded operations is then what the walk in `kiln_kernels::blocks` says, done
//! for 16 rows at a time; the integer dots are exact in any order.
//!
//! Types of 4 bits and fewer are kept as nibbles, the others as bytes. So memory grows for q2_k (2.6 to 4.6 bits),
//! q3_k (3.4 to 4.8), q5_* (5.5 to 8.5) and q6_k (6.6 to 9) and stays about the same for the rest.

use std::ops::Range;

use kiln_kernels::blocks::{Blocks, IQ4_NL_VALUES, PART};
use kiln_kernels::{Host, LANES};
use memmap2::MmapMut;

use crate::gguf::table::tensor_types;
use crate::gguf::{BlockVisitor, TensorType};

/// Rows of a panel.
pub const ROWS: usize = 16;
/// Columns of activations that a kernel takes at once.
pub const COLUMNS: usize = 8;

/// How the parts of a type are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Two quants a byte; otherwise one.
    pub nibble: bool,
    /// Nibbles index iq4_nl's table.
    pub table: bool,
    /// Stored quants are unsigned: the quant plus this.
    pub bias: i32,
    /// Each half of a part has its own factor.
    pub halves: bool,
    /// Parts have integer factors; otherwise all are 1.
    pub factors: bool,
    /// There is a minimum.
    pub min: bool,
    /// Parts that share a scale.
    pub shared: usize,
}

macro_rules! formats {
    (
        floats { $($float:ident: $float_number:literal, $float_name:literal, $float_bytes:literal, $float_doc:literal;)+ }
        quantised { $(
            $block:ident: $number:literal, $name:literal, $len:literal, $bytes:literal, $quant:literal, $factor:literal,
            ($scale:literal, $min:expr), $family:ident { $($field:ident: $value:expr),* }, $doc:literal;
        )+ }
    ) => {
        impl Format {
            /// The packing of a type, if it is a quantised one.
            pub const fn of(kind: TensorType) -> Option<Format> {
                match kind {
                    $(TensorType::$float => None,)+
                    $(TensorType::$block => Some(Format { $($field: $value,)* ..Format::$family }),)+
                }
            }
        }

        // What is stored is the quant plus the bias: 8 bits, or 4.
        $(const _: () = {
            let Some(format) = Format::of(TensorType::$block) else { panic!("quantised") };
            let most = if format.nibble && !format.table { 15 } else { 255 };
            let highest = if format.min { $quant } else { $quant - 1 + ($quant == 127) as i32 };
            let lowest = if format.min { 0 } else { -$quant };
            assert!(
                highest + format.bias <= most && lowest + format.bias >= 0,
                concat!("the packing of ", $name, " does not hold its quants")
            );
            assert!(format.min == {
                const MIN: Option<usize> = $min;
                MIN.is_some()
            }, concat!("the minimum of ", $name));
            assert!(format.shared * PART == $len, concat!("the super-block of ", $name));
        };)+
    };
}
tensor_types!(formats);

impl Format {
    const SMALL: Format =
        Format { nibble: true, table: false, bias: 0, halves: false, factors: false, min: false, shared: 1 };
    const LARGE: Format = Format { factors: true, shared: 8, ..Format::SMALL };

    /// Bytes of a part's quants.
    pub const fn quant_bytes(self) -> usize {
        if self.nibble { ROWS * PART / 2 } else { ROWS * PART }
    }

    /// Bytes of a part's factors: of quants, then of minimums.
    pub const fn factor_bytes(self) -> usize {
        if !self.factors {
            return 0;
        }
        ROWS * (if self.halves { 2 } else { 1 }) * (if self.min { 2 } else { 1 })
    }

    /// Bytes of the scales, then minimums, that `shared` parts have in common.
    pub const fn scale_bytes(self) -> usize {
        2 * ROWS * (if self.min { 2 } else { 1 })
    }

    /// Bytes of what accompanies the quants of `shared` parts.
    pub const fn meta_bytes(self) -> usize {
        self.scale_bytes() + self.shared * self.factor_bytes()
    }

    /// Bytes of a panel of `parts` parts a row: all quants, then all the rest; a multiple of 64.
    pub const fn panel_bytes(self, parts: usize) -> usize {
        (parts * self.quant_bytes() + parts / self.shared * self.meta_bytes()).next_multiple_of(64)
    }
}

/// What iq4_nl's nibbles become when [`Format::bias`] is added.
pub const BIASED_TABLE: [u8; 16] = {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (IQ4_NL_VALUES[i] as i32 + 128) as u8;
        i += 1;
    }
    out
};

/// One piece of memory for the panels of all matrices, at multiples of 64, on large pages where the system has them.
///
/// A step walks all weights: with pages of 4 KiB it would miss the processor's address cache at every one.
pub struct Arena {
    memory: MmapMut,
    used: usize,
}

impl Arena {
    /// Room for `len` bytes, zeros.
    ///
    /// # Errors
    /// What the system says when it has not that much.
    pub fn new(len: usize) -> std::io::Result<Arena> {
        // An empty mapping is an error.
        let memory = MmapMut::map_anon(len.max(1))?;
        // Only a hint: without large pages everything works, more slowly.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(Arena { memory, used: 0 })
    }

    /// Takes `len` bytes, rounded up to a multiple of 64; `None` when there is not as much left.
    pub fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let range = self.used..self.used.checked_add(len)?;
        if range.end > self.memory.len() {
            return None;
        }
        self.used = range.end.next_multiple_of(64);
        Some(range)
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

/// Packs up to [`ROWS`] rows of `parts` parts each; rows beyond those given are zeros.
///
/// # Panics
/// If `kind` is not a quantised type or a length does not agree.
pub fn pack(kind: TensorType, rows: &[u8], parts: usize, out: &mut [u8]) {
    struct Pack<'a>(&'a [u8], usize, &'a mut [u8]);
    impl BlockVisitor for Pack<'_> {
        type Output = ();
        fn visit<B: Blocks>(self, kind: TensorType) {
            pack_blocks::<B>(kind, self.0, self.1, self.2);
        }
    }
    assert!(kind.visit(Pack(rows, parts, out)).is_some(), "{kind} is not quantised");
}

fn pack_blocks<B: Blocks>(kind: TensorType, rows: &[u8], parts: usize, out: &mut [u8]) {
    let (Some(format), Some((scale, min))) = (Format::of(kind), kind.half_places()) else {
        panic!("{kind} is not quantised")
    };
    let row_bytes = parts * PART / B::BLOCK * B::BYTES;
    assert!(rows.len().is_multiple_of(row_bytes) && rows.len() <= ROWS * row_bytes, "up to 16 rows");
    assert_eq!(out.len(), format.panel_bytes(parts), "a panel");
    // A biased zero is not a zero byte, but with a scale of zero it is a weight of zero all the same.
    out.fill(0);
    let (quants, meta) = out.split_at_mut(parts * format.quant_bytes());
    for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
        for index in 0..parts {
            let per_block = B::BLOCK / PART;
            let block = &bytes[index / per_block * B::BYTES..][..B::BYTES];
            let part = B::part(Host, block, index % per_block);
            let quants = &mut quants[index * format.quant_bytes()..][..format.quant_bytes()];
            let stored = |i: usize| (i32::from(part.quants[i]) + format.bias) as u8;
            let code = |i: usize| {
                if format.table { code_of(part.quants[i]) } else { stored(i) }
            };
            for group in 0..PART / 4 {
                for k in 0..4 {
                    let i = 4 * group + k;
                    if !format.nibble {
                        quants[(group * ROWS + row) * 4 + k] = stored(i);
                    } else if group < 4 {
                        quants[(group * ROWS + row) * 4 + k] = code(i) | code(i + 16) << 4;
                    }
                }
            }
            let meta = &mut meta[index / format.shared * format.meta_bytes()..][..format.meta_bytes()];
            // The halves' bits are taken from the block, not made again from f32.
            if index % format.shared == 0 {
                meta[2 * row..2 * row + 2].copy_from_slice(&block[scale..scale + 2]);
                if let Some(min) = min {
                    // Large blocks subtract their minimum.
                    let flip = if format.shared > 1 { 0x80 } else { 0 };
                    meta[2 * (ROWS + row)] = block[min];
                    meta[2 * (ROWS + row) + 1] = block[min + 1] ^ flip;
                }
            }
            if format.factors {
                let at = format.scale_bytes() + index % format.shared * format.factor_bytes();
                let mut lines = meta[at..at + format.factor_bytes()].chunks_exact_mut(ROWS);
                let halves = if format.halves { 2 } else { 1 };
                let factors = part.factors[..halves].iter();
                let mins = part.min_factors[..if format.min { halves } else { 0 }].iter();
                for factor in factors.chain(mins) {
                    if let Some(line) = lines.next() {
                        line[row] = *factor as i8 as u8;
                    }
                }
            }
        }
    }
}

fn code_of(value: i8) -> u8 {
    IQ4_NL_VALUES.iter().position(|known| *known == value).unwrap_or(0) as u8
}

/// A column of activations as the kernels take it.
#[derive(Clone, Copy)]
pub struct Column<'a> {
    /// A byte a value.
    pub quants: &'a [i8],
    /// A scale a part.
    pub scales: &'a [f32],
    /// The sum of the quants in each half of a part.
    pub sums: &'a [[i32; 2]],
    /// The sum of the quants of a part.
    pub totals: &'a [i32],
}

/// Lane partials of all rows and columns of a kernel call: scratch.
#[repr(align(64))]
pub struct Partials(pub [[[f32; ROWS]; LANES]; COLUMNS]);

impl Partials {
    /// Scratch on the heap.
    pub fn boxed() -> Box<Partials> {
        Box::new(Partials([[[0.0; ROWS]; LANES]; COLUMNS]))
    }
}
