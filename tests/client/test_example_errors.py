"""What the examples and `client.loadtest` say to a newcomer's mistakes: one line, no traceback."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from client import loadtest

CLIENT = Path(__file__).resolve().parents[2] / "client"
# Nothing listens on this port.
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def said_by(example: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The line with which the example, run as a file, ends."""
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(CLIENT / example), run_name="__main__")
    assert isinstance(end.value.code, str), "a text: written to standard error, with status 1"
    assert "\n" not in end.value.code
    return end.value.code


@pytest.mark.parametrize(
    "example",
    [
        *("encode_grpc.py", "encode_http.py", "classify_text_grpc.py", "classify_image_grpc.py"),
        *("generate_grpc.py", "generate_answers.py"),
    ],
)
def test_no_server(example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"x")
    given = str(image) if "image" in example else "a text"
    said = said_by(example, monkeypatch, "--url", NOWHERE, given)
    assert said.startswith(f"{NOWHERE}: ") and ("UNAVAILABLE" in said or "http" in example), said


def test_refusals_of_the_server(server: Any, http_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server.failures.append(grpc.StatusCode.INVALID_ARGUMENT)
    said = said_by("encode_grpc.py", monkeypatch, "--url", server.url, "")
    assert said == f"{server.url}: [StatusCode.INVALID_ARGUMENT] fake failure of the next request"
    http_server.failures.append(400)
    assert "fake failure 400" in said_by("encode_http.py", monkeypatch, "--url", http_server.url, "")
    image = tmp_path / "image.png"
    image.write_bytes(b"x")
    server.failures.append(grpc.StatusCode.NOT_FOUND)
    given = ["--url", server.url, "--task", "absent", str(image)]
    assert "NOT_FOUND" in said_by("classify_image_grpc.py", monkeypatch, *given)


def test_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by("classify_image_grpc.py", monkeypatch, "--url", NOWHERE, "absent.jpg")
    assert said == "absent.jpg: No such file or directory"


@pytest.mark.parametrize("given", ["abc", "8,", "0", "-1"])
def test_loadtest_refuses_a_concurrency_that_is_no_number(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loadtest", f"--concurrency={given}"])
    assert loadtest.main() == 2
    said = f"client.loadtest: concurrency: got '{given}'; must be whole numbers from 1, separated by commas\n"
    assert capsys.readouterr().err == said
