"""When kernels count as right, and what those of attention are tried with before they are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.graphs import kernel_check
from shapeshift.fused_decode.model.graphs.verify import verified
from shapeshift.fused_decode.model.network import AttentionLayer
from shapeshift.fused_decode.model.torch_operations import PLAIN, Rows
from tests.fused_decode.decode_models import Tiny, batch, texts
from tests.fused_decode.test_decode_graphs import TOLERANCE, open_model, reference

MOST = kernel_check._MOST_ERROR


@pytest.mark.parametrize("errors", [[], [0.0], [MOST], [0.0, MOST, 0.01]])
def test_small_errors_are_right_and_nothing_is_said(errors: list[float]) -> None:
    assert kernel_check.are_right(lambda: errors, "another way", pytest.fail)


@pytest.mark.parametrize(
    ("errors", "said"), [([MOST + 0.01], "by 0.16 "), ([0.0, 0.5, 0.2], "by 0.5 "), ([float("inf"), 0.0], "by inf ")]
)
def test_one_large_error_is_wrong_and_the_largest_is_said(errors: list[float], said: str) -> None:
    log = list[str]()
    assert not kernel_check.are_right(lambda: errors, "another way", log.append)
    assert len(log) == 1 and log[0].startswith("another way: its kernels give something else here, ") and said in log[0]


def test_kernels_that_fail_at_their_second_call_are_not_right() -> None:
    def errors() -> Iterable[float]:
        yield 0.0
        raise OSError("no compiler")

    log = list[str]()
    assert not kernel_check.are_right(errors, "another way", log.append)
    assert log == ["another way: its kernels cannot run here: OSError: no compiler"]


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, -4.5], [1.0, -5.0], 0.1),
        ([1.5, -5.0], [1.0, -5.0], 0.1),
        ([0.0, -7.5], [0.0, -5.0], 0.5),
        ([float("nan"), -5.0], [1.0, -5.0], float("inf")),
    ],
)
def test_a_difference_is_a_share_of_the_largest_value(found: list[float], expected: list[float], share: float) -> None:
    assert kernel_check.difference(torch.tensor(found), torch.tensor(expected)) == pytest.approx(share)


# Attention.

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def layer(places: int = 4096, window: int = 0, cap: float = 0.0, norm: bool = False) -> AttentionLayer:
    """A layer of a model whose texts have up to so many places."""
    cache = torch.zeros(3, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    angles = torch.arange(places)[:, None] / torch.arange(1, HEAD_DIM // 2 + 1)
    table = torch.stack([angles.cos()] * 3), torch.stack([angles.sin()] * 3)
    weight = torch.ones(HEAD_DIM) if norm else None
    return AttentionLayer(cache[:, 0], cache[:, 1], *table, weight, weight, 1e-6, window, 0.25, cap)


class Tried:
    """Plain torch that keeps what it is asked: rows and tokens of each, blocks of each, window and places."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.layers: list[AttentionLayer] = []
        self.kernels = replace(PLAIN, read=self._read)

    def _read(self, queries: Any, own: AttentionLayer, rows: Rows, mixed: torch.Tensor) -> None:
        self.rows.append(rows)
        self.layers.append(own)
        PLAIN.read(queries, own, rows, mixed)


def test_single_tokens_and_chunks_are_tried_over_short_and_long_texts() -> None:
    tried = Tried()
    assert verified(tried.kernels, [layer()], HEADS, pytest.fail) is tried.kernels
    sizes = [(tuple(rows.positions.shape), rows.blocks.shape[1] * BLOCK_TOKENS) for rows in tried.rows]
    assert sizes == [((3, 1), 64), ((3, 1), 256), ((1, 24), 64), ((1, 24), 256)]
    for rows in tried.rows:
        context = rows.blocks.shape[1] * BLOCK_TOKENS
        assert int(rows.positions.max()) == context - 1, "the longest text is full"
        assert int(rows.positions.min()) >= 0
        assert len(rows.positions[:, 0].unique()) == len(rows.positions), "texts of several lengths"
        assert (rows.positions.diff() == 1).all()
        assert sorted(rows.blocks.flatten().tolist()) == list(range(rows.blocks.numel())), "blocks of its own"


def test_texts_are_no_longer_than_those_of_the_model() -> None:
    tried = Tried()
    verified(tried.kernels, [layer(places=20)], HEADS, pytest.fail)
    assert [tuple(rows.positions.shape) for rows in tried.rows] == [(3, 1), (3, 1), (1, 20), (1, 20)]
    assert max(int(rows.positions.max()) for rows in tried.rows) == 19


def test_layers_of_one_kind_are_tried_once() -> None:
    tried = Tried()
    layers = [layer(), layer(window=32), layer(cap=30.0), layer(norm=True)]
    verified(tried.kernels, [*layers, *layers], HEADS, pytest.fail)
    kinds = [(own.window, own.score_cap, own.query_norm is None) for own in tried.layers]
    assert len(kinds) == 4 * 4
    assert set(kinds) == {(0, 0.0, True), (32, 0.0, True), (0, 30.0, True), (0, 0.0, False)}


def test_plain_torch_is_not_tried() -> None:
    nowhere = replace(layer(), keys=torch.empty(0), values=torch.empty(0))
    assert verified(PLAIN, [nowhere], HEADS, pytest.fail) is PLAIN


def test_the_kernels_do_not_change_the_cache_of_the_model() -> None:
    own = layer()
    verified(Tried().kernels, [own], HEADS, pytest.fail)
    assert not own.keys.any() and not own.values.any()


def test_steps_without_a_graph_use_the_kernels_too(tiny: Callable[[str], Tiny]) -> None:
    """Chunks of several lengths side by side have no graph."""
    tried = Tried()
    model, given = open_model(tiny("qwen3"), kernels=tried.kernels), texts(2, seed=21)
    pieces = [text[:size] for text, size in zip(given, (5, 9), strict=True)]
    logits = model.forward(batch(pieces, [3, 0], [0, 0]))
    assert not model.graphs and sorted({rows.positions.shape[1] for rows in tried.rows}) == [5, 9]
    for row, expected in enumerate(reference(tiny("qwen3"), given)):
        assert (logits[row] - expected[len(pieces[row]) - 1]).abs().max() < TOLERANCE
