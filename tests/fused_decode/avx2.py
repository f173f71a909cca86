"""A pytest plugin: the tests of this run compile and use kernels for CPUs with AVX2 and neither AVX-512 nor AMX."""

from __future__ import annotations

from shapeshift.kernels import kernel_build

_FLAGS = [flag for flag in kernel_build._FLAGS if not flag.startswith("-march=")]

kernel_build._FLAGS = (*_FLAGS, "-march=haswell")  # type: ignore[assignment]
# A part of the libraries' names, and what the tests expect the fastest instructions to be.
kernel_build.cpu_flags = lambda: "flags : avx2 f16c fma"
