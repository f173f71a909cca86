"""What a front declares of its requests, read from its generated config.pbtxt, and one request that it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shapeshift.triton import model_config

# The values of a request that is answered. Every front has some of these inputs.
_VALID: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "TEXT": ((1,), ["what is the time"]),
    "PIXELS": ((2, 2, 3), [0, 50, 100, 150, 200, 250] * 2),
    "text_input": ((1,), ["Return the number of"]),
    "max_tokens": ((1,), [2]),
    "temperature": ((1,), [0.0]),
}
_TYPES = {"STRING": "BYTES"}


@dataclass(frozen=True)
class Tensor:
    """An input of a request. shape: with the batch axis; raw: its content, in place of the values' encoding."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]
    raw: bytes | None = None


@dataclass(frozen=True)
class Declared:
    """An input as it is declared. dims: without the batch axis, -1 where any size is allowed."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A request to `model`. fault: what is wrong with it, empty for one that is answered."""

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    parameters: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    fault: str = ""

    def with_input(self, tensor: Tensor, fault: str) -> Request:
        """This request with `tensor` in place of the input of that name, or beside the others."""
        others = tuple(one for one in self.inputs if one.name != tensor.name)
        return replace(self, inputs=(*others, tensor), fault=fault)


@dataclass(frozen=True)
class Declaration:
    """A front. max_batch_size: 0 without a batch axis; streams: whether it answers on streams only."""

    name: str
    max_batch_size: int
    streams: bool
    inputs: tuple[Declared, ...]
    outputs: tuple[str, ...]

    def input(self, name: str) -> Declared | None:
        """The input of that name, where there is one."""
        return next((one for one in self.inputs if one.name == name), None)

    def tensor(self, one: Declared, values: list[Any], dims: tuple[int, ...] | None = None) -> Tensor:
        """An input with these values; dims: those of its one row, as many as there are values unless given."""
        dims = (len(values),) if dims is None else dims
        return Tensor(one.name, one.datatype, (1, *dims) if self.max_batch_size else dims, tuple(values))

    @property
    def valid(self) -> Request:
        """A request that is answered."""
        tensors = [self.tensor(one, _VALID[one.name][1], _VALID[one.name][0]) for one in self.inputs if self._uses(one)]
        parameters: dict[str, Any] = {"task": "digits", "latency_ms": 1e4, "utility": 1.0} if self._sees else {}
        if self.streams:
            # Errors on a stream have no code of their own; this puts it into their text.
            parameters = {"forwarded": True}
        return Request(self.name, tuple(tensors), self.outputs[:1], parameters)

    @property
    def _sees(self) -> bool:
        return self.input("PIXELS") is not None

    def _uses(self, one: Declared) -> bool:
        return one.name in _VALID


def read(repository: Path, name: str) -> Declaration:
    """The declaration of the front `name` of a generated repository."""
    config = model_config.as_json(model_config.read(repository / name / "config.pbtxt"))
    inputs = tuple(
        Declared(one["name"], _datatype(one["data_type"]), tuple(int(size) for size in one["dims"]))
        for one in config["input"]
    )
    return Declaration(
        name,
        int(config.get("max_batch_size", 0)),
        bool(config.get("model_transaction_policy", {}).get("decoupled")) and not name.endswith("unary"),
        inputs,
        tuple(one["name"] for one in config["output"]),
    )


def _datatype(stated: str) -> str:
    kind = stated.removeprefix("TYPE_")
    return _TYPES.get(kind, kind)
