from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shapeshift.engines.execution.engine_set import pack
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers.emulated import PROVIDER, EmulatedRuntime
from shapeshift.errors import InvalidInputError, UnsupportedError


def opened(folder: Path, latency_ms: tuple[float, float] = (0.0, 0.0)) -> EmulatedRuntime:
    PROVIDER.describe(folder, [10, 110], latency_ms, {"EMBEDDING": 16, "LOGITS": 3})
    return PROVIDER.open(folder, "f32", threads=1)


def test_is_a_provider() -> None:
    assert PROVIDERS["emulated"] is PROVIDER
    assert PROVIDER.version()
    with pytest.raises(UnsupportedError, match="emulated"):
        PROVIDER.export(None, {}, Path(), "f32")


def test_vectors_depend_only_on_the_ids(tmp_path: Path) -> None:
    runtime = opened(tmp_path)
    texts = [np.array([5, 6, 7]), np.array([7, 6, 5]), np.array([9])]
    alone = [runtime.engine(None, None).run(pack([text], len(text), 1))["EMBEDDING"][0] for text in texts]
    packed = runtime.engine(32, 8).run(pack(texts, 32, 8))
    assert packed["EMBEDDING"].shape == (8, 16) and packed["LOGITS"].shape == (8, 3)
    for vector, wanted in zip(packed["EMBEDDING"], alone, strict=False):
        np.testing.assert_array_equal(vector, wanted)
    assert len({vector.tobytes() for vector in alone}) == 3
    np.testing.assert_allclose(np.linalg.norm(packed["EMBEDDING"], axis=1), 1, rtol=1e-6)
    assert packed["EMBEDDING"].dtype == np.float32


@pytest.mark.parametrize(("tokens", "seconds"), [(10, 0.1), (60, 0.2), (110, 0.3), (500, 0.3)])
def test_sleeps_for_the_latency_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, seconds: float
) -> None:
    slept: list[float] = []
    own, real = threading.get_ident(), time.sleep

    def sleep(wanted: float) -> None:
        # Threads of others sleep by the same function.
        (slept.append if threading.get_ident() == own else real)(wanted)

    monkeypatch.setattr(time, "sleep", sleep)
    engine = opened(tmp_path, (100, 300)).engine(None, None)
    engine.run(pack([np.arange(1, tokens + 1)], tokens, 1))
    assert slept == [pytest.approx(seconds)]


def test_invalid_profiles_are_rejected(tmp_path: Path) -> None:
    for lengths, latencies in (([], []), ([1, 2], [1.0])):
        with pytest.raises(InvalidInputError, match="one latency for each length"):
            PROVIDER.describe(tmp_path, lengths, latencies, {"EMBEDDING": 4})
    assert not list(tmp_path.iterdir())
