"""What the examples and `client.loadtest` say to a newcomer's mistakes: one line, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from client import loadtest

CLIENT = Path(__file__).resolve().parents[2] / "client"
# Nothing listens on this port.
NOWHERE = "127.0.0.1:1"


def said_by(example: str, *arguments: str) -> str:
    """The line with which the example, run as a file, ends."""
    done = subprocess.run(
        [sys.executable, str(CLIENT / example), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.rstrip("\n")


@pytest.mark.parametrize(
    "example",
    [
        *("encode_grpc.py", "encode_http.py", "classify_text_grpc.py", "classify_image_grpc.py"),
        *("generate_grpc.py", "generate_answers.py"),
    ],
)
def test_no_server(example: str, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"x")
    given = str(image) if "image" in example else "a text"
    said = said_by(example, "--url", NOWHERE, given)
    assert said.startswith(f"{NOWHERE}: ") and ("UNAVAILABLE" in said or "http" in example), said


def test_refusals_of_the_server(server: Any, http_server: Any, tmp_path: Path) -> None:
    server.failures.append(grpc.StatusCode.INVALID_ARGUMENT)
    said = said_by("encode_grpc.py", "--url", server.url, "")
    assert said == f"{server.url}: [StatusCode.INVALID_ARGUMENT] fake failure of the next request"
    http_server.failures.append(400)
    assert "fake failure 400" in said_by("encode_http.py", "--url", http_server.url, "")
    image = tmp_path / "image.png"
    image.write_bytes(b"x")
    server.failures.append(grpc.StatusCode.NOT_FOUND)
    given = ["--url", server.url, "--task", "absent", str(image)]
    assert "NOT_FOUND" in said_by("classify_image_grpc.py", *given)


def test_a_missing_file() -> None:
    said = said_by("classify_image_grpc.py", "--url", NOWHERE, "absent.jpg")
    assert said == "absent.jpg: No such file or directory"


@pytest.mark.parametrize("given", ["abc", "8,", "0", "-1"])
def test_loadtest_refuses_a_concurrency_that_is_no_number(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert loadtest.main([f"--concurrency={given}"]) == 2
    said = f"client.loadtest: concurrency: got '{given}'; must be whole numbers from 1, separated by commas\n"
    assert capsys.readouterr().err == said
