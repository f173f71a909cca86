"""An encoder that `shapeshift add` has written, with adapters, in a real Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from shapeshift.cli.main import main
from shapeshift.triton import metrics, model_config
from tests import waiting
from tests.adapter_cache.text_models import computed_by_peft, save_adapter
from tests.compiled import link_kernels
from tests.engines.families import save_model

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

TARGETS = ["query", "key", "value", "dense"]
ROWS = [np.array([2, 5, 9, 3]), np.array([2, 7, 3])]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the front `tenants`, two adapters, and the checkpoint `base`."""
    root = tmp_path_factory.mktemp("project")
    base = save_model(root / "base", "bert", num_hidden_layers=2)
    link_kernels(root / "build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["add", str(base), "--as", "tenants", "--technique", "adapter_cache"]) == 0
        config = model_config.read(root / "model_repository" / "tenants" / "config.pbtxt")
        for name, value in (("precision", "f32"), ("normalize", "true"), ("pooling", "mean")):
            model_config.set_parameter(config, name, value)
        model_config.write(config, root / "model_repository" / "tenants" / "config.pbtxt")
        assert main(["engines", "tenants"]) == 0
        for seed, rank in enumerate((4, 16)):
            folder = save_adapter(root / f"r{rank}", base, seed=seed, r=rank, target_modules=TARGETS)
            assert main(["adapters", "--model", "tenants", "add", f"r{rank}", str(folder)]) == 0
    return root


@pytest.fixture(scope="module")
def server(
    project: Path, make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with make_server((project / "build" / "repository",), ("tenants",), tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready()


def test_tenants_have_vectors_of_their_own(server: TritonServer, project: Path) -> None:
    def vectors(adapter: str | None) -> Any:
        ids, mask = np.zeros((2, 4), np.int64), np.zeros((2, 4), np.int64)
        for row, tokens in enumerate(ROWS):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        inputs = [grpc_client.InferInput(name, [2, 4], "INT64") for name in ("INPUT_IDS", "ATTENTION_MASK")]
        for tensor, values in zip(inputs, (ids, mask), strict=True):
            tensor.set_data_from_numpy(values)
        named = None if adapter is None else {"lora_name": adapter}
        return client.infer("tenants", inputs, client_timeout=30, parameters=named).as_numpy("EMBEDDING")

    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        for name in (None, "r4", "r16", "r4"):
            expected = computed_by_peft(project / "base", None if name is None else project / name, ROWS)
            np.testing.assert_allclose(vectors(name), expected, atol=1e-4)
        with pytest.raises(InferenceServerException, match="lora_name: no adapter 'r5'; known: r16, r4"):
            vectors("r5")

    def counted(name: str) -> float:
        return sum(value for (series, _), value in metrics.scrape(server.metrics_url).items() if series == name)

    wait_for(lambda: counted("shapeshift_adapter_requests_total") == 3)
    assert counted("shapeshift_adapters_resident") == 2
