"""The thread that loads adapters from their files into the shared buffer, beside the decode loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.adapter_cache.lora.batch import OFFSET, Factor, row_order
from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.registry import store
from shapeshift.engines.hardware import cores
from shapeshift.errors import EngineError, InvalidInputError, OverloadedError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.tensor_layout import shapes
from shapeshift.fused_decode.model.weights import WeightFiles

Store = Callable[[torch.Tensor, torch.Tensor, bool, float], bool]
"""See `LoraKernels.store`."""
OnLoaded = Callable[[Adapter, Exception | None, float], None]


Load = Callable[..., None]
"""load(target, adapter, pause=): fills the memory of an adapter; `load_weights` with a `write`."""
PAUSE = 8.0 / cores()
"""Seconds of pause for each second of CPU time while requests run: a load takes a tenth of two cores, less of more."""
_ROWS = 256
"""Rows of a weight that are merged between two pauses."""


def load_weights(
    target: torch.Tensor, adapter: Adapter, write: Store, pause: Callable[[], None] = lambda: None
) -> None:
    """Write an adapter's factors into its memory, [elements], see `lora.batch.lay_out`; `pause()` is called in between.

    Raises InvalidInputError if the weights are not finite, EngineError if a file has changed or is damaged,
    OverloadedError if one cannot be read now.
    """
    source = adapter.source
    try:
        if not adapter.verified:
            if store.digest(source.folder, pause) != adapter.sha256:
                raise EngineError(f"adapter {adapter.label}: its files differ from the registered ones; add it again")
            adapter.verified = True
        stat = source.weights.stat()
        if (stat.st_size, stat.st_mtime_ns) != source.stamp:
            name = source.weights.name
            raise EngineError(f"adapter {adapter.label}: {name} has changed since it was registered; add it again")
        architecture = source.base.architecture
        lengths = None
        if source.has_magnitudes:
            assert architecture is not None
            lengths = _MergedLengths(source.base.folder, architecture)
        with safe_open(str(source.weights), framework="pt") as file:
            for factor in source.factors:
                a, b = file.get_tensor(factor.a), file.get_tensor(factor.b)
                start = int(adapter.relative[factor.layer, factor.linear, factor.part, OFFSET])
                middle, end = start + a.numel(), start + a.numel() + b.numel()
                order = None
                if architecture is not None:
                    order = row_order(architecture, factor.layer, factor.linear, factor.part)
                if lengths is not None:
                    scales = file.get_tensor(factor.magnitude).float() / lengths.of(factor, a.float(), b.float(), pause)
                    b = b.float() * scales[:, None]
                    terms = torch.stack([scales - 1, (scales - 1) * lengths.bias(factor, len(scales))])
                    terms = terms if order is None else terms[:, order]
                    if not write(target[end : end + terms.numel()], terms, False, 1.0):
                        problem = "a row of the merged weight that is zero, or NaN or infinity"
                        raise InvalidInputError(
                            f"adapter {adapter.label}, {factor.magnitude}", problem, "finite scales"
                        )
                if not write(target[start:middle], a, False, 1.0):
                    raise InvalidInputError(f"adapter {adapter.label}, {factor.a}", "NaN or infinity", "finite weights")
                if order is not None:
                    b = b[order]
                if not write(target[middle:end], b, True, factor.scale):
                    raise InvalidInputError(f"adapter {adapter.label}, {factor.b}", "NaN or infinity", "finite weights")
                pause()
            for tensor, place in zip(source.head, adapter.head, strict=True):
                values = file.get_tensor(tensor.saved) if tensor.saved else source.base.head[tensor.index]
                values = values.float()
                if tensor.a:
                    values = (
                        values + tensor.scale * file.get_tensor(tensor.b).float() @ file.get_tensor(tensor.a).float()
                    )
                if not bool(torch.isfinite(values).all()):
                    name = tensor.saved or tensor.a
                    raise InvalidInputError(f"adapter {adapter.label}, {name}", "NaN or infinity", "finite weights")
                target[place].view(torch.float32).copy_(values.flatten())
    except SafetensorError as error:
        raise EngineError(f"adapter {adapter.label} is no longer readable: {error}") from None
    except OSError as error:
        raise OverloadedError(f"adapter {adapter.label} cannot be read: {error}; retry later") from None


class _MergedLengths:
    """The lengths of the rows of weights merged with an adapter, in f32: PEFT computes them from the same tensors."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._files = WeightFiles(folder, architecture)
        self._names = shapes(architecture).keys()
        self._columns = architecture.tensors.columns

    def of(self, factor: Factor, a: torch.Tensor, b: torch.Tensor, pause: Callable[[], None]) -> torch.Tensor:
        """[outputs]; `pause()` is called in between."""
        weight = self._files.read(f"{factor.module}.weight", torch.float32)
        weight = weight.T if self._columns else weight
        lengths = []
        for rows, low_rank in zip(torch.split(weight, _ROWS), torch.split(b, _ROWS), strict=True):
            lengths.append((rows + factor.scale * (low_rank @ a)).norm(dim=1))
            pause()
        return torch.cat(lengths)

    def bias(self, factor: Factor, outputs: int) -> torch.Tensor:
        """The bias [outputs] of the linear; zeros where it has none."""
        name = f"{factor.module}.bias"
        return self._files.read(name, torch.float32) if name in self._names else torch.zeros(outputs)


