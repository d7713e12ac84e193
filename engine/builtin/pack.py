"""Quantising and GGUF writing for the built-in model, with nothing but numpy."""
import struct

import numpy as np

F32, Q8_0, Q4_K, Q5_K, Q6_K = 0, 8, 12, 13, 14


def q8_0(w):
    x = w.reshape(-1, 32)
    d = (np.abs(x).max(1) / 127).astype(np.float16)
    wide = d.astype(np.float32)[:, None]
    q = np.round(np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)).clip(-127, 127).astype(np.int8)
    return np.concatenate([d[:, None].view(np.uint8), q.view(np.uint8)], 1).tobytes(), (q * wide).reshape(w.shape)


def _affine(x, levels):
    """Scale and minimum of each row of 32, by the least squares over a few candidate steps."""
    low, high = np.minimum(x.min(-1), 0), x.max(-1)
    best, scale, minimum = np.full(low.shape, np.inf, np.float32), np.zeros_like(low), np.zeros_like(low)
    for shrink in np.linspace(0.75, 1.0, 16):
        step = (np.maximum(high - low, 1e-12) * shrink / levels)[..., None]
        q = np.round((x - low[..., None]) / step).clip(0, levels)
        mean_q, mean_x = q.mean(-1), x.mean(-1)
        spread = np.maximum(((q - mean_q[..., None]) ** 2).mean(-1), 1e-12)
        s = np.maximum(((q - mean_q[..., None]) * (x - mean_x[..., None])).mean(-1) / spread, 0)
        m = np.maximum(s * mean_q - mean_x, 0)
        error = ((s[..., None] * q - m[..., None] - x) ** 2).sum(-1)
        better = error < best
        best, scale, minimum = (np.where(better, a, b) for a, b in ((error, best), (s, scale), (m, minimum)))
    return scale, minimum


def _q45_k(w, levels):
    x = w.reshape(-1, 8, 32)
    scale, minimum = _affine(x, levels)
    d, dmin = ((v.max(1) / 63).astype(np.float16) for v in (scale, minimum))
    wide, wide_min = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    sc = np.round(np.divide(scale, wide, out=np.zeros_like(scale), where=wide > 0)).clip(0, 63)
    mn = np.round(np.divide(minimum, wide_min, out=np.zeros_like(minimum), where=wide_min > 0)).clip(0, 63)
    step, offset = (wide * sc)[..., None], (wide_min * mn)[..., None]
    q = np.round(np.divide(x + offset, step, out=np.zeros_like(x), where=step > 0)).clip(0, levels)
    value = (step * q - offset).reshape(w.shape)
    q, sc, mn = q.astype(np.uint8), sc.astype(np.uint8), mn.astype(np.uint8)
    packed = np.concatenate([
        sc[:, :4] | (sc[:, 4:] >> 4 << 6), mn[:, :4] | (mn[:, 4:] >> 4 << 6), (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4,
    ], 1)
    return q, np.concatenate([d[:, None].view(np.uint8), dmin[:, None].view(np.uint8), packed], 1), value


def q4_k(w):
    q, head, value = _q45_k(w, 15)
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), 128)
    return np.concatenate([head, nibbles], 1).tobytes(), value


def q5_k(w):
    q, head, value = _q45_k(w, 31)
    nibbles = ((q & 15)[:, 0::2] | (q & 15)[:, 1::2] << 4).reshape(len(q), 128)
    fifth = np.zeros((len(q), 32), np.uint8)
    for part in range(8):
        fifth |= (q[:, part] >> 4) << part
    return np.concatenate([head, fifth, nibbles], 1).tobytes(), value


def q6_k(w):
    x = w.reshape(-1, 16, 16)
    scale = np.abs(x).max(-1) / 31
    d = (scale.max(1) / 127).astype(np.float16)
    wide = d.astype(np.float32)[:, None]
    sc = np.round(np.divide(scale, wide, out=np.zeros_like(scale), where=wide > 0)).clip(0, 127)
    step = (wide * sc)[..., None]
    q = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0)).clip(-32, 31)
    value = (q * step).reshape(w.shape)
    u = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([(u[:, :, 0] & 15) | (u[:, :, 2] & 15) << 4, (u[:, :, 1] & 15) | (u[:, :, 3] & 15) << 4], -1)
    high = u[:, :, 0] >> 4 | (u[:, :, 1] >> 4) << 2 | (u[:, :, 2] >> 4) << 4 | (u[:, :, 3] >> 4) << 6
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), sc.astype(np.int8).view(np.uint8), d[:, None].view(np.uint8)]
    return np.concatenate(parts, 1).tobytes(), value


def f32(w):
    return w.astype("<f4").tobytes(), w


ENCODERS = {F32: f32, Q8_0: q8_0, Q4_K: q4_k, Q5_K: q5_k, Q6_K: q6_k}


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(path, metadata, tensors):
    """Writes `tensors`, a list of (name, shape with the contiguous dimension first, type, bytes)."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, shape, kind, data in tensors:
        out += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += -(-len(data) // 32) * 32
    for _, _, _, data in tensors:
        out += bytes(-len(out) % 32) + data
    with open(path, "wb") as file:
        file.write(out)
