"""How the process of a model ends."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes import PbUtils

PROJECT = Path(__file__).resolve().parents[2]
BACKENDS = sorted(path.parent.name for path in (PROJECT / "backends").glob("*/model.py"))
# A cycle that dies when the interpreter ends, or earlier; it is printed when it is found.
CYCLE = """
import sys
from shapeshift.serving import model_args
class Cycle:
    def __del__(self):
        print("found", flush=True)
cycle = Cycle()
cycle.itself = cycle
"""


def printed(last: str) -> str:
    """What a process prints that ends with a cycle after the statement `last`."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", f"{CYCLE}\n{last}\ndel cycle"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_process_that_ends_looks_for_no_garbage() -> None:
    assert printed("model_args.freeze_objects()") == ""
    assert printed("") == "found\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_closes_its_front_and_then_skips_the_collections(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("freeze"))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", PbUtils())
    spec = importlib.util.spec_from_file_location("model", PROJECT / "backends" / backend / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model._front = model._model = SimpleNamespace(close=lambda: happened.append("close"))
    model.finalize()
    assert happened == ["close", "freeze"]
