"""What a front's configuration says, and what is refused."""

from __future__ import annotations

import json

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.scheduler.front import read
from tests.scheduler.fakes import EDGES, PROFILE, SERVICES, front, parameters


def test_service_times_come_from_the_static_engine_or_else_the_dynamic_one() -> None:
    assert front().services == SERVICES
    halfway = front(bin_edges="[32, 260]", plan_histogram="[1, 3]")
    assert halfway.services == (5.0, pytest.approx(3 + 97 * (260 - 8) / (512 - 8)))
    assert halfway.weights == (0.25, 0.75)


def test_bounds_default_to_the_workers() -> None:
    assert (front().least, front().most, front().scales) == (4, 4, False)
    scaled = front(min_workers=2, max_workers=6)
    assert (scaled.least, scaled.most, scaled.scales) == (2, 6, True)
    assert not front(min_workers=2, max_workers=6, worker_pool="p", pool_workers=6).scales


def test_a_front_without_workers_needs_nothing() -> None:
    assert not read("encode", {"placement": "inline", "checkpoint": "x"}).has_workers
    resident = read("encode", {"placement": "resident", "workers": "2"})
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
        ({"worker_pool": "p"}, "pool_workers"),
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
        ({"profile": ""}, "profile"),
        ({"profile": "{}"}, "profile"),
        ({"profile": '{"engines": []}'}, "profile"),
        ({"profile": '{"engines": [{"tokens": null, "latency": [[8]]}]}'}, "profile"),
        ({"profile": json.dumps({"engines": PROFILE["engines"][1:]})}, "profile"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        read("enc", parameters(**changes))


def test_no_histogram_means_every_bin_alike() -> None:
    assert front(plan_histogram="[]").weights == (1 / 3,) * len(EDGES)
