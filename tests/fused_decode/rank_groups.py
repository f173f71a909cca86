"""Ranks of tensor parallelism as threads of this process: as fast to start as a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.member import MemberModel, RankSpec, load_member


class ThreadedRanks:
    """All ranks of a model; `forward` gives what rank 0 gets."""

    def __init__(self, members: list[MemberModel], executor: ThreadPoolExecutor) -> None:
        self.members = members
        self._executor = executor

    def forward(self, batch: StepBatch) -> torch.Tensor:
        first, *_ = self._executor.map(lambda member: member.forward(batch), self.members)
        return first


@contextlib.contextmanager
def connected(folder: Path, ranks: int, meeting: Path, **options: object) -> Iterator[ThreadedRanks]:
    """The ranks of a checkpoint; options: fields of RankSpec. Raises ShapeshiftError where they cannot be loaded."""
    groups = [RankGroup(rank, ranks) for rank in range(ranks)]
    members = [load_member(spec(folder, group.rank, ranks, **options), group) for group in groups]
    with ThreadPoolExecutor(ranks) as executor:
        list(executor.map(lambda group: group.connect(meeting), groups))
        yield ThreadedRanks(members, executor)
    for group in groups:
        group.close()


def spec(folder: Path, rank: int, ranks: int, **options: object) -> RankSpec:
    """What a rank loads: in f32, three slots of 64 tokens."""
    plain: dict[str, object] = {
        "precision": "f32",
        "device": "cpu",
        "slots": 3,
        "max_length": 64,
        "blocks": 0,
        "kv_precision": "auto",
        "threads": 1,
        "native": True,
        "kernel_cache": "",
    }
    return RankSpec(rank, ranks, str(folder), **(plain | options))  # type: ignore[arg-type]
