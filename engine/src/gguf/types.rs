//! The tensor types and the metadata values of a GGUF file.

use std::fmt;

use kiln_kernels::blocks::{self, Blocks};

use super::table::tensor_types;

macro_rules! define {
    (
        floats { $($float:ident: $float_number:literal, $float_name:literal, $float_bytes:literal, $float_doc:literal;)+ }
        quantised { $(
            $block:ident: $number:literal, $name:literal, $len:literal, $bytes:literal, $quant:literal, $factor:literal,
            ($scale:literal, $min:expr), $family:ident { $($field:ident: $value:expr),* }, $doc:literal;
        )+ }
    ) => {
        /// The encodings of tensor elements that the engine reads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum TensorType {
            $(#[doc = $float_doc] $float,)+
            $(#[doc = $doc] $block,)+
        }

        const COUNT: usize = [$($float_number,)+ $($number),+].len();

        impl TensorType {
            /// All types, in the order of their numbers in the file.
            pub const ALL: [TensorType; COUNT] =
                in_order([$(TensorType::$float,)+ $(TensorType::$block),+]);

            /// The number that a GGUF file uses for this type.
            pub const fn number(self) -> u32 {
                match self {
                    $(TensorType::$float => $float_number,)+
                    $(TensorType::$block => $number,)+
                }
            }

            /// The name, as files and people spell it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(TensorType::$float => $float_name,)+
                    $(TensorType::$block => $name,)+
                }
            }

            /// Elements in a block.
            pub const fn block_len(self) -> usize {
                match self {
                    $(TensorType::$float => 1,)+
                    $(TensorType::$block => $len,)+
                }
            }

            /// Bytes in a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(TensorType::$float => $float_bytes,)+
                    $(TensorType::$block => $bytes,)+
                }
            }

            /// Whether it is one of the quantised types.
            pub const fn is_quantised(self) -> bool {
                match self {
                    $(TensorType::$float => false,)+
                    $(TensorType::$block => true,)+
                }
            }

            /// Where the f16 scale and the f16 minimum lie in a block of a quantised type.
            pub const fn half_places(self) -> Option<(usize, Option<usize>)> {
                match self {
                    $(TensorType::$float => None,)+
                    $(TensorType::$block => Some(($scale, $min)),)+
                }
            }

            /// The largest magnitudes of a quant and of an integer factor, as the row has them.
            #[cfg(test)]
            const fn integer_limits(self) -> Option<(i32, i32)> {
                match self {
                    $(TensorType::$float => None,)+
                    $(TensorType::$block => Some(($quant, $factor)),)+
                }
            }

            /// Hands the type's unpacker to `visitor`; `None` for float types.
            #[inline]
            pub fn visit<V: BlockVisitor>(self, visitor: V) -> Option<V::Output> {
                match self {
                    $(TensorType::$float => None,)+
                    $(TensorType::$block => Some(visitor.visit::<blocks::$block>(self)),)+
                }
            }
        }

        // The unpacker is the one that the row means.
        $(const _: () = assert!(
            <blocks::$block as Blocks>::BLOCK == $len
                && <blocks::$block as Blocks>::BYTES == $bytes
                && <blocks::$block as Blocks>::HAS_MIN == {
                const MIN: Option<usize> = $min;
                MIN.is_some()
            },
            concat!("the row of ", $name, " is not what its unpacker reads")
        );)+

        // A sub-block's integer, the sum over 32 of factor * quant * activation, fits an i32; and an f32 holds it exactly, so that
        // its conversion rounds nothing.
        $(const _: () = assert!(
            ($factor as i64) * $quant * 127 * 32 < 1 << 24,
            concat!("a sub-block of ", $name, " overflows an exact f32")
        );)+
    };
}
tensor_types!(define);

/// What is done with a quantised type whose unpacker is only known at run time.
pub trait BlockVisitor {
    /// What comes out.
    type Output;

    /// Called with the unpacker of `kind`.
    fn visit<B: Blocks>(self, kind: TensorType) -> Self::Output;
}

const fn in_order(mut types: [TensorType; COUNT]) -> [TensorType; COUNT] {
    let mut sorted = 1;
    while sorted < COUNT {
        let mut at = sorted;
        while at > 0 && types[at - 1].number() > types[at].number() {
            let higher = types[at - 1];
            types[at - 1] = types[at];
            types[at] = higher;
            at -= 1;
        }
        sorted += 1;
    }
    types
}

impl TensorType {
    /// The type with this number, if the engine reads it.
    pub fn from_number(number: u32) -> Option<TensorType> {
        TensorType::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// Bytes in a row of `len` elements, if `len` is a whole number of blocks and the product fits.
    pub fn row_bytes(self, len: usize) -> Option<usize> {
        len.is_multiple_of(self.block_len())
            .then(|| (len / self.block_len()).checked_mul(self.block_bytes()))
            .flatten()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A float of either width.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// An array of integers, signed or not; values above `i64::MAX` are refused by the reader.
    Integers(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f32>),
    /// An array of truth values.
    Bools(Vec<bool>),
    /// An array of texts.
    Strings(Vec<String>),
    /// An array of arrays.
    Arrays(Vec<Value>),
}

impl Value {
    /// The value as a size, if it is a non-negative integer.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(value) => Some(value),
            Value::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    /// The value as a float, integers included.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Float(value) => Some(value),
            Value::Unsigned(value) => Some(value as f64),
            Value::Signed(value) => Some(value as f64),
            _ => None,
        }
    }

