"""The file beside a torch graph: what it says of the inputs of a call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shapeshift.engines.providers.torch_signature import FILE, Input, Signature

IDS = Input("IDS", {"0": "rows", "1": "tokens"}, (2, 8), "int64")
MASK = Input("MASK", {"1": "tokens"}, (3, 8), "float32")


@pytest.mark.parametrize(
    ("one", "shape"), [(IDS, (5, 7)), (MASK, (3, 7)), (Input("FIXED", {}, (4, 0), "float32"), (4, 0))]
)
def test_the_axes_that_vary_have_their_sizes_and_the_others_stay(one: Input, shape: tuple[int, ...]) -> None:
    assert one.shape_of({"rows": 5, "tokens": 7}) == shape


def test_the_sizes_of_a_call_are_those_of_its_inputs() -> None:
    given = {"IDS": np.zeros((5, 7)), "MASK": np.zeros((3, 7))}
    assert Signature([IDS, MASK], ["OUT"], {}).sizes(given) == {"rows": 5, "tokens": 7}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    example = {"IDS": np.zeros((2, 8), np.int64)}
    module = SimpleNamespace(input_axes={"IDS": {0: "rows", 1: "tokens"}}, output_names=("A", "B"))
    made = Signature.of(module, example)
    assert (made.inputs, made.outputs, made.captured) == ([IDS], ["A", "B"], {})
    made.save(tmp_path)
    found = Signature.load(tmp_path)
    assert [(one.name, one.axes, tuple(one.shape), one.kind) for one in found.inputs] == [
        ("IDS", {"0": "rows", "1": "tokens"}, (2, 8), "int64")
    ]
    assert (found.outputs, found.captured) == (["A", "B"], {})
    assert (tmp_path / FILE).read_text().endswith("}\n")


def test_the_sizes_with_graphs_are_those_of_the_module(tmp_path: Path) -> None:
    module = SimpleNamespace(input_axes={}, output_names=("A",), captured={"images": (1, 2)})
    Signature.of(module, {}).save(tmp_path)
    assert Signature.load(tmp_path).captured == {"images": [1, 2]}
