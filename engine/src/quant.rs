//! From a tensor's type, known at run time, to the reference arithmetic of `kiln_kernels`, known at compile time.

use kiln_kernels::blocks::{self, Blocks};
use kiln_kernels::{Arith, Host, HostLanes, Q8Activations, float_rows};

use crate::gguf::{BlockVisitor, TensorType};

/// Decodes a row, or any whole number of blocks.
///
/// # Panics
/// If `bytes` does not hold exactly `out.len()` elements.
pub fn decode(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    struct Decode<'a>(&'a [u8], &'a mut [f32]);
    impl BlockVisitor for Decode<'_> {
        type Output = ();
        fn visit<B: Blocks>(self, _: TensorType) {
            let Decode(bytes, out) = self;
            blocks::decode_row::<B, _>(Host, bytes, |i, value| out[i] = value);
        }
    }
    assert_eq!(kind.row_bytes(out.len()), Some(bytes.len()), "a row of {} {kind}", out.len());
    if kind.visit(Decode(bytes, out)).is_some() {
        return;
    }
    if kind == TensorType::F32 {
        for (out, word) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *out = f32::from_le_bytes(*word);
        }
        return;
    }
    for (out, word) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        let half = u16::from_le_bytes(*word);
        *out = if kind == TensorType::F16 { Host.f16_to_f32(half) } else { float_rows::bf16_to_f32(half) };
    }
}

/// A row times activations by the reference arithmetic: the definition that every other path must equal bit for bit.
///
/// # Panics
/// If the lengths do not agree.
pub fn row_dot(kind: TensorType, row: &[u8], x: &[f32], quantised: Q8Activations<'_>) -> f32 {
    struct Dot<'a>(&'a [u8], Q8Activations<'a>);
    impl BlockVisitor for Dot<'_> {
        type Output = f32;
        fn visit<B: Blocks>(self, _: TensorType) -> f32 {
            blocks::block_row::<B, _>(HostLanes, self.0, self.1)
        }
    }
    kind.visit(Dot(row, quantised)).unwrap_or_else(|| match kind {
        TensorType::F32 => float_rows::f32_row(HostLanes, row, x),
        TensorType::F16 => float_rows::f16_row(HostLanes, row, x),
        _ => float_rows::bf16_row(HostLanes, row, x),
    })
}