class Loader:
    """Loads one adapter after another, and calls `on_loaded(adapter, error, seconds)` on its thread after each.

    While `is_busy()` it works in small pieces and pauses between them, since it takes CPU time from running requests.
    With a `host_tier.HostTier`, which a GPU needs, loads go through its memory; they are copied on a stream of their
    own, after what the GPU was given before `submit`, which may still use that memory. It ran on an H200.
    """

    def __init__(
        self,
        on_loaded: OnLoaded,
        load: Load,
        is_busy: Callable[[], bool] = lambda: False,
        host: Any = None,
    ) -> None:
        self._on_loaded = on_loaded
        self._load_weights = load
        self._is_busy = is_busy
        self._host = host
        self._stream: torch.cuda.Stream | None = None
        self._cpu_since = 0.0
        self._queue: queue.SimpleQueue[tuple[Adapter, torch.Tensor, torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
        self._thread.start()

    def submit(self, adapter: Adapter, target: torch.Tensor) -> None:
        """Fill `target`, [elements], which no step that comes later uses until `on_loaded`."""
        before = None
        if target.is_cuda:
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record(torch.cuda.current_stream(target.device))
        self._queue.put((adapter, target, before))

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the current load and end the thread."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None and not self._closing:
            start, self._cpu_since = time.monotonic(), time.thread_time()
            error: Exception | None = None
            try:
                self._load(*job)
            except Exception as raised:  # noqa: BLE001  one bad file must not end the thread
                error = raised
            self._on_loaded(job[0], error, time.monotonic() - start)

    def _pause(self) -> None:
        if self._is_busy() and not self._closing:
            time.sleep(PAUSE * (time.thread_time() - self._cpu_since))
        self._cpu_since = time.thread_time()

    def _load(self, adapter: Adapter, target: torch.Tensor, before: torch.cuda.Event | None) -> None:
        with torch.inference_mode():
            if self._host is None:
                self._load_weights(target, adapter, pause=self._pause)
            else:
                self._copy(self._image(self._host, adapter, target), target, before)

    def _image(self, host: Any, adapter: Adapter, target: torch.Tensor) -> torch.Tensor:
        """What `target` is to hold, in the memory of the host."""
        image: torch.Tensor | None = host.get(adapter.name)
        if image is not None:
            return image
        image = host.reserve(adapter.name, target)
        try:
            self._load_weights(image, adapter, pause=self._pause)
        except BaseException:
            host.drop(adapter.name)
            raise
        return image

    def _copy(self, image: torch.Tensor, target: torch.Tensor, before: torch.cuda.Event | None) -> None:
        if before is None:
            target.copy_(image)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            target.copy_(image, non_blocking=True)
        self._stream.synchronize()
