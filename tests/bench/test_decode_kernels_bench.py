"""What `bench.fused_decode.kernels` runs in turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bench.fused_decode.kernels import linears, steps
from bench.fused_decode.kernels.turns import in_turns
from bench.peers import random_llama


def test_works_take_turns_and_one_run_of_each_is_not_timed() -> None:
    ran: list[str] = []
    found, foreign = in_turns({name: partial(ran.append, name) for name in "ab"}, turns=2, times=2)
    assert ran == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert set(found) == {"a", "b"} and foreign >= 0.0


def test_pieces_of_prompts_are_those_of_the_loop() -> None:
    pieces = steps.prompts(1, 600)
    assert [(piece.starts.tolist(), piece.lengths.tolist()) for piece in pieces] == [
        ([0], [256]),
        ([256], [256]),
        ([512], [88]),
    ]
    (one,) = steps.prompts(8, 32)
    assert one.lengths.tolist() == [32] * 8 and len(one.tokens) == 256


@pytest.mark.parametrize("kind", linears.KINDS)
def test_linears_have_the_shapes_of_the_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SHAPES", ((96, 64), (64, 128)))
    seen: list[Any] = []
    own = linears._linears(kind, layers=2)
    for linear in own:
        monkeypatch.setattr(linear, "packed", _Recorder(seen))
    linears._all_of(own, rows=3)()
    assert seen == [(3, 64), (3, 128)] * 2


class _Recorder:
    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._seen.append(tuple(rows.shape))
        return rows


@pytest.mark.parametrize("size", random_llama.SIZES.values(), ids=list(random_llama.SIZES))
def test_a_size_states_its_parameters(size: random_llama.Size) -> None:
    head = size.hidden // size.heads
    attention = 2 * size.hidden * (size.hidden + size.kv_heads * head)
    layer = attention + 3 * size.hidden * size.inner + 2 * size.hidden
    assert size.parameters == random_llama.VOCABULARY * size.hidden + size.layers * layer + size.hidden
