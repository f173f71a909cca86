"""The try-it box of a panel: fields, the answer, and the calls that were made."""

from __future__ import annotations

import time
from collections.abc import Callable

from nicegui import events as ui_events
from nicegui import ui

from shapeshift.live import calls
from shapeshift.live.calls import Call
from shapeshift.live.source import Followed

_MOST_IMAGE = 4 << 20

Ask = Callable[[str], Call | str]
"""The call for a model, from what the fields say; a text: what is missing."""


class TryIt:
    """Fields and a button. kind: the panel's name; model(): the one that is chosen."""

    def __init__(self, kind: str, source: Followed, model: Callable[[], str | None]) -> None:
        self._source, self._model = source, model
        with ui.element("div").classes("try"):
            with ui.element("div").classes("fields"):
                self._ask = FIELDS[kind]()
                self._button = ui.button("Try it", on_click=self._press).props("no-caps unelevated")
            self._answer = ui.label("").classes("answer").props('role="status"')
            with ui.expansion("The same call with curl and with tritonclient") as self._same:
                self._curl, self._python = ui.code("", language="bash"), ui.code("", language="python")
        self._same.set_visibility(False)

    async def _press(self) -> None:
        self._button.disable()
        try:
            await self._send()
        finally:
            self._button.enable()

    async def _send(self) -> None:
        model = self._model()
        call = self._ask(model) if model else "No such model serves."
        if isinstance(call, str):
            self._answer.set_text(call)
            return
        at, began = self._source.addresses, time.monotonic()
        self._curl.set_content(call.curl(at))
        self._python.set_content(call.tritonclient(at))
        self._same.set_visibility(True)
        self._answer.set_text("…")
        if call.path == "infer":
            answer = await calls.infer(at, call)
            said = answer.error or "; ".join(f"{name}: {_shown(values)}" for name, values in answer.outputs.items())
            self._answer.set_text(f"{said}\n({(time.monotonic() - began) * 1e3:.0f} ms)")
            return
        text = ""
        async for piece in calls.stream(at, call):
            text += piece
            self._answer.set_text(text)
        self._answer.set_text(f"{text}\n({(time.monotonic() - began) * 1e3:.0f} ms)")


def _shown(values: list[object]) -> str:
    some = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:4])
    return f"{some}, … {len(values)} numbers" if len(values) > 4 else some


def _text_fields() -> Ask:
    text = ui.input("Text", value="A text of any length.").classes("long").props("outlined dense")
    return lambda model: calls.text(model, text.value, ("EMBEDDING",)) if text.value else "Write a text."


def _classify_fields() -> Ask:
    example = "what is the exchange rate of dollars to euros"
    text = ui.input("Text", value=example).classes("long").props("outlined dense")
    names = ("LABEL", "CONFIDENCE", "LEVEL")
    return lambda model: calls.text(model, text.value, names) if text.value else "Write a text."


def _generate_fields(adapters: bool = False) -> Ask:
    prompt = ui.input("Prompt", value="What is the capital of France?").classes("long").props("outlined dense")
    most = ui.number("Most tokens", value=60, min=1, max=4096, precision=0).classes("short").props("outlined dense")
    adapter = ui.input("Adapter, if any").classes("short").props("outlined dense") if adapters else None
    is_chat = ui.checkbox("as a turn of a chat (ChatML)", value=True)

    def ask(model: str) -> Call | str:
        if not prompt.value or not most.value:
            return "Write a prompt, and how many tokens at most."
        text = f"<|im_start|>user\n{prompt.value}<|im_end|>\n<|im_start|>assistant\n" if is_chat.value else prompt.value
        return calls.generation(model, text, int(most.value), adapter.value.strip() if adapter is not None else "")

    return ask


def _image_fields() -> Ask:
    data = b""

    async def take(uploaded: ui_events.UploadEventArguments) -> None:
        nonlocal data
        data = await uploaded.file.read()
        # It takes one file: the next one takes its place.
        upload.reset()
        upload.props["label"] = f"Image: {uploaded.file.name}"
        upload.update()

    upload = ui.upload(
        label="Image file: choose it with +", on_upload=take, auto_upload=True, max_file_size=_MOST_IMAGE, max_files=1
    )
    upload.classes("long").props('accept="image/*" flat bordered')
    deadline = ui.number("Deadline, ms", value=500, min=1, max=60_000).classes("short").props("outlined dense")
    return lambda model: calls.image(model, data, float(deadline.value or 500)) if data else "Choose an image."


FIELDS: dict[str, Callable[[], Ask]] = {
    "encode": _text_fields,
    "generate": _generate_fields,
    "lora": lambda: _generate_fields(adapters=True),
    "image": _image_fields,
    "text": _classify_fields,
}
