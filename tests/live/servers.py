"""What a server shows from outside, without one: a metrics page, rings, and the files of its run folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shapeshift.live.counters import Change, Page
from shapeshift.live.source import Addresses, View
from shapeshift.serving.events import Event, Ring
from shapeshift.triton import metrics

Series = Mapping[str, float]


def page_text(series: Series) -> str:
    """A page; keys: `model name label=value,...`, names without prefix."""
    lines = []
    for key, value in series.items():
        model, name, *labels = key.split(" ")
        pairs = dict(label.split("=", 1) for label in labels[0].split(",")) if labels else {}
        all_labels = {"model": model, "pid": "7", **pairs}
        text = ",".join(f'{label}="{one}"' for label, one in all_labels.items())
        lines.append(f"shapeshift_{name}{{{text}}} {value}")
    return "\n".join(lines) + "\n"


def page(series: Series, at: float) -> Page:
    return Page(metrics.parse(page_text(series)), at)


def view(old: Series, new: Series, events: Mapping[str, list[Event]] | None = None, **values: Any) -> View:
    """What is known at second 10 of a server that showed `old` at second 0 and `new` now."""
    change = Change(page(old, 0.0), page(new, 10.0))
    return View(10.0, change, change, events or {}, **values)


class MetricsServer:
    """Serves `text` as the metrics page, while it is open."""

    def __init__(self, port: int = 0) -> None:
        self.text = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802  the library's name
                self.send_response(200)
                self.end_headers()
                self.wfile.write(outer.text.encode())

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def addresses(self, run_directory: Path) -> Addresses:
        """Its own, and ports of gRPC and HTTP where nothing listens."""
        return Addresses("127.0.0.1:1", "127.0.0.1:1", f"http://127.0.0.1:{self.port}/metrics", "", run_directory)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def ring(run_directory: Path, model: str, pid: int) -> Ring:
    folder = run_directory / "events"
    folder.mkdir(parents=True, exist_ok=True)
    return Ring(folder / f"{model}.{pid}.ring")
