"""Greedy continuations of kiln and llama.cpp on the same file.

Usage: greedy.py MODEL.gguf KILN LLAMA_COMPLETION LOGITS [N]. KILN is the `kiln` binary, LLAMA_COMPLETION llama.cpp's
`llama-completion`, LOGITS the example `logits`. For each prompt of prompts.txt N tokens (default 32) are made; where
the texts part, the gap between the two best logits of kiln at that token is printed: a near-tie explains it.
"""
import os
import subprocess
import sys
import tempfile

import numpy as np

model, kiln, llama, logits = sys.argv[1:5]
count = sys.argv[5] if len(sys.argv) > 5 else "32"


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout.decode()


def tokens(text):
    out = run(kiln, "tokenize", "-m", model, "--ids", "--no-bos", "--no-parse-special", "-p", text)
    return [int(token) for token in out.strip("[]\n").split(",") if token.strip()]


same = 0
for prompt in open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts.txt")).read().splitlines():
    ours = run(kiln, "run", "-m", model, "-p", prompt, "-n", count, "--temp", "0", "--ignore-eos", "-c", "256")
    theirs = run(llama, "-m", model, "-p", prompt, "-n", count, "--temp", "0", "--ignore-eos", "-c", "256", "-no-cnv",
                 "--no-warmup", "-t", "2")
    ours, theirs = ours.rstrip("\n"), theirs.rstrip("\n")
    if ours.rstrip() == theirs.rstrip():
        same += 1
        continue
    a, b = tokens(ours), tokens(theirs)
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokens")
        open(path, "w").write(" ".join(map(str, a[:common])))
        run(logits, model, path, path + ".bin")
        last = np.fromfile(path + ".bin", "<f4").reshape(common, -1)[-1]
    best = np.argsort(-last)[:2]
    print(f"{prompt!r}: the texts part after {common - len(tokens(prompt))} tokens, where kiln's two best logits are "
          f"{last[best[0]]:.3f} and {last[best[1]]:.3f} (gap {last[best[0]] - last[best[1]]:.3f})")
print(f"{same} of 20 continuations of {count} tokens are the same")
