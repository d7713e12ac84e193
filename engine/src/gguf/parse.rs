//! The bounded parser: bytes in, metadata and checked tensor places out.

use std::collections::{BTreeMap, BTreeSet};

use super::{Tensor, TensorType, Value};
use crate::error::{Error, Result};

const MAX_KEY_BYTES: u64 = 65_535;
const MAX_TENSOR_NAME_BYTES: u64 = 255;
const MAX_DIMENSIONS: u32 = 4;
const MAX_NESTING: usize = 3;
/// Large enough for any file system or device page in use; a larger value is a damaged file.
const MAX_ALIGNMENT: u64 = 1 << 20;
const DEFAULT_ALIGNMENT: u64 = 32;

pub(super) struct Parsed {
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Tensor>,
}

pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Parsed> {
    let mut cursor = Cursor { file, bytes, at: 0 };
    let magic = cursor.take(4, "the magic")?;
    if magic != b"GGUF" {
        return Err(cursor.error_at(0, "the magic", format!("found {magic:02x?}, expected \"GGUF\"")));
    }
    let version = cursor.u32("the version")?;
    if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
        return Err(cursor.error_at(
            4,
            "the version",
            "the file is big-endian, which is not supported".into(),
        ));
    }
    if !(2..=3).contains(&version) {
        return Err(cursor.error_at(4, "the version", format!("found {version}, expected 2 or 3")));
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let value_count = cursor.u64("the metadata count")?;
    // The smallest entries: a key of one byte with a one-byte value; a name of one byte in one dimension.
    cursor.bound(tensor_count, 8 + 1 + 4 + 8 + 4 + 8, "the tensor count")?;
    cursor.bound(value_count, 8 + 1 + 4 + 1, "the metadata count")?;

    let metadata = parse_metadata(&mut cursor, value_count)?;
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => match value.as_u64() {
            Some(value) if value.is_power_of_two() && value <= MAX_ALIGNMENT => value,
            _ => {
                let problem = format!("found {value}, expected a power of two up to {MAX_ALIGNMENT}");
                return Err(cursor.error_at(cursor.at, "key general.alignment", problem));
            }
        },
    };
    let tensors = parse_tensors(&mut cursor, tensor_count, alignment)?;
    Ok(Parsed { version, metadata, tensors })
}

fn parse_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let start = cursor.at;
        let place = format!("the key of metadata entry {index}");
        let key = cursor.string(MAX_KEY_BYTES, &place)?.to_string();
        if key.is_empty() {
            return Err(cursor.error_at(start, &place, "it is empty".into()));
        }
        let place = format!("key {key}");
        let kind = cursor.u32(&place)?;
        let value = parse_value(cursor, kind, &place, 0)?;
        if metadata.insert(key, value).is_some() {
            return Err(cursor.error_at(start, &place, "it appears twice".into()));
        }
    }
    Ok(metadata)
}

