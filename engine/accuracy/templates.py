"""Renders every chat template of a folder with kiln and with jinja2 as transformers sets it up, and compares the bytes.

    python3 engine/accuracy/templates.py FOLDER [--kiln PATH] [--model FILE.gguf ...] [--markdown]

FOLDER holds *.jinja, such as models/templates of a llama.cpp source tree; the template of each --model is compared too.
Needs jinja2 3.1 (and gguf for --model). Exit code 1 if a text differs, or if one side refuses what the other renders.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATE = "2026-03-05T09:08:07"
TEXT = "What's <b>\"new\"</b> & old?\nÜber 東京 😀 \\ {{ x }}\t"


class Generation(jinja2.ext.Extension):
    """The block that transformers adds: it marks what an assistant wrote, and writes its content."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def reference(source, context):
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(DATE).strftime
    return environment.from_string(source).render(**context)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather's state: <now> & \"later\", in °C.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Which city"},
                    "days": {"type": "integer", "default": 3, "minimum": 1},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                    "exact": {"type": "boolean", "default": True},
                    "shift": {"type": "number", "default": 0.5},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": None},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "Time", "parameters": {"type": "object", "properties": {}}},
    },
]


def conversations():
    user = {"role": "user", "content": TEXT}
    system = {"role": "system", "content": "Be brief, <please>."}
    answer = {"role": "assistant", "content": "Nothing's new.\n"}
    thought = {"role": "assistant", "content": "<think>\nHm & hm.\n</think>\n\nNothing."}
    reasoned = {"role": "assistant", "content": "Nothing.", "reasoning_content": "Hm & hm."}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0001x",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "exact": False}},
            }
        ],
    }
    text_call = json.loads(json.dumps(call))
    text_call["tool_calls"][0]["function"]["arguments"] = '{"city": "Zürich", "days": 2}'
    result = {"role": "tool", "tool_call_id": "call_0001x", "name": "get_weather", "content": '{"sky": "grey <&>"}'}
    turns = [system, user, answer, {"role": "user", "content": "And now?"}]
    kinds = {
        "one turn": {"messages": [user]},
        "turns": {"messages": turns},
        "no prompt": {"messages": turns + [answer], "add_generation_prompt": False},
        "tools": {"messages": [system, user], "tools": TOOLS},
        "tools, no system": {"messages": [user], "tools": TOOLS},
        "call": {"messages": [user, call], "tools": TOOLS, "add_generation_prompt": False},
        "result": {"messages": [system, user, call, result], "tools": TOOLS},
        "result as text": {"messages": [user, text_call, result, answer, user], "tools": TOOLS},
        "thinking": {"messages": turns, "enable_thinking": True},
        "no thinking": {"messages": turns, "enable_thinking": False},
        "thought": {"messages": [user, thought, user]},
        "reasoned": {"messages": [user, reasoned, user], "enable_thinking": True},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "B"}]}]},
        "null content": {"messages": [user, {**call, "content": None}, result, user], "tools": TOOLS},
        "developer": {"messages": [{"role": "developer", "content": "Brief."}, user]},
        "order": {"messages": [user, user, system]},
        "no tools key": {"messages": turns, "tools": ...},
        "odd values": {
            "messages": [user, {**call, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments":
                {"n": None, "t": True, "x": 0.1, "e": 1e22, "s": "it's", "l": [1, "a", {}], "d": {"z": [], "a": {"q": "\"'"}}}}}]},
                {**result, "content": {"sky": [True, None, 2.50]}}],
            "tools": TOOLS,
        },
    }
    for name, context in kinds.items():
        context = {key: value for key, value in {**BASE, **context}.items() if value is not ...}
        yield name, context


BASE = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": True}


def kiln(command, path, context):
    command = [command, "apply-template", "--chat-template-file", path, "--date", DATE]
    done = subprocess.run(command, input=json.dumps(context, ensure_ascii=False).encode(), capture_output=True)
    if done.returncode == 0:
        return done.stdout.decode(), None
    return None, done.stderr.decode().strip()


def compare(source, path, command):
    """(equal, refused by both, list of differences)"""
    equal, refused, differences = 0, 0, []
    for name, context in conversations():
        try:
            expected, reason = reference(source, context), None
        except Exception as error:
            expected, reason = None, f"{type(error).__name__}: {error}"
        got, problem = kiln(command, path, context)
        if expected is None and got is None:
            refused += 1
        elif expected == got:
            equal += 1
        else:
            differences.append((name, reason or problem or "other bytes", expected, got))
    return equal, refused, differences


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kiln", default="target/debug/kiln")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/files.md")
    arguments = parser.parse_args()
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted(arguments.folder.glob("*.jinja"))}
    for model in arguments.model:
        import gguf

        templates[pathlib.Path(model).name] = gguf.GGUFReader(model).fields["tokenizer.chat_template"].contents()
    if not templates:
        sys.exit(f"{arguments.folder} holds no *.jinja")
    bad = 0
    if arguments.markdown:
        print("| template | equal | refused by both | different |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, source in templates.items():
            path = pathlib.Path(folder) / "template.jinja"
            path.write_text(source, encoding="utf-8", newline="")
            equal, refused, differences = compare(source, path, arguments.kiln)
            bad += bool(differences)
            if arguments.markdown:
                reasons = "; ".join(f"{kind}: {reason}" for kind, reason, _, _ in differences)
                print(f"| {name} | {equal} | {refused} | {reasons or 0} |")
            elif differences:
                print(f"{name}: {equal} equal, {refused} refused by both")
                for kind, reason, expected, got in differences:
                    print(f"  {kind}: {reason}")
                    if expected is not None and got is not None:
                        at = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(map(len, (expected, got))))
                        print(f"    expected ...{expected[max(0, at - 40):at + 40]!r}")
                        print(f"    got      ...{got[max(0, at - 40):at + 40]!r}")
                    elif got is None:
                        print("    jinja2 renders it")
    print(f"{len(templates)} templates, {sum(1 for _ in conversations())} conversations each: {len(templates) - bad} equal, {bad} not",
          file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
