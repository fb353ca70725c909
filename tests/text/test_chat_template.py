"""Chat templates of strangers end in an error that names the template; those of models work as before."""

import random

import hostile
import pytest

from jspec.checkpoints.files import CheckpointError
from jspec.text import chat_template
from jspec.text.chat_template import ChatTemplate
from jspec.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
VALUES = {"messages": MESSAGES, "bos_token": "<s>", "tools": None, "add_generation_prompt": True}


def render(source, **values):
    return ChatTemplate(source, "dir/chat_template.jinja").render({**VALUES, **values})


@pytest.fixture
def few_steps(monkeypatch):
    """A template may do less, so that the tests take less time."""
    monkeypatch.setattr(chat_template, "STEPS", 2**13)
    monkeypatch.setattr(chat_template, "TEXT", 2**17)


GROW = "{{% set ns = namespace(x='aaaa') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ ns.x }}}}"
DOUBLED = [
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x * 3 %}",
    "{% set ns.x = [ns.x, ns.x] %}",
    "{% set ns.x = (ns.x, ns.x) %}",
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}",
    "{% set ns.x = [ns.x, ns.x] | join %}",
    "{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}",
    "{% set ns.x = ns.x.join(['a', 'b', 'c', 'd']) %}",
    "{% set ns.x = ['a', 'b', 'c'] | join(ns.x) %}",
    "{% set ns.x = ns.x.replace('a', 'aaaa') %}",
    "{% set ns.x = ns.x.replace('', ns.x) %}",
    "{% set ns.x = ns.x | replace('a', ns.x) %}",
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}",
    "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    "{% set ns.x = '{a}{a}'.format(a=ns.x) %}",
    "{% set ns.x = '{a}{a}'.format_map({'a': ns.x}) %}",
    "{% set ns.x = ns.x | indent(9999, true) %}",
    "{% set ns.x = ns.x | indent(ns.x, true) %}",
    "{% set ns.x = ns.x | center(9999) ~ ns.x %}",
    "{% set ns.x = ns.x.replace('a', '\t').expandtabs(9999) %}",
    "{% set ns.x = [ns.x, ns.x] | tojson %}",
    "{% set ns.x = ns.x | tojson | tojson %}",
    "{% set ns.x = (ns.x | e) ~ '<&' | e %}{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x | wordwrap(1, wrapstring=ns.x) %}",
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "{% macro f() %}{{ ns.x }}{{ ns.x }}{% endmacro %}{% set ns.x = f() %}",
    "{% set y %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = y %}",
    "{% set ns.x = [ns.x, ns.x] | string %}",
    "{% set ns.x = [ns.x] | batch(9999, ns.x) | list | string %}",
    "{% set ns.x = [[ns.x], [ns.x]] | sum(start=[]) | string %}",
    "{% set ns.x = [ns.x, ns.x] | map('upper') | join %}",
    "{% set ns.x = ns.x | list + ns.x | list %}",
    "{% set ns.x = ns.x.encode('utf-16').decode('latin-1') * 2 %}",
]


@pytest.mark.parametrize("body", DOUBLED)
def test_a_text_that_doubles(few_steps, body):
    with pytest.raises(CheckpointError, match=r"dir/chat_template.jinja: the chat template (takes too|makes a|calls)"):
        render(GROW.format(body))


