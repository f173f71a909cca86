"""A front and a worker on releases after 24.10: what their Python stub has, and what it asks of a model's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from shapeshift.polymorph.front import TextFront
from shapeshift.serving.front import EntryPoint
from tests import fakes
from tests.polymorph.conftest import Gate
from tests.waiting import wait_for


class NewerError(fakes.TritonError):
    """With a code that 24.10 has not."""

    TIMEOUT = 8


class NewerResponse(fakes.InferenceResponse):
    """With parameters (25.02)."""

    def __init__(
        self, output_tensors: Sequence[Any] = (), error: Any = None, parameters: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(output_tensors, error)


class NewerPbUtils(fakes.PbUtils):
    """The module of 26.03."""

    def __init__(self) -> None:
        super().__init__()
        self.InferenceResponse = NewerResponse
        self.TritonError = NewerError
        self.MetricFamily.HISTOGRAM = "HISTOGRAM"  # type: ignore[attr-defined]


class Entry(EntryPoint):
    """As backends/polymorph/model.py."""

    front = TextFront


def answers_ready(model: EntryPoint) -> bool:
    """As the stub of 26.03 does for /v2/models/NAME/ready: what is no bool is an error."""
    is_ready = model.is_ready()
    assert isinstance(is_ready, bool)
    return is_ready


@pytest.fixture
def model(front_args: Callable[..., dict[str, str]]) -> Iterator[EntryPoint]:
    entry = Entry()
    entry.pb_utils = NewerPbUtils()  # type: ignore[misc]
    entry.initialize(front_args())
    yield entry
    entry.finalize()


def test_a_front_serves(model: EntryPoint) -> None:
    request = fakes.text_request("w1 w2")
    fakes.send_returned([request], model.execute([request]))
    assert np.linalg.norm(request.vectors()) == pytest.approx(1.0, abs=1e-3)
    refused = fakes.text_request("w1", parameters={"latency_ms": -1})
    fakes.send_returned([refused], model.execute([refused]))
    assert refused.refusal()[0] == NewerError.INVALID_ARG
    assert answers_ready(model)


@pytest.mark.slow
def test_a_front_whose_engine_hangs_is_not_ready_until_it_goes_on(gate: Gate, model: EntryPoint) -> None:
    request = fakes.text_request("w1 w2")
    gate.hold()
    fakes.send_returned([request], model.execute([request]))
    gate.wait_held()
    assert answers_ready(model), "a call that takes its time"
    wait_for(lambda: not answers_ready(model), pause_s=0.1)
    gate.release()
    wait_for(lambda: answers_ready(model), pause_s=0.1)
    request.vectors()
