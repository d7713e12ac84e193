//! The tensor types and the metadata values of a GGUF file.

use std::fmt;

/// The encodings of tensor elements that the engine reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// Upper half of a 32-bit float.
    Bf16,
    /// 4 bits, one scale a block of 32.
    Q4_0,
    /// 4 bits, scale and minimum a block of 32.
    Q4_1,
    /// 5 bits, one scale a block of 32.
    Q5_0,
    /// 5 bits, scale and minimum a block of 32.
    Q5_1,
    /// 8 bits, one scale a block of 32.
    Q8_0,
    /// 2 bits, blocks of 256 in 16 parts.
    Q2K,
    /// 3 bits, blocks of 256 in 16 parts.
    Q3K,
    /// 4 bits, blocks of 256 in 8 parts.
    Q4K,
    /// 5 bits, blocks of 256 in 8 parts.
    Q5K,
    /// 6 bits, blocks of 256 in 16 parts.
    Q6K,
    /// 4 bits through a table, blocks of 32.
    Iq4Nl,
}

impl TensorType {
    /// All types, in the order of their numbers in the file.
    pub const ALL: [TensorType; 14] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::Q2K,
        TensorType::Q3K,
        TensorType::Q4K,
        TensorType::Q5K,
        TensorType::Q6K,
        TensorType::Iq4Nl,
        TensorType::Bf16,
    ];

    /// The number that a GGUF file uses for this type.
    pub fn number(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Q4_0 => 2,
            TensorType::Q4_1 => 3,
            TensorType::Q5_0 => 6,
            TensorType::Q5_1 => 7,
            TensorType::Q8_0 => 8,
            TensorType::Q2K => 10,
            TensorType::Q3K => 11,
            TensorType::Q4K => 12,
            TensorType::Q5K => 13,
            TensorType::Q6K => 14,
            TensorType::Iq4Nl => 20,
            TensorType::Bf16 => 30,
        }
    }

    /// The type with this number, if the engine reads it.
    pub fn from_number(number: u32) -> Option<TensorType> {
        TensorType::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// Elements in a block.
    pub fn block_len(self) -> usize {
        match self {
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => 1,
            TensorType::Q4_0
            | TensorType::Q4_1
            | TensorType::Q5_0
            | TensorType::Q5_1
            | TensorType::Q8_0
            | TensorType::Iq4Nl => 32,
            TensorType::Q2K | TensorType::Q3K | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => 256,
        }
    }

    /// Bytes in a block.
    pub fn block_bytes(self) -> usize {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 | TensorType::Bf16 => 2,
            TensorType::Q4_0 | TensorType::Iq4Nl => 18,
            TensorType::Q4_1 => 20,
            TensorType::Q5_0 => 22,
            TensorType::Q5_1 => 24,
            TensorType::Q8_0 => 34,
            TensorType::Q2K => 84,
            TensorType::Q3K => 110,
            TensorType::Q4K => 144,
            TensorType::Q5K => 176,
            TensorType::Q6K => 210,
        }
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
        f.pad(match self {
            TensorType::F32 => "F32",
            TensorType::F16 => "F16",
            TensorType::Bf16 => "BF16",
            TensorType::Q4_0 => "Q4_0",
            TensorType::Q4_1 => "Q4_1",
            TensorType::Q5_0 => "Q5_0",
            TensorType::Q5_1 => "Q5_1",
            TensorType::Q8_0 => "Q8_0",
            TensorType::Q2K => "Q2_K",
            TensorType::Q3K => "Q3_K",
            TensorType::Q4K => "Q4_K",
            TensorType::Q5K => "Q5_K",
            TensorType::Q6K => "Q6_K",
            TensorType::Iq4Nl => "IQ4_NL",
        })
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
