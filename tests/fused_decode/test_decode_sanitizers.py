"""The native kernels and their callers under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from shapeshift.kernels import kernel_build
from tests.fused_decode import kernel_tests

pytestmark = pytest.mark.long


def library(name: str) -> str:
    """The path of a library of the compiler."""
    asked = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


@pytest.mark.parametrize("tests", (*kernel_tests.FILES, "tests/engines/test_engines_native.py"))
def test_no_address_is_wrong_and_no_behaviour_undefined(tests: str) -> None:
    # The sanitizer must come first in the process; libstdc++ with it, whose exceptions it follows.
    preloaded = " ".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so")))
    environment = {
        "LD_PRELOAD": preloaded,
        # Python and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    report = kernel_tests.passed("tests.fused_decode.sanitized", tests, "-m", "not long", environment=environment)
    assert "ERROR: AddressSanitizer" not in report and "runtime error" not in report, report


def test_threads_of_a_team_do_not_race(tmp_path: Path) -> None:
    root = Path(torch.__file__).parent
    target, source = tmp_path / "team", Path(__file__).with_name("team.cpp")
    includes = [f"-I{kernel_build.HEADERS}", f"-isystem{root / 'include'}"]
    flags = ["-std=c++20", "-O1", "-g", "-march=native", "-fsanitize=thread", "-fopenmp"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiled = [
        str(target.with_suffix(".o")),
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    for command in (
        ["g++", *flags, abi, *includes, "-c", str(source), "-o", compiled[0]],
        ["g++", "-fsanitize=thread", *compiled, "-o", str(target)],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    ran = subprocess.run(
        [str(target)],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0 and ran.stdout.strip() == "right", (ran.stdout + ran.stderr)[-8000:]
