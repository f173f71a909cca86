"""The page and the process that serves it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol, cast

import uvicorn
from fastapi import FastAPI
from nicegui import Client, ui

from shapeshift.live import encode, fleet, generate, image, lora, sidecar, text
from shapeshift.live.access import Guard
from shapeshift.live.source import PERIOD_S, SERVES, Followed, View
from shapeshift.live.svg import escaped, number, table
from shapeshift.live.try_it import FIELDS, TryIt
from shapeshift.serving.bounds import OTHERS

TITLE = "Shapeshift live"
_STYLE = Path(__file__).with_name("style.css")


class Panel(Protocol):
    """A module that draws what one technique does.

    NAME        in the page's address; `IDEA`: what the technique does, in two sentences
    models(view)       those that it is about, the busiest first
    draw(view, model)  HTML of one of them
    """

    NAME: str
    TECHNIQUE: str
    TITLE: str
    IDEA: str
    models: Callable[[View], list[str]]
    draw: Callable[[View, str], str]


# Shown where there is something to show; the others say that nothing of theirs serves.
_OPTIONAL = (fleet.NAME,)
PANELS = cast(Sequence[Panel], (encode, generate, lora, image, text, sidecar, fleet))


def make_server(source: Followed, host: str, port: int, key: str = "") -> uvicorn.Server:
    """A server of the page that is not started; its `run` returns after SIGINT or SIGTERM, or `should_exit`.

    key: asked of whoever opens the page; empty: this machine alone may.
    """

    @contextlib.asynccontextmanager
    async def following(_: FastAPI) -> AsyncIterator[None]:
        source.start()
        yield
        source.stop()

    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None, lifespan=following)
    ui.run_with(
        app,
        root=lambda: _page(source),
        title=TITLE,
        dark=None,
        tailwind=False,
        language="en-US",
        show_welcome_message=False,
    )
    config = uvicorn.Config(
        Guard(app, key),
        host=host,
        port=port,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def is_watched() -> bool:
    """Whether anybody looks at the page."""
    return any(client.has_socket_connection for client in Client.instances.values())


def _page(source: Followed) -> None:
    ui.add_css(_STYLE)
    ui.colors(primary="#1f5fa8")
    dark = ui.dark_mode(None)
    with ui.element("div").classes("page"):
        with ui.element("header").classes("top"):
            _html(f"<h1>{TITLE}</h1>")
            state = _html("").classes("grow").props('role="status"')
            with ui.element("button").props('type="button"').on("click", lambda: dark.set_value(not dark.value)):
                _html("light or dark", tag="span")
        nav = _html("", tag="nav").props('aria-label="Panels"')
        with ui.element("main"):
            shown = [ShownPanel(panel, source) for panel in PANELS]

    def refresh() -> None:
        state.set_content(state_of(source))
        for one in shown:
            one.refresh()
        nav.set_content(links([one.panel for one in shown if one.is_shown]))

    ui.timer(PERIOD_S, refresh)


def links(panels: Sequence[Panel]) -> str:
    """The list of panels, as HTML."""
    each = [f'<li><a href="#{one.NAME}"><b>{one.TITLE}</b> <span>{one.TECHNIQUE}</span></a></li>' for one in panels]
    return f"<ul>{''.join(each)}</ul>"


class ShownPanel:
    """A panel on one client's page. That of a fleet is there where the server is in one."""

    def __init__(self, panel: Panel, source: Followed) -> None:
        self.panel, self._source = panel, source
        self.is_shown = panel.NAME not in _OPTIONAL
        # The model that somebody chose, and whether it is the panel itself that chooses just now.
        self._chosen: str | None = None
        self._follows = False
        title = f'<h2 id="{panel.NAME}-title">{panel.TITLE} <code>{panel.TECHNIQUE}</code></h2>'
        self._section = ui.element("section").classes("panel")
        self._section.props(f'id="{panel.NAME}" aria-labelledby="{panel.NAME}-title"')
        self._section.set_visibility(self.is_shown)
        with self._section:
            _html(f'{title}<p class="idea">{panel.IDEA}</p>')
            self._choice = ui.select([], label="model", on_change=self._choose).classes("choice")
            self._choice.props("dense outlined options-dense")
            self._drawn = _html("").classes("drawn")
            if panel.NAME in FIELDS and source.addresses.grpc:
                TryIt(panel.NAME, source, lambda: self._choice.value)

    def _choose(self) -> None:
        if not self._follows:
            self._chosen = self._choice.value
            self.refresh()

    def refresh(self) -> None:
        """Draw what is known now."""
        view = self._source.view
        if self._source.problem:
            self._section.classes("stale")
        else:
            self._section.classes(remove="stale")
        if view is None:
            return
        models = self.panel.models(view)
        self.is_shown = bool(models) or self.panel.NAME not in _OPTIONAL
        self._section.set_visibility(self.is_shown)
        model = self._chosen if self._chosen in models else next(iter(models), None)
        if sorted(models) != self._choice.options or model != self._choice.value:
            self._follows = True
            self._choice.set_options(sorted(models), value=model)
            self._follows = False
        self._choice.set_visibility(len(models) > 1)
        self._drawn.set_content(
            drawn(self.panel.draw, view, model) if model else '<p class="note">No such model serves.</p>'
        )


