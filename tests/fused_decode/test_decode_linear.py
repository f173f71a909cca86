"""Packed linears, and the plain ones that replace them."""

from __future__ import annotations

import pytest
import torch

from shapeshift.fused_decode.interfaces import Groups
from shapeshift.fused_decode.model.torch_operations import PackedLinear, PlainLinear, maker, packs


def test_packed_linears_equal_plain_ones() -> None:
    if not packs(torch.float32):
        pytest.skip("this build of torch has no packed linears")
    generator = torch.Generator().manual_seed(0)
    weight, bias, rows = (torch.randn(*shape, generator=generator) for shape in ((70, 33), (70,), (9, 33)))
    for given in (None, bias):
        packed, plain = PackedLinear(weight, given), PlainLinear(weight, given)
        for count in (1, 5, 9):
            assert torch.allclose(packed(rows[:count]), plain(rows[:count]), atol=1e-4)


def test_one_line_says_that_linears_are_plain() -> None:
    lines: list[str] = []
    if packs(torch.float32):
        assert maker(torch.float32, lines.append) is PackedLinear
        assert lines == []
    # Nobody packs numbers of 64 bits.
    assert maker(torch.float64, lines.append) is PlainLinear
    assert len(lines) == 1


@pytest.mark.parametrize("fault", ["missing", "refuses", "wrong"])
def test_operators_with_wrong_results_are_not_used(fault: str) -> None:
    class Faulty(PlainLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            if fault == "missing":
                raise AttributeError("no such operator")
            super().__init__(weight * 1.1, bias)

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            if fault == "refuses":
                raise RuntimeError("not on this CPU")
            return super().__call__(rows)

    assert packs(torch.float32, PlainLinear)
    assert not packs(torch.float32, Faulty)


def test_groups_name_their_tokens() -> None:
    groups = Groups(6, *(torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 2, 4], [2, 4, 0, 3])))
    assert [tokens.tolist() for tokens in groups.each()] == [[2, 4], [], [0, 3]]
    assert all(tokens.dtype == torch.int64 for tokens in groups.each())
