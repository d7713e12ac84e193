"""Makes fixtures/templates.json: small templates and what jinja2 writes with transformers' settings, or that it refuses.

Run from this folder with jinja2 3.1.
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "accuracy"))
from templates import BASE, DATE, TOOLS, conversations, reference

SOURCES = [
    "{{ bos_token }}\n{% for m in messages %}\n  {% if m['role'] == 'user' %}\n[{{ m.content.strip() | upper }}]\n  {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token if loop.last else '|' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=4) }}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% if tools %}{{ tools | tojson(ensure_ascii=True, sort_keys=True) }}{{ tools | tojson(separators=(',', ':')) }}{% endif %}",
    "{% if tools %}{{ tools }}{{ tools[0].function.parameters.properties }}{% endif %}",
    "{{ tools }}{{ true }}{{ none }}{{ 1.0 }}{{ [1, 'a', \"it's\", none, false, 2.5] }}{{ {'a': {'b': []}} }}",
    "{{ strftime_now('%d %b %Y') }} {{ strftime_now(\"%B %d, %Y\") }} {% if strftime_now is defined %}yes{% endif %}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('begin with a system message') }}{% endif %}ok",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{%- for m in messages -%}\n  {%- generation -%}\n {{ m.role }} \n  {%- endgeneration %}\n x\n{%- endfor -%}",
    "{{ frobnicate('x') }}",
    "{{ frob.nicate }}",
    "[{{ frob }}{% for x in frob %}{% endfor %}]",
    "{% for x in none %}{% endfor %}",
    "{% for x in tools %}{{ x.function.name }}{% endfor %}",
    "{% set ns = namespace(a=0, b='') %}{% for m in messages %}{% set ns.a = ns.a + loop.index0 %}{% set ns.b = ns.b ~ m.role[0] %}{% endfor %}{{ ns.a }}{{ ns.b }}",
    "{% macro f(x, y='z') %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f('a', y=2) }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='role') | tojson }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | length }}",
    "{{ messages | map(attribute='role') | join(', ') }}{% if messages | selectattr('role', 'equalto', 'frob') %}true{% endif %}",
    "{{ messages[0].content.split('<')[0] }}{{ messages[-1].content[::-1] }}{{ messages[0].content.startswith(('W', 'B')) }}",
    "{{ '%s-%d' | format('a', 3) }}{{ 'x'.upper() ~ 'Y'.lower() }}{{ 'a,b'.split(',') }}{{ ' x '.lstrip() }}|{{ 'abc'.replace('b', '') }}",
    "{% if enable_thinking is defined and enable_thinking is false %}off{% elif enable_thinking %}on{% else %}unsaid{% endif %}",
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}{% if a is mapping %}{% for k, v in a.items() %}{{ k }}={{ v }};{{ v | tojson }};{{ v | string }}{% endfor %}{% else %}{{ a }}{% endif %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}s{% elif m.content is none %}n{% elif m.content is sequence %}l{% elif m.content is mapping %}m{% endif %}{{ m.content is iterable }}{{ m.content is sequence }}{% endfor %}",
    "{{ none is iterable }}{{ 1 is iterable }}{{ {} is sequence }}{{ 'a' is sequence }}{{ true is number }}{{ true is integer }}{{ frob is iterable }}",
    "{{ messages[0].content | e }}",
    "{{ 'a < b'|safe }}{{ messages[0].content | length }}{{ messages | length }}",
    "{# a comment {% generation %} #}{% raw %}{% for a in none %}{% endraw %}{{ '{% generation %}' }}",
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1, 'a': 2}.items() | list }}{{ {'b': 1}.get('c') }}{{ {'b': 1}.get('c', 'd') }}{{ {'z': 1, 'a': 2} | tojson }}",
    "{{ 1e22 }} {{ 1e-5 }} {{ 0.1 }} {{ 3 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1e22 | tojson }}",
    "  {% if true %}\n  x\n  {% endif %}\n  {%- if true %} y {%+ endif %}\n\n",
    "{{ messages | last | attr('role') }}{{ (messages | first)['role'] }}{{ messages[1:] | length }}{{ range(3) | list }}{{ 'x' * 3 }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{{ x | trim }}{% filter upper %}abc{% endfilter %}",
    "{{ 'a' if false }}|{{ ('x' ~ none ~ true) }}|{{ 'q' in 'qrs' }}|{{ 'role' in messages[0] }}|{{ 3 not in [1, 2] }}",
    "{{ messages | tojson }}{{ '\\u003c\\t\"' | tojson }}{{ '/é😀\\x7f' | tojson(ensure_ascii=true) }}",
]


def main():
    cases = []
    for name, context in conversations():
        for index, source in enumerate(SOURCES):
            try:
                expected = reference(source, context)
            except Exception:
                expected = None
            cases.append({"conversation": name, "template": index, "expected": expected})
    text = {
        "date": DATE,
        "templates": SOURCES,
        "conversations": dict(conversations()),
        "cases": cases,
    }
    pathlib.Path("fixtures/templates.json").write_text(json.dumps(text, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


main()
