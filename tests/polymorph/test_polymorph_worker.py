"""One worker from its requests to its answers, over engines that only imitate."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving.pb_utils import InferenceResponse
from tests.fakes import PbUtils, Request, TritonError, ids_request
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.polymorph.conftest import Gate

MakeWorker = Callable[..., TextWorker]
BuildFront = Callable[..., dict[str, str]]


@pytest.fixture(autouse=True)
def built(front_args: BuildFront) -> None:
    """A front whose worker holds all its engines: 16, 64 and one for any shape."""
    front_args(placement="resident", workers=1)


def packed(*rows: Sequence[int], outputs: Sequence[str] = ("EMBEDDING", "STATE")) -> Request:
    """What a router sends for so many texts."""
    ids = np.array([number for row in rows for number in row], dtype=np.int64)
    return Request(outputs, INPUT_IDS=ids, LENGTHS=np.array([len(row) for row in rows], dtype=np.int32))


def outputs(response: InferenceResponse) -> dict[str, np.ndarray]:
    error = response.error()
    assert error is None, error.message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def refusal(response: InferenceResponse) -> tuple[int, str]:
    error = response.error()
    assert error is not None, "the request was served"
    return error.code(), error.message()


def test_vectors_are_those_of_a_front_that_holds_the_engines_itself(
    make_worker: MakeWorker, make_front: Callable[..., TextFront]
) -> None:
    rng = random.Random(2)
    packs = [
        [[rng.randint(1, 30000) for _ in range(rng.choice((1, 3, 16, 40)))] for _ in range(rows)]
        for rows in (1, 2, 3, 4, 12)
    ]
    worker = make_worker()
    responses = worker.execute([packed(*rows) for rows in packs])
    front = make_front()
    for rows, response in zip(packs, responses, strict=True):
        inline = ids_request(*rows)
        front.execute([inline])
        np.testing.assert_array_equal(outputs(response)["EMBEDDING"], inline.vectors())


@pytest.mark.parametrize(
    ("bin_edge", "engines"), [(16, {"16"}), (64, {"64"}), (512, {"dynamic"}), (0, {"dynamic", "16", "64"})]
)
def test_it_holds_the_engines_of_its_bin_and_reports_its_state(
    make_worker: MakeWorker, bin_edge: int, engines: set[str]
) -> None:
    worker = make_worker(bin=bin_edge, generation=7)
    wait_for(lambda: set(worker.engines.loaded) == engines)
    assert worker.loader.wait(120) and set(worker.engines.loaded) == engines
    response, hello = worker.execute([packed([101, 102]), packed()])
    for one in (response, hello):
        state = outputs(one)["STATE"]
        assert state.dtype == np.int64 and state[:3].tolist() == [bin_edge, 7, os.getpid()]
    assert outputs(response)["EMBEDDING"].shape == (1, 8)
    assert outputs(hello)["EMBEDDING"].shape == (0, 8) and outputs(hello)["EMBEDDING"].dtype == np.float32


def test_it_reports_the_time_of_each_call_and_of_all(make_worker: MakeWorker, gate: Gate) -> None:
    worker = make_worker()
    reported = [outputs(one)["STATE"] for one in worker.execute([packed([5]), packed()])]
    assert reported[0][3] > 0 and reported[1][4] >= reported[0][4] + reported[1][3]
    gate.hold()
    holding = threading.Timer(0.2, gate.release)
    holding.start()
    slow = outputs(worker.execute([packed([5])])[0])["STATE"]
    assert slow[3] >= 150_000 and slow[4] >= reported[1][4] + slow[3]
    # One that fails takes time, too.
    gate.fail = RuntimeError("out of luck")
    worker.execute([packed([5])])
    after = outputs(worker.execute([packed()])[0])["STATE"]
    assert after[4] > slow[4] + after[3]


def test_outputs_are_those_requested(make_worker: MakeWorker) -> None:
    (response,) = make_worker().execute([packed([5], outputs=["STATE"])])
    assert list(outputs(response)) == ["STATE"]


def test_a_text_too_long_for_the_bin_is_unsupported(make_worker: MakeWorker) -> None:
    worker = make_worker(bin=16)
    fits, one, two, wrong = worker.execute(
        [packed([5] * 10, [5] * 6), packed([5] * 17), packed([5] * 9, [5] * 8), packed([-1] * 17)]
    )
    assert outputs(fits)["EMBEDDING"].shape == (2, 8)
    for response in (one, two, wrong):
        assert refusal(response) == (TritonError.UNSUPPORTED, "LENGTHS: 17 tokens in all; this worker takes 16")
    (response,) = make_worker(bin=0).execute([packed([5] * 513)])
    assert refusal(response)[0] == TritonError.UNSUPPORTED


IDS = np.array([101, 7, 102], dtype=np.int64)


def lengths(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"INPUT_IDS": IDS}, "LENGTHS: got None; given"),
        ({"LENGTHS": lengths(3)}, "INPUT_IDS: got None; given"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths(2)}, r"LENGTHS: got \[2\]; at least 1 each, 3 in all"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths(4)}, r"LENGTHS: got \[4\]; at least 1 each, 3 in all"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths(3, 0)}, r"LENGTHS: got \[3, 0\]; at least 1 each"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths(4, -1)}, r"LENGTHS: got \[4, -1\]; at least 1 each"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths()}, r"LENGTHS: got \[\]; at least 1 each, 3 in all"),
        ({"INPUT_IDS": IDS[:0], "LENGTHS": lengths(1)}, r"LENGTHS: got \[1\]; at least 1 each, 0 in all"),
        ({"INPUT_IDS": IDS, "LENGTHS": lengths(2**31 - 1, 2**31 - 1, 5)}, "LENGTHS: got .*; at least 1 each, 3 in all"),
        ({"INPUT_IDS": IDS.reshape(1, 3), "LENGTHS": lengths(3)}, r"INPUT_IDS, LENGTHS: got \[2, 1\]; one axis each"),
        ({"INPUT_IDS": IDS + 30422, "LENGTHS": lengths(3)}, r"INPUT_IDS: got \[30429, 30524\]; 0 to 30521"),
        ({"INPUT_IDS": IDS - 8, "LENGTHS": lengths(3)}, r"INPUT_IDS: got \[-1, 94\]; 0 to 30521"),
    ],
)
def test_malformed_input_is_named_and_fails_only_its_request(
    make_worker: MakeWorker, inputs: dict[str, Any], said: str
) -> None:
    bad, good = make_worker().execute([Request(["EMBEDDING", "STATE"], **inputs), packed([5])])
    code, text = refusal(bad)
    assert code == TritonError.INVALID_ARG
    with pytest.raises(AssertionError, match=f"^{said}"):
        raise AssertionError(text)
    assert outputs(good)["EMBEDDING"].shape == (1, 8)


def test_an_engine_that_fails_fails_only_its_request(make_worker: MakeWorker, gate: Gate) -> None:
    worker = make_worker()
    gate.fail = RuntimeError("out of luck")
    failed, hello = worker.execute([packed([5]), packed()])
    assert refusal(failed) == (TritonError.INTERNAL, "RuntimeError: out of luck")
    assert outputs(hello)["STATE"][0] == 0
    gate.fail = None
    assert outputs(worker.execute([packed([5])])[0])["EMBEDDING"].shape == (1, 8)


def test_metrics_of_a_worker(make_worker: MakeWorker, pb_utils: PbUtils) -> None:
    worker = make_worker()
    worker.execute([packed([5], [6]), packed([7]), packed(), packed([-1])])
    labels = {"model": "front_w00", "pid": str(os.getpid())}
    key = ("shapeshift_engine_rows_total", frozenset(labels.items()))
    # Exported once a second, the rows last.
    wait_for(lambda: pb_utils.metrics.get(key) == 3)
    assert pb_utils.metric("shapeshift_engine_calls_total", **labels) == 2
    assert pb_utils.metric("shapeshift_heartbeat_total", **labels) >= 1
    assert "front_w00: ready: bin any, generation 0, emulated f32" in pb_utils.Logger.lines


@pytest.mark.parametrize(
    ("parameters", "kind", "said"),
    [
        ({"bin": 17}, InvalidInputError, "bin: got 17; 0, or one of 16, 64, 512"),
        ({"bin": -1}, InvalidInputError, "bin: got -1; 0 or more"),
        ({"bins_": "3"}, InvalidInputError, "bins_: .*unknown parameter; .*known: .*worker_of"),
        ({"manifest_sha256": "0" * 64}, EngineError, "is not the one that the model's config names"),
        ({"engines": "../absent"}, EngineError, "no engine manifest .*absent"),
    ],
)
def test_an_invalid_config_is_refused(
    make_worker: MakeWorker, parameters: dict[str, object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make_worker(**parameters)
