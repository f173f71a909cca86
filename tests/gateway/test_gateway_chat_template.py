"""Chat templates: the text that transformers makes of a conversation, and bounds for templates that do too much."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.chat_templates import limits
from shapeshift.gateway.chat_templates.chat_template import MAX_MESSAGES, ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# In the manner of well-known models: what their templates use of Jinja, in words of our own.
TEMPLATES = {
    "chatml": """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' ~ message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' -}}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "headers": """{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- set year = strftime_now('%Y') %}
{{- '<|head|>system<|/head|>\\n\\n' ~ year | length ~ system ~ '<|eot|>' }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}{{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- message.tool_calls[0].function | tojson }}
    {%- else %}
        {{- '<|head|>' + message.role + '<|/head|>\\n\\n' + (message.content or '') | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}""",
    "turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('no system role') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% set role = 'model' if message.role == 'assistant' else message.role %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'].strip() + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "brackets": """{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set ns = namespace(count=0, last=asked | last) -%}
{{ bos_token }}{% for message in messages recursive %}
{%- if loop.index > 40 %}{% break %}{% endif -%}
{%- if message.role == 'user' %}{% set ns.count = ns.count + 1 %}
{{- '[INST] %s [/INST]' % message.content -}}
{%- elif message.role == 'assistant' -%}
{% generation %} {{ message.content ~ eos_token }}{% endgeneration %}
{%- else %}{% continue %}{% endif %}
{%- endfor %}{{ ns.count * 2 }}{{ dict(a=[1, 'ä']) | tojson(sort_keys=true) }}{{ ns.last.content | upper }}""",
}
ASK = {"role": "user", "content": " What is <b>1 & 1</b>? "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [ASK],
    "conversation": [
        ASK,
        {"role": "assistant", "content": "Zwei, größer als eins."},
        {"role": "user", "content": "Why?"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "tool": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größe", "parameters": {"maximum": 10**7}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, chat: str, tokenizer: Any) -> None:
    template, messages = ChatTemplate(TEMPLATES[name], TOKENS), CHATS[chat]
    for tools, prompted in ((None, True), (TOOLS, False)):
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompted}
        try:
            wanted = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **given)
        except Exception as error:  # noqa: BLE001  what it refuses is refused here, too
            with pytest.raises(InvalidInputError) as raised:
                template.render(messages, **given)
            assert str(error) in str(raised.value)
            continue
        assert template.render(messages, **given) == wanted and wanted


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


ASKED = [ASK]
WRONG: dict[str, tuple[Any, str]] = {
    "no message": ([], "messages: got 0; 1 to 4096 messages"),
    "too many": ([ASK] * (MAX_MESSAGES + 1), "messages: got 4097; 1 to 4096 messages"),
    "no object": (["hello"], "messages[0]: got 'hello'; an object with role and content"),
    "no role": ([ASK, {"content": "a"}], "messages[1].role: got None; one of system, developer, user, "),
    "another role": ([{"role": "root", "content": "a"}], "messages[0].role: got 'root'; one of system"),
    "no content": ([{"role": "user"}], "messages[0].content: got None; a text, or parts of type text"),
    "a number": ([{"role": "user", "content": 4}], "messages[0].content: got 4; a text, or parts of type text"),
    "an image": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
        "messages[0].content[1]: got 'image_url'; a part of type text, with its text",
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]: got 'text'"),
    "a part that is none": ([{"role": "user", "content": [3]}], "messages[0].content[0]: got 3; a part of type text"),
    "no JSON": ([{"role": "user", "content": "a", "more": object()}], "the chat template fails: TypeError: Object of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_message_is_named(case: str) -> None:
    messages, said = WRONG[case]
    with pytest.raises(InvalidInputError) as raised:
        ChatTemplate("{{ messages[-1].content }}", {}).render(messages)
    assert said in str(raised.value)


FAILING = {
    "{{ raise_exception('not so') }}": "messages: got 'user'; the chat template refuses: not so",
    "{{ messages.append(1) }}": "the chat template refuses: ",
    "{{ messages.__class__.__mro__ }}": "the chat template refuses: ",
    "{{ ''.__class__.__mro__ }}": "the chat template refuses: ",
    "{{ none.a.b }}": "the chat template refuses: ",
    "{{ 1 // 0 }}": "the chat template fails: ZeroDivisionError",
    "{{ nothing() }}": "the chat template refuses: 'nothing' is undefined",
    "{% include 'x' %}": "the chat template fails: TypeError: no loader",
}


@pytest.mark.parametrize("source", FAILING)
def test_what_a_template_raises_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        ChatTemplate(source, {}).render(ASKED)
    assert FAILING[source] in str(raised.value)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(90) %}GROW{% endfor %}{{ n.x }}"
TOO_MUCH = {
    "empty loops": NESTED.replace("BODY", ""),
    "loops that write": NESTED.replace("BODY", "text "),
    "calls of macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop within itself": "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "a text twice as long each time": DOUBLED.replace("GROW", "{% set n.x = n.x ~ n.x %}"),
    "the same by plus": DOUBLED.replace("GROW", "{% set n.x = n.x + n.x %}"),
    "the same by blocks": DOUBLED.replace("GROW", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "the same by join": DOUBLED.replace("GROW", "{% set n.x = [n.x, n.x] | join %}"),
    "the same by replace": DOUBLED.replace("GROW", "{% set n.x = n.x.replace('a', 'aaab') %}"),
    "a list of lists": DOUBLED.replace("GROW", "{% set n.x = [n.x, n.x] %}"),
    "a list of lists by filters": DOUBLED.replace("GROW", "{% set n.x = [n.x] * 2 | batch(2) | list %}"),
    "namespaces": DOUBLED.replace("GROW", "{% set n.x = namespace(a=n.x, b=n.x) %}"),
    "dictionaries": DOUBLED.replace("GROW", "{% set n.x = dict(a=n.x, b=n.x) %}"),
    "a text many times in a list": "{{ ([('ab' * 500000)] * 100000) | join }}",
    "a text times a number": "{{ 'a' * 999999999 }}",
    "a list times a number": "{{ [1] * 999999999 }}",
    "a power": "{{ 9 ** 99999999 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a width": "{{ 'a'.center(999999999) }}",
    "a filter's width": "{{ 'a' | center(999999999) }}",
    "a format's width": "{{ '%999999999d' % 1 }}",
    "a formatter's width": "{{ '{:999999999}'.format(1) }}",
    "the format filter's width": "{{ '%999999999d' | format(1) }}",
    "a batch": "{{ [1] | batch(999999999, 0) | list }}",
    "slices": "{{ [1] | slice(999999999) | list }}",
    "a range": "{{ range(999999999) | list }}",
    "words": "{{ lipsum(n=999999) }}",
}


@pytest.mark.parametrize("case", TOO_MUCH)
@pytest.mark.timeout(30)
def test_a_template_that_does_too_much_is_ended(case: str) -> None:
    template = ChatTemplate(TOO_MUCH[case], {})
    with pytest.raises(InvalidInputError):
        template.render(ASKED)
    assert ChatTemplate("{{ 'a' ~ messages[0].role }}", {}).render(ASKED) == "auser", "the next one has its own budget"


# Each makes 200 MB of texts that are within the bounds.
MANY, LONG = "('a' * 20000)", "('b' * 10000)"
PRODUCTS = {
    "replace": f"{{{{ {MANY}.replace('a', {LONG}) }}}}",
    "the filter replace": f"{{{{ {MANY} | replace('a', {LONG}) }}}}",
    "replace by names": f"{{{{ {MANY} | replace(new={LONG}, old='a') }}}}",
    "join": f"{{{{ {LONG}.join({MANY}) }}}}",
    "the filter join": f"{{{{ {MANY} | list | join({LONG}) }}}}",
    "join of what a filter yields": f"{{{{ {LONG}.join({MANY} | map('upper')) }}}}",
    "format": f"{{{{ ('{{0}}' * 20000).format({LONG}) }}}}",
    "the filter format": f"{{{{ ('%(a)s' * 20000) | format(a={LONG}) }}}}",
    "modulo": f"{{{{ ('%(a)s' * 20000) % {{'a': {LONG}}} }}}}",
    "widths": "{{ ('{0:999}' * 140000).format(1) }}",
    "translate": f"{{{{ {MANY}.translate({{97: {LONG}}}) }}}}",
    "expandtabs": "{{ ('\\t' * 1000000).expandtabs(256) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(200, blank=true) }}",
    "wordwrap": f"{{{{ {MANY} | wordwrap(1, wrapstring={LONG}) }}}}",
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_text_beyond_the_bounds_is_never_made(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is traced is slow, and the bound of time must not be met first.
    monkeypatch.setattr(limits, "MAX_SECONDS", 100.0)
    template = ChatTemplate(PRODUCTS[case], {})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="longer than"):
            template.render(ASKED)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_long_text_may_be_changed() -> None:
    text = "one {two} 100% \n" * 4000
    for source in (
        "c.replace('\\n', ' ')",
        "c | replace('one', '1') | indent(4)",
        "c.split() | join(' ')",
        "c | wordwrap(80)",
    ):
        assert (
            len(
                ChatTemplate(f"{{% set c = messages[0].content %}}{{{{ {source} }}}}", {}).render(
                    [{"role": "user", "content": text}]
                )
            )
            > 50_000
        )


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% if " + "(" * 5000 + "%}", "{% frobnicate %}"])
def test_a_text_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(InvalidInputError, match="^chat_template: got "):
        ChatTemplate(source, {})


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": ("user", "assistant")[row % 2], "content": "word " * 20} for row in range(1000)]
    text = ChatTemplate(TEMPLATES["chatml"], TOKENS).render(messages)
    assert text.count("<|im_start|>") == 1002
