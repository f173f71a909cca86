"""`shapeshift cascade select` on a server: which front it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cascade import candidates
from shapeshift.cli.main import main
from tests.live.servers import MetricsServer, page_text
from tests.model_control import FakeControl

DEMO = Path(__file__).resolve().parents[2] / "checkpoints" / "text-classifiers" / "candidates"


class Page(MetricsServer):
    """A page on which the cascade has swapped once more at each look."""

    looks = 0

    @property
    def text(self) -> str:
        self.looks += 1
        return page_text({"classify_text candidate_swaps_total": float(self.looks)})

    @text.setter
    def text(self, text: str) -> None:
        """Whatever it was."""


@dataclass
class Server:
    """Its models are ready; `encode` is no cascade, `flowers` serves another task. A selection swaps at once."""

    control: FakeControl
    page: Page

    def options(self, folder: Path, candidate: str) -> list[str]:
        address = f"http://127.0.0.1:{self.page.port}/metrics"
        return [
            *("--dir", str(folder), "--task", "clinc150", "--candidate", candidate),
            *("--url", self.control.address, "--metrics", address),
        ]


@pytest.fixture
def server() -> Iterator[Server]:
    def serves(task: str) -> dict[str, Any]:
        return {"backend": "cascade", "parameters": {"task": {"string_value": task}}}

    models = {"flowers": serves("flowers"), "classify_text": serves("clinc150"), "encode": {"backend": "polymorph"}}
    server = Server(FakeControl(models), Page())
    yield server
    server.page.close()
    server.control.close()


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
        ("absent", "front: no model absent is ready at 127.0.0.1:"),
        ("encode", "front: got 'encode'; a cascade that serves task clinc150; this model has the backend polymorph"),
        ("flowers", "this model has task flowers. Name the cascade with --front"),
    ],
)
def test_the_wrong_front_is_refused_before_anything_changes(
    front: str, said: str, server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = candidates.serving(folder, "clinc150").candidate
    assert main(["cascade", "select", *server.options(folder, other(folder)), "--front", front]) == 2
    assert said in capsys.readouterr().err
    assert candidates.serving(folder, "clinc150").candidate == before
    assert server.control.loads == [] and server.page.looks == 0


def test_the_wait_is_announced(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = other(folder)
    assert main(["cascade", "select", *server.options(folder, wanted)]) == 0
    assert candidates.serving(folder, "clinc150").candidate.name == wanted
    assert "waiting until classify_text has swapped its candidate, at most 90 s\n" in capsys.readouterr().out


def test_a_registry_is_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cascade", "list", "--dir", "s3://bucket/candidates"]) == 2
    assert "dir: got 's3://bucket/candidates'; a folder, such as a bucket" in capsys.readouterr().err
