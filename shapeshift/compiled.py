"""Compiling the inner steps of policies with numba.

What is kept on disk is renewed when the file of a compiled function changes: functions that call one another belong
into one file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str | None = None) -> Callable[[F], F]:
    """Compile with numba, at once where a signature is given; kept on disk where some folder takes it."""

    def wrap(function: F) -> F:
        try:
            return cast(F, numba.njit(signature, cache=True, error_model="numpy", nogil=True)(function))
        except RuntimeError:
            # Neither the package's folder nor the user's can be written.
            return cast(F, numba.njit(signature, error_model="numpy", nogil=True)(function))

    return wrap
