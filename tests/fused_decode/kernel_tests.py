"""The tests that compute with the native kernels, run in a process of their own over kernels of another build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# Of both packages that have kernels.
FILES = (
    *("tests/fused_decode/test_decode_native.py", "tests/fused_decode/test_decode_model.py"),
    *("tests/fused_decode/test_decode_sampling.py", "tests/adapter_cache/test_lora_batch.py"),
    *("tests/adapter_cache/test_lora_kernels.py", "tests/fused_decode/test_decode_quantised.py"),
    *("tests/fused_decode/test_decode_shared_weights.py", "tests/fused_decode/test_decode_experts.py"),
    "tests/fused_decode/test_decode_states.py",
)
_TIMEOUT_S = 3600.0


def passed(plugin: str, *files: str, environment: Mapping[str, str] | None = None) -> str:
    """The end of the report of `files`, which all have to pass; `plugin`: the pytest plugin that chooses the build."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", plugin, *files]
    ran = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    report = (ran.stdout + ran.stderr)[-8000:]
    assert ran.returncode == 0, report
    assert re.search(r"[1-9]\d* passed", ran.stdout), report
    return report
