"""Fronts from their configurations, and the errors for invalid ones."""

from __future__ import annotations

import json

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.sidecar.front_config import read_front
from tests.sidecar.fakes import EDGES, PROFILE, SERVICE_MS, front, parameters


def test_service_times_prefer_the_static_engine() -> None:
    assert front().service_ms == SERVICE_MS
    halfway = front(bin_edges="[32, 260]", plan_histogram="[1, 3]")
    assert halfway.service_ms == (5.0, pytest.approx(3 + 97 * (260 - 8) / (512 - 8)))
    assert halfway.weights == (0.25, 0.75)


def test_bounds_default_to_the_workers() -> None:
    assert (front().min_workers, front().max_workers, front().is_scaled) == (4, 4, False)
    scaled = front(min_workers=2, max_workers=6)
    assert (scaled.min_workers, scaled.max_workers, scaled.is_scaled) == (2, 6, True)


def test_a_front_without_workers_needs_nothing() -> None:
    assert not read_front("encode", {"placement": "inline", "checkpoint": "x"}).has_workers
    resident = read_front("encode", {"placement": "resident", "workers": "2"})
    assert resident.has_workers
    assert not resident.is_binned


def test_worker_names() -> None:
    one = front("enc")
    assert [one.worker_number(name) for name in ("enc_w00", "enc_w17", "enc_w123")] == [0, 17, 123]
    assert [one.worker_number(name) for name in ("enc", "enc_w1", "enc_wx1", "other_w00", "enc_w00_w01")] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"placement": "anywhere"}, "placement"),
        ({"slo_ms": 0}, "slo_ms"),
        ({"slo_ms": "soon"}, "slo_ms"),
        ({"workers": 0, "min_workers": 1}, "workers"),
        ({"placement": "auto"}, "placement"),
        ({"min_workers": 5}, "min_workers"),
        ({"max_workers": 3, "min_workers": 1}, "max_workers"),
        ({"allocation": "best"}, "allocation"),
        ({"curve": "straight"}, "curve"),
        ({"bin_edges": ""}, "bin_edges"),
        ({"bin_edges": "[64, 32]"}, "bin_edges"),
        ({"bin_edges": "[32, 32]"}, "bin_edges"),
        ({"bin_edges": "[0.5]"}, "bin_edges"),
        ({"bin_edges": "[NaN]"}, "bin_edges"),
        ({"bin_edges": "[]"}, "bin_edges"),
        ({"bin_edges": "64"}, "bin_edges"),
        ({"plan_histogram": "[1, 2]"}, "plan_histogram"),
        ({"plan_histogram": "[0, 0, 0]"}, "plan_histogram"),
        ({"plan_histogram": "[1, -1, 1]"}, "plan_histogram"),
        ({"plan_histogram": "[1, Infinity, 1]"}, "plan_histogram"),
        ({"plan_histogram": "{}"}, "plan_histogram"),
        ({"plan_histogram": "[8, 1"}, "plan_histogram"),
        ({"plan_histogram": "[8, true, 1]"}, "plan_histogram"),
        ({"profile": ""}, "profile"),
        ({"profile": "{}"}, "profile"),
        ({"profile": '{"engines"'}, "profile"),
        ({"profile": '{"engines": [{"tokens": null, "latency": [[8, 0], [512, 0]]}]}'}, "profile"),
        ({"profile": '{"engines": []}'}, "profile"),
        ({"profile": '{"engines": [{"tokens": null, "latency": [[8]]}]}'}, "profile"),
        ({"profile": json.dumps({"engines": PROFILE["engines"][1:]})}, "profile"),
    ],
)
def test_invalid_parameters_are_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        read_front("enc", parameters(**changes))


def test_without_a_histogram_all_bins_have_the_same_weight() -> None:
    assert front(plan_histogram="[]").weights == (1 / 3,) * len(EDGES)


def test_a_static_engine_that_was_measured_below_its_length_has_its_longest_time() -> None:
    engines = [{"tokens": 32, "latency": [[16, 2.0], [8, 1.0]]}, {"tokens": 128, "latency": [[128, 7.0], [64, 9.0]]}]
    found = front(bin_edges="[32, 128]", plan_histogram="[]", profile=json.dumps({"engines": engines}))
    assert found.service_ms == (2.0, 7.0)


def test_weights_are_shares_and_a_bin_may_have_none() -> None:
    assert front(plan_histogram="[3, 0, 1]").weights == (0.75, 0.0, 0.25)
