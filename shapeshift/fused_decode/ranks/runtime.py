"""The decode loop's runtime over several processes: rank 0, which is this one, and its children."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from logging import Logger
from pathlib import Path

import torch

from shapeshift.engines.hardware import cores
from shapeshift.errors import EngineError, UnsupportedError
from shapeshift.fused_decode.interfaces import CopyStates, StepBatch, blocks_of
from shapeshift.fused_decode.model.cpu_runtime import DTYPES
from shapeshift.fused_decode.ranks.collective import LONGEST_S, RankGroup
from shapeshift.fused_decode.ranks.launcher import Launcher
from shapeshift.fused_decode.ranks.member import MemberModel, RankSpec, load_member, to_bytes
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.settings import require

# Below the limits of `serving.liveness`, after which the whole process is replaced: half of them for long steps.
_LEAST_STEP_S = 4.0
_LONGEST_STEPS = 5.0
_REAP_S = 0.5


def load(
    folder: Path,
    decode: FusedDecodeSettings,
    *,
    precision: str,
    device: str,
    kernel_cache: Path,
    extra_elements: int,
    checkpoint_sha256: str,
    log: Logger,
) -> TensorParallelModel:
    """The model that the settings `decode` describe, on `decode.tensor_parallel_size` processes of this machine."""
    require(
        not extra_elements, "tensor_parallel_size", decode.tensor_parallel_size, "1 for a model that shares its cache"
    )
    return TensorParallelModel.start(spec_of(folder, decode, precision, device, kernel_cache), log)


def spec_of(folder: Path, decode: FusedDecodeSettings, precision: str, device: str, kernel_cache: Path) -> RankSpec:
    """What rank 0 loads. Raises InvalidInputError and UnsupportedError for what ranks cannot do.

    device: cpu, or that of rank 0; further ranks have the GPUs behind it. The threads are divided among the ranks.
    """
    ranks = decode.tensor_parallel_size
    require(precision in DTYPES, "precision", precision, f"one of {', '.join(DTYPES)} with several ranks")
    if device != "cpu" and (devices := torch.cuda.device_count()) < int(device.partition(":")[2]) + ranks:
        raise UnsupportedError(
            f"tensor_parallel_size: got {ranks} from {device} on; torch finds {devices} CUDA devices"
        )
    return RankSpec(
        rank=0,
        ranks=ranks,
        folder=str(folder.resolve()),
        precision=precision,
        device=device,
        slots=decode.max_concurrency,
        max_length=decode.max_length,
        blocks=blocks_of(decode.kv_cache_tokens),
        kv_precision=decode.kv_precision,
        threads=max(1, (decode.threads or cores()) // ranks),
        native=decode.native,
        kernel_cache=str(kernel_cache.resolve()),
    )


class TensorParallelModel:
    """See `interfaces.Runtime`. The processes are started again after any failure of a step, also of this one's part:
    the ranks would no longer agree on which batch is next. What the cache held is lost then.
    """

    longest_step_s: float = 0.0
    feed = None
    copy_states: CopyStates | None = None

    def __init__(self, model: MemberModel, group: RankGroup, launcher: Launcher, log: Logger) -> None:
        """launcher: whose children are connected."""
        self.vocab_size, self.eos_ids = model.vocab_size, model.eos_ids
        self.slots, self.max_length, self.blocks = model.slots, model.max_length, model.blocks
        self.shares_prefixes = model.shares_prefixes
        self._model, self._group, self.launcher, self._log = model, group, launcher, log
        self.starting: Future[None] | None = None
        self._copied: tuple[list[int], list[int]] = [], []

    @classmethod
    def start(cls, spec: RankSpec, log: Logger) -> TensorParallelModel:
        """The model of `spec`, which is that of rank 0, and its children. Raises ShapeshiftError."""
        group = RankGroup(0, spec.ranks, spec.device)
        launcher = Launcher(spec, group)
        try:
            launcher.start()
            model = load_member(spec, group, log.warning)
            launcher.connect()
        except BaseException:
            launcher.stop()
            raise
        family, kernels = model.architecture.family, model.operations.name
        log.info(f"{family}, {spec.precision}, {kernels} kernels, {spec.threads} threads in each of {spec.ranks} ranks")
        runtime = cls(model, group, launcher, log)
        runtime._log_pids()
        return runtime

    def ready(self) -> bool:
        """See `interfaces.Runtime.ready`."""
        if self.starting is not None:
            if not self.starting.done():
                return False
            if self.starting.exception() is not None:
                # The next step raises it, and tries again.
                return True
            self.starting = None
        if ended := self.launcher.ended():
            self._restart()
            raise EngineError(ended)
        return True

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `interfaces.Runtime.forward`. Raises EngineError where a rank fails, or hangs for too long."""
        limit_s = max(_LEAST_STEP_S, _LONGEST_STEPS * self.longest_step_s) if self.longest_step_s else LONGEST_S
        self._group.timeout_s = limit_s
        message = to_bytes(batch, *self._copied)
        self._copied = [], []
        try:
            if self.starting is not None:
                self.starting.result()
                self.starting = None
            self.launcher.send(message)
            return self._model.forward(batch)
        except (RuntimeError, OSError) as error:
            # Of a connection. The process at its other end may be ending still.
            reason = self.launcher.ended(_REAP_S) or f"a rank has failed, or given no answer within {limit_s:.0f} s"
            self._log.error(f"{reason}: {error}")
            self._restart()
            raise EngineError(reason) from error
        except Exception:
            self._restart()
            raise

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `interfaces.Runtime.copy_blocks`. The other ranks copy before the next step."""
        self._model.copy_blocks(sources, targets)
        self._copied[0].extend(sources)
        self._copied[1].extend(targets)

    def close(self) -> None:
        """See `interfaces.Runtime.close`: ends the children."""
        self.launcher.close()

    def _restart(self) -> None:
        """Replace all children, on a thread of its own: loading takes seconds, and the loop goes on meanwhile."""
        self.launcher.stop()
        self._copied = [], []
        self.starting = Future()
        threading.Thread(target=self._start_again, args=(self.starting,), name="ranks", daemon=True).start()

    def _start_again(self, started: Future[None]) -> None:
        begun = time.monotonic()
        try:
            self.launcher.start()
            self.launcher.connect()
            self._log_pids(f", again after {time.monotonic() - begun:.1f} s")
            started.set_result(None)
        except Exception as error:  # noqa: BLE001  whatever it is, the next step fails with it
            self._log.error(f"the ranks do not start: {error}")
            started.set_exception(EngineError(f"the ranks do not start: {error}"))

    def _log_pids(self, more: str = "") -> None:
        pids = ", ".join(map(str, self.launcher.pids))
        self._log.info(f"{len(self.launcher.pids) + 1} ranks: this process, and {pids}{more}")
