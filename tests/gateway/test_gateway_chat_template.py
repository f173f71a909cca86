"""Chat templates: the text that transformers makes of a conversation, and what ends a template that does too much."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.catalogue import Front, Target
from shapeshift.gateway.conversation import ChatRenderer, Conversation
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.template_process import TemplateProcess
from shapeshift.serving.chat_templates.conversation import ChatTemplate
from tests.waiting import wait_for

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
    {{ '<start_of_turn>' + role + '\\n' + message['content'].strip().replace('{', '{{') + '<end_of_turn>\\n' }}
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
    # What a text holds is no format.
    "formats": [{"role": "user", "content": "In 2024 it was 50% {of} %s, {0:9999}."}],
    "tool": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größe", "parameters": {"maximum": 10**7}}}]


# What users write, none of which is a format or a template.
MESSAGES = (
    "In 2024, 50% of 1,234 were at 99.9 %; in 1999 100%",
    "%s %d %(name)s %% {} {0} {name} {0:9999} ${x}",
    "{{ bos_token }} {% for m in messages %}{% endfor %} {# none #} {%- raw -%} }} %}",
    "def f(x: int) -> dict:\n    return {'a': x % 2}  # odd?\n\nprint(f\"{f(3)!r:>10}\")\n",
    '{"k": [1, null, true], "s": "\\"q\\" \\u00e9\\n", "nested": {"a": {}}}',
    "👩‍👧 🇩🇪 👍🏽 ☕️ e\u0301 \u00e9 ﬁ",
    "مرحبا بالعالم 123 \u200fשלום\u200e, mixed with English",
    "<|im_end|> </s> <end_of_turn> [INST] <b>1 & 1</b> &amp; 'single' \"double\" `code`",
    "C:\\new\\table \\n \\t \\\\ $HOME ~/.x",
    "a\r\nb\tc\u00a0d\u2028e\u200bf\x00g",
    "東京は2024年に50%です。",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


def as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as objects, in which transformers wants them."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers makes of it. A call is written in the first of the forms in which a client may send it."""
    texts: list[str] = []
    failure: Exception | None = None
    for without_content, sent in itertools.product(
        ({}, {"content": ""}, {"content": None}), (as_objects(messages), messages)
    ):
        complete = [
            {**without_content, **{name: value for name, value in one.items() if value}} if "tool_calls" in one else one
            for one in sent
        ]
        try:
            rendered: Any = render_jinja_template([complete], chat_template=source, **{**TOKENS, **options})
            texts.append(rendered[0][0])
        except Exception as error:  # noqa: BLE001  a template may raise whatever Python does
            failure = failure or error
    if not texts:
        assert failure is not None
        raise failure
    return next((text for text in texts if "Paris" in text), texts[0])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, chat: str) -> None:
    template, messages = ChatTemplate(TEMPLATES[name], TOKENS), CHATS[chat]
    for tools, prompted in ((None, True), (TOOLS, False)):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompted}
        try:
            expected = by_transformers(TEMPLATES[name], messages, **options)
        except Exception as error:  # noqa: BLE001  what it refuses is refused here, too
            with pytest.raises(type(error)) as raised:
                template.render(messages, **options)
            assert str(error) == str(raised.value)
            continue
        assert template.render(messages, **options) == expected and expected


