"""Calls to workers that Triton's own backends serve: padding, versions that are bins, and a router over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import EngineError, ModelGoneError
from shapeshift.polymorph.router.engine_client import EngineClient
from shapeshift.polymorph.router.placement import open_router
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.router.transport import WrongBinError
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse
from tests import waiting
from tests.fakes import PbUtils, logger
from tests.polymorph import engine_models
from tests.polymorph.engine_models import EngineModel, wanted

TEXTS = [np.array(ids) for ids in ([5, 6, 7], [9], [4] * 10)]


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def client(pb_utils: PbUtils) -> EngineClient:
    return EngineClient(pb_utils, engine_models.made())


def versions(*edges: int) -> list[int]:
    return [engine_models.version(edge) for edge in edges]


def serve(pb_utils: PbUtils, edge: int, worker: str = "w") -> EngineModel:
    """Let the worker have this bin from now on."""
    for former in [name for name in pb_utils.models if name.startswith(f"{worker}/")]:
        del pb_utils.models[former]
    pb_utils.models[f"{worker}/{engine_models.version(edge)}"] = model = EngineModel(pb_utils, edge)
    return model


@pytest.mark.parametrize("edge", engine_models.SHAPES)
def test_a_pack_is_padded_to_the_engine_and_each_text_gets_its_vector(
    pb_utils: PbUtils, client: EngineClient, edge: int
) -> None:
    serve(pb_utils, edge)
    outputs, info = client.call("w", [])
    assert outputs["EMBEDDING"].shape == (0, 2) and (info.bin, info.pid) == (edge, 0)
    outputs, info = client.call("w", TEXTS)
    assert outputs["EMBEDDING"].tolist() == [wanted(text.tolist()) for text in TEXTS]
    assert info.bin == edge and info.busy_us == 0


def test_a_probe_asks_the_known_version_first(pb_utils: PbUtils, client: EngineClient) -> None:
    asked: list[int] = []
    made = pb_utils.InferenceRequest
    pb_utils.InferenceRequest = lambda **given: asked.append(given["model_version"]) or made(**given)  # type: ignore[func-returns-value]
    serve(pb_utils, 64)
    client.call("w", [])
    assert asked == versions(16, 32, 64)
    client.call("w", [])
    assert asked[3:] == versions(64)
    serve(pb_utils, 32)
    assert client.call("w", [])[1].bin == 32 and asked[4:] == versions(64, 16, 32)


def test_time_beyond_the_profile_counts_as_the_way(
    pb_utils: PbUtils, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serve(pb_utils, 32)
    client.call("w", [])
    assert client.call("w", TEXTS)[1].call_us <= 2000, "by the profile"
    compute = model.execute

    def slow(requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        time.sleep(0.02)
        return compute(requests)

    monkeypatch.setattr(model, "execute", slow)
    assert client.call("w", TEXTS)[1].call_us == 2000


def test_a_worker_with_another_bin_gets_no_texts(pb_utils: PbUtils, client: EngineClient) -> None:
    with pytest.raises(ModelGoneError, match="w: no version of it is ready"):
        client.call("w", [])
    with pytest.raises(WrongBinError, match="its bin is not known now"):
        client.call("w", TEXTS[:1])
    serve(pb_utils, 64)
    client.call("w", [])
    other = serve(pb_utils, 16)
    with pytest.raises(ModelGoneError):
        client.call("w", TEXTS)
    client.call("w", [])
    with pytest.raises(WrongBinError, match="its bin is 16 now"):
        client.call("w", [np.ones(17, np.int64)])
    assert other.requests == 1, "the probe"


def test_an_engine_that_fails_is_not_taken_for_another_bin(
    pb_utils: PbUtils, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = pb_utils.InferenceResponse([], pb_utils.TritonError("out of memory"))
    monkeypatch.setattr(serve(pb_utils, 16), "execute", lambda requests: [failed])
    with pytest.raises(EngineError, match="out of memory"):
        client.call("w", [])


# Behind a router.


def settings(**changes: object) -> PolymorphSettings:
    own: dict[str, object] = {"placement": "partitioned", "worker_backend": "triton", "workers": 2, "max_workers": 2}
    return PolymorphSettings(**{"slo_ms": 100.0, **own, **changes})  # type: ignore[arg-type]


@pytest.fixture
def router(pb_utils: PbUtils) -> Iterator[Router]:
    placement = PlacementSettings(bin_edges="[16, 32, 64]")
    opened = open_router(pb_utils, "front", engine_models.made(), settings(), placement, logger())
    yield opened
    opened.close()


def ask(router: Router, *lengths: int) -> TextRequest:
    """Submit one request of texts of these lengths, and wait for its end."""
    done = threading.Event()
    # Without the token 1, which is padding.
    texts = [np.arange(2, length + 2, dtype=np.int64) for length in lengths]
    request = TextRequest(texts, lambda ended: done.set())
    router.submit(request)
    assert done.wait(120)
    return request


def test_a_router_uses_them_and_follows_their_bins(router: Router, pb_utils: PbUtils) -> None:
    short, long = serve(pb_utils, 16, "front_w00"), serve(pb_utils, 64, "front_w01")
    for lengths in ((3,), (64,), (3, 40, 16, 17)):
        request = ask(router, *lengths)
        assert request.error is None
        assert request.outputs["EMBEDDING"].tolist() == [wanted(range(2, length + 2)) for length in lengths]
    assert short.requests and long.requests
    # The long bin moves to the other worker.
    serve(pb_utils, 16, "front_w01")
    serve(pb_utils, 64, "front_w00")
    waiting.wait_for(lambda: ask(router, 50).error is None)
