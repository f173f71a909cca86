"""Loads and unloads models of a running server, over gRPC."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from shapeshift.errors import (
    CancelledRequestError,
    EngineError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    ShapeshiftError,
    UnsupportedError,
)
from shapeshift.triton.keys import GRPC_HEADER
from shapeshift.triton.names import check_model_name

_ERRORS: dict[str, type[ShapeshiftError]] = {
    "NOT_FOUND": NotFoundError,
    "UNIMPLEMENTED": UnsupportedError,
    "CANCELLED": CancelledRequestError,
    "RESOURCE_EXHAUSTED": OverloadedError,
}
_QUICK_S = 5.0
_RECONNECT_MS = 500


@dataclass(frozen=True)
class ModelState:
    """One line of the repository's index; `state` is READY, LOADING, UNLOADING, UNAVAILABLE or empty."""

    name: str
    version: str
    state: str
    reason: str


class ModelControl:
    """A connection to the model control of the server at `url`, HOST:PORT of its gRPC interface.

    Every call ends within its time-out, and raises InvalidInputError for a name that no model can have,
    UnsupportedError where the key is wrong, ShapeshiftError where no server answers. Threads may share it.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._headers = {GRPC_HEADER: key} if key else {}
        # A proxy for the web has no business between a server and its control.
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        # A server that comes back is found again within a second.
        options += [(f"grpc.{kind}_reconnect_backoff_ms", _RECONNECT_MS) for kind in ("initial", "min", "max")]
        self._client = triton.InferenceServerClient(url, channel_args=options)

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 300.0) -> None:
        """Load the model, or load it again if its files or `config` differ from what runs.

        `config` is a complete configuration, such as `config(name)` returns, and stands in for the model's
        file until the next load. Returns when the model is ready. Raises EngineError with the server's reason
        otherwise; a version that ran before keeps running then.
        """
        check_model_name(name)
        text = None if config is None else json.dumps(config)
        with self._errors(f"load {name}", EngineError):
            self._client.load_model(name, headers=self._headers, config=text, client_timeout=timeout_s)

    def unload(self, name: str, timeout_s: float = 30.0) -> None:
        """Unload the model; returns before its running requests have ended, see `wait_unloaded`."""
        check_model_name(name)
        with self._errors(f"unload {name}", EngineError):
            self._client.unload_model(name, headers=self._headers, client_timeout=timeout_s)

    def wait_unloaded(self, name: str, timeout_s: float = 30.0) -> None:
        """Wait until no version of the model is loaded. Raises OverloadedError if one still is."""
        check_model_name(name)
        deadline = time.monotonic() + timeout_s
        while True:
            left = [model.state for model in self.index() if model.name == name]
            if not any(state in ("READY", "UNLOADING", "LOADING") for state in left):
                return
            if time.monotonic() > deadline:
                raise OverloadedError(f"{name} is still loaded after {timeout_s:g} s; are requests running?")
            time.sleep(0.02)

    def index(self, timeout_s: float = _QUICK_S) -> list[ModelState]:
        """Every model of the repositories, one entry a version; those never loaded have empty fields."""
        with self._errors("read the index", ShapeshiftError):
            answer = self._client.get_model_repository_index(headers=self._headers, client_timeout=timeout_s)
        return [ModelState(model.name, model.version, model.state, model.reason) for model in answer.models]

    def config(self, name: str, timeout_s: float = _QUICK_S) -> dict[str, Any]:
        """The configuration that the loaded model runs with, as JSON values that `load` takes back."""
        check_model_name(name)
        with self._errors(f"read the configuration of {name}", ShapeshiftError):
            answer = self._client.get_model_config(name, as_json=True, client_timeout=timeout_s)
        return dict(answer["config"])

    def is_ready(self, name: str, timeout_s: float = _QUICK_S) -> bool:
        """Whether the model takes requests now."""
        check_model_name(name)
        with self._errors(f"ask for {name}", ShapeshiftError):
            return bool(self._client.is_model_ready(name, client_timeout=timeout_s))

    def version(self, timeout_s: float = _QUICK_S) -> str:
        """The server's version, such as 2.51.0."""
        with self._errors("ask for the version", ShapeshiftError):
            return str(self._client.get_server_metadata(client_timeout=timeout_s).version)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors(self, doing: str, otherwise: type[ShapeshiftError]) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise self._translated(error, doing, otherwise) from error
        except ValueError as error:
            raise InvalidInputError("url", self.url, "must be HOST:PORT of a gRPC interface") from error

    def _translated(
        self, error: InferenceServerException, doing: str, otherwise: type[ShapeshiftError]
    ) -> ShapeshiftError:
        status = str(error.status() or "").removeprefix("StatusCode.")
        text = str(error.message() or "").strip()
        if "restricted" in text and GRPC_HEADER in text:
            return UnsupportedError(f"cannot {doing}: {self.url} wants its key; set SHAPESHIFT_KEY")
        if status == "DEADLINE_EXCEEDED":
            return OverloadedError(f"cannot {doing}: {self.url} did not answer in time; try again")
        if status == "UNAVAILABLE" and "failed to connect" in text.lower():
            return ShapeshiftError(f"cannot {doing}: no server answers at {self.url}; is it running?")
        return _ERRORS.get(status, otherwise)(f"cannot {doing}: {text}")
