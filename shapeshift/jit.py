"""Compiling the inner loops of policies with numba.

numba renews its disk cache when the file of a compiled function changes, not when a function it calls does: functions
that call one another must be in one file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(signature: str | None = None) -> Callable[[F], F]:
    """`numba.njit` with a disk cache where a folder is writable. With a signature it compiles at once."""

    def wrap(function: F) -> F:
        try:
            return cast(F, numba.njit(signature, cache=True, error_model="numpy", nogil=True)(function))
        except RuntimeError:
            # Neither the package's folder nor the user's cache folder is writable.
            return cast(F, numba.njit(signature, error_model="numpy", nogil=True)(function))

    return wrap
