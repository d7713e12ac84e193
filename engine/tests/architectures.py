"""Makes fixtures/{llama,qwen2,qwen3,gemma3}.gguf, tiny random models, and fixtures/logits.gguf, what they compute.

The forward pass here is numpy in double precision, written from the papers' formulas and llama.cpp's tensor layout; it
shares nothing with the engine. Run from this folder with numpy and gguf 0.19.0.
"""
import gguf
import numpy as np

VOCABULARY, WIDTH, HEADS, KV_HEADS, INNER, LAYERS, EPSILON = 288, 32, 4, 2, 64, 3, 1e-5
TOKENS = [1, 40, 100, 7, 256, 3, 99, 12, 150, 201, 66, 5]
WINDOW = 4


def write(name, rng):
    head = {"qwen3": 16, "gemma3": 16}.get(name, WIDTH // HEADS)
    w = {}

    def matrix(key, rows, columns):
        w[key + ".weight"] = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float16)

    def vector(key, n, around=1.0):
        w[key] = (around + 0.1 * rng.standard_normal(n)).astype(np.float32)

    matrix("token_embd", VOCABULARY, WIDTH)
    vector("output_norm.weight", WIDTH)
    if name == "llama":
        matrix("output", VOCABULARY, WIDTH)
        w["rope_freqs.weight"] = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    for i in range(LAYERS):
        p = f"blk.{i}."
        matrix(p + "attn_q", HEADS * head, WIDTH)
        matrix(p + "attn_k", KV_HEADS * head, WIDTH)
        matrix(p + "attn_v", KV_HEADS * head, WIDTH)
        matrix(p + "attn_output", WIDTH, HEADS * head)
        matrix(p + "ffn_gate", INNER, WIDTH)
        matrix(p + "ffn_up", INNER, WIDTH)
        matrix(p + "ffn_down", WIDTH, INNER)
        vector(p + "attn_norm.weight", WIDTH)
        vector(p + "ffn_norm.weight", WIDTH)
        if name == "qwen2":
            vector(p + "attn_q.bias", HEADS * head, 0.0)
            vector(p + "attn_k.bias", KV_HEADS * head, 0.0)
            vector(p + "attn_v.bias", KV_HEADS * head, 0.0)
        if name in ("qwen3", "gemma3"):
            vector(p + "attn_q_norm.weight", head)
            vector(p + "attn_k_norm.weight", head)
        if name == "gemma3":
            vector(p + "post_attention_norm.weight", WIDTH)
            vector(p + "post_ffw_norm.weight", WIDTH)

    out = gguf.GGUFWriter(f"fixtures/{name}.gguf", name)
    out.add_context_length(128)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(EPSILON)
    out.add_rope_freq_base(10000.0 if name == "llama" else 1e6)
    if head != WIDTH // HEADS:
        out.add_key_length(head)
        out.add_value_length(head)
    else:
        out.add_rope_dimension_count(head)
    if name == "gemma3":
        out.add_sliding_window(WINDOW)
        out.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        out.add_string("gemma3.rope.scaling.type", "linear")
        out.add_float32("gemma3.rope.scaling.factor", 8.0)
    out.add_vocab_size(VOCABULARY)
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)]
                       + [b"t%d" % i for i in range(VOCABULARY - 259)])
    out.add_token_scores([0.0] * VOCABULARY)
    out.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259))
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for key, value in w.items():
        out.add_tensor(key, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return {key: value.astype(np.float64) for key, value in w.items()}, head


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotate(name, x, base, factors, scale):
    """x is positions, heads, elements."""
    count, _, head = x.shape
    frequency = base ** (-np.arange(0, head, 2) / head) / factors / scale
    angle = np.arange(count)[:, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.empty_like(x)
    a, b = (x[..., 0::2], x[..., 1::2]) if name == "llama" else (x[..., : head // 2], x[..., head // 2 :])
    u, v = a * cos - b * sin, a * sin + b * cos
    if name == "llama":
        out[..., 0::2], out[..., 1::2] = u, v
    else:
        out[..., : head // 2], out[..., head // 2 :] = u, v
    return out


def forward(name, w, head):
    gemma = name == "gemma3"
    x = w["token_embd.weight"][TOKENS] * (np.sqrt(WIDTH) if gemma else 1.0)
    count = len(TOKENS)
    for i in range(LAYERS):
        p = f"blk.{i}."
        local = gemma and (i + 1) % 2 != 0
        base = 10000.0 if name == "llama" or local else 1e6
        h = norm(x, w[p + "attn_norm.weight"])
        q, k, v = (h @ w[p + f"attn_{t}.weight"].T for t in "qkv")
        if name == "qwen2":
            q, k, v = (y + w[p + f"attn_{t}.bias"] for y, t in ((q, "q"), (k, "k"), (v, "v")))
        q, k, v = q.reshape(count, HEADS, head), k.reshape(count, KV_HEADS, head), v.reshape(count, KV_HEADS, head)
        if name in ("qwen3", "gemma3"):
            q, k = norm(q, w[p + "attn_q_norm.weight"]), norm(k, w[p + "attn_k_norm.weight"])
        factors = w["rope_freqs.weight"] if name == "llama" else 1.0
        scale = 8.0 if gemma and not local else 1.0
        q, k = rotate(name, q, base, factors, scale), rotate(name, k, base, factors, scale)
        k, v = (np.repeat(y, HEADS // KV_HEADS, 1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head)
        distance = np.arange(count)[:, None] - np.arange(count)
        hidden = (distance < 0) | (local & (distance >= WINDOW))
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        a = np.einsum("hqk,khd->qhd", weights, v).reshape(count, HEADS * head) @ w[p + "attn_output.weight"].T
        x = x + (norm(a, w[p + "post_attention_norm.weight"]) if gemma else a)
        h = norm(x, w[p + "ffn_norm.weight"])
        g, u = h @ w[p + "ffn_gate.weight"].T, h @ w[p + "ffn_up.weight"].T
        act = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if gemma else g / (1 + np.exp(-g))
        d = (act * u) @ w[p + "ffn_down.weight"].T
        x = x + (norm(d, w[p + "post_ffw_norm.weight"]) if gemma else d)
    head_rows = w.get("output.weight", w["token_embd.weight"])
    return norm(x, w["output_norm.weight"]) @ head_rows.T


expected = gguf.GGUFWriter("fixtures/logits.gguf", "none")
for seed, name in enumerate(["llama", "qwen2", "qwen3", "gemma3"]):
    weights, head = write(name, np.random.default_rng(seed))
    expected.add_tensor(name, forward(name, weights, head).astype(np.float32))
expected.add_array("tokens", TOKENS)
expected.write_header_to_file()
expected.write_kv_data_to_file()
expected.write_tensors_to_file()
expected.close()
