"""Loads and unloads models of a running server, over gRPC."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from shapeshift.errors import (
    CancelledRequestError,
    EngineError,
    InvalidInputError,
    ModelGoneError,
    NotFoundError,
    OverloadedError,
    ShapeshiftError,
    UnsupportedError,
)
from shapeshift.triton.endpoint import Tls
from shapeshift.triton.keys import GRPC_HEADER
from shapeshift.triton.model_state import ModelState
from shapeshift.triton.names import check_model_name

_ERRORS: dict[str, type[ShapeshiftError]] = {
    "NOT_FOUND": NotFoundError,
    "UNIMPLEMENTED": UnsupportedError,
    "CANCELLED": CancelledRequestError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    # The server does not answer or is ending, or it has not loaded the model.
    "UNAVAILABLE": ModelGoneError,
}
_QUERY_TIMEOUT_S = 5.0
_RECONNECT_MS = 500


class ModelControl:
    """A connection to the model control of the server at `url`, HOST:PORT of its gRPC interface. Thread-safe.

    tls: for a server that asks for mutual TLS; None for plain text. Calls after its files were replaced use the new
    ones. Raises NotFoundError for a missing file of it.

    Every call ends within its timeout. It raises InvalidInputError for an invalid model name, UnsupportedError for a
    wrong key, and ModelGoneError if no server answers.
    """

    def __init__(self, url: str, key: str = "", tls: Tls | None = None) -> None:
        self.url = url
        self._headers = {GRPC_HEADER: key} if key else {}
        self._tls = tls
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._connection = self._connect()

    def _connect(self) -> triton.InferenceServerClient:
        # Never connect through a web proxy.
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        # Reconnect to a restarted server within a second.
        options += [(f"grpc.{kind}_reconnect_backoff_ms", _RECONNECT_MS) for kind in ("initial", "min", "max")]
        secured = {}
        if self._tls is not None:
            self._stamp, secured = self._tls.stamp(), self._tls.client_options()
        return triton.InferenceServerClient(self.url, channel_args=options, **secured)

    @property
    def _client(self) -> triton.InferenceServerClient:
        with self._lock:
            if self._tls is not None and self._tls.stamp() != self._stamp:
                # Calls on other threads end on the connection that they hold.
                self._connection = self._connect()
            return self._connection

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 900.0) -> None:
        """Load the model; reload it if its files or `config` differ from what is loaded.

        `config` is a complete configuration, such as `config(name)` returns. It replaces the model's file until the
        next load. Returns when the model is ready. Raises EngineError with the server's reason; the version that was
        loaded before then keeps running.
        """
        check_model_name(name)
        text = None if config is None else json.dumps(config)
        with self._errors(f"load {name}", EngineError):
            self._client.load_model(name, headers=self._headers, config=text, client_timeout=timeout_s)

    def unload(self, name: str, timeout_s: float = 30.0) -> None:
        """Unload the model. Returns before its running requests have ended; see `wait_unloaded`."""
        check_model_name(name)
        with self._errors(f"unload {name}", EngineError):
            self._client.unload_model(name, headers=self._headers, client_timeout=timeout_s)

    def wait_unloaded(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until no version of the model is loaded. Raises OverloadedError after `timeout_s`."""
        check_model_name(name)
        deadline = time.monotonic() + timeout_s
        while True:
            states = [model.state for model in self.index() if model.name == name]
            if not any(state in ("READY", "UNLOADING", "LOADING") for state in states):
                return
            if time.monotonic() > deadline:
                raise OverloadedError(f"{name} is still loaded after {timeout_s:g} s; are requests running?")
            time.sleep(0.02)

    def index(self, timeout_s: float = _QUERY_TIMEOUT_S) -> list[ModelState]:
        """One entry for each model version in the repositories; state and version of one never loaded are empty."""
        with self._errors("read the index", ShapeshiftError):
            answer = self._client.get_model_repository_index(headers=self._headers, client_timeout=timeout_s)
        return [ModelState(model.name, model.version, model.state, model.reason) for model in answer.models]

    def ready(self, names: Collection[str]) -> set[str]:
        """Those of the models that are ready."""
        return {*names} & {one.name for one in self.index() if one.state == "READY"}

    def is_loaded(self, name: str) -> bool:
        """Whether the model is ready."""
        return bool(self.ready([name]))

    def config(self, name: str, timeout_s: float = _QUERY_TIMEOUT_S) -> dict[str, Any]:
        """The configuration of the loaded model, as JSON values that `load` accepts."""
        check_model_name(name)
        with self._errors(f"read the configuration of {name}", ShapeshiftError):
            answer = self._client.get_model_config(name, as_json=True, client_timeout=timeout_s)
        return dict(answer["config"])

    def parameters(self, name: str, timeout_s: float = _QUERY_TIMEOUT_S) -> dict[str, str]:
        """The parameters of the loaded model; cheaper than `config`."""
        check_model_name(name)
        with self._errors(f"read the configuration of {name}", ShapeshiftError):
            answer = self._client.get_model_config(name, client_timeout=timeout_s)
        return {key: str(value.string_value) for key, value in answer.config.parameters.items()}

    def is_ready(self, name: str, timeout_s: float = _QUERY_TIMEOUT_S) -> bool:
        """Whether the model accepts requests now."""
        check_model_name(name)
        with self._errors(f"ask for {name}", ShapeshiftError):
            return bool(self._client.is_model_ready(name, client_timeout=timeout_s))

    def version(self, timeout_s: float = _QUERY_TIMEOUT_S) -> str:
        """The server's version, such as 2.51.0."""
        with self._errors("ask for the version", ShapeshiftError):
            return str(self._client.get_server_metadata(client_timeout=timeout_s).version)

    def ask(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, NDArray[Any]]:
        """The last value of each of these outputs of the model, which may be a decoupled one. One thread calls it.

        Raises ShapeshiftError where the model refuses, or has not answered within the time.
        """
        tensors = []
        for key, value in inputs.items():
            tensors.append(triton.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype)))
            tensors[-1].set_data_from_numpy(value)
        answers: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        requested = [triton.InferRequestedOutput(output) for output in outputs]
        values: dict[str, NDArray[Any]] = {}
        deadline = time.monotonic() + timeout_s
        client = self._client
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            with self._errors(f"ask {name}", EngineError):
                client.async_stream_infer(
                    name, tensors, outputs=requested, parameters=dict(parameters), enable_empty_final_response=True
                )
                is_last = False
                while not is_last:
                    result, error = answers.get(timeout=max(deadline - time.monotonic(), 0.0))
                    if error is not None:
                        raise error
                    is_last = result.get_response().parameters["triton_final_response"].bool_param
                    present = {output: result.as_numpy(output) for output in outputs}
                    values |= {output: value for output, value in present.items() if value is not None}
        except queue.Empty:
            raise OverloadedError(f"cannot ask {name}: it has not answered within {timeout_s:g} s") from None
        finally:
            client.stop_stream(cancel_requests=True)
        return values

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors(self, action: str, default: type[ShapeshiftError]) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise self._translate(error, action, default) from error
        except ValueError as error:
            raise InvalidInputError("url", self.url, "must be HOST:PORT of a gRPC interface") from error

    def _translate(
        self, error: InferenceServerException, action: str, default: type[ShapeshiftError]
    ) -> ShapeshiftError:
        status = str(error.status() or "").removeprefix("StatusCode.")
        text = str(error.message() or "").strip()
        if "restricted" in text and GRPC_HEADER in text:
            return UnsupportedError(f"cannot {action}: {self.url} requires its key; set SHAPESHIFT_KEY")
        if status == "DEADLINE_EXCEEDED":
            return OverloadedError(f"cannot {action}: {self.url} did not answer in time; try again")
        # For whoever reads it; programs go by the class.
        if status == "UNAVAILABLE" and "failed to connect" in text.lower():
            text = f"no server answers at {self.url}; is it running?"
        return _ERRORS.get(status, default)(f"cannot {action}: {text}")
