//! Tensors onto the card: repacked as [`crate::layout`] says, with the host's threads.

use std::sync::Arc;

use cuda_core::{CudaStream, DeviceBuffer};
use kiln_engine::gguf::{Gguf, Tensor, TensorType};
use kiln_kernels::Host;
use kiln_kernels::blocks::{self, Blocks};

use crate::gpu::Result;
use crate::layout::{Matrix, PART, class, class_of};

/// A matrix on the card.
pub struct Uploaded {
    /// Where it is.
    pub matrix: Matrix,
    bytes: u64,
    _quants: DeviceBuffer<u8>,
    _factors: Option<DeviceBuffer<u8>>,
    _scales: Option<DeviceBuffer<u8>>,
}

impl Uploaded {
    /// Bytes that a product with one column reads.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A tensor in the layout of the card, on the host.
pub struct Packed {
    /// Quants, or floats.
    pub quants: Vec<u8>,
    /// Integer factors.
    pub factors: Vec<u8>,
    /// Scales and minimums.
    pub scales: Vec<u8>,
}

/// Whether a type has parts.
pub fn is_quantised(kind: TensorType) -> bool {
    Shape::of(kind).is_some()
}

/// Bytes that a tensor takes on the card.
pub fn packed_bytes(tensor: &Tensor) -> u64 {
    let Some(shape) = Shape::of(tensor.kind) else { return tensor.byte_len() as u64 };
    let parts = (tensor.rows() * (tensor.columns() / PART)) as u64;
    parts * (shape.quants + shape.factors) as u64 + parts / shape.shared as u64 * shape.scales as u64
}

/// The shape and type of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// The type.
    pub kind: TensorType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, whole blocks.
    pub columns: usize,
}

impl Description {
    fn of(tensor: &Tensor) -> Description {
        Description { kind: tensor.kind, rows: tensor.rows(), columns: tensor.columns() }
    }
}

/// Repacks a tensor with `threads` threads.
pub fn pack(tensor: &Description, data: &[u8], threads: usize) -> Packed {
    match tensor.kind {
        TensorType::Q4_0 => pack_blocks::<blocks::Q4_0>(tensor, data, threads),
        TensorType::Q4_1 => pack_blocks::<blocks::Q4_1>(tensor, data, threads),
        TensorType::Q5_0 => pack_blocks::<blocks::Q5_0>(tensor, data, threads),
        TensorType::Q5_1 => pack_blocks::<blocks::Q5_1>(tensor, data, threads),
        TensorType::Q8_0 => pack_blocks::<blocks::Q8_0>(tensor, data, threads),
        TensorType::Iq4Nl => pack_blocks::<blocks::Iq4Nl>(tensor, data, threads),
        TensorType::Q2K => pack_blocks::<blocks::Q2K>(tensor, data, threads),
        TensorType::Q3K => pack_blocks::<blocks::Q3K>(tensor, data, threads),
        TensorType::Q4K => pack_blocks::<blocks::Q4K>(tensor, data, threads),
        TensorType::Q5K => pack_blocks::<blocks::Q5K>(tensor, data, threads),
        TensorType::Q6K => pack_blocks::<blocks::Q6K>(tensor, data, threads),
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            Packed { quants: data.to_vec(), factors: Vec::new(), scales: Vec::new() }
        }
    }
}

/// Repacks a tensor of a file and copies it to the card.
///
/// # Errors
/// The driver's.
pub fn upload(stream: &Arc<CudaStream>, file: &Gguf, tensor: &Tensor, threads: usize) -> Result<Uploaded> {
    let description = Description::of(tensor);
    copy(stream, &description, pack(&description, file.data(tensor), threads))
}

/// Copies a repacked tensor to the card.
///
/// # Errors
/// The driver's.
pub fn copy(stream: &Arc<CudaStream>, tensor: &Description, packed: Packed) -> Result<Uploaded> {
    let quants = DeviceBuffer::from_host(stream, &packed.quants)?;
    let some = |bytes: &Vec<u8>| -> Result<_> {
        if bytes.is_empty() { Ok(None) } else { Ok(Some(DeviceBuffer::from_host(stream, bytes)?)) }
    };
    let (factors, scales) = (some(&packed.factors)?, some(&packed.scales)?);
    let address = |buffer: &DeviceBuffer<u8>| buffer.cu_deviceptr() as *const u8;
    Ok(Uploaded {
        matrix: Matrix {
            quants: address(&quants),
            factors: factors.as_ref().map_or(std::ptr::null(), address),
            scales: scales.as_ref().map_or(std::ptr::null(), address),
            rows: u32::try_from(tensor.rows)?,
            columns: u32::try_from(tensor.columns)?,
            class: class_of(tensor.kind),
            reserved: 0,
        },
        bytes: (packed.quants.len() + packed.factors.len() + packed.scales.len()) as u64,
        _quants: quants,
        _factors: factors,
        _scales: scales,
    })
}