fn parse_value(cursor: &mut Cursor<'_>, kind: u32, place: &str, depth: usize) -> Result<Value> {
    Ok(match kind {
        0 => Value::Unsigned(cursor.array::<1>(place)?[0].into()),
        1 => Value::Signed(i8::from_le_bytes(cursor.array(place)?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(cursor.array(place)?).into()),
        3 => Value::Signed(i16::from_le_bytes(cursor.array(place)?).into()),
        4 => Value::Unsigned(cursor.u32(place)?.into()),
        5 => Value::Signed(i32::from_le_bytes(cursor.array(place)?).into()),
        6 => Value::Float(f32::from_le_bytes(cursor.array(place)?).into()),
        7 => Value::Bool(cursor.boolean(place)?),
        8 => Value::String(cursor.string(u64::MAX, place)?.to_string()),
        9 => parse_array(cursor, place, depth)?,
        10 => Value::Unsigned(cursor.u64(place)?),
        11 => Value::Signed(i64::from_le_bytes(cursor.array(place)?)),
        12 => Value::Float(f64::from_le_bytes(cursor.array(place)?)),
        _ => {
            let problem = format!("value type {kind} is not known, expected 0 to 12");
            return Err(cursor.error_at(cursor.at - 4, place, problem));
        }
    })
}

fn parse_array(cursor: &mut Cursor<'_>, place: &str, depth: usize) -> Result<Value> {
    let start = cursor.at;
    if depth >= MAX_NESTING {
        let problem = format!("arrays nest deeper than {MAX_NESTING}");
        return Err(cursor.error_at(start, place, problem));
    }
    let kind = cursor.u32(place)?;
    let count = cursor.u64(place)?;
    let smallest = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => {
            let problem = format!("array element type {kind} is not known, expected 0 to 12");
            return Err(cursor.error_at(start, place, problem));
        }
    };
    cursor.bound(count, smallest, place)?;
    let mut values = Vec::new();
    Ok(match kind {
        0..=5 | 10 | 11 => {
            let mut integers = Vec::with_capacity(count as usize);
            for _ in 0..count {
                let at = cursor.at;
                integers.push(match parse_value(cursor, kind, place, depth)? {
                    Value::Signed(value) => value,
                    Value::Unsigned(value) => i64::try_from(value).map_err(|_| {
                        cursor.error_at(at, place, format!("element {value} is above {}", i64::MAX))
                    })?,
                    _ => 0,
                });
            }
            Value::Integers(integers)
        }
        6 | 12 => {
            let mut floats = Vec::with_capacity(count as usize);
            for _ in 0..count {
                floats.push(match kind {
                    6 => f32::from_le_bytes(cursor.array(place)?),
                    _ => f64::from_le_bytes(cursor.array(place)?) as f32,
                });
            }
            Value::Floats(floats)
        }
        7 => {
            let mut bools = Vec::with_capacity(count as usize);
            for _ in 0..count {
                bools.push(cursor.boolean(place)?);
            }
            Value::Bools(bools)
        }
        8 => {
            let mut strings = Vec::with_capacity(count as usize);
            for index in 0..count {
                match cursor.string(u64::MAX, place) {
                    Ok(text) => strings.push(text.to_string()),
                    Err(Error::Gguf { offset, problem, .. }) => {
                        let place = format!("{place}, element {index}");
                        return Err(cursor.error_at(offset as usize, &place, problem));
                    }
                    Err(error) => return Err(error),
                }
            }
            Value::Strings(strings)
        }
        _ => {
            for _ in 0..count {
                values.push(parse_array(cursor, place, depth + 1)?);
            }
            Value::Arrays(values)
        }
    })
}

fn parse_tensors(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Result<Vec<Tensor>> {
    // Offsets count from the end of this table, which is known only after it: places are checked in a second pass.
    let mut pending = Vec::new();
    let mut names = BTreeSet::new();
    for index in 0..count {
        let start = cursor.at;
        let place = format!("the name of tensor {index}");
        let name = cursor.string(MAX_TENSOR_NAME_BYTES, &place)?.to_string();
        let place = format!("tensor {name}");
        if !names.insert(name.clone()) {
            return Err(cursor.error_at(start, &place, "it appears twice".into()));
        }
        let at = cursor.at;
        let dimensions = cursor.u32(&place)?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            let problem = format!("it has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}");
            return Err(cursor.error_at(at, &place, problem));
        }
        let mut shape = Vec::with_capacity(dimensions as usize);
        let mut elements: u64 = 1;
        for _ in 0..dimensions {
            let at = cursor.at;
            let length = cursor.u64(&place)?;
            elements = match elements.checked_mul(length) {
                Some(product) if product > 0 && product <= i64::MAX as u64 => product,
                _ => {
                    let problem = format!("a dimension of {length} makes it empty or larger than 2^63");
                    return Err(cursor.error_at(at, &place, problem));
                }
            };
            shape.push(length as usize);
        }
        let at = cursor.at;
        let number = cursor.u32(&place)?;
        let Some(kind) = TensorType::from_number(number) else {
            let supported = TensorType::ALL.map(|kind| kind.to_string()).join(", ");
            let problem = format!("its type, number {number}, is not supported; these are: {supported}");
            return Err(cursor.error_at(at, &place, problem));
        };
        if !shape[0].is_multiple_of(kind.block_len()) {
            let problem =
                format!("rows of {} elements are not whole blocks of {} {kind}", shape[0], kind.block_len());
            return Err(cursor.error_at(at, &place, problem));
        }
        let Some(len) = (elements / kind.block_len() as u64).checked_mul(kind.block_bytes() as u64) else {
            return Err(cursor.error_at(at, &place, "its size in bytes does not fit 64 bits".into()));
        };
        let at = cursor.at;
        let offset = cursor.u64(&place)?;
        if !offset.is_multiple_of(alignment) {
            let problem = format!("its offset {offset} is not a multiple of the alignment {alignment}");
            return Err(cursor.error_at(at, &place, problem));
        }
        pending.push((name, shape, kind, offset, len, at));
    }
    place_tensors(cursor, pending, alignment)
}

