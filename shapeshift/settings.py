"""Settings as frozen dataclasses, read from string mappings such as config.pbtxt `parameters`.

A component declares a frozen dataclass. Its fields carry the defaults and its `__post_init__` checks the values. `read`
fills it from strings; `refuse_unknown` rejects names that no component declares. `Choices` are the interchangeable
implementations that a setting names.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from shapeshift.errors import InvalidInputError, did_you_mean, unknown

T = TypeVar("T")

REMOVED: dict[str, str] = {
    "max_latency_ms": "choose by `shapeshift cascade select --max-latency-ms`",
    "min_accuracy": "choose by `shapeshift cascade select --min-accuracy`, or send the request parameter",
    "call_threads": "queue_rows bounds the calls to later levels",
    "retry_ms": "leave it out, a level that failed is called again after a second or longer",
    "compaction": "leave it out, nothing is copied where requests end",
    "stacked_ranks": "leave it out, low-rank terms have one form",
    "few_batches": "leave it out, the paper's 5 holds",
    "high_utility": "leave it out, the paper's 0.8 holds",
    "initial_ms": "leave it out, the paper's 2000 holds",
    "tick_ms": "leave it out, 1 ms holds",
    "membership": "leave it out, [[nodes]], or a section [dns] or [ray], says where the nodes are found",
    "min_nodes": "`nodes` is how many",
    "registry_period_s": "nothing: a registry is a folder, which a server looks at each second",
    "worker_backend": "nothing: workers are processes of the backend polymorph",
    "worker_pool": "`max_workers` of each front, which it does not share",
    "pool_workers": "`max_workers` of each front, which it does not share",
    "max_nodes": "a fleet on Ray has `nodes`; let Kubernetes or your own program change their number",
    "metrics_port": "leave it out, the page of a node is 1000 above its grpc_port",
    "caching": "eviction: unused, where it was false",
    "max_queues": "leave it out, the paper's 4 holds",
    "recluster_s": "leave it out, the paper's 300 holds",
    "first_token_slo_ms": "leave it out, five times the mean run time of a request holds, as in the paper",
    "bypass": "leave it out, requests may overtake one that waits for memory",
    "ageing": "leave it out, 10 holds",
    "patience": "leave it out, 2 holds",
    "prompt_lookup_min": "leave it out, 2 holds",
    "prompt_lookup_max": "leave it out, 4 holds",
    "overtaken_requests": "leave it out, 32 holds",
    "stream_responses": "leave it out, 16 holds",
    "perplexity_text": "put the text into the checkpoint's folder as perplexity.txt",
    "forward_requests": "queue_requests of the model that generates bounds what waits",
    "queue_tokens": "queue_rows and max_queue_ms, or of a model that generates queue_requests, bound the queue",
    "time_scale": "write the scaled latencies into profile_file",
    "threshold": "leave it out, the paper's 0.85 holds",
    "decay": "leave it out, the paper's 0.9 holds",
    "peek": "leave it out, the paper's 6 holds",
    "cap_last": "leave it out, it follows from curve",
    "drain": "leave it out, it follows from curve",
    "batch_share": "leave batch_size out, or state it where batches should be larger",
    "batch_window_ms": "leave it out, 500 ms hold",
    "queue_images": "queue_mb bounds the images that wait",
    "utility": "write it into task.json, or send the request parameter",
    "seed": "leave it out",
    "queue_calls": "queue_rows bounds the calls to later levels, too",
    "call_timeout_ms": "leave it out, a call may take 60 s; or send the request parameter latency_ms",
    "predictor_model": "leave it out, `predictor_weights` needs no other model; train it again",
    "grpc_url": "set the environment variable SHAPESHIFT_GRPC_URL of the server",
}
"""What to do instead of a setting that a former version had, by its name: the end of a sentence."""


def names(*classes: type) -> set[str]:
    """The names of all settings that the given dataclasses declare."""
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


def read(cls: type[T], values: Mapping[str, str]) -> T:
    """An instance of the dataclass `cls` from strings. Missing names keep their defaults; other names are ignored.

    A field is a str, int, float or bool, or one of these or None, which is written as the empty string. Raises
    InvalidInputError naming the field if a text does not parse, a required field is missing, or `cls.__post_init__`
    rejects a value.
    """
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            arguments[field.name] = _parse(field.name, values[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidInputError(field.name, None, "this parameter is required")
    return cls(**arguments)


def refuse_unknown(
    present: Iterable[str], declared: Iterable[str], unfit: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Raise InvalidInputError for the first name in `present` that is not in `declared`, with what to write instead.

    unfit: names that other models may set, by the reason why this one may not, such as `does not go with forward_to`.
    """
    allowed = set(declared)
    reasons = {name: reason for reason, names in (unfit or {}).items() for name in names}
    for name in present:
        if name not in allowed and name in reasons:
            raise InvalidInputError(name, name, reasons[name])
        if name not in allowed and name in REMOVED:
            raise InvalidInputError(name, name, f"this setting is gone: {REMOVED[name]}")
        if name not in allowed:
            raise InvalidInputError(name, name, unknown(did_you_mean(name, allowed), sorted(allowed)))


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise InvalidInputError(field, value, allowed) unless `condition` holds."""
    if not condition:
        raise InvalidInputError(field, value, allowed)


class Choices(Mapping[str, T], Generic[T]):
    """What the setting `parameter` can name.

    targets: "module:attribute" of each choice. A choice is imported at its first use, so that a process holds only
    the code that its settings name.
    """

    def __init__(self, parameter: str, targets: Mapping[str, str]) -> None:
        self._parameter = parameter
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> T:
        """The choice called `name`. Raises InvalidInputError that names the parameter and every choice."""
        self.require(name)
        module, _, attribute = self._targets[name].partition(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def require(self, name: str) -> None:
        """Raise InvalidInputError unless `name` is one of the choices. Imports nothing."""
        if name not in self._targets:
            raise InvalidInputError(self._parameter, name, f"one of {', '.join(self._targets)}")


def _parse(name: str, text: str, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text == "":
        return None
    kind = next(option for option in options if option is not type(None))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InvalidInputError(name, text, "must be true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            raise InvalidInputError(name, text, f"must be {number}") from None
    return text
