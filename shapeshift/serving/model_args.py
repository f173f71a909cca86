"""A model's configuration as its Python backend sees it: read from Triton, checked, completed; lines in its
log, and the end of its process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.serving.pb_utils import ModelConfig, PbUtils
from shapeshift.settings import require

Log = Callable[[str], None]
"""Writes one line, at the level that its caller chose: `log.warning` of a `model_log`."""
FLEET_FILE_VARIABLE = "SHAPESHIFT_FLEET"
NODE_VARIABLE = "SHAPESHIFT_NODE"
"""The environment with which the server of a fleet's node is started."""
_BATCH = 64
# What Triton shows for a type that is left out.
_NO_TYPE = "TYPE_INVALID"


@dataclass(frozen=True)
class Tensor:
    """An input or output.

    dims      without the batch axis; -1: differs between requests; None: a number that the checkpoint decides
    optional  of an input: whether a request may leave it out
    listed    whether a model has it only if its config.pbtxt lists it
    always    of an output: whether a model has it even if its config.pbtxt lists only others
    """

    name: str
    data_type: str
    dims: tuple[int | None, ...] = (1,)
    optional: bool = False
    listed: bool = False
    always: bool = False

    def complete(self, kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """`entry`, an input or output (`kind`) of a ModelConfig in JSON, with what it leaves out.

        A number may be stated for a dimension of -1 of an input. Raises InvalidInputError for another type or dims.
        """
        data_type = entry.get("data_type", _NO_TYPE)
        data_type = self.data_type if data_type == _NO_TYPE else data_type
        dims = [int(size) for size in entry.get("dims", ())]
        declared = [
            size if size is not None else dims[axis] if axis < len(dims) else -1 for axis, size in enumerate(self.dims)
        ]
        fits = not dims or len(dims) == len(declared)
        for size, one in zip(dims, declared, strict=False):
            fits = fits and (size in (one, -1) or (one == -1 and kind == "input"))
        if data_type != self.data_type or not fits:
            allowed = f"data_type: {self.data_type} dims: [ {', '.join(map(str, declared))} ]"
            raise InvalidInputError(f"{kind} {self.name}", [data_type, *dims], allowed)
        dims_of_both = [size if one == -1 else one for size, one in zip(dims or declared, declared, strict=True)]
        whether = {"optional": True} if self.optional else {}
        return {"name": self.name, **whether, **entry, "data_type": self.data_type, "dims": dims_of_both}


DESCRIPTION = Tensor("DESCRIPTION", "TYPE_STRING", always=True)
"""The output of every front that says what it is, see `serving.description`."""
TOKENS = Tensor("TOKENS", "TYPE_STRING", always=True)
"""Of a front that reads texts: their tokens, in JSON (`engines.text.tokenizer`), for requests with no other output."""


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a kind of model, and how Triton calls it: the parts of config.pbtxt that it fixes.

    max_batch_size  of a model that states none; 0: its requests have no batch axis
    decoupled       whether a request gets more than one response
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int = _BATCH
    decoupled: bool = False

    def with_dims(self, dims: Mapping[str, tuple[int, ...]]) -> Signature:
        """The signature once the dims of these outputs are known."""
        return replace(self, outputs=tuple(replace(one, dims=dims.get(one.name, one.dims)) for one in self.outputs))

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config`, a ModelConfig in JSON, with what it leaves out. What it states it keeps.

        Every missing input is added. Outputs are added only where none is listed: each one listed is computed and sent.
        Raises InvalidInputError for a field that is stated differently from this signature.
        """
        inputs = _completed("input", config.get("input", ()), self.inputs)
        names = {tensor["name"] for tensor in inputs}
        inputs += [one.complete("input", {}) for one in self.inputs if not one.listed and one.name not in names]
        outputs = _completed("output", config.get("output", ()), self.outputs)
        if not outputs:
            outputs = [one.complete("output", {}) for one in self.outputs if not one.listed]
        names = {tensor["name"] for tensor in outputs}
        outputs += [one.complete("output", {}) for one in self.outputs if one.always and one.name not in names]
        policy = self._policy(config.get("model_transaction_policy"))
        return {
            **config,
            "max_batch_size": self._batch(config.get("max_batch_size", self.max_batch_size)),
            "input": inputs,
            "output": outputs,
            "instance_group": config.get("instance_group") or [{"kind": "KIND_CPU", "count": 1}],
            **({"model_transaction_policy": policy} if policy else {}),
        }

    def _batch(self, size: int) -> int:
        if self.max_batch_size and size < 1:
            raise InvalidInputError("max_batch_size", size, f"1 or more, or left out for {self.max_batch_size}")
        if not self.max_batch_size and size:
            raise InvalidInputError("max_batch_size", size, "0, or left out: requests of this model have no batch axis")
        return size

    def _policy(self, policy: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if policy is not None and bool(policy.get("decoupled")) != self.decoupled:
            allowed = f"{str(self.decoupled).lower()}, or left out"
            raise InvalidInputError("model_transaction_policy decoupled", not self.decoupled, allowed)
        return {"decoupled": True} if self.decoupled else None


GENERATION = "generation"
"""The parameter that is raised to load a model again: Triton loads nothing that has not changed."""


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """Parameters that every front has.

    log_requests    share of the requests that get a line in the server's log when they have ended; 0: none
    """

    log_requests: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.log_requests <= 1, "log_requests", self.log_requests, "0 to 1")


@dataclass(frozen=True)
class ModelArgs:
    """The parts of the `args` of a backend's `initialize` that this project uses.

    parameters: those of the technique; generation: of the load, which any model may have.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    parameters: Mapping[str, str]
    kind: str
    device_id: int
    version: str = "1"
    generation: int = 0

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, in the order of config.pbtxt."""
        return [tensor["name"] for tensor in self.config["input"]]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, in the order of config.pbtxt; without DESCRIPTION, which no served request gets."""
        return [output["name"] for output in self.config["output"] if output["name"] != DESCRIPTION.name]

    @property
    def device(self) -> int | None:
        """The number of the instance's GPU; None with KIND_CPU."""
        return self.device_id if self.kind == "GPU" else None

    @property
    def max_batch_size(self) -> int:
        return int(self.config["max_batch_size"])


def read(args: Mapping[str, str]) -> ModelArgs:
    """Parse the `args` of `initialize`."""
    config = json.loads(args["model_config"])
    parameters = _parameters(config)
    generation = parameters.pop(GENERATION, "")
    return ModelArgs(
        name=args["model_name"],
        folder=Path(args["model_repository"]),
        config=config,
        parameters=parameters,
        kind=args["model_instance_kind"],
        device_id=int(args["model_instance_device_id"] or 0),
        version=args["model_version"],
        generation=int(generation) if generation.isdecimal() else 0,
    )


def auto_complete(
    pb_utils: PbUtils, config: ModelConfig, signature: Callable[[Mapping[str, str]], Signature | None]
) -> ModelConfig:
    """A backend's `auto_complete_config`: adds to `config` what it leaves out.

    signature: of a model with these parameters; None for a model whose configuration is always complete.
    """
    # Triton shows an empty value for what a configuration leaves out.
    config_json = {name: value for name, value in config.as_dict().items() if value}
    declared = signature(_parameters(config_json))
    if declared is None:
        return config
    try:
        completed = declared.complete(config_json)
    except ShapeshiftError as error:
        raise pb_utils.TritonModelException(str(error)) from error
    for kind, add in (("input", config.add_input), ("output", config.add_output)):
        for tensor in completed[kind]:
            if tensor not in config_json.get(kind, ()):
                add({name: tensor[name] for name in ("name", "data_type", "dims", "optional") if name in tensor})
    if "max_batch_size" not in config_json:
        config.set_max_batch_size(declared.max_batch_size)
    if declared.decoupled:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def model_log(pb_utils: PbUtils, model: str) -> logging.Logger:
    """Writes lines with the model's name into the server's log, each at its level, from any thread."""
    log = logging.Logger(model, logging.INFO)
    log.addHandler(_ServerLog(pb_utils))
    return log


class _ServerLog(logging.Handler):
    def __init__(self, pb_utils: PbUtils) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self._log = pb_utils.Logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._log.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._log.log_warn(text)
        else:
            self._log.log_info(text)


def freeze_objects() -> None:
    """Let Python look for garbage no more among the objects that there are.

    When a model is loaded, they stay: to look through those of torch takes a tenth of the time of short texts. When it
    ends, the server waits for the process, which would look through them several times; its memory goes back as it is.
    """
    gc.freeze()


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    parameters = config.get("parameters", {})
    return {name: value.get("string_value", "") for name, value in parameters.items()}


def _completed(kind: str, entries: Sequence[Mapping[str, Any]], declared: Sequence[Tensor]) -> list[dict[str, Any]]:
    tensors = {one.name: one for one in declared}
    for one in entries:
        if one.get("name") not in tensors:
            raise InvalidInputError(kind, one.get("name"), f"one of {', '.join(tensors)}")
    return [tensors[one["name"]].complete(kind, one) for one in entries]


def fleet_file() -> Path | None:
    """The fleet file of the server that this process belongs to; None outside a fleet."""
    file = os.environ.get(FLEET_FILE_VARIABLE)
    return Path(file) if file else None


def own_node() -> str:
    """The name of the node that this process belongs to; empty outside a fleet."""
    return os.environ.get(NODE_VARIABLE, "")