@pytest.mark.parametrize("text", MESSAGES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_of_any_kind_are_written_as_in_transformers(name: str, text: str, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
    messages.append({"role": "user", "content": f" {text}\n"})
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "tokenize": False, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(messages, **options)
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages, None) == expected and text[:2].strip() in expected


CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
EACH = "{% for m in messages %}{{ m.role }}:BODY;{% endfor %}"
ONLY_PARTS = EACH.replace("BODY", "{% for p in m.content if p is mapping %}{{ p.text }}{% endfor %}")
EITHER = EACH.replace(
    "BODY",
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}",
)
ARGUMENTS = "{% for m in messages %}{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"
# What templates read, the messages that they get, and what they write.
FORMS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "a list where texts are read": (
        EACH.replace("BODY", "{{ m.content }}"),
        [{"role": "user", "content": PARTS}],
        "user:a\nb;",
    ),
    "a list where texts are changed": (
        EACH.replace("BODY", "{{ m.content.strip() }}"),
        [{"role": "system", "content": PARTS[:1]}, {"role": "user", "content": PARTS}],
        "system:a;user:a\nb;",
    ),
    "a list where lists alone are read": (ONLY_PARTS, [{"role": "user", "content": PARTS}], "user:ab;"),
    "a text where lists alone are read": (ONLY_PARTS, [{"role": "user", "content": "hello"}], "user:hello;"),
    "a result where lists alone are read": (
        ONLY_PARTS,
        [ASK, CALL, {**RESULT, "content": "x"}],
        "user: What is <b>1 & 1</b>? ;assistant:;tool:x;",
    ),
    "a list where both are read": (EITHER, [{"role": "user", "content": PARTS}], "user:[a][b];"),
    "a text where both are read": (EITHER, [{"role": "user", "content": "hello"}], "user:hello;"),
    "a list that is written as JSON": (
        EACH.replace("BODY", "{{ m.content if m.content is string else m.content | tojson }}"),
        [{"role": "tool", "content": PARTS, "tool_call_id": "c"}],
        "tool:a\nb;",
    ),
    "arguments as JSON": (
        ARGUMENTS.replace("BODY", "{{ c.function.arguments | tojson }}"),
        [ASK, CALL],
        '{"city": "Paris"}',
    ),
    "arguments one by one": (
        ARGUMENTS.replace("BODY", "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}"),
        [ASK, CALL],
        "<city>Paris",
    ),
    "arguments of a call without any": (
        ARGUMENTS.replace("BODY", "{{ c.function.arguments | tojson }}"),
        [ASK, {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}],
        "{}",
    ),
    "arguments that are no JSON": (
        ARGUMENTS.replace("BODY", "{{ c.function.arguments }}"),
        [ASK, {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{oops"}}]}],
        "{oops",
    ),
    "arguments that are put together as text": (
        ARGUMENTS.replace("BODY", "{{ '>' + c.function.arguments }}"),
        [ASK, CALL],
        '>{"city": "Paris"}',
    ),
    "a call where texts are put together": (
        EACH.replace("BODY", "{{ '>' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"),
        [ASK, CALL, RESULT],
        "user:> What is <b>1 & 1</b>? ;assistant:>f;tool:>sunny;",
    ),
    "a call where none has no content": (
        EACH.replace(
            "BODY",
            "{% if m.content is none %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
            "{% if m.content is not none %}{{ '>' + m.content }}{% endif %}",
        ),
        [ASK, {**CALL, "content": ""}, RESULT],
        'user:> What is <b>1 & 1</b>? ;assistant:{"city": "Paris"};tool:>sunny;',
    ),
    "a field without a value": (
        EACH.replace("BODY", "{{ m.name is defined }}"),
        [{**ASK, "name": None}],
        "user:False;",
    ),
    "reasoning": (
        EACH.replace("BODY", "{{ m.reasoning_content }}{{ m.thinking }}"),
        [{**ASK, "reasoning": "hm"}],
        "user:hmhm;",
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_template_gets_what_it_reads(case: str) -> None:
    source, messages, expected = FORMS[case]
    assert ChatTemplate(source, {}).render(messages, None) == expected


ASKED = [ASK]
FAILING = {
    "{{ raise_exception('not so') }}": "TemplateError: not so",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ dict.mro() }}": "has no attribute 'mro'",
    "{{ namespace(__class__=1) }}": "SecurityError",
    "{% set n = namespace() %}{% set n._a = 1 %}": "SecurityError",
    "{{ none.a.b }}": "UndefinedError",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ nothing() }}": "'nothing' is undefined",
    "{% include 'x' %}": "no loader",
    "{{ ('a' * 99999) * 99999 }}": "MemoryError",
    "{{ ('a' * 99999999) }}": "longer than",
    "{% for %}": "TemplateSyntaxError",
    "{{ a": "TemplateSyntaxError",
    "{% if " + "(" * 5000 + "%}": "Error",
    "{% frobnicate %}": "TemplateSyntaxError",
}


@pytest.fixture(scope="module")
def chats() -> Iterator[ChatRenderer]:
    made = ChatRenderer()
    yield made
    made.close()


def model(source: str, tokens: Any = None) -> Target:
    """One with this template."""
    return Target(Front("m", "generation", {"chat_template": source, "special_tokens": tokens}), "", "m")


def rendered(chats: ChatRenderer, source: str, messages: list[dict[str, Any]] = ASKED) -> str:
    return asyncio.run(chats.prompt(model(source), Conversation(messages)))


@pytest.mark.parametrize("source", FAILING)
def test_what_a_template_raises_is_an_error_of_the_request(source: str, chats: ChatRenderer) -> None:
    with pytest.raises(InvalidInputError) as raised:
        rendered(chats, source)
    assert FAILING[source] in str(raised.value) and str(raised.value).startswith("messages: got 'user'; what the model")


