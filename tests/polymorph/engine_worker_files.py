"""What a real Triton needs to serve workers of its own backend `onnxruntime`: the wheel lacks it, a double computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tritonclient.grpc as grpc_client

from shapeshift.polymorph import engine_model
from shapeshift.triton.control import ModelControl

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

_PROJECT = Path(__file__).resolve().parents[2]
_DOUBLE = Path(__file__).parent / "backends" / "onnxruntime"
_CONFIG = """
backend: "polymorph"
output [ { name: "EMBEDDING" } ]
instance_group [ { kind: KIND_CPU } ]
"""
_COMMON = {"provider": "onnxruntime", "precision": "f32", "layers": "1", "max_tokens": "64", "bins": "16,32"}
TEXTS = ["word " * words for words in (1, 5, 11, 20, 28, 40, 58)]


def build(
    folder: Path,
    checkpoint: Path,
    fronts: Mapping[str, Mapping[str, str]],
    build_fronts: Callable[[Path, Path], Path],
) -> tuple[Path, Path]:
    """The generated repository with these fronts, by name their parameters, and the folder of backends for it."""
    for name, own in fronts.items():
        stated = {"checkpoint": checkpoint, **_COMMON, **own}
        (folder / "repository" / name).mkdir(parents=True)
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in stated.items()]
        (folder / "repository" / name / "config.pbtxt").write_text(_CONFIG + "\n".join(lines))
    generated = build_fronts(folder / "repository", folder / "build")
    shutil.copytree(_PROJECT / "backends" / "polymorph", folder / "backends" / "polymorph")
    shutil.copytree(_DOUBLE, folder / "backends" / "onnxruntime")
    return generated, folder / "backends"


def vectors(server: TritonServer, model: str, texts: Sequence[str]) -> np.ndarray:
    tensor = grpc_client.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], object))
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        return np.array(client.infer(model, [tensor], client_timeout=60).as_numpy("EMBEDDING"))


def check(server: TritonServer) -> None:
    """Requests of every length to `binned` get the vectors that the engines give inside the front `plain`."""
    for texts in ([TEXTS[0]], [TEXTS[3]], [TEXTS[6]], TEXTS):
        wanted, found = (vectors(server, model, texts) for model in ("plain", "binned"))
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def load(control: ModelControl, worker: str, bin_edge: int) -> None:
    """Give the worker another bin, as the sidecar does."""
    config = control.config(worker)
    config["parameters"]["bin"] = {"string_value": str(bin_edge)}
    engine_model.place(config, bin_edge)
    control.load(worker, config)
