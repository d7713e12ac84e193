"""Makes fixtures/types.gguf: a tensor of every type, and its values as the PyPI package gguf 0.19.0 decodes them.

Run from this folder with numpy and gguf 0.19.0. Blocks are random bytes with sane scales, so that every bit of a block
matters; the values are in tensors named `TYPE.values`, in F32.
"""
import os

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

rng = np.random.default_rng(2026)
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
    T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0],
}
os.makedirs("fixtures", exist_ok=True)
writer = gguf.GGUFWriter("fixtures/types.gguf", "none")
for kind in [T.F32, T.F16, T.BF16, *HALVES]:
    size, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in HALVES:
        raw = rng.integers(0, 256, (3, 512 // size, size_bytes), np.uint8)
        for at in HALVES[kind]:
            scale = (rng.standard_normal((3, 512 // size)) * 0.01).astype(np.float16)
            raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
        raw = raw.reshape(3, -1)
        values = dequantize(raw, kind)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    else:
        values = rng.standard_normal((3, 512)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind)
        values = dequantize(raw, kind).astype(np.float32)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.add_tensor(kind.name + ".values", values.astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
