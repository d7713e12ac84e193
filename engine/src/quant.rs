//! From a tensor's type, known at run time, to the walks of `kiln_kernels`, known at compile time.

use kiln_kernels::{Arith, Host, HostLanes, Q8Activations, blocks, float_rows};

use crate::gguf::TensorType;

/// Evaluates an expression with a type alias for the [`blocks::Blocks`] of a quantised type, or another for floats.
macro_rules! with_blocks {
    ($kind:expr, $alias:ident => $quantised:expr, $float:expr) => {{
        use kiln_kernels::blocks as b;
        use $crate::gguf::TensorType as T;
        match $kind {
            T::Q4_0 => {
                type $alias = b::Q4_0;
                $quantised
            }
            T::Q4_1 => {
                type $alias = b::Q4_1;
                $quantised
            }
            T::Q5_0 => {
                type $alias = b::Q5_0;
                $quantised
            }
            T::Q5_1 => {
                type $alias = b::Q5_1;
                $quantised
            }
            T::Q8_0 => {
                type $alias = b::Q8_0;
                $quantised
            }
            T::Q2K => {
                type $alias = b::Q2K;
                $quantised
            }
            T::Q3K => {
                type $alias = b::Q3K;
                $quantised
            }
            T::Q4K => {
                type $alias = b::Q4K;
                $quantised
            }
            T::Q5K => {
                type $alias = b::Q5K;
                $quantised
            }
            T::Q6K => {
                type $alias = b::Q6K;
                $quantised
            }
            T::Iq4Nl => {
                type $alias = b::Iq4Nl;
                $quantised
            }
            T::F32 | T::F16 | T::Bf16 => $float,
        }
    }};
}
pub(crate) use with_blocks;

/// Decodes a row, or any whole number of blocks.
///
/// # Panics
/// If `bytes` does not hold exactly `out.len()` elements.
pub fn decode(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(kind.row_bytes(out.len()), Some(bytes.len()), "a row of {} {kind}", out.len());
    with_blocks!(kind, B => blocks::decode_row::<B, _>(Host, bytes, |i, value| out[i] = value), {
        match kind {
            TensorType::F32 => {
                for (out, word) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(*word);
                }
            }
            _ => {
                for (out, word) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    let half = u16::from_le_bytes(*word);
                    *out = if kind == TensorType::F16 { Host.f16_to_f32(half) } else { float_rows::bf16_to_f32(half) };
                }
            }
        }
    })
}

/// A row times activations by the plain walk: the definition that every other path must equal bit for bit.
///
/// # Panics
/// If the lengths do not agree.
pub fn row_dot(kind: TensorType, row: &[u8], x: &[f32], quantised: Q8Activations<'_>) -> f32 {
    with_blocks!(kind, B => blocks::block_row::<B, _>(HostLanes, row, quantised), {
        match kind {
            TensorType::F32 => float_rows::f32_row(HostLanes, row, x),
            TensorType::F16 => float_rows::f16_row(HostLanes, row, x),
            _ => float_rows::bf16_row(HostLanes, row, x),
        }
    })
}