    /// What kind of value this is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Unsigned(_) => "unsigned integer",
            Value::Signed(_) => "integer",
            Value::Float(_) => "float",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Integers(_) => "array of integers",
            Value::Floats(_) => "array of floats",
            Value::Bools(_) => "array of bools",
            Value::Strings(_) => "array of strings",
            Value::Arrays(_) => "array of arrays",
        }
    }

    /// The number of elements of an array, 1 for anything else.
    pub fn count(&self) -> usize {
        match self {
            Value::Integers(values) => values.len(),
            Value::Floats(values) => values.len(),
            Value::Bools(values) => values.len(),
            Value::Strings(values) => values.len(),
            Value::Arrays(values) => values.len(),
            _ => 1,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: fmt::Debug>(f: &mut fmt::Formatter<'_>, values: &[T]) -> fmt::Result {
            const SHOWN: usize = 4;
            write!(f, "[")?;
            for (index, value) in values.iter().take(SHOWN).enumerate() {
                let separator = if index == 0 { "" } else { ", " };
                write!(f, "{separator}{value:?}")?;
            }
            if values.len() > SHOWN {
                write!(f, ", ... {} in all", values.len())?;
            }
            write!(f, "]")
        }
        match self {
            Value::Unsigned(value) => write!(f, "{value}"),
            Value::Signed(value) => write!(f, "{value}"),
            Value::Float(value) => write!(f, "{value}"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::String(value) => write!(f, "{value:?}"),
            Value::Integers(values) => list(f, values),
            Value::Floats(values) => list(f, values),
            Value::Bools(values) => list(f, values),
            Value::Strings(values) => list(f, values),
            Value::Arrays(values) => write!(f, "[{} arrays]", values.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kiln_kernels::{Arith, Host};

    use super::*;
    use crate::rng::SplitMix64;

    #[test]
    fn numbers_and_names_are_each_type_s_own() {
        let numbers: BTreeSet<u32> = TensorType::ALL.iter().map(|kind| kind.number()).collect();
        let names: BTreeSet<&str> = TensorType::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!((numbers.len(), names.len()), (COUNT, COUNT));
        assert!(TensorType::ALL.is_sorted_by_key(|kind| kind.number()));
        for kind in TensorType::ALL {
            assert_eq!(TensorType::from_number(kind.number()), Some(kind));
            assert_eq!(kind.to_string(), kind.name());
        }
        assert_eq!(TensorType::from_number(u32::MAX), None);
    }

    #[test]
    fn the_documentation_lists_every_type() {
        let page = include_str!("../../../docs/engine.md");
        let line = page.lines().find_map(|line| line.strip_prefix("- **Types**: ")).expect("a list");
        let listed: BTreeSet<&str> = line.trim_end_matches('.').split(", ").collect();
        assert_eq!(listed, TensorType::ALL.iter().map(|kind| kind.name()).collect());
    }

    /// The limits and places of a row against what its unpacker makes of random blocks. The limits are reached, so that a row
    /// that claims too much fails as well.
    #[test]
    fn every_unpacker_keeps_and_reaches_the_limits_of_its_row() {
        struct Check(SplitMix64);
        impl BlockVisitor for Check {
            type Output = ();
            fn visit<B: Blocks>(mut self, kind: TensorType) {
                let (quant_limit, factor_limit) = kind.integer_limits().expect("quantised");
                let (scale_at, min_at) = kind.half_places().expect("quantised");
                let (mut largest_quant, mut largest_factor) = (0, 0);
                for _ in 0..200 {
                    let mut block: Vec<u8> = (0..B::BYTES).map(|_| self.0.bits() as u8).collect();
                    // 1.5 and 2.5, as halves.
                    block[scale_at..scale_at + 2].copy_from_slice(&0x3e00u16.to_le_bytes());
                    if let Some(min_at) = min_at {
                        block[min_at..min_at + 2].copy_from_slice(&0x4100u16.to_le_bytes());
                    }
                    for index in 0..B::BLOCK / blocks::PART {
                        let part = B::part(Host, &block, index);
                        assert_eq!(part.scale, Host.f16_to_f32(0x3e00), "the scale's place in {kind}");
                        let min = if min_at.is_some() { Host.f16_to_f32(0x4100) } else { 0.0 };
                        assert_eq!(part.min.abs(), min, "the minimum's place in {kind}");
                        let quants = part.quants.iter().map(|quant| i32::from(*quant).abs());
                        largest_quant = quants.fold(largest_quant, i32::max);
                        let factors = part.factors.iter().chain(&part.min_factors).map(|factor| factor.abs());
                        largest_factor = factors.fold(largest_factor, i32::max);
                    }
                }
                assert_eq!((largest_quant, largest_factor), (quant_limit, factor_limit), "{kind}");
            }
        }
        let checked =
            TensorType::ALL.iter().filter(|kind| kind.visit(Check(SplitMix64::new(7))).is_some()).count();
        assert_eq!(checked, TensorType::ALL.iter().filter(|kind| kind.is_quantised()).count());
    }
}
