from __future__ import annotations

import random

import numpy as np
import pytest

from shapeshift.engines.execution.engine_set import pack
from shapeshift.engines.interfaces import INPUT_AXES


def test_rows_lie_side_by_side() -> None:
    made = pack([np.array([5, 6, 7]), np.array([8])], tokens=6, rows=3)
    assert made["INPUT_IDS"].tolist() == [[5, 6, 7, 8, 0, 0]]
    assert made["SEGMENTS"].tolist() == [[1, 1, 1, 2, 0, 0]]
    assert made["POSITIONS"].tolist() == [[0, 1, 2, 0, 0, 0]]
    assert made["ROWS"].tolist() == [1, 2, 3]


def test_positions_count_from_the_familys_offset() -> None:
    made = pack([np.array([5, 6]), np.array([7, 8, 9])], 5, 2, position_offset=2)
    assert made["POSITIONS"].tolist() == [[2, 3, 2, 3, 4]]


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_positions_are_those_of_roberta_where_a_text_contains_padding(padding: int) -> None:
    import torch
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    for stride in (0, 100):
        text = np.array([7, 9, padding, 8, padding, padding, 6])
        wanted = RobertaEmbeddings.create_position_ids_from_input_ids(torch.from_numpy(text)[None], padding)
        # A pair's second text has its ids above the stride.
        made = pack([np.array([3]), text + stride * (np.arange(7) > 3)], 8, 2, padding + 1, stride)
        assert made["POSITIONS"][0, 1:].tolist() == wanted[0].tolist()


def test_the_longest_text_has_positions_from_an_offset() -> None:
    """As in models of 8,194 positions, such as BGE-M3."""
    made = pack([np.full(8192, 7)], 8192, 8192, 2)
    assert made["POSITIONS"][0, [0, -1]].tolist() == [2, 8193]
    assert made["ROWS"][[0, -1]].tolist() == [1, 8192]


@pytest.mark.parametrize("seed", range(30))
def test_rows_can_be_recovered_from_a_pack(seed: int) -> None:
    rng = random.Random(seed)
    texts = [np.array([rng.randint(1, 30000) for _ in range(rng.randint(1, 40))]) for _ in range(rng.randint(1, 9))]
    total = sum(map(len, texts))
    made = pack(texts, total + rng.randint(0, 50), len(texts) + rng.randint(0, 5), 3)
    assert tuple(made) == tuple(INPUT_AXES)
    assert all(array.dtype == np.int64 for array in made.values())
    for number, text in enumerate(texts, start=1):
        own = made["SEGMENTS"][0] == number
        assert made["INPUT_IDS"][0][own].tolist() == text.tolist()
        assert made["POSITIONS"][0][own].tolist() == list(range(3, 3 + len(text)))
    unused = made["SEGMENTS"][0] == 0
    assert unused.sum() == made["INPUT_IDS"].shape[1] - total
    assert not made["INPUT_IDS"][0][unused].any()


def test_packs_do_not_share_memory() -> None:
    first = pack([np.array([1, 2])], 4, 1)
    pack([np.array([3, 4])], 4, 1)
    assert first["INPUT_IDS"].tolist() == [[1, 2, 0, 0]]


def test_too_many_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="shape"):
        pack([np.array([1, 2, 3])], 2, 1)
