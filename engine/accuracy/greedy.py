"""Greedy continuations of kiln and llama.cpp on the same file; explains every difference by the gap of the two best.

Usage: greedy.py MODEL.gguf KILN LOGITS PROMPTS LLAMA. KILN is the binary, LOGITS the example `logits`, PROMPTS a text a
line, LLAMA what `llama_driver greedy MODEL 1 PROMPTS 32` printed. Needs numpy and gguf. A control token ends the text.
"""
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGUFReader

model, kiln, logits, prompts, llama = sys.argv[1:6]
vocabulary = GGUFReader(model).fields["tokenizer.ggml.tokens"].contents()
plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
rest = [byte for byte in range(256) if byte not in plain]
letters = {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
same = 0
folder = tempfile.TemporaryDirectory()
tokens_file, logits_file = f"{folder.name}/tokens", f"{folder.name}/logits"


def text(ids):
    return b"".join(bytes(letters[c] for c in vocabulary[i]) for i in ids if not vocabulary[i].startswith("<|"))


for prompt, line in zip(open(prompts).read().splitlines(), open(llama)):
    ids = [int(token) for token in line.split()]
    flags = ["-n", str(len(ids)), "--temp", "0", "--ignore-eos", "-c", "256", "--no-display-prompt"]
    ours = subprocess.run([kiln, "run", "-m", model, "-p", prompt, *flags], capture_output=True, check=True).stdout[:-1]
    if ours == text(ids):
        same += 1
        continue
    shared = 0
    while shared < len(ids) and ours.startswith(text(ids[: shared + 1])):
        shared += 1
    listed = subprocess.run([kiln, "tokenize", "-m", model, "--ids", "--no-parse-special", "-p", prompt],
                            capture_output=True, text=True, check=True).stdout
    sequence = [int(token) for token in listed.strip("[]\n ").split(",")] + ids[:shared]
    with open(tokens_file, "w") as file:
        file.write(" ".join(map(str, sequence)))
    subprocess.run([logits, model, tokens_file, logits_file], check=True)
    last = np.fromfile(logits_file, "<f4").reshape(len(sequence), -1)[-1]
    best = np.argsort(-last)[:2]
    print(f"{prompt!r}: after {shared} tokens, kiln {vocabulary[best[0]]!r} {last[best[0]]:.3f}, then "
          f"{vocabulary[best[1]]!r} {last[best[1]]:.3f}; llama.cpp took {vocabulary[ids[shared]]!r}")
print(f"{same} the same")
