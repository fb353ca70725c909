"""Chat templates: features and texts of transformers, bounds, and errors that name the template."""

import hostile
import pytest

from jspec.checkpoints.files import CheckpointError
from jspec.text.chat_template import ChatTemplate
from jspec.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
VALUES = {"messages": MESSAGES, "bos_token": "<s>", "tools": None, "add_generation_prompt": True}


def render(source, **values):
    return ChatTemplate(source, "dir/chat_template.jinja").render({**VALUES, **values})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% set x = range(1000) | list %}{% for a in x %}{% for b in x %}{% for c in x %}"
            + "y" * 1000
            + "{% endfor %}{% endfor %}{% endfor %}",
            "the chat template makes a text of more than",
        ),
        ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "template uses ranges of"),
        ("{% macro f() %}{% for a in range(100000) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}", "uses ranges"),
        ("{{ range(10**30) }}", "the chat template uses ranges of more"),
        ("{{", r"invalid chat template, line 1 \("),
        ("a\n{% for %}", r"invalid chat template, line 2 \("),
        ("{{ x | nofilter }}", "No filter named 'nofilter'"),
        ("{{ x is nothing }}", "No test named 'nothing'"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "invalid chat template"),
        ("{% if a %}" * 99 + "{% endif %}" * 99, "invalid chat template"),
        ("a" * 100_001, "has 100001 characters"),
    ],
)
def test_a_template_without_end_is_stopped_and_an_invalid_one_refused(source, message):
    with pytest.raises(CheckpointError, match=f"dir/chat_template.jinja: .*{message}"):
        render(source)


INTERNAL = "rejects these messages: .*(unsafe|must not begin)"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", INTERNAL),
        ("{{ ''['__class__'].x }}", INTERNAL),
        ("{{ ('' | attr('__class__')).x }}", INTERNAL),
        ("{{ messages.append(1) }}", INTERNAL),
        ("{{ messages[0].update(role='x') }}", INTERNAL),
        ("{% set x = namespace() %}{% set x.__class__ = 1 %}", INTERNAL),
        ("{{ namespace(__class__=1) }}", INTERNAL),
        ("{{ namespace({'_x': 1}) }}", INTERNAL),
        ("a\n{{ 1 + 'x' }}", r"fails for these messages in line 2 \(TypeError: unsupported operand"),
        ("a\n\n{{ 1 / 0 }}", r"in line 3 \(ZeroDivisionError"),
        ("{{ messages.x.y }}", "rejects these messages: .* has no attribute 'x' in line 1"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ {}.x | tojson }}", "Undefined is not JSON serializable"),
        ("{{ raise_exception('x' * 100000) }}", "x{500}\\.\\.\\."),
    ],
)
def test_errors_of_the_messages_name_the_template(source, message):
    """A template reaches no internals, and changes no messages."""
    with pytest.raises(ValueError, match=f"dir/chat_template.jinja: .*{message}"):
        render(source)


FEATURES = [
    ("{% for m in messages %}{{ '<' ~ m.role ~ '|' ~ loop.index ~ '>' }}{% endfor %}", "<system|1><user|2>"),
    ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}{% endfor %}", "2False12True0"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "hello"),
    (
        "{% for m in messages %}{{ loop.nextitem.role if not loop.last else loop.previtem.role }};{% endfor %}",
        "user;system;",
    ),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}", "user"),
    ("{% for k, v in messages[0].items() %}{{ k }}={{ v }},{% endfor %}", "role=system,content=be brief,"),
    ("{% for k, v in messages[0] | dictsort %}{{ k }}{% endfor %}", "contentrole"),
    ("{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
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
    ("{{ {'b': [1, {'c': none}]} | tojson(indent=2) }}", '{\n  "b": [\n    1,\n    {\n      "c": null\n    }\n  ]\n}'),
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
        "{{ spec.type | join(' | ') }}{% else %}{% for name, value in (spec.properties or {}).items() -%}"
        "{{ name }}: {{ of(value) }};{% else %}{{ spec.type }}{% endfor %}{% endif %}{%- endmacro %}"
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
]


@pytest.mark.parametrize(("source", "expected"), FEATURES)
def test_features_that_templates_of_models_use(source, expected):
    assert render(source) == expected
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs the extra parity")
    rendered, _ = utils.render_jinja_template([MESSAGES], chat_template=source, bos_token="<s>", tools=None)
    assert rendered == [expected]


def test_a_long_chat_is_within_the_bounds():
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


def test_a_tokenizer_gives_the_sources_of_its_templates(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(hostile.TOKENIZER)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None and loaded.templates == {"default": "{{ messages }}"}


CHAT = [
    {"role": "developer", "content": "brief"},
    {"role": "user", "content": "brief?"},
    {"role": "assistant", "content": "<think>no</think>Yes"},
    {"role": "user", "content": " why "},
]
SHOWN = "{{ m.role[0] }}:{{ m.content.split('</think>')[-1] | trim | upper }} "


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("true", "d:BRIEF u:BRIEF? a:YES u:WHY "),
        ("m.role != 'developer'", "s:BRIEF u:BRIEF? a:YES u:WHY "),
        ("m.role in ('user', 'assistant')", "messages[0]: .* drops this message of the role 'developer': must have"),
        ("m.role != 'assistant'", "messages[2]: .* drops this message of the role 'assistant'"),
        ("loop.last or m.role != 'user'", "messages[1]: .* drops this message of the role 'user'"),
    ],
)
def test_no_message_is_dropped_in_silence(condition, expected):
    """What a template changes or takes out of a content is its own affair."""
    source = "{% for m in messages %}{% if CONDITION %}SHOWN{% endif %}{% endfor %}"
    template = ChatTemplate(source.replace("CONDITION", condition).replace("SHOWN", SHOWN), "it")
    if "drops" not in expected:
        assert template.render_whole(CHAT, {}) == expected
        return
    with pytest.raises(ValueError, match=expected.replace("[", r"\[", 1)):
        template.render_whole(CHAT, {})


