"""Real chat templates and tokenizers: those in the source archive of llama-cpp-python, which the benchmarks pin."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
_PIN = re.compile(r"^llama-cpp-python==(\S+)", re.MULTILINE | re.IGNORECASE)


def models() -> Path:
    """The folder with templates/*.jinja and ggml-vocab-*.gguf, in build/. Skips a test that cannot fetch it."""
    pins = (_PIN.search(file.read_text()) for file in (PROJECT / "requirements").glob("*.txt"))
    version = next(pin[1] for pin in pins if pin is not None)
    folder = PROJECT / "build" / "sources"
    found = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp" / "models"
    if not found.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        package = f"llama-cpp-python=={version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", package]
        if subprocess.run([*command, "-d", str(folder)], check=False).returncode:
            pytest.skip(f"no source archive of {package}")
        with tarfile.open(folder / f"llama_cpp_python-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return found