/// Bytes of a part, and of what `shared` parts have in common.
struct Shape {
    quants: usize,
    factors: usize,
    scales: usize,
    shared: usize,
}

impl Shape {
    fn of(kind: TensorType) -> Option<Shape> {
        let shape = |quants, factors, scales, shared| Some(Shape { quants, factors, scales, shared });
        match class_of(kind) {
            class::Q4_0 => shape(16, 0, 2, 1),
            class::Q4_1 => shape(16, 0, 4, 1),
            class::BYTES => shape(32, 0, 2, 1),
            class::Q5_1 => shape(32, 0, 4, 1),
            class::Q2K => shape(16, 4, 4, 8),
            class::Q3K | class::Q4K => shape(16, 2, 4, 8),
            class::Q5K | class::Q6K => shape(32, 2, 4, 8),
            _ => None,
        }
    }
}

/// Where the f16 scale and minimum lie in a block.
fn places(kind: TensorType) -> (usize, Option<usize>) {
    match kind {
        TensorType::Q2K => (80, Some(82)),
        TensorType::Q3K => (108, None),
        TensorType::Q6K => (208, None),
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => (0, Some(2)),
        _ => (0, None),
    }
}

fn pack_blocks<B: Blocks>(tensor: &Description, data: &[u8], threads: usize) -> Packed {
    let Some(shape) = Shape::of(tensor.kind) else { panic!("{} is not quantised", tensor.kind) };
    let (rows, parts) = (tensor.rows, tensor.columns / PART);
    let row_quants = parts * shape.quants;
    let row_factors = parts * shape.factors;
    let row_scales = parts / shape.shared * shape.scales;
    let row_bytes = parts * PART / B::BLOCK * B::BYTES;
    let mut packed = Packed {
        quants: vec![0; rows * row_quants],
        factors: vec![0; rows * row_factors],
        scales: vec![0; rows * row_scales],
    };
    let share = rows.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let mut quants = &mut packed.quants[..];
        let mut factors = &mut packed.factors[..];
        let mut scales = &mut packed.scales[..];
        for rows in data.chunks(share * row_bytes) {
            let count = rows.len() / row_bytes;
            let (q, rest) = quants.split_at_mut(count * row_quants);
            quants = rest;
            let (f, rest) = factors.split_at_mut(count * row_factors);
            factors = rest;
            let (s, rest) = scales.split_at_mut(count * row_scales);
            scales = rest;
            let (shape, kind) = (&shape, tensor.kind);
            scope.spawn(move || pack_rows::<B>(kind, shape, rows, q, f, s));
        }
    });
    packed
}

/// Rows are whole blocks, so all of them together are one long row.
fn pack_rows<B: Blocks>(
    kind: TensorType,
    shape: &Shape,
    data: &[u8],
    quants: &mut [u8],
    factors: &mut [u8],
    scales: &mut [u8],
) {
    let bias = match class_of(kind) {
        class::Q4_0 => 8,
        class::Q3K => 4,
        _ => 0,
    };
    let per_block = B::BLOCK / PART;
    for (number, block) in data.chunks_exact(B::BYTES).enumerate() {
        for index in 0..per_block {
            let part = B::part(Host, block, index);
            let at = number * per_block + index;
            let out = &mut quants[at * shape.quants..(at + 1) * shape.quants];
            if shape.quants == PART {
                for (out, quant) in out.iter_mut().zip(part.quants) {
                    *out = quant as u8;
                }
            } else {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = (part.quants[i] + bias) as u8 | ((part.quants[i + 16] + bias) as u8) << 4;
                }
            }
            if shape.factors > 0 {
                let out = &mut factors[at * shape.factors..(at + 1) * shape.factors];
                let halves = class_of(kind) != class::Q4K && class_of(kind) != class::Q5K;
                let all = [part.factors[0], part.factors[1], part.min_factors[0], part.min_factors[1]];
                let few = [part.factors[0], part.min_factors[0]];
                let numbers = if halves { &all[..] } else { &few[..] };
                for (out, number) in out.iter_mut().zip(numbers) {
                    *out = *number as i8 as u8;
                }
            }
        }
        // The halves' bits are those of the file; large blocks subtract their minimum.
        let (scale, min) = places(kind);
        let out = &mut scales[number * per_block / shape.shared * shape.scales..][..shape.scales];
        out[..2].copy_from_slice(&block[scale..scale + 2]);
        if let Some(min) = min {
            let flip = if shape.shared > 1 { 0x80 } else { 0 };
            out[2] = block[min];
            out[3] = block[min + 1] ^ flip;
        }
    }
}
