"""What Triton tells a Python backend about its model, typed, and lines in the server's log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Log = Callable[[str], None]


@dataclass(frozen=True)
class ModelArgs:
    """The parts of the `args` of a backend's `initialize` that this project uses."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    parameters: Mapping[str, str]
    kind: str
    device_id: int

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, in the order of config.pbtxt."""
        return [tensor["name"] for tensor in self.config["input"]]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, in the order of config.pbtxt."""
        return [output["name"] for output in self.config["output"]]

    @property
    def max_batch_size(self) -> int:
        return int(self.config["max_batch_size"])


def read(args: Mapping[str, str]) -> ModelArgs:
    """Parse the `args` of `initialize`."""
    config = json.loads(args["model_config"])
    given = config.get("parameters", {})
    return ModelArgs(
        name=args["model_name"],
        folder=Path(args["model_repository"]),
        config=config,
        parameters={name: value.get("string_value", "") for name, value in given.items()},
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"] or 0),
    )


def model_log(pb_utils: Any, model: str) -> Log:
    """A function that writes one line with the model's name, from any thread."""

    def log(text: str) -> None:
        pb_utils.Logger.log_info(f"{model}: {text}")

    return log
