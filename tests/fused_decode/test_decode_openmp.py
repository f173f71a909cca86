"""How long OpenMP's threads spin, and that torch uses the setting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shapeshift.fused_decode.model.cpu_runtime import in_temporary_thread
from shapeshift.kernels import kernel_build

PROJECT = Path(__file__).resolve().parents[2]


def displayed(script: str) -> str:
    """The settings that OpenMP displays in a process that runs `script` and then imports torch."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = clean | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", f"{script}\nimport torch"]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr


def test_torch_uses_the_setting() -> None:
    expected = f"GOMP_SPINCOUNT = '{kernel_build.SPIN_COUNT}'"
    script = "from shapeshift.kernels import kernel_build\nassert kernel_build.limit_spinning()"
    assert expected in displayed(script)
    assert expected not in displayed("")


def test_the_choice_of_the_environment_stays() -> None:
    for name, value in (("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")):
        environment = {name: value}
        assert kernel_build.limit_spinning(environment)
        assert environment == {name: value}


def test_it_is_too_late_after_torch() -> None:
    import torch

    environment: dict[str, str] = {}
    assert torch.__version__
    assert not kernel_build.limit_spinning(environment)
    assert environment == {}


def test_a_temporary_thread_ends_with_its_work() -> None:
    seen: list[threading.Thread] = []

    def work() -> int:
        seen.append(threading.current_thread())
        return 7

    assert in_temporary_thread(work) == 7
    assert seen[0] is not threading.current_thread() and not seen[0].is_alive()
    with pytest.raises(ZeroDivisionError):
        in_temporary_thread(lambda: 1 // 0)
