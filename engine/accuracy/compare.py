"""kiln's logits against transformers in f32 on the same dequantised weights.

Usage: compare.py MODEL.gguf TOKENS KILN_LOGITS. MODEL is a llama file, TOKENS holds token numbers, KILN_LOGITS what
`cargo run --release -p kiln-engine --example logits MODEL TOKENS KILN_LOGITS` wrote. Needs torch, transformers, gguf.
"""
import sys

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

reader = GGUFReader(sys.argv[1])
tokens = [int(word) for word in open(sys.argv[2]).read().split()]


def meta(key, default=None):
    field = reader.fields.get("llama." + key)
    return default if field is None else field.contents()


heads, kv_heads = meta("attention.head_count"), meta("attention.head_count_kv")
weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
vocabulary = weights["token_embd.weight"].shape[0]
config = LlamaConfig(
    vocab_size=vocabulary, hidden_size=meta("embedding_length"), intermediate_size=meta("feed_forward_length"),
    num_hidden_layers=meta("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
    rms_norm_eps=meta("attention.layer_norm_rms_epsilon"), max_position_embeddings=meta("context_length"),
    rope_theta=meta("rope.freq_base"), rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
    tie_word_embeddings="output.weight" not in weights, attn_implementation="eager",
)


def unpermute(w, n):
    """Rows of a head from adjacent pairs (GGUF) to halves (transformers)."""
    rows, columns = w.shape
    return w.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


names = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}
state = {}
for name, w in weights.items():
    part = name.removesuffix(".weight").split(".")
    if part[0] == "blk":
        w = unpermute(w, heads) if part[2] == "attn_q" else unpermute(w, kv_heads) if part[2] == "attn_k" else w
        state[f"model.layers.{part[1]}.{names[part[2]]}.weight"] = torch.tensor(w)
    else:
        new = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[part[0]]
        state[new + ".weight"] = torch.tensor(w)
model = LlamaForCausalLM(config)
missing, unexpected = model.load_state_dict(state, strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
print("rope", getattr(model.config, "rope_parameters", None), "eps", model.config.rms_norm_eps)
with torch.no_grad():
    reference = model.float().eval()(torch.tensor([tokens])).logits[0].double()
kiln = torch.from_numpy(np.fromfile(sys.argv[3], "<f4").reshape(len(tokens), vocabulary)).double()
p, q = torch.log_softmax(reference, -1), torch.log_softmax(kiln, -1)
divergence = (p.exp() * (p - q)).sum(-1)
agree = reference.argmax(-1) == kiln.argmax(-1)
top = reference.topk(2, -1).values
gap = (top[:, 0] - top[:, 1])[~agree]
following = torch.tensor(tokens[1:])[:, None]
nll = [float(-x[:-1].gather(1, following).mean()) for x in (p, q)]
print(f"positions {len(tokens)}")
print(f"KL divergence mean {divergence.mean():.6f} median {divergence.median():.6f} "
      f"99% {divergence.quantile(0.99):.6f} max {divergence.max():.6f}")
print(f"top-1 agreement {agree.sum()} of {len(tokens)} = {agree.double().mean():.4f}")
print(f"largest gap of the reference's two best where they differ: {gap.max() if len(gap) else 0:.4f}")
print(f"perplexity transformers {np.exp(nll[0]):.4f} kiln {np.exp(nll[1]):.4f}")
