"""Calls and reasoning in the form of real chat templates: what a template writes of a turn is read as that turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shapeshift.gateway.answers.families import format_of
from shapeshift.serving.chat_templates.conversation import ChatTemplate
from tests import llama_cpp_source
from tests.gateway.test_gateway_answers import calls_of, read, text_of, thought_of, without_ids

pytestmark = pytest.mark.long
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "array"}},
}
TOOLS = {"weather": SCHEMA, "news": SCHEMA}
LISTED = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
ARGUMENTS = [{"city": 'größe "x" {', "days": 2, "more": [1, {"a": "b"}]}, {"city": "Rom"}]
ASK = {"role": "user", "content": "Q?"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end_of_text|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>")


def turn_of(template: ChatTemplate, message: dict[str, Any]) -> tuple[str, bool]:
    """What the template writes of an assistant's message, and whether that is just what follows its prompt."""
    prompt = template.render([ASK], LISTED)
    written = template.render([ASK, message], LISTED, add_generation_prompt=False)
    at = next((at for at, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    if at < len(prompt):
        # The prompt has begun another kind of answer: reasoning, or none.
        at = written.rfind(">", 0, at) + 1
    text = written[at:]
    for end in ENDS:
        text = text.partition(end)[0]
    return text, written.startswith(prompt)


def test_calls_in_the_form_of_each_template_are_read() -> None:
    folder, answered, thought = llama_cpp_source.models() / "templates", set(), set()
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text()
        template, form = ChatTemplate(source, TOKENS), format_of([source])
        for count in (1, 2):
            calls = [
                {
                    "id": f"call1234{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for place, (name, arguments) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
            ][:count]
            message = {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": calls}
            if form.messages is not None:
                del message["content"]
            try:
                text, follows = turn_of(template, message)
            except Exception:  # noqa: BLE001  a template may raise whatever Python does
                continue
            if "größe" not in text and "gr\\u00f6" not in text:
                # One that writes no calls of its own.
                continue
            marks, prompt = form.reasoning, template.render([ASK], LISTED)
            # Some leave the reasoning of earlier turns out.
            opened = follows and marks is not None and marks.opened_by(prompt) and marks.end in text
            pieces = read(text, form, tools=TOOLS, thinks=opened)
            expected = list(zip(TOOLS, ARGUMENTS, strict=True))[: text.count("Rom") + 1]
            assert calls_of(pieces) == expected, (file.stem, text)
            for streams in (False, True):
                cut = read(text, form, tools=TOOLS, step=1, streams=streams, thinks=opened)
                assert without_ids(cut) == without_ids(pieces), file.stem
            answered.add(file.stem)
            if thought_of(pieces):
                thought.add(file.stem)
                assert thought_of(pieces) == "hm" and "hm" not in text_of(pieces), file.stem
    assert len(answered) >= 45 and len(thought) >= 12, (len(answered), len(thought))
