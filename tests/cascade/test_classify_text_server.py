"""The demo through a real server: early answers, calls to the second level, and the unload and reload of that level."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests import precision, waiting
from tests.conftest import BUILD

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.2)

pytestmark = pytest.mark.server
MODELS = ("classify_text", "classify_text_large")
TEXTS = [
    *(
        "what is the exchange rate of dollars to euros",
        "play some jazz",
        "is my flight on time",
        "set an alarm for six",
    ),
    *("tell me something that i would not guess", "er could you maybe do the thing again", "hm"),
    *("how would one go about getting rid of it", "the one from before please", "what about the other account"),
]
ALL = ("LABEL", "PROBABILITIES", "CONFIDENCE", "LEVEL", "WORDS_PRUNED", "ENGINE_MS", "CONTROL_MS")


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    for needed in (BUILD / "repository" / name for name in MODELS):
        if not needed.is_dir():
            pytest.skip(f"no {needed}: run `make engines`")
    with make_server((BUILD / "repository",), MODELS, tmp_path_factory.mktemp("classify")) as running:
        yield running.wait_ready()


@pytest.fixture
def ask(server: TritonServer) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that classifies texts; request parameters are keyword arguments."""
    with triton.InferenceServerClient(server.grpc_url) as client:

        def call(texts: list[str], **parameters: Any) -> dict[str, Any]:
            rows = np.array([[text.encode()] for text in texts], dtype=object)
            given = triton.InferInput("TEXT", rows.shape, "BYTES")
            given.set_data_from_numpy(rows)
            answer = client.infer("classify_text", [given], parameters=parameters, client_timeout=120)
            return {name: answer.as_numpy(name) for name in ALL}

        yield call


def asked_of_the_second(ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The answers of the second level alone; a call that timed out is repeated."""
    found: list[dict[str, Any]] = []

    def answered() -> bool:
        with contextlib.suppress(InferenceServerException):
            found.append(ask(TEXTS, level=2))
        return bool(found)

    wait_for(answered)
    return found[0]


def asked_until_both_levels_answer(ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Answers of which some come from the second level."""
    found: list[dict[str, Any]] = []

    def answered() -> bool:
        found.append(ask(TEXTS))
        return 2 in found[-1]["LEVEL"]

    wait_for(answered)
    return found[-1]


def test_answers_are_whole(ask: Callable[..., dict[str, Any]]) -> None:
    # On a busy machine a call to the second level may time out: then the first level's answer is returned.
    found = asked_until_both_levels_answer(ask)
    assert found["PROBABILITIES"].shape == (len(TEXTS), 150)
    np.testing.assert_allclose(found["PROBABILITIES"].sum(axis=1), 1, atol=1e-4)
    assert found["LABEL"][0, 0] == b"exchange_rate" and found["LABEL"][3, 0] == b"alarm"
    assert set(found["LEVEL"].ravel().tolist()) == {1, 2}
    assert (found["ENGINE_MS"] > 0).all() and ((found["CONFIDENCE"] > 0) & (found["CONFIDENCE"] <= 1)).all()
    small, large = ask(TEXTS, level=1), asked_of_the_second(ask)
    assert set(small["LEVEL"].ravel()) == {1} and set(large["LEVEL"].ravel()) == {2}
    early = found["LEVEL"][:, 0] == 1
    tolerance = precision.MAX_PROBABILITY_ERROR[precision.of_model(BUILD / "repository", "classify_text_small")]
    np.testing.assert_allclose(found["PROBABILITIES"][early], small["PROBABILITIES"][early], rtol=0, atol=tolerance)
    assert (found["LABEL"][early] == small["LABEL"][early]).all()


def test_invalid_requests_are_refused(server: TritonServer, ask: Callable[..., dict[str, Any]]) -> None:
    for texts, parameters, message in (
        (["fine", ""], {}, "row 1: TEXT"),
        (["word " * 200], {}, "at most 128"),
        (["fine"], {"level": 3}, "1 to 2"),
        (["fine"], {"min_accuracy": 0.9999}, "min_accuracy"),
    ):
        with pytest.raises(InferenceServerException, match=message) as refused:
            ask(texts, **parameters)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    pair = [triton.InferInput(name, [1, 1], "BYTES") for name in ("TEXT", "TEXT_PAIR")]
    for one in pair:
        one.set_data_from_numpy(np.array([[b"fine"]], dtype=object))
    with triton.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException, match="PAIR"):
        client.infer("classify_text", pair, client_timeout=120)
    assert ask(["word " * 200], truncate=True)["LABEL"].shape == (1, 1)


@pytest.mark.kills
def test_the_second_level_is_unloaded_killed_and_loaded_again(
    server: TritonServer, ask: Callable[..., dict[str, Any]]
) -> None:
    from shapeshift.triton.control import ModelControl

    with ModelControl(server.grpc_url, server.key) as control:
        wait_for(lambda: 2 in ask(TEXTS)["LEVEL"])
        control.unload("classify_text_large")
        control.wait_unloaded("classify_text_large")
        assert set(ask(TEXTS)["LEVEL"].ravel()) == {1}
        with pytest.raises(InferenceServerException):
            ask(TEXTS, level=2)
        control.load("classify_text_large")
        wait_for(lambda: 2 in ask(TEXTS)["LEVEL"])
        os.kill(_stub_of("classify_text_large", server), signal.SIGKILL)
        for _ in range(3):
            assert len(ask(TEXTS)["LABEL"]) == len(TEXTS)
        assert set(ask(TEXTS)["LEVEL"].ravel()) == {1}
        config = control.config("classify_text_large")
        config["parameters"]["generation"] = {"string_value": "1"}
        control.load("classify_text_large", config)
        wait_for(lambda: 2 in ask(TEXTS)["LEVEL"])


def _stub_of(model: str, server: TritonServer) -> int:
    """The process of a model's only instance, from the metrics."""
    from shapeshift.triton import metrics

    def found() -> list[int]:
        samples = metrics.scrape(server.metrics_url)
        return [
            int(dict(labels)["pid"])
            for (name, labels), _ in samples.items()
            if name == "shapeshift_heartbeat_total" and ("model", model) in labels
        ]

    wait_for(lambda: any(Path(f"/proc/{pid}").exists() for pid in found()))
    return next(pid for pid in reversed(found()) if Path(f"/proc/{pid}").exists())
