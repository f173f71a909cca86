"""What is read of answers: text, reasoning and calls, however the answer is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeshift.gateway.answers.families import TOOL_FAMILIES, AnswerFormat, ReasoningMarks, format_of
from shapeshift.gateway.answers.pieces import ArgumentsPiece, CallBegun, CallEnded, Piece, ReasoningPiece, TextPiece
from shapeshift.gateway.answers.reader import AnswerReader
from shapeshift.serving.description import TOOL_PARSERS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "array"}},
}
TOOLS = {"weather": SCHEMA, "news": {}}
THINK = ReasoningMarks("<think>", "</think>", "</think>")
BY_NAME = {family.name: family for family in TOOL_FAMILIES}
# By family: an answer with a text and a call of each tool.
ANSWERS = {
    "openai": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}<|end|><|start|>assistant<|channel|>commentary'
        ' to=functions.news <|constrain|>json<|message|>{"city": "Rom"}'
    ),
    "muse_glimmer": (
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Look:<|eom|><|start|>assistant to=weather"
        '<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Pa"{ris'
        '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n<atem:parameter name="more">'
        '[1, {"a": null}]</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=news'
        '<|message|><atem:function_calls>\n<atem:invoke name="news">\n<atem:parameter name="city">Rom'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
    ),
    "gemma4": (
        'Look:<|tool_call>call:weather{city:<|"|>Pa"{ris<|"|>,days:2,more:[1,{a:None}]}<tool_call|>'
        '<|tool_call>call:news{city:<|"|>Rom<|"|>}<tool_call|>'
    ),
    "seed_oss": (
        'Look:\n<seed:tool_call>\n<function=weather>\n<parameter=city>Pa"{ris</parameter>\n<parameter=days>2</parameter>'
        "<parameter=more>[1, {'a': None}]</parameter></function>\n</seed:tool_call>"
        "<seed:tool_call><function=news><parameter=city>Rom</parameter></function></seed:tool_call>"
    ),
    "qwen3_coder": (
        'Look:\n\n<tool_call>\n<function=weather>\n<parameter=city>\nPa"{ris\n</parameter>\n<parameter=days>\n2\n'
        '</parameter>\n<parameter=more>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n'
        "<function=news>\n<parameter=city>\nRom\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": (
        'Look:\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa"{ris</arg_value>\n<arg_key>days</arg_key>\n'
        '<arg_value>2</arg_value>\n<arg_key>more</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>\n'
        "<tool_call>news<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call>"
    ),
    "minimax_m2": (
        'Look:\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Pa"{ris</parameter>\n'
        '<parameter name="days">2</parameter>\n<parameter name="more">[1, {"a": null}]</parameter>\n</invoke>\n'
        '<invoke name="news">\n<parameter name="city">Rom</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        'Look:]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">'
        ']<]minimax[>[<city>Pa"{ris]<]minimax[>[</city>'
        "]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[<more>]<]minimax[>[<item>1]<]minimax[>[</item>"
        "]<]minimax[>[<item>]<]minimax[>[<a>null]<]minimax[>[</a>]<]minimax[>[</item>]<]minimax[>[</more>"
        ']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="news">]<]minimax[>[<city>Rom]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "kimi_k3": (
        '<|open|>response<|sep|>Look:<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"'
        '<|sep|><|open|>argument key="city" type="string"<|sep|>Pa"{ris<|close|>argument<|sep|><|open|>argument '
        'key="days" type="number"<|sep|>2<|close|>argument<|sep|><|open|>argument key="more" type="array"<|sep|>'
        '[1, {"a": null}]<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="news" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"city": "Rom"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>"
    ),
    "functionary_v3_2": (
        'all\nLook:>>>weather\n{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}>>>news\n{"city": "Rom"}'
    ),
    "deepseek_v3": (
        "Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>news<｜tool▁sep｜>{"city": "Rom"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi_k2": (
        "Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}<|tool_call_end|><|tool_call_begin|>functions.news:1'
        '<|tool_call_argument_begin|>{"city": "Rom"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "mistral": (
        'Look:[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}'
        '[TOOL_CALLS][{"name": "news", "arguments": {"city": "Rom"}, "id": "abc123deg"}]'
    ),
    "lfm2": (
        "Look:<|tool_call_start|>[weather(city='Pa\"{ris', days=2, more=[1, {'a': None}]), news(city='Rom')]"
        "<|tool_call_end|>"
    ),
    "gigachat3_roles": (
        'Look:<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Pa\\"{ris", '
        '"days": 2, "more": [1, {"a": null}]}}<|message_sep|>\n\nfunction call<|role_sep|>\n'
        '{"name": "news", "arguments": {"city": "Rom"}}'
    ),
    "apertus": (
        'Look:<|tools_prefix|>[{"weather": {"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}}, '
        '{"news": {"city": "Rom"}}]<|tools_suffix|>'
    ),
    "solar_open": (
        "Look:<|tool_calls|><|tool_call:begin|>call0<|tool_call:name|>weather<|tool_call:args|>"
        '{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}<|tool_call:end|><|tool_call:begin|>call1'
        '<|tool_call:name|>news<|tool_call:args|>{"city": "Rom"}<|tool_call:end|><|calls|>'
    ),
    "hy_v3": (
        "Look:<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
        '</arg_key:opensource>\n<arg_value:opensource>Pa"{ris</arg_value:opensource>\n<arg_key:opensource>days'
        "</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n<arg_key:opensource>more"
        '</arg_key:opensource>\n<arg_value:opensource>[1, {"a": null}]</arg_value:opensource>\n</tool_call:opensource>'
        "\n<tool_call:opensource>news<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Rom</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
    ),
    "minicpm5": (
        'Look:\n<function name="weather"><param name="city">Pa"{ris</param><param name="days">2</param>'
        "<param name=\"more\">[1, {'a': None}]</param></function>\n"
        '<function name="news"><param name="city"><![CDATA[Rom]]></param></function>'
    ),
    "functionary": (
        'Look:<function=weather>{"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}</function>'
        '<function=news>{"city": "Rom"}</function>'
    ),
    "llama3_json": (
        'Look:<|python_tag|>{"name": "weather", "parameters": {"city": "Pa\\"{ris", "days": 2, "more": [1, '
        '{"a": null}]}}; {"name": "news", "parameters": {"city": "Rom"}}'
    ),
}
DSML = (
    'Look:\n\n<｜DSML｜{0}>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Pa"{{ris'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n<｜DSML｜parameter '
    'name="more" string="false">[1, {{"a": null}}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="news">'
    '\n<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)
ANSWERS |= {"deepseek_v32": DSML.format("function_calls"), "deepseek_v4": DSML.format("tool_calls")}
JSON_CALLS = (
    '[{"name": "weather", "arguments": {"city": "Pa\\"{ris", "days": 2, "more": [1, {"a": null}]}}, '
    '{"arguments": {"city": "Rom"}, "name": "news"}]'
)
for name in TOOL_PARSERS:
    ANSWERS.setdefault(name, f"Look:\n{BY_NAME[name].begin}{JSON_CALLS}{BY_NAME[name].end}")


def form(family: str | None, reasoning: ReasoningMarks | None = None) -> AnswerFormat:
    return AnswerFormat(BY_NAME[family] if family else None, reasoning)


def read(text: str, form: AnswerFormat, *, step: int = 0, tools: Any = TOOLS, **options: bool) -> list[Piece]:
    """The pieces of an answer that comes `step` characters at a time, or at once, with texts joined."""
    reader = AnswerReader(form, tools, **{"thinks": False, "streams": False, **options})
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    pieces: list[Piece] = []
    for piece in [*(piece for part in parts for piece in reader.add(part)), *reader.end()]:
        last = pieces[-1] if pieces else None
        if isinstance(piece, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            pieces[-1] = ArgumentsPiece(piece.index, last.text + piece.text)
        elif isinstance(piece, TextPiece | ReasoningPiece) and type(piece) is type(last):
            pieces[-1] = type(piece)(last.text + piece.text)
        else:
            pieces.append(piece)
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def thought_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))


def calls_of(pieces: list[Piece]) -> list[tuple[str, Any]]:
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    texts = [piece.text for piece in pieces if isinstance(piece, ArgumentsPiece)]
    assert len(names) == sum(isinstance(piece, CallEnded) for piece in pieces)
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def without_ids(pieces: list[Piece]) -> list[Piece]:
    return [CallBegun(one.index, one.name, "") if isinstance(one, CallBegun) else one for one in pieces]


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_calls_are_read_however_the_answer_is_cut(family: str) -> None:
    answer = ANSWERS[family]
    pieces = read(answer, form(family))
    assert calls_of(pieces) == [
        ("weather", {"city": 'Pa"{ris', "days": 2, "more": [1, {"a": None}]}),
        ("news", {"city": "Rom"}),
    ]
    assert text_of(pieces) == "Look:" and thought_of(pieces) == ("hm" if BY_NAME[family].messages else "")
    begun = [piece for piece in pieces if isinstance(piece, CallBegun)]
    assert [one.index for one in begun] == [0, 1] and begun[0].id != begun[1].id
    for streams in (False, True):
        for step in (1, 2, 3, 7, 50):
            assert without_ids(read(answer, form(family), step=step, streams=streams)) == without_ids(pieces)


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_a_stream_has_the_arguments_before_they_are_complete(family: str) -> None:
    reader = AnswerReader(form(family), TOOLS, thinks=False, streams=True)
    answer, pieces = ANSWERS[family], list[Piece]()
    for character in answer:
        pieces += reader.add(character)
        if any(isinstance(piece, ArgumentsPiece) for piece in pieces):
            break
    first = [piece for piece in pieces if not isinstance(piece, TextPiece | ReasoningPiece)]
    assert isinstance(first[0], CallBegun) and first[0].name == "weather"
    if family not in ("gemma4", "lfm2", "minimax_m3"):
        assert CallEnded(0) not in first


@pytest.mark.parametrize("recipient", ["self", "user"])
def test_a_call_that_is_thought_or_said_is_none(recipient: str) -> None:
    call = ANSWERS["muse_glimmer"].rpartition("<|message|>")[2]
    pieces = read(f" to={recipient}<|message|>so: {call}", form("muse_glimmer"), step=1, streams=True)
    said = thought_of(pieces) if recipient == "self" else text_of(pieces)
    assert calls_of(pieces) == [] and said == f"so: {call.removesuffix('<|eot|>')}"


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_a_call_of_no_tool_stays_text(family: str) -> None:
    for step in (0, 1):
        pieces = read(ANSWERS[family], form(family), step=step, tools={"other": {}}, streams=bool(step))
        text = "".join(text_of(pieces).split())
        whole = ANSWERS[family]
        for mark in (BY_NAME[family].said, *BY_NAME[family].dropped):
            whole = whole.replace(mark, "")
        whole = "".join(whole.split())
        in_messages = BY_NAME[family].messages is not None and "weather<|" in text
        assert calls_of(pieces) == [] and (text == whole or in_messages)


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "weather"',
        '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"title": "weather", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        "the tag <tool_cal",
        '```json\n{"name": "weather", "arguments": {}}\n```',
    ],
)
def test_what_only_looks_like_a_call_stays_text(answer: str) -> None:
    for step in (0, 1):
        assert read(answer, form("hermes"), step=step) == [TextPiece(answer)]


def test_a_call_behind_what_only_looks_like_one_is_read() -> None:
    pieces = read('<tool_call>no <tool_call>{"name": "news", "arguments": {}}</tool_call> and on', form("hermes"))
    assert text_of(pieces) == "<tool_call>noand on" and calls_of(pieces) == [("news", {})]


def test_behind_many_marks_without_a_call_all_is_text() -> None:
    """Each may be read up to the end of the answer: of thousands the gateway would stand still for minutes."""
    call = '{"name": "news", "arguments": {}}</tool_call>'
    few, many = ("<tool_call>no " * times + f"<tool_call>{call}" for times in (15, 16))
    assert calls_of(read(few, form("hermes"))) == [("news", {})]
    assert read(many, form("hermes")) == [TextPiece(many)]


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", "<tool_call>" + '{"function": ' * 2000),
        ("gemma4", "<|tool_call>call:news{" + "a" * 300_000 + "}<tool_call|>"),
    ],
)
def test_what_a_model_repeats_without_end_is_text(family: str, answer: str) -> None:
    """Python would not go so deep, and a time that grows with the square of the length would be minutes."""
    assert read(answer, form(family)) == [TextPiece(answer)]


def test_in_a_stream_arguments_that_break_stay_those_of_the_call() -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    pieces = read(answer, form("hermes"), step=1, streams=True)
    assert pieces[1:] == [ArgumentsPiece(0, '{"city": "Par'), CallEnded(0)]


def test_an_answer_of_llama_is_a_call_from_its_start() -> None:
    for step in (0, 1):
        pieces = read('{"name": "news", "parameters": {"a": 1}}', form("llama3_json"), step=step)
        assert calls_of(pieces) == [("news", {"a": 1})]
        assert read('{"answer": [1, 2]}', form("llama3_json"), step=step) == [TextPiece('{"answer": [1, 2]}')]
        pieces = read("<|python_tag|>news.call(a=1)", form("llama3_json"), step=step)
        assert calls_of(pieces) == [("news", {"a": 1})]


def test_arguments_written_as_a_text_and_ids_of_the_model() -> None:
    written = '[TOOL_CALLS][{"name": "news", "arguments": "{\\"a\\": 1}", "id": "abcdefghi"}]'
    pieces = read(written, form("mistral"), step=1)
    assert pieces == [CallBegun(0, "news", "abcdefghi"), ArgumentsPiece(0, '{"a": 1}'), CallEnded(0)]


def test_values_between_tags_are_of_the_types_of_the_schema() -> None:
    types = {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "c": {}}
    values = {"a": "null", "b": "1.5", "c": "7", "d": "x"}
    parts = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())
    answer = f"<tool_call><function=f>{parts}</function></tool_call>"
    pieces = read(answer, form("qwen3_coder"), tools={"f": {"properties": types}})
    assert calls_of(pieces) == [("f", {"a": None, "b": 1.5, "c": "7", "d": "x"})]


def test_values_between_tags_are_of_the_types_that_the_schema_refers_to() -> None:
    refers = {
        "a": {"$ref": "#/$defs/point"},
        "b": {"allOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/number"}], "description": "d"},
        "c": {"$ref": "#/$defs/loop"},
        "d": {"$ref": "#/$defs/nothing"},
        "e": {"$ref": "https://example.org/number"},
    }
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 30 + [{"$ref": "#/$defs/number"}]}
    parts = {"point": {"type": "object"}, "number": {"type": "number"}, "loop": loop}
    written = "".join(f"<parameter={name}>{'{}' if name == 'a' else 7}</parameter>" for name in refers)
    answer = f"<tool_call><function=f>{written}</function></tool_call>"
    pieces = read(answer, form("qwen3_coder"), tools={"f": {"properties": refers, "$defs": parts}})
    assert calls_of(pieces) == [("f", {"a": {}, "b": 7, "c": 7, "d": "7", "e": "7"})]


def test_a_value_that_nests_too_deep_for_json_stays_text() -> None:
    deep = "[" * 300 + "]" * 300
    answer = f"<tool_call><function=f><parameter=a>{deep}</parameter></function></tool_call>"
    pieces = read(answer, form("qwen3_coder"), tools={"f": {"properties": {"a": {"type": "array"}}}})
    assert calls_of(pieces) == [("f", {"a": deep})]


@pytest.mark.parametrize("step", [0, 1, 4])
def test_marks_of_what_is_said_are_no_text_without_tools_too(step: int) -> None:
    functionary, kimi = form("functionary_v3_2"), form("kimi_k3")
    for written, how in (("all\nYes.", functionary), ("<|open|>response<|sep|>Yes.<|close|>response<|sep|>", kimi)):
        assert read(written, how, step=step, tools={}) == read(written, how, step=step) == [TextPiece("Yes.")]
    assert functionary.before_grammar(thinks=False) == "all\n"
    ends = form("kimi_k3", ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|close|>think<|sep|>"))
    assert ends.before_grammar(thinks=True) == "<|close|>think<|sep|><|open|>response<|sep|>"
    assert ends.before_grammar(thinks=False) == "", "the prompt has it"
    assert read("call\nYes >>> no", functionary, step=step) == [TextPiece("call\nYes >>> no")]
    assert read("</think>Yes.", form(None, THINK), step=step) == [TextPiece("Yes.")]


@pytest.mark.parametrize("step", [0, 1, 4])
def test_elements_are_of_the_types_of_the_schema(step: int) -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/node"}, "names": {"items": {"type": "string"}, "type": "array"}}}
    types = {
        "at": {"$ref": "#/$defs/node"},
        "none": {"type": "array"},
        "all": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "string"}}}},
    }
    marked = "<at><next><names><item>1</item></names></next></at><none></none><all><item><n>1</n></item></all><x>1</x>"
    marked = marked.replace("<", "]<]minimax[>[<")
    answer = (
        f']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">{marked}]<]minimax[>[</invoke>]<]minimax[>[</tool_call>'
    )
    tools = {"f": {"properties": types, "$defs": {"node": node}}}
    expected = {"at": {"next": {"names": ["1"]}}, "none": [], "all": [{"n": "1"}], "x": "1"}
    assert calls_of(read(answer, form("minimax_m3"), step=step, tools=tools)) == [("f", expected)]
    for broken in (
        answer.replace("</at>", "</to>"),
        answer.replace("]<]minimax[>[</all>", ""),
        deep(100),
        deep(100_000),
    ):
        assert calls_of(read(broken, form("minimax_m3"), tools=tools)) == []


def deep(levels: int) -> str:
    inside = "]<]minimax[>[<item>" * levels + "]<]minimax[>[</item>" * levels
    return (
        f']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">{inside}]<]minimax[>[</invoke>]<]minimax[>[</tool_call>'
    )


@pytest.mark.parametrize("step", [0, 1, 4])
def test_reasoning_is_split_out(step: int) -> None:
    plain = form(None, THINK)
    both = [ReasoningPiece("hm, <b>"), TextPiece("Yes.")]
    assert read("<think>\nhm, <b>\n</think>\n\nYes.", plain, step=step) == both
    assert read("hm, <b>\n</think>\n\nYes.", plain, step=step, thinks=True) == both
    assert read("<think>\n\n</think>\n\nYes.", plain, step=step) == both[1:]
    assert read("Yes, <think> is a tag.", plain, step=step) == [TextPiece("Yes, <think> is a tag.")]
    assert read("<think>hm", plain, step=step) == [ReasoningPiece("hm")]
    called = '<think>a <tool_call></think><tool_call>{"name": "news", "arguments": {}}</tool_call>'
    pieces = read(called, form("hermes", THINK), step=step)
    assert thought_of(pieces) == "a <tool_call>" and calls_of(pieces) == [("news", {})]


def test_whether_a_prompt_opens_reasoning() -> None:
    assert THINK.opened_by("<assistant>\n<think>\n")
    assert not THINK.opened_by("<assistant>\n<think>\n\n</think>\n\n")


def test_the_family_is_found_in_a_template_and_may_be_stated() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert format_of([template]) == AnswerFormat(None, None)
    assert format_of([template], "mistral").tools == BY_NAME["mistral"]
    found = format_of([template + "<tool_call></tool_call>{% if m.reasoning %}<think></think>"])
    assert found.tools == BY_NAME["hermes"] and found.reasoning and found.reasoning.begin == "<think>"
    assert format_of([template + "<tool_call><function=>"]).tools == BY_NAME["qwen3_coder"]


WORDS = st.sampled_from(
    ["<tool_", "<tool_call>", "</tool_call>", "{", '{"name": "', '"', "}", "\\", "<", "[", "]", ", "]
)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(TOOL_PARSERS), st.booleans())
def test_no_text_is_lost_or_doubled(data: st.DataObject, family: str, streams: bool) -> None:
    """Of an answer in pieces of marks and calls each numbered word comes out once, wherever it was cut."""
    parts = data.draw(st.lists(st.one_of(WORDS, st.sampled_from(("call", "word"))), max_size=12))
    answer = ""
    for number, part in enumerate(parts):
        call = f'{BY_NAME[family].begin}{{"name": "news", "arguments": {{"k": "w{number}w"}}}}{BY_NAME[family].end}'
        answer += call if part == "call" else f" w{number}w " if part == "word" else part
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=5)))
    reader = AnswerReader(form(family), TOOLS, thinks=False, streams=streams)
    pieces = [piece for a, b in zip([0, *cuts], [*cuts, None], strict=True) for piece in reader.add(answer[a:b])]
    pieces += reader.end()
    joined = "".join(getattr(piece, "text", "") for piece in pieces)
    for number, part in enumerate(parts):
        if part in ("call", "word"):
            assert joined.count(f"w{number}w") == 1, (answer, pieces)
    if not any(isinstance(piece, CallBegun) for piece in pieces):
        assert "".join(joined.split()) == "".join(answer.split())
