"""The panel of the sidecar: what it decided and why, what each worker holds, which processes live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shapeshift.live.source import SERVES, View
from shapeshift.live.svg import escaped, number, table, tile, tiles

NAME = "sidecar"
TECHNIQUE = "sidecar"
TITLE = "The watcher beside the server"
IDEA = (
    "A process beside the server reloads models that have died or hang, and moves workers to the lengths of text that"
    " arrive. Every decision has a reason. Watch: a model whose process ends comes back."
)
_SHOWN = 12
_THE_SERVER = "this server"


def models(view: View) -> list[str]:
    """There is one sidecar for all."""
    return [_THE_SERVER] if view.status else []


def draw(view: View, model: str) -> str:
    """The panel, as HTML."""
    status, sidecar = view.status, view.status["sidecar"]
    processes = [(one["name"], one["state"], one["pid"] or "–") for one in _processes(view)]
    serving = sum(state == SERVES for _, state, _ in processes)
    workers = status["workers"]
    worker_rows = [
        (one["front"], one["name"], one["bin"] or "any", one["state"], one["outstanding"], one["generation"])
        for one in workers
    ]
    state = "frozen: it decides and changes nothing" if sidecar["frozen"] else "watches"
    parts = [
        tiles(
            tile("sidecar", state if sidecar["pid"] else "not running", "", "good" if sidecar["pid"] else "bad"),
            tile(
                "processes that serve",
                f"{serving} of {len(processes)}",
                "",
                "good" if serving == len(processes) else "bad",
            ),
            *([tile("workers loaded", number(sum(one["state"] == SERVES for one in workers)))] if workers else []),
        ),
        table(
            "Decisions, the last first",
            ("when", "what", "of", "why"),
            [(one["at"][11:19], one["kind"], one["subject"], one["text"]) for one in reversed(shown(view.decisions))],
            "none yet",
        ),
        _how_to_see_it(view),
    ]
    plans = [
        (front["name"], front["plan"]["plan"], front["plan"]["reason"]) for front in status["fronts"] if front["plan"]
    ]
    if plans:
        parts.append(table("Plans", ("front", "workers by length", "why"), plans, ""))
    if worker_rows:
        parts.append(
            table("Workers", ("front", "worker", "bin", "state", "waiting", "times loaded anew"), worker_rows, "")
        )
    chips = [
        f'<li class="{"good" if state == SERVES else "bad"}"><b>{escaped(name)}</b> {escaped(f"{state}, {pid}")}</li>'
        for name, state, pid in processes
    ]
    parts.append(f'<h3>Models, their state and process</h3><ul class="chips">{"".join(chips)}</ul>')
    return "".join(parts)


def shown(decisions: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The last decisions, and before them the last ones about a model's health: plans do not push those out."""
    earlier = [one for one in decisions[:-_SHOWN] if one["kind"] == "health"]
    return [*earlier[-_SHOWN:], *decisions[-_SHOWN:]]


def _how_to_see_it(view: View) -> str:
    """A command that ends the process of a model that serves."""
    one = next((one for one in _processes(view) if one["state"] == SERVES and one["pid"]), None)
    if one is None or not view.status["sidecar"]["pid"]:
        return '<p class="note">To see models come back, run <code>shapeshift sidecar</code> beside the server.</p>'
    return (
        f'<p class="note">To see it work, end the process of {escaped(one["name"])} on the server\'s machine:'
        f" <code>kill -9 {escaped(one['pid'])}</code></p>"
    )


def _processes(view: View) -> list[dict[str, object]]:
    status = view.status
    of_fronts = [model for front in status["fronts"] for model in front["models"]]
    return sorted([*of_fronts, *status["models"]], key=lambda one: str(one["name"]))
