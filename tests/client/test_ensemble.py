"""The ensemble of client/ensemble/, served and called as its page says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.triton.embedded.server import TritonServer
from tests.docs.docs_pages import blocks

PROJECT = Path(__file__).resolve().parents[2]
ENSEMBLE = PROJECT / "client" / "ensemble"
LEVELS = ("classify_text_small", "classify_text_large")


@pytest.mark.server
def test_both_levels_answer(make_server: Callable[..., TritonServer], tmp_path: Path) -> None:
    repository = PROJECT / "build" / "repository"
    if any(not (repository / name).is_dir() for name in LEVELS):
        pytest.skip(f"no {' or '.join(LEVELS)} in {repository}: run `make engines`")
    serve, call = blocks(ENSEMBLE / "README.md", "sh")
    models = (*LEVELS, ENSEMBLE.joinpath("both_levels").name)
    assert f"--models {','.join(models)}\n" in serve.text
    with make_server((repository, ENSEMBLE), models, tmp_path) as server:
        server.wait_ready()
        command = call.text.replace("localhost:8000", server.http_url)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    found = {output["name"]: output["shape"] for output in json.loads(done.stdout)["outputs"]}
    assert found == {"SMALL": [1, 150], "LARGE": [1, 150]}
