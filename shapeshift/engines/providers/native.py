"""native: the project's own kernels for CPUs (`engines.native`). One engine computes packs of every shape.

There is nothing to compile for a length. The weights lie in memory once for all engines of a process, and once for all
processes, which map one file; DeBERTa's tables of places once for each process.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Engine, Runtime
from shapeshift.errors import UnsupportedError
from shapeshift.kernels import kernel_build

_SOURCES = Path(__file__).parents[1] / "native"
_KINDS = (".py", ".h", ".cpp")


class NativeRuntime:
    """The engines of one encoder."""

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        # torch takes a second to import: not for a look at the providers.
        kernel_build.limit_spinning()
        kernel_build.import_torch()
        from shapeshift.engines.native import encoder

        self._make = encoder.NativeEngine
        self._file, self._threads = encoder.EncoderFile(folder, precision), threads

    def engine(self, tokens: int | None, rows: int | None) -> Engine:
        return self._make(self._file, self._threads, tokens, rows)

    def used_mb(self) -> float:
        return resident_mb()


class NativeProvider:
    """See `interfaces.Provider`."""

    name = "native"

    def version(self) -> str:
        if shutil.which(kernel_build.COMPILER) is None:
            raise UnsupportedError(f"provider native: no {kernel_build.COMPILER}; install a C++ compiler")
        sources = [*sorted(_SOURCES.rglob("*.*")), *sorted(kernel_build.HEADERS.glob("*.h"))]
        texts = [path.read_bytes() for path in sources if path.suffix in _KINDS]
        return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        from shapeshift.engines.native import export

        return export.write(module, example, folder, precision)

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        from shapeshift.engines.native import encoder

        return encoder.WEIGHTS

    def open(
        self, folder: Path, precision: str, threads: int, device: int | None = None, beside: Runtime | None = None
    ) -> NativeRuntime:
        return NativeRuntime(folder, precision, threads)


PROVIDER = NativeProvider()
