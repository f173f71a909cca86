"""A pytest plugin: the tests of this run compile kernels in half the time, and use slower ones."""

from __future__ import annotations

from shapeshift.kernels import kernel_build

kernel_build._FLAGS = (*kernel_build._FLAGS, "-O1")  # type: ignore[assignment]
