"""The setting of waiting threads, and that torch's OpenMP sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shapeshift.fused_decode import waiting

PROJECT = Path(__file__).resolve().parents[2]


def displayed(script: str) -> str:
    """What OpenMP says about its settings in a process that runs `script` and then imports torch."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = clean | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", f"{script}\nimport torch"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr


def test_torch_sees_it() -> None:
    wanted = f"GOMP_SPINCOUNT = '{waiting.SPINS}'"
    assert wanted in displayed("from shapeshift.fused_decode import waiting\nassert waiting.arrange()")
    assert wanted not in displayed("")


def test_the_choice_of_the_environment_stays() -> None:
    for name, value in (("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")):
        environment = {name: value}
        assert waiting.arrange(environment)
        assert environment == {name: value}


def test_it_is_too_late_after_torch() -> None:
    import torch

    environment: dict[str, str] = {}
    assert torch.__version__
    assert not waiting.arrange(environment)
    assert environment == {}


def test_what_computes_in_passing_leaves_no_thread() -> None:
    seen: list[threading.Thread] = []
    assert waiting.passing(lambda: seen.append(threading.current_thread()) or 7) == 7
    assert seen[0] is not threading.current_thread() and not seen[0].is_alive()
    with pytest.raises(ZeroDivisionError):
        waiting.passing(lambda: 1 // 0)