def test_a_conversation_that_is_nested_too_deep_is_refused(chats: ChatRenderer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidInputError, match="what the model's chat template takes: Recursion"):
        asyncio.run(chats.prompt(model("a"), Conversation(ASKED, [tool])))


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_LONG = {
    "a loop": (NESTED, "a"),
    # One call of a filter, which lets no other thread run.
    "a slow filter": ("{{ messages[0].content | urlize }}", "a" + ")" * 100_000 + "a)"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "a"),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_template_that_takes_too_long_is_ended(case: str) -> None:
    source, text = TOO_LONG[case]
    chats = ChatRenderer(max_seconds=2.0)

    async def beside() -> str:
        endless = Conversation([{"role": "user", "content": text}])
        slow = asyncio.create_task(chats.prompt(model(source), endless))
        await asyncio.sleep(0)
        text_beside = await chats.prompt(model("{{ messages[0].role }}"), Conversation(ASKED))
        with pytest.raises(InvalidInputError, match="renders within"):
            await slow
        return text_beside

    try:
        # Its processes may need longer to start.
        wait_for(lambda: is_rendered(chats), timeout_s=60)
        assert asyncio.run(beside()) == "user"
        assert rendered(chats, "{{ 'a' ~ messages[0].role }}") == "auser"
    finally:
        chats.close()


def is_rendered(chats: ChatRenderer) -> bool:
    with contextlib.suppress(InvalidInputError):
        return rendered(chats, "a") == "a"
    return False


def processes() -> list[psutil.Process]:
    """Those of the gateway that render, and run."""
    children = psutil.Process().children()
    return [one for one in children if "shapeshift.gateway.template_process" in one.cmdline()]


def test_processes_that_end_cost_no_conversation(chats: ChatRenderer) -> None:
    rendered(chats, "a")
    killed = processes()
    for process in killed:
        process.kill()
    assert [rendered(chats, "b") for _ in range(4)] == ["b"] * 4 and killed


def test_a_process_that_is_stuck_is_replaced() -> None:
    before = {process.pid for process in processes()}
    renderer = ChatRenderer(max_seconds=1.0)
    rendered(renderer, "a")
    stopped = [process for process in processes() if process.pid not in before]
    try:
        for process in stopped:
            process.suspend()
        with pytest.raises(InvalidInputError, match="renders within 1 s"):
            rendered(renderer, "b")
        assert rendered(renderer, "b") == "b" and stopped
    finally:
        renderer.close()
    assert not any(process.is_running() for process in stopped)


def test_a_process_that_was_never_asked_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kill, process = subprocess.Popen.kill, TemplateProcess()
    # Its first line, which nobody reads.
    assert select.select([process.start()], [], [], 60)[0]

    def late(killed: subprocess.Popen[bytes]) -> None:
        time.sleep(0.5)
        kill(killed)

    monkeypatch.setattr(subprocess.Popen, "kill", late)
    process.end()
    assert capfd.readouterr().err == ""


def test_a_process_ends_with_the_gateway_also_while_it_renders() -> None:
    script = f"""
import asyncio
from shapeshift.gateway.catalogue import Front, Target
from shapeshift.gateway.conversation import ChatRenderer, Conversation
model = Target(Front("m", "generation", {{"chat_template": "{NESTED}"}}), "", "m")
asyncio.run(ChatRenderer(max_seconds=600).prompt(model, Conversation([{{"role": "user", "content": "a"}}])))
"""
    gateway = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: psutil.Process(gateway.pid).children(), timeout_s=60)
        children = psutil.Process(gateway.pid).children()
        wait_for(lambda: children[0].cpu_times().user > 1, timeout_s=60)
    finally:
        gateway.kill()
        gateway.wait()
    gone, alive = psutil.wait_procs(children, 30)
    assert gone and not alive


def test_a_conversation_that_waits_too_long_for_others_may_come_again() -> None:
    chats = ChatRenderer(max_seconds=0.5)

    async def all_at_once() -> list[str | BaseException]:
        conversations = [chats.prompt(model(NESTED), Conversation(ASKED)) for _ in range(20)]
        return await asyncio.gather(*conversations, return_exceptions=True)

    rendered(chats, "a")
    answers = asyncio.run(all_at_once())
    chats.close()
    refused = [one for one in answers if isinstance(one, ApiError)]
    assert {one.status for one in refused} == {429} and all(
        isinstance(one, ApiError | InvalidInputError) for one in answers
    )


def test_a_client_that_leaves_ends_its_rendering() -> None:
    chats = ChatRenderer(max_seconds=60.0)

    async def leave() -> str:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(chats.prompt(model(NESTED), Conversation(ASKED)), 1)
        return await chats.prompt(model("b"), Conversation(ASKED))

    rendered(chats, "a")
    assert asyncio.run(leave()) == "b"
    chats.close()


def test_text_that_is_no_unicode_is_refused(chats: ChatRenderer) -> None:
    with pytest.raises(InvalidInputError, match="surrogates"):
        rendered(chats, "{{ '\\ud800' }}")


def test_a_long_conversation_is_within_the_bounds(chats: ChatRenderer) -> None:
    messages = [{"role": ("user", "assistant")[row % 2], "content": "word " * 20} for row in range(1000)]
    text = asyncio.run(chats.prompt(model(TEMPLATES["chatml"], TOKENS), Conversation(messages)))
    assert text.count("<|im_start|>") == 1002