def test_a_rejected_role_of_a_developer_is_written_as_system():
    source = "{% for m in messages %}{% if m.role == 'developer' or m.role == 'system' and not loop.first %}"
    source += "{{ raise_exception('only the first one is of the system') }}{% endif %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, "it")
    assert template.render_whole(CHAT[:2], {}) == "briefbrief?"
    with pytest.raises(ValueError, match="it: the chat template rejects these messages: only the first one"):
        template.render_whole([*CHAT[1:], CHAT[0]], {})


def test_the_content_beside_calls_of_tools_may_be_left_out():
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    calls = [{"name": "f", "arguments": {}}]
    messages = [{"role": "assistant", "content": "I look.", "tool_calls": calls}, {"role": "user", "content": "x"}]
    assert ChatTemplate(source, "it").render_whole(messages, {}) == f"{calls}x"


CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"function": {"name": "f", "arguments": '{"x": "é"}'}},
        {"function": {"name": "g", "arguments": "5"}},
    ],
}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", 'f{"x": "é"}g"5"'),
        ("{{ c.function.name + c.function.arguments }}", 'f{"x": "é"}g5'),
        ("{% if m.content is none %}{{ c.function.name }}{{ c.function.arguments.x }}{% endif %}", "fég"),
        ("{% if m.content is none %}{{ c.function.name + c.function.arguments }}{% endif %}", 'f{"x": "é"}g5'),
        ("{{ c.function.name + c.function.arguments + m.content }}", 'f{"x": "é"}g5'),
    ],
    ids=["mapping", "text", "mapping, content none", "text, content none", "text, content empty"],
)
def test_calls_are_spelled_as_the_template_takes_them(call, expected):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}{{ m.content or '' }}{% endfor %}"
    )
    template = ChatTemplate(source, "x")
    user = {"role": "user", "content": "hi"}
    assert template.render_whole([user, CALLED], VALUES) == "hi" + expected
    # Arguments may be a mapping already, and calls without "function".
    plain = [{"name": "f", "arguments": {"x": "é"}}]
    bare = ChatTemplate(
        "{{ messages[0].content }}{% for c in messages[0].tool_calls %}{{ c.arguments.x }}{{ c.name }}{% endfor %}", "x"
    )
    assert bare.render_whole([{"role": "assistant", "tool_calls": plain}], VALUES) == "éf"


def test_calls_and_tools_are_text_of_the_template_s_format():
    said = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    granite = ChatTemplate(said + "{# <|tool_call|> #}{{ tools }}", "x")
    called = {"role": "assistant", "tool_calls": CALLED["tool_calls"][:1]}
    text = '<|tool_call|>[{"name": "f", "arguments": {"x": "é"}}]'
    assert granite.render_whole([called], {**VALUES, "tools": "t"}) == f"assistant:{text}|t"
    # Tools as the template takes them, or in words.
    tools = [{"type": "function", "function": {"name": "f"}}]
    field = "{% for m in messages %}{% set message = m %}{{ message['tools'] }}<|/tool|>{{ m.content }}{% endfor %}"
    users = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    rendered = ChatTemplate(field, "x").render_whole(users, {**VALUES, "tools": tools})
    assert rendered == '[{"name": "f"}]<|/tool|>Be brief.<|/tool|>hi'
    described = ChatTemplate(f"<TOOLCALL>{said}{{# tools #}}", "x").render_whole(users[1:], {**VALUES, "tools": tools})
    assert '<TOOLCALL>[{"name": "its name", "arguments": {"an argument": "its value"}}]</TOOLCALL>|user:hi' in described
    # Arguments that are no object.
    olmo = ChatTemplate(f"<function_calls>{said}", "x")
    with pytest.raises(ValueError, match="must be objects of JSON for a chat template with calls in the format 'olmo'"):
        olmo.render_whole([CALLED], VALUES)


@pytest.mark.parametrize("call", ["", "{{ m.tool_calls[0].function.name if m.tool_calls }}"], ids=["all", "the second"])
def test_calls_that_a_template_drops_are_an_error(call):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}" + call + "{# tool_calls #}{% endfor %}", "x")
    with pytest.raises(ValueError, match=r"messages\[1\]: x drops these calls of the role 'assistant'"):
        template.render_whole([{"role": "user", "content": "hi"}, CALLED], VALUES)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("m.tool_calls | length > 1", "hi|f:call_a|f:yes|g:call_b|g:no|"),
        ("m.tool_calls and m.tool_calls[0].id | length != 9", "hi|f:000000001,g:000000000|g:no|f:yes|"),
        (
            "m.tool_calls | length > 1 or m.tool_calls and m.tool_calls[0].id | length != 9",
            "hi|f:000000001|f:yes|g:000000000|g:no|",
        ),
    ],
    ids=["one by one", "short ids", "both"],
)
def test_calls_of_templates_with_other_rules(condition, expected):
    source = (
        "{% for m in messages %}{% if CONDITION %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}:{{ c.id }}{{ ',' if not loop.last }}{% endfor %}|{% endfor %}"
    )
    calls = [{**call, "id": f"call_{name}"} for call, name in zip(CALLED["tool_calls"], "ab", strict=True)]
    results = [{"role": "tool", "tool_call_id": f"call_{name}", "content": said} for name, said in RESULTS]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, *results]
    assert ChatTemplate(source.replace("CONDITION", condition), "x").render_whole(messages, VALUES) == expected


RESULTS = (("b", "g:no"), ("a", "f:yes"))