LOOPS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{{ loop.length }}{% for b in range(100000) %}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{{ range(100000) | map('string') | map('upper') | list | length }}{% endfor %}",
    "{% for a in range(100000) %}{{ range(100000) | select('odd') | list | length }}{% endfor %}",
    "{% for a in range(100000) %}{{ range(100000) | list | sort | first }}{% endfor %}",
    "{% for a in range(100000) %}{{ messages == messages + messages }}{% endfor %}",
    "{% set b = 'a' * 100000 %}{% for a in range(100000) %}{{ 'ab' in b }}{% endfor %}",
    "{% set b = 'a' * 100000 %}{% for a in range(100000) %}{{ b.count('ab') }}{% endfor %}",
    "{% set b = 'a' * 100000 %}{% for a in range(100000) %}{{ b[1:] | length }}{% endfor %}",
    "{% for a in range(100000) %}" + "{{ a }}" * 1000 + "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "{% macro g() %}" + "{{ caller() }}" * 3000 + "{% endmacro %}{% call g() %}" + "{{ 1 }}" * 5000 + "{% endcall %}",
    "{% set ns = namespace(d=0) %}{% for i in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}"
    "{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_does_not_end(few_steps, source):
    with pytest.raises(
        CheckpointError, match=r"dir/chat_template.jinja: the chat template (takes too many|makes a text)"
    ):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** 10000000000 }}",
        "{% set ns = namespace(x=10) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        *(f"{{{{ 'a' | {name}(10**10) }}}}" for name in ("center", "indent", "wordwrap", "batch", "slice", "round")),
        *(f"{{{{ 'a\t'.{name}(10**10) }}}}" for name in ("center", "ljust", "rjust", "zfill", "expandtabs")),
        "{{ messages | tojson(indent=10**9) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%.99999999f' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10000000000) }}",
        "{{ ('{:>' ~ 10**10 ~ '}').format(1) }}",
        "{{ ('x' | attr('center'))(10**10) }}",
        "{{ ['a'] | map('center', 10**10) | list }}",
        "{{ (5).to_bytes(10**10, 'little') }}",
        "{{ 'aa'.translate({97: 'b'}) }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ strftime_now('%Y' * 1000) }}",
    ],
)
def test_a_size_that_is_refused(source):
    with pytest.raises(CheckpointError, match="dir/chat_template.jinja: the chat template .* in line 1"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ 1 + 'x' }}", r"fails for these messages in line 2 \(TypeError: unsupported operand"),
        ("a\n\n{{ 1 / 0 }}", r"in line 3 \(ZeroDivisionError"),
        ("{{ messages.x.y }}", "rejects these messages: .* has no attribute 'x' in line 1"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ range(10**9) }}", "OverflowError"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "RecursionError"),
        ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "RecursionError"),
        ("{{ messages | tojson(indent='x') | int + [] }}", "TypeError"),
        ("{{ {}.x | tojson }}", "Undefined is not JSON serializable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ '\\ud800' }}", "has a lone surrogate at position 0"),
        ("{{ raise_exception('x' * 100000) }}", "x{500}\\.\\.\\."),
    ],
)
def test_errors_name_the_template(source, message):
    with pytest.raises(ValueError, match=f"dir/chat_template.jinja: .*{message}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{",
        "a\n{% for %}",
        "{{ x | nofilter }}",
        "{{ 'x' | urlize }}",
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ " + "1+" * 5000 + "1 }}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 99 + "{% endif %}" * 99,
        "a" * 100_001,
        "\x00{% endfor %}",
        "{% set x.y.z = 1 %}",
        "{{ x is nothing }}",
    ],
)
def test_what_is_no_template(source):
    with pytest.raises(
        CheckpointError, match=r"dir/chat_template.jinja: (invalid chat template|has 100001 characters)"
    ):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ '<' ~ m.role ~ '|' ~ loop.index ~ '>' }}{% endfor %}", "<system|1><user|2>"),
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}{% endfor %}", "2False12True0"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "hello"),
        (
            "{% for m in messages %}{{ loop.nextitem.role if not loop.last else loop.previtem.role }};{% endfor %}",
            "user;system;",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
            "user",
        ),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }},{% endfor %}", "role=system,content=be brief,"),
        ("{% for k, v in messages[0] | dictsort %}{{ k }}{% endfor %}", "contentrole"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("{% macro f(x, y='b') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ f('a') }}", "ab"),
        ("{% macro f(x) %}[{{ caller() }}{{ x }}]{% endmacro %}{% call f(1) %}in{% endcall %}", "[in1]"),
        ("{% for n in [1, [2, [3]]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}", "123"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first }}", "be brief"),
        ("{{ (messages | groupby('role') | list)[0].grouper }}", "system"),
        ("{{ [3, 1, 2] | sort | list }}{{ [1, 2] | sum }}{{ [1, 2] | max }}", "[1, 2, 3]32"),
        ("{{ 'a-b'.split('-')[-1].strip().upper() }}{{ 'ab'.startswith('a') }}", "BTrue"),
        ("{{ 'x</think>y'.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}", "x"),
        ("{{ '%s: %5.1f' % ('a', 2) }}{{ '{} {b!r}'.format(1, b='c') }}", "a:   2.01 'c'"),
        ("{{ 'a\\nb' | indent(2) }}{{ ' a ' | trim }}{{ 'a' | center(3) }}{{ 'ab' * 2 }}", "a\n  ba a abab"),
        (
            "{{ {'b': [1, {'c': none}]} | tojson(indent=2) }}",
            '{\n  "b": [\n    1,\n    {\n      "c": null\n    }\n  ]\n}',
        ),
        ("{{ messages[0].x is defined }}{{ messages is sequence }}{{ messages[0] is mapping }}", "FalseTrueTrue"),
        ("{{ messages[0].x | default('d') }}{{ 'a' if tools is none else 'b' }}{{ 2 ** 10 }}{{ 7 % 4 }}", "da10243"),
        ("{% set x %}{{ bos_token }}y{% endset %}{{ x ~ x }}{% filter upper %}z{% endfilter %}", "<s>y<s>yZ"),
        ("{% if messages[-1]['role'] == 'user' and 'hell' in messages[-1]['content'] %}yes{% endif %}", "yes"),
        ("{{ raise_exception is callable }}{{ strftime_now('%d %b %Y') | length }}", "True11"),
        ("{{ '<' | e }}{{ ('<' | safe) ~ '>' }}{{ 1.5 | round(1) }}{{ '7' | int + 1 }}", "&lt;<>1.58"),
        ("{{ (['a'] + ['b']) | join }}{{ range(3) | list }}{{ ('a', 'b') + ('c',) }}", "ab[0, 1, 2]('a', 'b', 'c')"),
        (  # As in gpt-oss: macros that call themselves, keys that are methods of dictionaries, and the rest of a list.
            "{% macro of(spec, null=false) -%}{% if spec.type == 'array' %}{{ of(spec['items']) + '[]' }}"
            "{% elif spec.type is iterable and spec.type is not string and spec.type[0] is defined -%}"
            "{{ spec.type | join(' | ') }}{% else %}{% for name, own in (spec.properties or {}).items() -%}"
            "{{ name }}: {{ of(own) }};{% else %}{{ spec.type }}{% endfor %}{% endif %}{%- endmacro %}"
            "{{ of({'type': 'object', 'properties': {'a': {'type': 'array', 'items': {'type': 'string'}},"
            " 'b': {'type': ['integer', 'null']}}}) }}",
            "a: string[];b: integer | null;",
        ),
        (
            "{% macro date() %}{% if day is not defined %}{% set day = strftime_now('%Y') %}{% endif %}"
            "{{ day | length }}{% endmacro %}{% set last = namespace(name=none) %}"
            "{% for m in messages %}{% if 'content' in m and "
            "'<|x|>' in m.content %}{{ raise_exception('x') }}{% endif %}{% for later in messages[loop.index:] %}"
            "{% set last.name = later.role %}{% endfor %}{% endfor %}"
            "{{ last.name }}{{ date() }}{{ {'a': 1} | tojson }}",
            'user4{"a": 1}',
        ),
        ("{{ [1, 2, 3, 4] | batch(2) | list }}{{ [2, 1, 2] | unique | list }}", "[[1, 2], [3, 4]][2, 1]"),
    ],
)
def test_what_templates_of_models_do(source, expected):
    assert render(source) == expected