type Pending = (String, Vec<usize>, TensorType, u64, u64, usize);

fn place_tensors(cursor: &Cursor<'_>, pending: Vec<Pending>, alignment: u64) -> Result<Vec<Tensor>> {
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let available = (cursor.bytes.len() as u64).saturating_sub(data_start);
    let mut tensors = Vec::with_capacity(pending.len());
    let mut extents = Vec::with_capacity(pending.len());
    for (name, shape, kind, offset, len, at) in pending {
        if offset.checked_add(len).is_none_or(|end| end > available) {
            let problem = format!(
                "its data is {len} bytes at {offset} of the data section, which has {available}; the file is truncated or damaged"
            );
            return Err(cursor.error_at(at, &format!("tensor {name}"), problem));
        }
        extents.push((offset, len, tensors.len(), at));
        tensors.push(Tensor {
            name,
            shape,
            kind,
            part: 0,
            start: (data_start + offset) as usize,
            len: len as usize,
        });
    }
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let ((offset, len, first, _), (next, _, second, at)) = (pair[0], pair[1]);
        if offset + len > next {
            let problem = format!("its data overlaps that of tensor {}", tensors[first].name);
            return Err(cursor.error_at(at, &format!("tensor {}", tensors[second].name), problem));
        }
    }
    Ok(tensors)
}

struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn error_at(&self, offset: usize, place: &str, problem: String) -> Error {
        Error::Gguf { file: self.file.to_string(), place: place.to_string(), offset: offset as u64, problem }
    }

    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Refuses a count of entries that the rest of the file cannot hold.
    fn bound(&self, count: u64, smallest: u64, place: &str) -> Result<()> {
        match count.checked_mul(smallest) {
            Some(bytes) if bytes <= self.remaining() => Ok(()),
            _ => {
                let problem =
                    format!("{count} entries do not fit in the {} bytes that are left", self.remaining());
                Err(self.error_at(self.at.saturating_sub(8), place, problem))
            }
        }
    }

    fn take(&mut self, len: u64, place: &str) -> Result<&'a [u8]> {
        if len > self.remaining() {
            let problem = format!("{len} bytes expected, {} left; the file is truncated", self.remaining());
            return Err(self.error_at(self.at, place, problem));
        }
        let start = self.at;
        self.at += len as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self, place: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, place)?);
        Ok(out)
    }

    fn u32(&mut self, place: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(place)?))
    }

    fn u64(&mut self, place: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(place)?))
    }

    fn boolean(&mut self, place: &str) -> Result<bool> {
        match self.array::<1>(place)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.error_at(self.at - 1, place, format!("a bool of {other}, expected 0 or 1"))),
        }
    }

    fn string(&mut self, longest: u64, place: &str) -> Result<&'a str> {
        let start = self.at;
        let len = self.u64(place)?;
        if len > longest {
            return Err(self.error_at(start, place, format!("{len} bytes long, expected at most {longest}")));
        }
        let bytes = self.take(len, place)?;
        std::str::from_utf8(bytes).map_err(|error| {
            self.error_at(start + 8 + error.valid_up_to(), place, "the text is not UTF-8".into())
        })
    }
}
