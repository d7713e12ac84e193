"""Trains the built-in model and writes it as GGUF: `python3 train.py OUT.gguf`. Needs PyTorch, numpy and a GPU.

A llama of 5 million weights learns the stories of `stories.py` with a byte-level BPE vocabulary of its own. Seeds are
fixed; the same PyTorch on the same kind of card gives a model of the same quality, not of the same bits. The file that
is committed was trained once, and its sha256 is in README.md beside this.
"""
import math
import random
import re
import sys
import time
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

import pack
import stories

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 1024, 256, 6, 4, 2, 768, 512
HEAD, BASE, EPSILON = WIDTH // HEADS, 10000.0, 1e-5
STORIES, STEPS, BATCH, RATE = 120_000, 3_000, 64, 3e-3
END, USER, ASSISTANT = 0, 1, 2
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# GPT-2's words; the stories are ASCII.
WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def byte_alphabet():
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}


class Tokenizer:
    def __init__(self, texts):
        letters = byte_alphabet()
        counts = Counter(word for text in texts for word in WORD.findall(text))
        words = {word: [letters[byte] for byte in word.encode()] for word in counts}
        self.merges = []
        while len(self.merges) < VOCABULARY - 256 - len(SPECIAL):
            pairs = Counter()
            for word, symbols in words.items():
                for pair in zip(symbols, symbols[1:]):
                    pairs[pair] += counts[word]
            # The most frequent pair; the alphabet breaks ties.
            left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
            self.merges.append((left, right))
            for symbols in words.values():
                i = 0
                while i + 1 < len(symbols):
                    if (symbols[i], symbols[i + 1]) == (left, right):
                        symbols[i : i + 2] = [left + right]
                    i += 1
        self.tokens = SPECIAL + [letters[byte] for byte in range(256)] + [a + b for a, b in self.merges]
        ids = {token: i for i, token in enumerate(self.tokens)}
        self.cache = {word: [ids[symbol] for symbol in symbols] for word, symbols in words.items()}
        self.bytes = {i: bytes({c: b for b, c in letters.items()}[c] for c in t) for t, i in ids.items() if i > 2}

    def encode(self, text):
        return [token for word in WORD.findall(text) for token in self.cache[word]]

    def decode(self, tokens):
        return b"".join(self.bytes.get(int(token), SPECIAL[min(int(token), 2)].encode()) for token in tokens).decode(
            errors="replace")


def corpus():
    rng = random.Random(2024)
    documents = []
    for _ in range(STORIES):
        documents.append(stories.conversation(rng) if rng.random() < 0.4 else [("story", stories.story(rng))])
    return documents


def encode(tokenizer, documents):
    stream = []
    for document in documents:
        stream.append(END)
        for role, text in document:
            if role != "story":
                stream.append(USER if role == "user" else ASSISTANT)
            stream += tokenizer.encode(text)
            if role == "user":
                stream.append(END)
    return torch.tensor(stream, dtype=torch.int16)


def shapes():
    """Name, rows, columns and type of each matrix."""
    yield "token_embd", VOCABULARY, WIDTH, pack.Q8_0
    for i in range(LAYERS):
        yield f"blk.{i}.attn_q", HEADS * HEAD, WIDTH, pack.Q5_K
        yield f"blk.{i}.attn_k", KV_HEADS * HEAD, WIDTH, pack.Q5_K
        yield f"blk.{i}.attn_v", KV_HEADS * HEAD, WIDTH, pack.Q6_K
        yield f"blk.{i}.attn_output", WIDTH, HEADS * HEAD, pack.Q6_K
        yield f"blk.{i}.ffn_gate", INNER, WIDTH, pack.Q4_K
        yield f"blk.{i}.ffn_up", INNER, WIDTH, pack.Q4_K
        yield f"blk.{i}.ffn_down", WIDTH, INNER, pack.Q6_K


def norms():
    return [f"blk.{i}.{n}" for i in range(LAYERS) for n in ("attn_norm", "ffn_norm")] + ["output_norm"]


def init(device):
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, rows, columns, _ in shapes():
        scale = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("attn_output", "ffn_down")) else 0.02
        weights[name] = (torch.randn(rows, columns, generator=generator) * scale).to(device).requires_grad_()
    for name in norms():
        weights[name] = torch.ones(WIDTH, device=device, requires_grad=True)
    return weights


