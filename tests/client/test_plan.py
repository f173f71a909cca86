from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from client.plan import Settings, plan
from shapeshift.errors import InvalidInputError


def words(text: bytes) -> int:
    return len(text.split())


@pytest.mark.parametrize("arrivals", ["constant", "poisson", "mmpp"])
def test_texts_arrive_by_the_process_and_the_seed(arrivals: str) -> None:
    settings = Settings(arrivals=arrivals, rate=100.0, duration_s=2.0, seed=7)
    planned = plan(settings)
    at_s = [request.at_s for request in planned]
    assert at_s == sorted(at_s)
    assert at_s[-1] < 2.0
    assert planned[0].inputs["TEXT"].shape == (1, 1)
    assert planned[0].parameters == {"truncate": True}
    texts = [request.inputs["TEXT"].item() for request in planned]
    assert texts == [request.inputs["TEXT"].item() for request in plan(settings)]
    assert len(set(texts)) > 0.9 * len(texts)


def test_ids_have_exactly_the_length_asked_for() -> None:
    planned = plan(Settings(input="ids", lengths="33", rate=20.0, duration_s=1.0))
    for request in planned:
        ids, mask = request.inputs["INPUT_IDS"], request.inputs["ATTENTION_MASK"]
        assert ids.shape == mask.shape == (1, 33)
        assert ids.dtype == mask.dtype == np.int64
        assert (ids[0, 0], ids[0, -1], mask.sum()) == (101, 102, 33)
        assert request.parameters == {}


def test_longer_texts_are_made_as_long_as_allowed() -> None:
    planned = plan(Settings(input="ids", lengths="long", max_length=64, rate=200.0, duration_s=1.0))
    sizes = [request.inputs["INPUT_IDS"].shape[1] for request in planned]
    assert max(sizes) == 64
    assert min(sizes) < 64


def test_a_trace_gives_instants_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at_s,length\n0.5,10\n1.0,20\n9.0,30\n")
    planned = plan(Settings(arrivals="csv", trace=str(path), rate_factor=2.0, duration_s=4.0, input="ids"))
    assert [request.at_s for request in planned] == [0.25, 0.5]
    assert [request.inputs["INPUT_IDS"].shape[1] for request in planned] == [10, 20]
    with pytest.raises(InvalidInputError, match="duration_s"):
        plan(Settings(arrivals="csv", trace=str(path), duration_s=0.1))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("arrivals", {"arrivals": "uniform"}),
        ("input", {"input": "image"}),
        ("trace", {"arrivals": "csv"}),
        ("trace", {"trace": "x.csv"}),
        ("max_length", {"max_length": 1}),
        ("seed", {"seed": -1}),
        ("slo_ms", {"slo_ms": 0.0}),
        ("rate", {"rate": 0.0}),
        ("lengths", {"lengths": "medium"}),
        ("lengths", {"lengths": "0"}),
        ("states", {"arrivals": "mmpp", "states": "x"}),
        ("tokenizer", {"tokenizer": "missing.json"}),
    ],
)
def test_invalid_settings_are_refused_by_field(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        plan(Settings(**settings))  # type: ignore[arg-type]
    assert refused.value.field == field
