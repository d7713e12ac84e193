//! Instruction sets, chosen at run time, and the calls that differ between them.
//!
//! Every level gives the same bits: see [`super::panel`]. The float walks of `kiln_kernels` are compiled once for each
//! level, so that their loops over lanes become the vectors of that level.

use std::fmt;

use kiln_kernels::attention::{self, Rows};
use kiln_kernels::blocks;
use kiln_kernels::{Host, HostLanes, LANES, math};

#[cfg(target_arch = "x86_64")]
use super::attend;
use super::attend::Heads;
use super::panel::{Column, Format, Partials, ROWS};
use super::portable;
use crate::error::{Error, Result};
use crate::gguf::TensorType;
use crate::gguf::table::tensor_types;
use crate::quant;

/// The instruction sets that there is code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instructions {
    Portable,
    Neon,
    Avx2,
    Avx512,
}

/// A level of instructions that this processor has. Only detection makes one, so that code for a level cannot be reached
/// on a processor without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Instructions);

/// The one list of the features of each level, handed to a macro: for detection and for compilation alike.
#[cfg(target_arch = "x86_64")]
macro_rules! features {
    (Avx2, $then:ident! { $($rest:tt)* }) => { $then! { ["avx2" "fma" "f16c"] $($rest)* } };
    (Avx512, $then:ident! { $($rest:tt)* }) => {
        $then! { ["avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni"] $($rest)* }
    };
}

/// Whether this processor has all features of a list.
#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! detect {
    ([$($feature:tt)+]) => { $(std::is_x86_feature_detected!($feature))&&+ };
}

/// Compiles a function for the features of a list.
#[cfg(target_arch = "x86_64")]
macro_rules! compile {
    ([$($feature:tt)+] $($function:tt)+) => {
        #[target_feature($(enable = $feature),+)]
        #[allow(clippy::too_many_arguments)]
        $($function)+
    };
}

impl Instructions {
    const ALL: [Instructions; 4] =
        [Instructions::Portable, Instructions::Neon, Instructions::Avx2, Instructions::Avx512];

    fn is_available(self) -> bool {
        match self {
            // What the compiler was told that every processor has.
            Instructions::Portable => true,
            // Every AArch64 processor has it. Miri runs the portable code alone.
            Instructions::Neon => cfg!(all(target_arch = "aarch64", not(miri))),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Instructions::Avx2 => features!(Avx2, detect! {}),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Instructions::Avx512 => features!(Avx512, detect! {}),
            #[cfg(any(not(target_arch = "x86_64"), miri))]
            Instructions::Avx2 | Instructions::Avx512 => false,
        }
    }
}

impl Level {
    /// The level that every processor has.
    pub const PORTABLE: Level = Level(Instructions::Portable);

    /// All levels of this processor, slowest first: `portable`, `neon`, `avx2` (with FMA and F16C), `avx512` (F, BW, DQ, VL
    /// and VNNI).
    pub fn detected() -> Vec<Level> {
        Instructions::ALL.into_iter().filter(|set| set.is_available()).map(Level).collect()
    }

    /// The fastest level that this processor has.
    pub fn fastest() -> Level {
        Level::detected().last().copied().unwrap_or(Level::PORTABLE)
    }

    /// The level of this name, if this processor has it.
    ///
    /// # Errors
    /// [`Error::Request`] that says which levels there are.
    pub fn from_name(name: &str) -> Result<Level> {
        let detected = Level::detected();
        detected.iter().copied().find(|level| level.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = detected.iter().map(Level::to_string).collect();
            Error::Request(format!(
                "instruction level {name:?} is not available here; these are: {}",
                names.join(", ")
            ))
        })
    }

    /// The instructions: this processor has them.
    pub(super) fn instructions(self) -> Instructions {
        self.0
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Instructions::Portable => "portable",
            Instructions::Neon => "neon",
            Instructions::Avx2 => "avx2",
            Instructions::Avx512 => "avx512",
        })
    }
}

/// A [`Format`] known at compile time.
pub trait Packing {
    /// The format.
    const FORMAT: Format;
}