@lru_cache(maxsize=64)
def drawn(draw: Callable[[View, str], str], view: View, model: str) -> str:
    """The panel as HTML. A server of another version may lack what it needs: then it says so."""
    try:
        # A node's own panels show the classes.
        return draw(view, model) + ("" if draw is fleet.draw else classes(view, model))
    except Exception as error:  # noqa: BLE001  the other panels can still be drawn
        return f'<p class="note">This cannot be drawn from what the server says: {escaped(error)}</p>'


def classes(view: View, model: str) -> str:
    """What the requests of each class did, where they name one; see `serving.bounds.SloClasses`."""
    started = view.minute.by(model, "class_started_total", "slo_class")
    waiting = view.page.by(model, "class_waiting", "slo_class")
    seconds = view.minute.by(model, "class_wait_seconds_total", "slo_class")
    overtaken = view.minute.by(model, "class_overtaken_total", "slo_class")
    if not any(count for each in (started, waiting) for name, count in each.items() if name != OTHERS):
        return ""
    rows = [
        (
            "all others" if name == OTHERS else name,
            number(waiting[name]),
            number(started.get(name, 0.0)),
            number(1e3 * seconds.get(name, 0.0) / started[name], "ms") if started.get(name) else "–",
            number(overtaken.get(name, 0.0)),
        )
        for name in sorted(waiting, key=lambda name: (name == OTHERS, name))
    ]
    caption = f"Urgent requests go first: classes (slo_class), {view.minute_words}"
    return table(caption, ("class", "waiting now", "served", "mean wait", "times overtaken"), rows, "")


def state_of(source: Followed) -> str:
    """One line about the server, as HTML."""
    at = escaped(source.addresses.metrics)
    if source.problem:
        return f'<span class="state bad">no answer</span> {escaped(source.problem)}. This page goes on asking.'
    down = dead_models(source.view)
    if down:
        count = "1 model does" if len(down) == 1 else f"{len(down)} models do"
        words = ", ".join(f"{escaped(name)} ({escaped(state)})" for name, state in down.items())
        return f'<span class="state bad">{count} not serve</span> {words}'
    return f'<span class="state good">serving</span> <span class="quiet">{at}</span>'


def dead_models(view: View | None) -> dict[str, str]:
    """The state of each model that is to serve and does not. The sidecar loads and unloads workers as it likes."""
    if view is None:
        return {}
    status = view.status
    models = [model for front in status.get("fronts", ()) for model in front["models"]] + [*status.get("models", ())]
    states = {model["name"]: model["state"] for model in models if model["state"] != SERVES}
    leave = {*status.get("unloaded", ()), *(worker["name"] for worker in status.get("workers", ()))}
    return {model: "no heartbeat" for model in view.silent if model not in leave} | states


def _html(content: str, tag: str = "div") -> ui.html:
    return ui.html(content, sanitize=False, tag=tag)
