"""How families of models write reasoning and calls: declarations, found by what a chat template says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.gateway.answers.steps import Arguments, Braces, Elements, Head, Object, Parameters, Python, Step
from shapeshift.serving.description import TOOL_PARSERS

Steps = Sequence[str | Step]


MESSAGE = "<|message|>"


@dataclass(frozen=True)
class Messages:
    """An answer that is messages, each a header, `MESSAGE`, its text and one of `ends`.

    thought  what the header of reasoning has
    answer   the header of what is said
    others   who is no tool, though a header has `to=` before the name
    """

    thought: str
    answer: str
    ends: Sequence[str]
    others: Sequence[str] = ()

    @property
    def reasoning(self) -> ReasoningMarks:
        """The marks around reasoning."""
        end = self.ends[0]
        return ReasoningMarks(f"{self.thought}{MESSAGE}", end, f"{end}<|start|>assistant{self.answer}{MESSAGE}")


@dataclass(frozen=True)
class ToolFamily:
    """How calls are written; names are those of vLLM's parsers.

    marks   a template that has all texts of one of these groups is of the family
    begin   the text before one call or several; empty: a call only starts an answer
    calls   what a call may be, the first one that fits
    end     the text after them; it may be missing
    at_start  whether an answer may also start with a call of the first kind, without `begin`
    said    what may stand before what is said, at the start of an answer or behind `begin`
    dropped  further marks that are no text
    messages  the answer is messages: a call is the whole text of one, by default of the tool that its header names
    """

    name: str
    marks: Sequence[Sequence[str]]
    begin: str
    calls: Sequence[Steps]
    end: str = ""
    at_start: bool = False
    said: str = ""
    dropped: Sequence[str] = ()
    messages: Messages | None = None


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts around reasoning. closing: what ends it where the model does not.

    mark: what a template has of them; empty: both.
    """

    begin: str
    end: str
    closing: str
    mark: str = ""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends with `begin`, so that an answer starts with reasoning."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def is_open_in(self, begun: str) -> bool:
        """Whether an answer that has begun so goes on with reasoning."""
        return begun.rfind(self.begin) > begun.rfind(self.end)


