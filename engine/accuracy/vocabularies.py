"""Compares kiln's splitting and merging with HuggingFace tokenizers on long random Unicode text.

    python3 engine/accuracy/vocabularies.py [--kiln PATH] [--characters N] [--seed N]

For every rule a small vocabulary is trained on the spot, saved as a GGUF file, and applied by both to the same texts.
Needs the packages tokenizers and gguf. Exit code 1 if the numbers of any token differ.

The suite of llama.cpp, whose files are not made here, is compared by
`KILN_VOCABULARIES=FOLDER cargo test -p kiln-engine --test vocabularies -- --nocapture`, which prints the table.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?%s*%s+%s|[^\r\n\p{L}\p{N}]?%s+%s*%s"
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LLAMA = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = None
DIGITS = "digits"
# The rules as the models' tokenizer.json have them.
RULES = {
    "gpt-2": [GPT2],
    "smollm": [DIGITS, GPT2],
    "llama-bpe": [LLAMA],
    "dbrx": [LLAMA],
    "smaug-bpe": [LLAMA],
    "qwen2": [LLAMA.replace("{1,3}", "")],
    "qwen35": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "tekken": [CASED % (UPPER, LOWER, "", UPPER, LOWER, "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-4o": [CASED % (UPPER, LOWER, CONTRACTION + "?", UPPER, LOWER, CONTRACTION + "?")
               + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", CASED % (UPPER, LOWER, CONTRACTION + "?", UPPER, LOWER, CONTRACTION + "?")
                 + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "bailingmoe": [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
    "seed-coder": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "exaone-moe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"],
    "minicpm5": [r"\p{N}{1,3}", LLAMA.replace("{1,3}", "+")],
    "jais-2": [LLAMA[: -len(r"|\s+(?!\S)|\s+")] + "".join(r"|\s{%d}(?!\S)" % n for n in (512, 256, 128, 64, 32, 16, 8, 4))
               + r"|\s{1,2}(?!\S)|\s{1}"],
}
# Rules whose words are looked up whole before any merge.
WHOLE_WORDS = {"llama-bpe", "tekken", "minicpm5"}


def random_text(rng, count):
    """Words of many scripts, contractions, digits, blanks and single characters of all of Unicode."""
    ranges = [(0x20, 0x7E)] * 6 + [(0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F),
              (0xE00, 0xE7F), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2150, 0x218F), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
              (0x1F300, 0x1F6FF), (0x1D400, 0x1D7FF), (0x10000, 0x10FFF), (0xE000, 0xE0FF)]
    fixed = ["'s", "'LL", "'d", "\r\n", "\n\n", "  ", "\t", " ", " ", " \n ", "   x", "123", "12345678", "1234567", "HTMLParser",
             "the", " of", "camelCase", "ΣΑΣ", "٣٤٥٦", "½", "_", "ſ", "'ſ", "\u00a0", "\u2028", "\u3000", "e\u0301", "/", "[a]"]
    out = []
    while sum(map(len, out)) < count:
        if rng.random() < 0.5:
            out.append(rng.choice(fixed))
        else:
            low, high = rng.choice(ranges)
            drawn = (chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
            # The two sides know different versions of Unicode: characters that are new in one are unassigned in the other.
            out.append("".join(c for c in drawn if unicodedata.category(c) != "Cn"))
    return "".join(out)


def splitter(steps):
    parts = []
    for step in steps:
        if step is GPT2:
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
            return pre_tokenizers.Sequence(parts)
        parts.append(pre_tokenizers.Digits(individual_digits=True) if step == DIGITS
                     else pre_tokenizers.Split(Regex(step), behavior="isolated"))
    return pre_tokenizers.Sequence(parts + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def save(path, name, tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="target/debug/kiln")
    parser.add_argument("--characters", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    bad = 0
    print("| rule | tokens of the text | result |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, steps in RULES.items():
            rng = random.Random(f"{arguments.seed} {name}")
            tokenizer = Tokenizer(models.BPE(ignore_merges=name in WHOLE_WORDS))
            tokenizer.pre_tokenizer = splitter(steps)
            trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
            tokenizer.train_from_iterator([random_text(rng, 20_000)], trainer)
            path = pathlib.Path(folder) / f"{name}.gguf"
            save(path, name, tokenizer)
            text = random_text(rng, arguments.characters)
            expected = tokenizer.encode(text).ids
            command = [arguments.kiln, "tokenize", "--ids", "--no-bos", "--stdin", "-m", str(path)]
            done = subprocess.run(command, input=text.encode(), capture_output=True)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.decode()}")
            got = json.loads(done.stdout)
            if got == expected:
                print(f"| {name} | {len(got)} | equal |")
                continue
            bad += 1
            at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            shown = [[tokenizer.id_to_token(token) for token in ids[max(0, at - 3):at + 4]] for ids in (expected, got)]
            print(f"| {name} | {len(expected)} | differs at {at}: expected {shown[0]}, got {shown[1]} |")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