def test_a_long_chat_passes():
    """About what the templates of current models do for each message."""
    source = (
        "{% macro show(m) %}<{{ m.role }}>{{ m.content | trim }}{% endmacro %}{% set ns = namespace(last=0) %}"
        "{% for m in messages[::-1] %}{% if m.role == 'user' and ns.last == 0 %}{% set ns.last = loop.index %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% if m.content is string %}"
        "{% set c = m.content.split('</think>')[-1] %}"
        "{{ '<|' ~ m.role ~ '|>' ~ c.lstrip('\\n') }}{{ show(m) }}{% endif %}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(2000)]
    assert len(render(source, messages=messages)) > 4_000_000
    one = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(render(source, messages=one)) > 20_000_000


def random_template(generator: random.Random) -> str:
    """Nested loops and macros around steps that make a text longer."""

    def body(depth: int) -> str:
        if depth == 0 or generator.random() < 0.3:
            return generator.choice(DOUBLED)
        inner = body(depth - 1) + body(depth - 1)
        return generator.choice(
            [
                f"{{% for i in range({generator.choice((2, 60, 10**5))}) %}}{inner}{{% endfor %}}",
                f"{{% for i in [ns.x] %}}{inner}{{% endfor %}}",
                f"{{% if ns.x == ns.x + ns.x or true %}}{inner}{{% endif %}}",
                f"{{% set z %}}{inner}{{{{ ns.x }}}}{{% endset %}}{{{{ z }}}}",
            ]
        )

    return "{% set ns = namespace(x='aaaa') %}" + body(4) + "{{ ns.x }}"


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_templates(few_steps, count):
    generator = random.Random(count)
    outcomes = {"text": 0, "error": 0}
    for _ in range(count):
        try:
            render(random_template(generator))
            outcomes["text"] += 1
        except ValueError as error:
            assert "dir/chat_template.jinja" in str(error)
            outcomes["error"] += 1
    assert outcomes["error"] > count // 3


@pytest.mark.slow
@pytest.mark.parametrize("source", [*LOOPS, *map(GROW.format, DOUBLED[::3])])
def test_at_the_full_bounds(source):
    with pytest.raises(CheckpointError, match="the chat template"):
        render(source)


def test_a_tokenizer_gives_the_sources_of_its_templates(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(hostile.TOKENIZER)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None and loaded.templates == {"default": "{{ messages }}"}
