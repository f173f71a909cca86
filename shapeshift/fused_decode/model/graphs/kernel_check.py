"""Whether kernels of a GPU give there what plain torch gives. It is asked when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from shapeshift.serving.model_args import Log

_MOST_ERROR = 0.15
"""Largest difference, as a share of the largest value: rounding to bf16 gives less, also of large scores."""


def are_right(errors: Callable[[], Iterable[float]], instead: str, log: Log) -> bool:
    """Whether all `errors` are small. Where one is not, or is not found, the log says what is done `instead`, and why.

    errors: runs the kernels, which compiles them; see `difference`
    """
    try:
        shares = list(errors())
    except Exception as error:  # noqa: BLE001  whatever a missing package, a compiler, a driver or a GPU refuses
        log(f"{instead}: its kernels cannot run here: {type(error).__name__}: {error}")
        return False
    if all(error <= _MOST_ERROR for error in shares):
        return True
    log(f"{instead}: its kernels give something else here, by {max(shares):.2g} of the largest value")
    return False


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value; infinite where one is no number."""
    wide = expected.float()
    share = (result.float() - wide).abs().max() / wide.abs().max()
    return float(share.nan_to_num(float("inf")))