_OBJECT: Sequence[Steps] = ((Object(),),)
_FUNCTION = re.compile(r'\s*(?P<name>[^"<>\s]+)\s*')
_KIMI = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*")
_MISTRAL = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?")
_ROLE, _SEPARATOR = "function call<|role_sep|>", "<|message_sep|>"
_SOLAR = re.compile(r"\s*(?P<id>[\w.-]+)<\|tool_call:name\|>(?P<name>[\w.:/-]+)\s*")
_LINES = Parameters("<parameter=", ">", "", "</parameter>", has_lines=True)
_NAMED = Parameters('<parameter name="', '"', ">", "</parameter>")
_KEYS = Parameters("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PARAMS = Parameters('<param name="', '"', ">", "</param>", around=("<![CDATA[", "]]>"))
_HY = Parameters(
    *("<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>")
)
_M3 = "]<]minimax[>["
_K3_CALL = Head("<|sep|>", re.compile(r'\s*tool="(?P<name>[^"]+)"[^"]*(?:index="\d+")?\s*'))
_K3_VALUES = Parameters('<|open|>argument key="', '"', "<|sep|>", "<|close|>argument<|sep|>")
_K3_JSON = ('<|open|>json type="object"<|sep|>', Arguments(), "<|close|>json<|sep|>")
_ATEM = Parameters('<atem:parameter name="', '"', ">", "</atem:parameter>")
_DSML = Parameters('<｜DSML｜parameter name="', '"', ">", "</｜DSML｜parameter>")

# Of two that fit a template the first one counts.
TOOL_FAMILIES: Sequence[ToolFamily] = (
    ToolFamily(
        "openai",
        [["<|channel|>", "<|start|>"]],
        "",
        [(Arguments(),)],
        messages=Messages("<|channel|>analysis", "<|channel|>final", ("<|end|>", "<|call|>", "<|return|>")),
    ),
    ToolFamily(
        "muse_glimmer",
        [["<atem:function_calls>"]],
        "<atem:function_calls>",
        [('<atem:invoke name="', Head('">', _FUNCTION), _ATEM, "</atem:invoke>")],
        "</atem:function_calls>",
        messages=Messages(" to=self", " to=user", ("<|eom|>", "<|eot|>"), others=("self", "user")),
    ),
    ToolFamily(
        "gemma4",
        [["<|tool_call>call:"]],
        "<|tool_call>",
        [("call:", Head("{", _FUNCTION, keeps_end=True), Braces('<|"|>', "<tool_call|>"))],
    ),
    ToolFamily(
        "seed_oss",
        [["<seed:tool_call>"]],
        "<seed:tool_call>",
        [("<function=", Head(">"), Parameters("<parameter=", ">", "", "</parameter>"), "</function>")],
        "</seed:tool_call>",
    ),
    ToolFamily(
        "qwen3_coder",
        [["<tool_call>", "<function="]],
        "<tool_call>",
        [("<function=", Head(">"), _LINES, "</function>"), (Object(),)],
        "</tool_call>",
    ),
    ToolFamily(
        "glm45",
        [["<tool_call>", "<arg_key>"]],
        "<tool_call>",
        [(Head("<", _FUNCTION, keeps_end=True), _KEYS)],
        "</tool_call>",
    ),
    ToolFamily(
        "minimax_m2",
        [["<minimax:tool_call>"]],
        "<minimax:tool_call>",
        [('<invoke name="', Head('">', _FUNCTION), _NAMED, "</invoke>")],
        "</minimax:tool_call>",
    ),
    ToolFamily(
        "minimax_m3",
        [[_M3]],
        f"{_M3}<tool_call>",
        [(f'{_M3}<invoke name="', Head('">', _FUNCTION), Elements(_M3, "invoke"))],
        f"{_M3}</tool_call>",
    ),
    ToolFamily(
        "kimi_k3",
        [["<|open|>", "<|close|>", "<|sep|>"]],
        "<|open|>tools<|sep|>",
        [
            ("<|open|>call", _K3_CALL, *_K3_JSON, "<|close|>call<|sep|>"),
            ("<|open|>call", _K3_CALL, _K3_VALUES, "<|close|>call<|sep|>"),
        ],
        "<|close|>tools<|sep|>",
        said="<|open|>response<|sep|>",
        dropped=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ToolFamily(
        "functionary_v3_2",
        [[">>>${recipient}"]],
        ">>>",
        [(Head("\n"), Arguments())],
        at_start=True,
        said="all\n",
    ),
    ToolFamily(
        "deepseek_v32",
        [["｜DSML｜", "function_calls"]],
        "<｜DSML｜function_calls>",
        [('<｜DSML｜invoke name="', Head('">', _FUNCTION), _DSML, "</｜DSML｜invoke>")],
        "</｜DSML｜function_calls>",
    ),
    ToolFamily(
        "deepseek_v4",
        [["｜DSML｜", "tool_calls"]],
        "<｜DSML｜tool_calls>",
        [('<｜DSML｜invoke name="', Head('">', _FUNCTION), _DSML, "</｜DSML｜invoke>")],
        "</｜DSML｜tool_calls>",
    ),
    ToolFamily(
        "deepseek_v3",
        [["<｜tool▁calls▁begin｜>"]],
        "<｜tool▁calls▁begin｜>",
        [
            (
                *("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", Head("\n"), "```json"),
                *(Arguments(), "```", "<｜tool▁call▁end｜>"),
            ),
            ("<｜tool▁call▁begin｜>", Head("<｜tool▁sep｜>"), Arguments(), "<｜tool▁call▁end｜>"),
        ],
        "<｜tool▁calls▁end｜>",
    ),
    ToolFamily(
        "kimi_k2",
        [["<|tool_calls_section_begin|>"]],
        "<|tool_calls_section_begin|>",
        [("<|tool_call_begin|>", Head("<|tool_call_argument_begin|>", _KIMI), Arguments(), "<|tool_call_end|>")],
        "<|tool_calls_section_end|>",
    ),
    ToolFamily("cohere_command3", [["<|START_ACTION|>"]], "<|START_ACTION|>", _OBJECT, "<|END_ACTION|>"),
    ToolFamily(
        "mistral",
        [["[TOOL_CALLS]"]],
        "[TOOL_CALLS]",
        [(Object(),), (Head("[ARGS]", _MISTRAL), Arguments()), (Head("{", _MISTRAL, keeps_end=True), Arguments())],
    ),
    ToolFamily(
        "lfm2",
        [["<|tool_call_start|>"], ["<|tool_list_start|>"]],
        "<|tool_call_start|>",
        [(Python("<|tool_call_end|>"),)],
    ),
    ToolFamily("nemotron", [["<TOOLCALL>"]], "<TOOLCALL>", _OBJECT, "</TOOLCALL>"),
    ToolFamily("minimax", [["<tool_calls>"]], "<tool_calls>", _OBJECT, "</tool_calls>"),
    ToolFamily("granite", [["<|tool_call|>"]], "<|tool_call|>", _OBJECT),
    ToolFamily("gigachat3", [["<|function_call|>"]], "<|function_call|>", _OBJECT),
    ToolFamily(
        "gigachat3_roles",
        [["'function call'", "<|role_sep|>"]],
        f"{_SEPARATOR}\n\n{_ROLE}",
        # A separator ends each call, and may be the token that ends the answer.
        [(Object(), _SEPARATOR), (_ROLE, Object(), _SEPARATOR), (Object(),), (_ROLE, Object())],
    ),
    ToolFamily(
        "apertus",
        [["<|tools_prefix|>"]],
        "<|tools_prefix|>",
        [("{", '"', Head('"'), ":", Arguments(), "}")],
        "<|tools_suffix|>",
    ),
    ToolFamily(
        "solar_open",
        [["<|tool_call:begin|>"]],
        "<|tool_calls|>",
        [("<|tool_call:begin|>", Head("<|tool_call:args|>", _SOLAR), Arguments(), "<|tool_call:end|>")],
        "<|calls|>",
    ),
    ToolFamily(
        "hy_v3",
        [["<tool_calls{}>", ":opensource"]],
        "<tool_calls:opensource>",
        [("<tool_call:opensource>", Head("<tool_sep:opensource>"), _HY, "</tool_call:opensource>")],
        "</tool_calls:opensource>",
    ),
    ToolFamily(
        "minicpm5",
        [['<function name="', '<param name="']],
        '<function name="',
        [(Head('">'), _PARAMS)],
        "</function>",
    ),
    ToolFamily("hermes", [["<tool_call>"]], "<tool_call>", _OBJECT, "</tool_call>"),
    ToolFamily("functionary", [["<function=", "</function>"]], "<function=", [(Head(">"), Arguments())], "</function>"),
    ToolFamily(
        "llama3_json",
        [["<|python_tag|>"], ['{"name": function name, "parameters": ']],
        "<|python_tag|>",
        [(Object(),), (Python(),)],
        at_start=True,
    ),
)
_BY_NAME = {family.name: family for family in TOOL_FAMILIES}
assert tuple(_BY_NAME) == TOOL_PARSERS

_REASONING: Sequence[ReasoningMarks] = (
    ReasoningMarks("[THINK]", "[/THINK]", "[/THINK]"),
    ReasoningMarks("<|channel>thought", "<channel|>", "<channel|>"),
    ReasoningMarks("<seed:think>", "</seed:think>", "</seed:think>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<mm:think>", "</mm:think>", "</mm:think>"),
    ReasoningMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n[BEGIN FINAL RESPONSE]\n"),
    ReasoningMarks("<think:opensource>", "</think:opensource>", "</think:opensource>", "<think{}>"),
    ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|close|>think<|sep|>", "open_tag('think'"),
    ReasoningMarks("<think>", "</think>", "\n</think>\n\n"),
)


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers. tools, reasoning: None where its template does not say."""

    tools: ToolFamily | None
    reasoning: ReasoningMarks | None

    @property
    def messages(self) -> Messages | None:
        """How answers are messages; None for others."""
        return None if self.tools is None else self.tools.messages

    def before_grammar(self, thinks: bool) -> str:
        """What a prompt ends with before an answer by a grammar. thinks: whether it has opened reasoning."""
        if self.messages is not None:
            return f"{self.messages.answer}{MESSAGE}"
        closing = self.reasoning.closing if thinks and self.reasoning is not None else ""
        # A prompt of a model that thinks, without reasoning, ends with it.
        says = thinks or self.reasoning is None
        return closing + self.tools.said if self.tools is not None and says else closing


def format_of(templates: Sequence[str], tool_parser: str = "") -> AnswerFormat:
    """The format of a model with these chat templates. tool_parser: the name of its family; empty: it is found."""
    source = "\n".join(templates)
    tools = _BY_NAME.get(tool_parser) or next((one for one in TOOL_FAMILIES if _fits(one, source)), None)
    if tools is not None and tools.messages is not None:
        return AnswerFormat(tools, tools.messages.reasoning)
    reasoning = next((marks for marks in _REASONING if _shows(source, marks)), None)
    return AnswerFormat(tools, reasoning)


def _shows(source: str, marks: ReasoningMarks) -> bool:
    return marks.mark in source if marks.mark else marks.begin in source and marks.end in source


def _fits(family: ToolFamily, source: str) -> bool:
    return any(all(mark in source for mark in group) for group in family.marks)
