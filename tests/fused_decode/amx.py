"""A pytest plugin: the tests of this run compile and use kernels for CPUs with AMX, whose tiles are emulated.

A bf16 call takes some 450 times as long: 3.7 s on each of two threads for 256 tokens of a BERT of width 384.
"""

from __future__ import annotations

from pathlib import Path

from shapeshift.kernels import kernel_build

_TILES = str(Path(__file__).with_name("emulated_tiles.h"))
_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-include", _TILES)
_flags = kernel_build.cpu_flags

kernel_build._FLAGS = (*kernel_build._FLAGS, *_FLAGS)  # type: ignore[assignment]
# A part of the libraries' names, and what the tests expect the fastest instructions to be.
kernel_build.cpu_flags = lambda: f"{_flags()} amx_tile amx_bf16 amx_int8 emulated"
