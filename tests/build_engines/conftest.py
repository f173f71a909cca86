"""A hub on this machine, for checkpoints and adapters that are named by id."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shapeshift.engines import gpu, hardware
from tests.build_engines import hub_server
from tests.build_engines.hub_server import Hub


@pytest.fixture(scope="session")
def running_hub() -> Iterator[Hub]:
    with hub_server.serve() as running:
        yield running


@pytest.fixture
def hub(running_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty hub, which `huggingface_hub` in this process asks, with a cache of the test in hf/hub.

    One server for all tests: the library keeps the first address that it is given.
    """
    from huggingface_hub import constants

    hub = running_hub
    for kept in (hub.repositories, hub.asked, hub.cut, hub.sent, hub.hashes, hub.silent):
        kept.clear()
    hub.resumed.clear()
    template = running_hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", running_hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # The library waits longer and longer between its tries.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    return running_hub


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes up what this machine has, as far as it is named."""

    def state(bf16: bool | None = None, gpus: int | None = None, capability: tuple[int, int] = (8, 0)) -> None:
        if bf16 is not None:
            monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: bf16)
        if gpus is not None:
            monkeypatch.setattr(hardware, "gpus", lambda: gpus)
            monkeypatch.setattr(gpu, "describe", lambda device: gpu.Gpu(device, "T", capability, 16e3))

    return state
