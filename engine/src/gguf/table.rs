//! The table of tensor types: **one row a type**. The enum, its numbers and names, the CPU's packing and the dispatch to the
//! unpackers of [`kiln_kernels::blocks`] are all made from it.
//!
//! A new type is a row here, an unpacker of the same name in `kiln_kernels::blocks`, and golden values in
//! `engine/tests/fixtures.py`. What a row claims of its unpacker is asserted when this is compiled.

/// Calls the macro `$rows` with all rows.
///
/// A row of a float type: variant, number in a GGUF file, name, bytes of an element, what it is. Of a quantised type:
/// variant, number, name, weights of a block, bytes of a block; the largest magnitudes of a quant and of an integer factor (1 where a type has
/// none); the places of the f16 scale and of the f16 minimum in a block; how the CPU packs it, as fields of
/// `backend::cpu::panel::Format` over one of its two families; what it is.
macro_rules! tensor_types {
    ($rows:ident) => {
        $rows! {
            floats {
                F32: 0, "F32", 4, "32-bit float.";
                F16: 1, "F16", 2, "16-bit IEEE float.";
                Bf16: 30, "BF16", 2, "Upper half of a 32-bit float.";
            }
            quantised {
                Q4_0: 2, "Q4_0", 32, 18, 8, 1, (0, None), SMALL { bias: 8 },
                    "4 bits, one scale a block of 32.";
                Q4_1: 3, "Q4_1", 32, 20, 15, 1, (0, Some(2)), SMALL { min: true },
                    "4 bits, scale and minimum a block of 32.";
                Q5_0: 6, "Q5_0", 32, 22, 16, 1, (0, None), SMALL { nibble: false, bias: 128 },
                    "5 bits, one scale a block of 32.";
                Q5_1: 7, "Q5_1", 32, 24, 31, 1, (0, Some(2)), SMALL { nibble: false, bias: 128, min: true },
                    "5 bits, scale and minimum a block of 32.";
                Q8_0: 8, "Q8_0", 32, 34, 128, 1, (0, None), SMALL { nibble: false, bias: 128 },
                    "8 bits, one scale a block of 32.";
                Q2K: 10, "Q2_K", 256, 84, 3, 15, (80, Some(82)), LARGE { halves: true, min: true },
                    "2 bits, super-blocks of 256 in 16 sub-blocks.";
                Q3K: 11, "Q3_K", 256, 110, 4, 32, (108, None), LARGE { bias: 4, halves: true },
                    "3 bits, super-blocks of 256 in 16 sub-blocks.";
                Q4K: 12, "Q4_K", 256, 144, 15, 63, (0, Some(2)), LARGE { min: true },
                    "4 bits, super-blocks of 256 in 8 sub-blocks.";
                Q5K: 13, "Q5_K", 256, 176, 31, 63, (0, Some(2)), LARGE { nibble: false, bias: 128, min: true },
                    "5 bits, super-blocks of 256 in 8 sub-blocks.";
                Q6K: 14, "Q6_K", 256, 210, 32, 128, (208, None), LARGE { nibble: false, bias: 128, halves: true },
                    "6 bits, super-blocks of 256 in 16 sub-blocks.";
                Iq4Nl: 20, "IQ4_NL", 32, 18, 127, 1, (0, None), SMALL { table: true, bias: 128 },
                    "4 bits through a table, blocks of 32.";
            }
        }
    };
}
pub(crate) use tensor_types;
