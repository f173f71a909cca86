"""`shapeshift cascade select` on a server: which front it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

from shapeshift.cascade import candidates
from shapeshift.cli.main import main
from shapeshift.cli.registries import cascade

DEMO = Path(__file__).resolve().parents[2] / "checkpoints" / "text-classifiers" / "candidates"
METRICS = "http://localhost:8002/metrics"


class Server:
    """Its models are ready; `encode` is no cascade, `flowers` serves another task. A selection swaps at once."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.scrapes = 0

    def __call__(self, url: str, key: str, tls: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def is_ready(self, name: str) -> bool:
        return name in ("encode", "flowers", "classify_text")

    def config(self, name: str) -> dict[str, Any]:
        if name == "encode":
            return {"backend": "polymorph", "parameters": {}}
        task = {"flowers": "flowers", "classify_text": "clinc150"}[name]
        return {"backend": "cascade", "parameters": {"task": {"string_value": task}}}

    def load(self, name: str) -> None:
        self.loaded.append(name)

    def unload(self, name: str) -> None:
        self.unloaded.append(name)

    def scrape(self, url: str, tls: object = None) -> dict[Any, float]:
        assert url == METRICS
        self.scrapes += 1
        return {("shapeshift_candidate_swaps_total", (("model", "classify_text"),)): float(self.scrapes)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(cascade, "ModelControl", made)
    monkeypatch.setattr(cascade.metrics, "scrape", made.scrape)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A registry of its own with the demo's candidates."""
    found = candidates.serving(DEMO, "clinc150")
    candidates.put(tmp_path, found.table, found.candidate.name, pinned=False)
    return tmp_path


def other(folder: Path) -> str:
    found = candidates.serving(folder, "clinc150")
    return next(one.name for one in found.table.candidates if one.name != found.candidate.name)


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("absent", "front: no model absent is ready at localhost:8001; name the cascade with --front"),
        ("encode", "front: got 'encode'; a cascade that serves task clinc150; this model has the backend polymorph"),
        ("flowers", "this model has task flowers. Name the cascade with --front"),
    ],
)
def test_the_wrong_front_is_refused_before_anything_changes(
    front: str, said: str, server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = candidates.serving(folder, "clinc150").candidate
    given = ["--dir", str(folder), "--task", "clinc150", "--candidate", other(folder), "--url", "localhost:8001"]
    assert main(["cascade", "select", *given, "--metrics", METRICS, "--front", front]) == 2
    assert said in capsys.readouterr().err
    assert candidates.serving(folder, "clinc150").candidate == before
    assert server.loaded == [] and server.scrapes == 0


def test_the_wait_is_announced(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = other(folder)
    given = ["--dir", str(folder), "--task", "clinc150", "--candidate", wanted, "--url", "localhost:8001"]
    assert main(["cascade", "select", *given, "--metrics", METRICS]) == 0
    assert candidates.serving(folder, "clinc150").candidate.name == wanted
    assert "waiting until classify_text has swapped its candidate, at most 90 s\n" in capsys.readouterr().out


def test_a_registry_at_a_url_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cascade", "list", "--dir", "s3://bucket/candidates"]) == 2
    assert "dir: got 's3://bucket/candidates'; a folder: commands do not change a registry" in capsys.readouterr().err
