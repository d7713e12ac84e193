//! GGUF files, versions 2 and 3, little-endian: memory-mapped, checked in full before anything uses them.
//!
//! Every count, length, offset, alignment and product of dimensions is bounded by the bytes that are there, so that
//! a file can neither make the reader allocate more than a small multiple of its own size nor read outside itself.
//! Decoding of tensor data is in `kiln_kernels`; what the metadata means is in [`crate::model`].

mod parse;
pub(crate) mod table;
mod types;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

pub use types::{BlockVisitor, TensorType, Value};

use crate::error::{Error, Result};

/// Where a file's bytes live.
#[derive(Clone, Debug)]
enum Bytes {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
    Owned(Arc<Vec<u8>>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// One tensor of a file: its shape, its type and its checked place.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Elements along each dimension, the contiguous one first; 1 to 4 of them, none zero.
    pub shape: Vec<usize>,
    /// How the elements are encoded.
    pub kind: TensorType,
    part: usize,
    start: usize,
    len: usize,
}

impl Tensor {
    /// Elements in a row (the first dimension).
    pub fn columns(&self) -> usize {
        self.shape[0]
    }

    /// Rows: the product of the other dimensions.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Bytes of the tensor in the file.
    pub fn byte_len(&self) -> usize {
        self.len
    }
}

/// An opened model file, or all parts of a split one.
#[derive(Clone, Debug)]
pub struct Gguf {
    name: String,
    version: u32,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
    parts: Vec<Bytes>,
}

impl Gguf {
    /// Opens a file, or all parts of a split file given its first part.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be opened or mapped, [`Error::Gguf`] if its bytes are not a well-formed GGUF.
    pub fn open(path: &Path) -> Result<Gguf> {
        let mut first = Gguf::parse(path.display().to_string(), map(path)?)?;
        let count = match first.metadata.get("split.count") {
            None => return Ok(first),
            Some(value) => value.as_u64().unwrap_or(0),
        };
        let refuse = |problem: String| Error::Model(format!("{}: {problem}", path.display()));
        if count <= 1 {
            return Ok(first);
        }
        let names = split_names(path, count).ok_or_else(|| {
            refuse(format!(
                "split.count is {count}, so the name must end in -00001-of-{count:05}.gguf (give the first part)"
            ))
        })?;
        let check = |part: &Gguf, index: usize, part_path: &Path| {
            let number = part.metadata.get("split.no").and_then(Value::as_u64);
            let parts = part.metadata.get("split.count").and_then(Value::as_u64);
            if number == Some(index as u64) && parts == Some(count) {
                return Ok(());
            }
            let shown =
                |found: Option<u64>, add: u64| found.map_or("?".to_string(), |n| (n + add).to_string());
            Err(refuse(format!(
                "{} says that it is part {} of {}, expected part {} of {count}",
                part_path.display(),
                shown(number, 1),
                shown(parts, 0),
                index + 1
            )))
        };
        check(&first, 0, path)?;
        for (index, part_path) in names.iter().enumerate().skip(1) {
            let part = Gguf::parse(part_path.display().to_string(), map(part_path)?)?;
            check(&part, index, part_path)?;
            for (name, mut tensor) in part.tensors {
                tensor.part = first.parts.len();
                if first.tensors.insert(name.clone(), tensor).is_some() {
                    return Err(refuse(format!("tensor {name} is in two parts")));
                }
            }
            first.parts.extend(part.parts);
        }
        let expected = first.metadata.get("split.tensors.count").and_then(Value::as_u64);
        if let Some(expected) = expected
            && expected != first.tensors.len() as u64
        {
            let found = first.tensors.len();
            return Err(refuse(format!("split.tensors.count is {expected}, and the parts hold {found}")));
        }
        Ok(first)
    }

    /// Reads a file that is part of the program.
    ///
    /// # Errors
    /// [`Error::Gguf`] if the bytes are not a well-formed GGUF.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Gguf> {
        Gguf::parse(name.to_string(), Bytes::Static(bytes))
    }

    /// Reads a file from memory.
    ///
    /// # Errors
    /// [`Error::Gguf`] if the bytes are not a well-formed GGUF.
    pub fn from_vec(name: &str, bytes: Vec<u8>) -> Result<Gguf> {
        Gguf::parse(name.to_string(), Bytes::Owned(Arc::new(bytes)))
    }

    fn parse(name: String, bytes: Bytes) -> Result<Gguf> {
        let parsed = parse::parse(&name, bytes.as_slice())?;
        let tensors = parsed.tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        Ok(Gguf { name, version: parsed.version, metadata: parsed.metadata, tensors, parts: vec![bytes] })
    }

    /// The name that the file was opened under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format version: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// The bytes of one of this file's tensors.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        &self.parts[tensor.part].as_slice()[tensor.start..tensor.start + tensor.len]
    }

    /// The text under `key`, if there is one.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// The non-negative integer under `key`, if there is one.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn integer(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "non-negative integer", Value::as_u64)
    }

    /// The number under `key`, if there is one.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "number", Value::as_f64)
    }

    /// The truth value under `key`, if there is one.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "bool", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// The texts under `key`, if they are there.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "array of strings", |value| match value {
            Value::Strings(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// The integers under `key`, if they are there.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
        self.typed(key, "array of integers", |value| match value {
            Value::Integers(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// The floats under `key`, if they are there.
    ///
    /// # Errors
    /// [`Error::Model`] if the value is of another kind.
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "array of floats", |value| match value {
            Value::Floats(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| {
            Error::Model(format!("{}: {key} is {value} ({}), expected {expected}", self.name, value.kind()))
        })
    }
}

fn map(path: &Path) -> Result<Bytes> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let metadata = file.metadata().map_err(Error::io("read", path))?;
    if !metadata.is_file() {
        let problem = if metadata.is_dir() { "it is a directory" } else { "it is not a regular file" };
        return Err(Error::Model(format!("{}: {problem}, expected a GGUF file", path.display())));
    }
    if metadata.len() == 0 {
        return Ok(Bytes::Static(&[]));
    }
    // SAFETY: the mapping is read-only and private. Another process that truncates the file while it is in use can
    // still end this one with a signal; that is the documented price of mapping and the same in every GGUF reader.
    let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
    Ok(Bytes::Mapped(Arc::new(map)))
}

/// The paths of all parts, if `path` is named like the first of `count`.
fn split_names(path: &Path, count: u64) -> Option<Vec<PathBuf>> {
    const MAX_PARTS: u64 = 99_999;
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf"))?;
    (count <= MAX_PARTS).then(|| {
        (1..=count).map(|part| path.with_file_name(format!("{stem}-{part:05}-of-{count:05}.gguf"))).collect()
    })
}
