"""Lines in the server's log, each with the name of the model that speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Log = Callable[[str], None]


def of_model(pb_utils: Any, model: str) -> Log:
    """A function that writes one line, from any thread."""

    def log(text: str) -> None:
        pb_utils.Logger.log_info(f"{model}: {text}")

    return log