macro_rules! packings {
    (
        floats { $($float:ident: $float_number:literal, $float_name:literal, $float_bytes:literal, $float_doc:literal;)+ }
        quantised { $(
            $block:ident: $number:literal, $name:literal, $len:literal, $bytes:literal, $quant:literal, $factor:literal,
            ($scale:literal, $min:expr), $family:ident { $($field:ident: $value:expr),* }, $doc:literal;
        )+ }
    ) => {
        $(impl Packing for blocks::$block {
            const FORMAT: Format = match Format::of(TensorType::$block) {
                Some(format) => format,
                None => panic!("a quantised type has a packing"),
            };
        })+

        /// [`packed_panel`] for the packing of `kind`.
        #[allow(clippy::too_many_arguments)]
        fn panel_of(
            kind: TensorType,
            level: Level,
            bytes: &[u8],
            parts: usize,
            columns: &[Column<'_>],
            partials: &mut Partials,
            results: &mut [[f32; ROWS]],
        ) {
            match kind {
                $(TensorType::$block => packed_panel::<blocks::$block>(level, bytes, parts, columns, partials, results),)+
                $(TensorType::$float)|+ => panic!("{kind} is not packed"),
            }
        }
    };
}
tensor_types!(packings);

/// The products of a panel's rows with up to [`super::panel::COLUMNS`] columns.
///
/// # Panics
/// If a length does not agree.
pub fn panel(
    level: Level,
    kind: TensorType,
    bytes: &[u8],
    parts: usize,
    columns: &[Column<'_>],
    partials: &mut Partials,
    results: &mut [[f32; ROWS]],
) {
    let fits = columns.iter().all(|column| {
        column.quants.len() == parts * 32
            && column.scales.len() == parts
            && column.sums.len() == parts
            && column.totals.len() == parts
    });
    assert!(
        fits && columns.len() <= partials.0.len() && columns.len() <= results.len(),
        "columns of {parts} parts"
    );
    panel_of(kind, level, bytes, parts, columns, partials, results);
}

/// [`panel`] for one packing; the columns are checked.
fn packed_panel<P: Packing>(
    level: Level,
    bytes: &[u8],
    parts: usize,
    columns: &[Column<'_>],
    partials: &mut Partials,
    results: &mut [[f32; ROWS]],
) {
    // Scales and factors lie by the super-block: a part of one has none, and the kernels would read past the end.
    assert!(parts.is_multiple_of(P::FORMAT.shared), "whole super-blocks, not {parts} parts");
    assert_eq!(bytes.len(), P::FORMAT.panel_bytes(parts), "a panel of {parts} parts");
    match level.instructions() {
        Instructions::Portable => portable::panel::<P>(bytes, parts, columns, partials, results),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only detection makes a level, and the lengths are checked above.
        Instructions::Avx2 => unsafe { super::avx2::panel::<P>(bytes, parts, columns, partials, results) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instructions::Avx512 => unsafe {
            super::avx512::panel::<P>(bytes, parts, columns, partials, results)
        },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every AArch64 processor has NEON, and the lengths are checked above.
        Instructions::Neon => unsafe { super::neon::panel::<P>(bytes, parts, columns, partials, results) },
        #[allow(unreachable_patterns)]
        _ => panic!("{level} is not available"),
    }
}

/// Compiles a walk for each level and calls the right one.
macro_rules! leveled {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub fn $name(level: Level, $($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn walk($($arg: $type),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            features!(Avx2, compile! { fn avx2($($arg: $type),*) $(-> $out)? { walk($($arg),*) } });

            #[cfg(target_arch = "x86_64")]
            features!(Avx512, compile! { fn avx512($($arg: $type),*) $(-> $out)? { walk($($arg),*) } });

            match level.instructions() {
                Instructions::Portable | Instructions::Neon => walk($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: only detection makes a level.
                Instructions::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Instructions::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                Instructions::Avx2 | Instructions::Avx512 => walk($($arg),*),
            }
        }
    };
}

leveled! {
    /// A float row times a column.
    pub fn float_row(kind: TensorType, row: &[u8], x: &[f32]) -> f32 {
        match kind {
            TensorType::F32 => kiln_kernels::float_rows::f32_row(HostLanes, row, x),
            TensorType::F16 => kiln_kernels::float_rows::f16_row(HostLanes, row, x),
            TensorType::Bf16 => kiln_kernels::float_rows::bf16_row(HostLanes, row, x),
            _ => f32::NAN,
        }
    }
}

leveled! {
    /// Normalises `x` into `out`.
    pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        kiln_kernels::rms_norm(HostLanes, x, weight, epsilon, |i, value| out[i] = value);
    }
}

leveled! {
    /// Quantises `x` and sums the quants of each half of a part and of the part.
    pub fn quantise(
        x: &[f32],
        quants: &mut [i8],
        scales: &mut [f32],
        sums: &mut [[i32; 2]],
        totals: &mut [i32],
    ) {
        kiln_kernels::quantize_q8(Host, x, quants, scales);
        for ((half, sums), total) in quants.as_chunks::<32>().0.iter().zip(sums).zip(totals) {
            let sum = |half: &[i8]| half.iter().map(|q| i32::from(*q)).sum();
            *sums = [sum(&half[..16]), sum(&half[16..])];
            *total = sums[0] + sums[1];
        }
    }
}

leveled! {
    /// `gate = silu(gate) * up`.
    pub fn silu_times(gate: &mut [f32], up: &[f32]) {
        use kiln_kernels::Arith;
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = Host.mul(math::silu(Host, *gate), *up);
        }
    }
}

leveled! {
    /// `gate = gelu(gate) * up`.
    pub fn gelu_times(gate: &mut [f32], up: &[f32]) {
        use kiln_kernels::Arith;
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = Host.mul(math::gelu_tanh(Host, *gate), *up);
        }
    }
}

#[derive(Clone, Copy)]
struct HeadRows<'a> {
    halves: &'a [u16],
    width: usize,
}

impl Rows for HeadRows<'_> {
    #[inline(always)]
    fn row(&self, index: usize) -> &[u16] {
        &self.halves[index * self.width..(index + 1) * self.width]
    }
}

leveled! {
    /// Attention of one query head by the plain walk.
    pub fn attend_plain(
        heads: Heads<'_>,
        scores: &mut [f32],
        partials: &mut [f32],
        out: &mut [f32],
    ) {
        let width = heads.width;
        let (keys, values) = (HeadRows { halves: heads.keys, width }, HeadRows { halves: heads.values, width });
        attention::attend(HostLanes, heads.queries, keys, values, heads.scale, scores, partials, out);
    }
}

/// Attention of up to [`attend::QUERIES`] query heads that share keys and values, over `positions` positions.
///
/// # Panics
/// If the lengths do not agree; see [`attend::attend`].
pub fn attend(
    level: Level,
    heads: Heads<'_>,
    positions: usize,
    scores: &mut [f32],
    partials: &mut [f32],
    out: &mut [f32],
) {
    let width = heads.width;
    let vector = match level.instructions() {
        Instructions::Portable | Instructions::Neon => 0,
        Instructions::Avx2 => 32,
        Instructions::Avx512 => 64,
    };
    if vector == 0 || !width.is_multiple_of(vector) {
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            let heads = Heads { queries: &heads.queries[index * width..(index + 1) * width], ..heads };
            attend_plain(level, heads, &mut scores[..positions], &mut partials[..LANES * width], out);
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! on {
            ($level:ident, $vector:ident) => {{
                features!(
                    $level,
                    compile! {
                        fn call<const COUNT: usize>(
                            heads: Heads<'_>,
                            positions: usize,
                            scores: &mut [f32],
                            partials: &mut [f32],
                            out: &mut [f32],
                        ) {
                            // SAFETY: the features are enabled, and the width is a multiple of four vectors.
                            unsafe {
                                attend::attend::<super::vector::$vector, COUNT>(
                                    heads, positions, scores, partials, out,
                                );
                            }
                        }
                    }
                );
                // SAFETY: only detection makes a level.
                unsafe {
                    match out.len() / width {
                        1 => call::<1>(heads, positions, scores, partials, out),
                        2 => call::<2>(heads, positions, scores, partials, out),
                        3 => call::<3>(heads, positions, scores, partials, out),
                        _ => call::<4>(heads, positions, scores, partials, out),
                    }
                }
            }};
        }
        match level.instructions() {
            Instructions::Avx512 => on!(Avx512, F32x16),
            _ => on!(Avx2, F32x8),
        }
    }
}

/// Decodes a row of a tensor.
pub fn decode(kind: TensorType, row: &[u8], out: &mut [f32]) {
    quant::decode(kind, row, out);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    macro_rules! names {
        ([$($feature:tt)+]) => { &[$($feature),+] };
    }

    /// The kernels that spell their features spell none that their level does not detect; all other code is compiled by
    /// `compile!`, from the list that detection uses.
    #[test]
    fn no_code_is_compiled_for_a_feature_that_is_not_detected() {
        const AVX2: &[&str] = features!(Avx2, names! {});
        const AVX512: &[&str] = features!(Avx512, names! {});
        // In two pieces, so that this line is not an attribute.
        let attribute = concat!("target_", "feature(");
        for (name, source, spelled, detected) in [
            ("avx2.rs", include_str!("avx2.rs"), 1, AVX2),
            ("avx512.rs", include_str!("avx512.rs"), 1, AVX512),
            ("attend.rs", include_str!("attend.rs"), 0, &[]),
            ("vector.rs", include_str!("vector.rs"), 0, &[]),
            ("kernel.rs", include_str!("kernel.rs").split("mod tests").next().unwrap_or_default(), 1, &[]),
        ] {
            let attributes: Vec<&str> = source.split(attribute).skip(1).collect();
            assert_eq!(attributes.len(), spelled, "{name}");
            for attribute in attributes {
                let list = attribute.split(")]").next().unwrap_or_default();
                if name == "kernel.rs" {
                    assert_eq!(list, "$(enable = $feature),+", "only `compile!` compiles for features here");
                    continue;
                }
                let literals: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
                assert!(!literals.is_empty(), "{name}: a list that cannot be read: {list}");
                for feature in literals.iter().flat_map(|literal| literal.split(',')) {
                    assert!(detected.contains(&feature), "{name}: nothing detects {feature}");
                }
            }
        }
    }
}
