"""The sums and the gathering that connect the ranks of tensor parallelism: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

LONGEST_S = 600.0
"""Time limit where none is stated, seconds."""
_LOOPBACK = "127.0.0.1"


class RankGroup:
    """`rank` of `ranks` processes of one machine. All of them call the same methods in the same order.

    gloo listens on the loopback interface alone. Every call raises RuntimeError where another rank is gone, and where
    it takes longer than `timeout_s`; afterwards the group is of no use until all ranks `connect` again.
    """

    def __init__(self, rank: int, ranks: int, device: str = "cpu") -> None:
        self.rank, self.ranks = rank, ranks
        self.timeout_s = LONGEST_S
        self._device = torch.device(device)
        self._group: Any = None

    def connect(self, meeting: Path, timeout_s: float = LONGEST_S) -> None:
        """Wait until all ranks have called this with the same file, which nothing has used before."""
        self._group = None
        store = distributed.FileStore(str(meeting), self.ranks)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=timeout_s))
        make = _gloo if self._device.type == "cpu" else _nccl
        self._group = make(store, self.rank, self.ranks, timedelta(seconds=timeout_s))

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Replace `rows`, of one shape on all ranks, by their sum over the ranks; returns `rows`.

        Each sum is in the order of the ranks. An all-reduce of three or more sums in an order that depends on the place
        in the tensor: a row's result would depend on the other rows.
        """
        timeout = timedelta(seconds=self.timeout_s)
        if self.ranks == 2:
            reducing = distributed.AllreduceOptions()
            reducing.timeout = timeout
            self._group.allreduce([rows], reducing).wait()
            return rows
        gathering = distributed.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        gathering.timeout = timeout
        parts = [torch.empty_like(rows) for _ in range(self.ranks)]
        self._group.allgather([parts], [rows], gathering).wait()
        rows.copy_(parts[0])
        for part in parts[1:]:
            rows += part
        return rows

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """On rank 0 the columns [rows, n] of all ranks side by side, [rows, ranks n]; elsewhere what was given."""
        options = distributed.GatherOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        parts = [torch.empty_like(columns) for _ in range(self.ranks)] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [columns], options).wait()
        return torch.cat(parts, dim=1) if parts else columns

    def close(self) -> None:
        """Leave the group."""
        self._group = None


def _gloo(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    # The ranks do one thing at a time, and every further thread takes a core from the kernels.
    options._threads = 1
    return distributed.ProcessGroupGloo(store, rank, ranks, options)


def _nccl(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    # Only torch for CUDA has it.
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, ranks, options)