def forward(w, tokens):
    count = tokens.shape[1]
    frequency = BASE ** (-torch.arange(0, HEAD, 2, device=tokens.device) / HEAD)
    angle = torch.arange(count, device=tokens.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def norm(x, name):
        return F.rms_norm(x.float(), (WIDTH,), w[name], EPSILON)

    def rotate(x):
        # Pairs 2i and 2i + 1, as llama files have them.
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def heads(x, n):
        return x.unflatten(-1, (n, HEAD)).transpose(1, 2)

    x = F.embedding(tokens, w["token_embd"])
    for i in range(LAYERS):
        p = f"blk.{i}."
        h = norm(x, p + "attn_norm")
        q = rotate(heads(F.linear(h, w[p + "attn_q"]), HEADS).float())
        k = rotate(heads(F.linear(h, w[p + "attn_k"]), KV_HEADS).float())
        v = heads(F.linear(h, w[p + "attn_v"]), KV_HEADS)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1).to(v.dtype) for t in (k, v))
        a = F.scaled_dot_product_attention(q.to(v.dtype), k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + F.linear(a, w[p + "attn_output"])
        h = norm(x, p + "ffn_norm")
        h = F.silu(F.linear(h, w[p + "ffn_gate"])) * F.linear(h, w[p + "ffn_up"])
        x = x + F.linear(h, w[p + "ffn_down"])
    return F.linear(norm(x, "output_norm"), w["token_embd"]).float()


def loss_of(w, stream, starts):
    rows = torch.stack([stream[s : s + CONTEXT + 1] for s in starts]).long()
    with torch.autocast(stream.device.type, dtype=torch.bfloat16):
        logits = forward(w, rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def sample(w, tokenizer, prompt, count=220, temperature=0.7, seed=0):
    device = w["token_embd"].device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = forward(w, torch.tensor([tokens], device=device))[0, -1]
        token = int(torch.multinomial(F.softmax(logits / temperature, 0), 1, generator=generator))
        if token == END:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


def main():
    began = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    documents = corpus()
    held_out = documents[-1000:]
    tokenizer = Tokenizer([text for document in documents for _, text in document])
    stream = encode(tokenizer, documents[:-1000]).to(device)
    test = encode(tokenizer, held_out).to(device)
    print(f"{len(stream)} tokens, {time.time() - began:.0f} s", flush=True)

    w = init(device)
    decayed = [w[name] for name, *_ in shapes()]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": [w[name] for name in norms()], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    picker = np.random.default_rng(3)
    step_loss = torch.compile(loss_of, dynamic=False) if "--compile" in sys.argv else loss_of
    steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else STEPS
    limit = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else math.inf
    for step in range(steps):
        progress = max(step / steps, (time.time() - began) / limit)
        if progress >= 1:
            break
        rate = RATE * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step_loss(w, stream, picker.integers(0, len(stream) - CONTEXT - 1, BATCH))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        optimizer.step()
        if step % 250 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.time() - began:.0f} s", flush=True)

    starts = range(0, min(len(test) - CONTEXT - 1, 64 * CONTEXT), CONTEXT)
    with torch.no_grad():
        print(f"held-out loss {loss_of(w, test, starts).item():.4f}")
    tensors, packed = [], {}
    for name, rows, columns, kind in shapes():
        data, value = pack.ENCODERS[kind](w[name].detach().cpu().float().numpy())
        tensors.append((name + ".weight", (columns, rows), kind, data))
        packed[name] = torch.tensor(value, dtype=torch.float32, device=device)
    for name in norms():
        data, _ = pack.f32(w[name].detach().cpu().numpy())
        tensors.append((name + ".weight", (WIDTH,), pack.F32, data))
        packed[name] = w[name].detach()
    with torch.no_grad():
        print(f"held-out loss, quantised {loss_of(packed, test, starts).item():.4f}")
    metadata = {
        "general.architecture": "llama", "general.name": "kiln stories", "general.license": "MIT OR Apache-2.0",
        "general.file_type": 15, "general.quantization_version": 2,
        "llama.context_length": CONTEXT, "llama.embedding_length": WIDTH, "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.dimension_count": HEAD, "llama.rope.freq_base": BASE, "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokenizer.tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (VOCABULARY - len(SPECIAL)),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in tokenizer.merges],
        "tokenizer.ggml.bos_token_id": END, "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
    }
    pack.write_gguf(sys.argv[1], metadata, tensors)
    for seed, text in enumerate(["Once upon a time", "One day", "There was a shy fox"]):
        print("---", sample(packed, tokenizer, [END] + tokenizer.encode(text), seed=seed), sep="\n")
    request = [END, USER] + tokenizer.encode("Tell me a story about an owl.") + [END, ASSISTANT]
    print("---", sample(packed, tokenizer, request, seed=9), sep="\n")


if __name__ == "__main__":
    main()
