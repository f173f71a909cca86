"""Random models behind one Triton: our fronts, and plain Python backends over transformers with a dynamic batcher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.output import FOLDER, empty
from bench.common.server import running_server, wait_loaded
from bench.common.texts import TritonModel
from bench.fused_decode.loads import PROMPT, SLOTS
from bench.fused_decode.served import TritonStreams, TritonUnary
from bench.gpu.checkpoints import save
from bench.gpu.device import DTYPES, Device
from bench.gpu.random_models import Shape, encoder, reference_decoder
from bench.peers.protocol import DecodeRequest
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.errors import EngineError

OURS, PLAIN = "ours", "plain"
BACKEND = Path(__file__).resolve().parents[1] / "peers" / "backends" / "plain_transformers.py"
_ENCODE, _GENERATE, _PLAIN_ENCODE, _PLAIN_GENERATE = "encode", "generate", "plain_encode", "plain_generate"
# Texts that arrive while a batch is computed are the next one.
_ENCODES = """backend: "python" max_batch_size: 64 dynamic_batching { }
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ -1 ] } ]"""
# A batch lasts so long that it waits for what arrives with its first request.
_GENERATES = f"""backend: "python" max_batch_size: {SLOTS} dynamic_batching {{ max_queue_delay_microseconds: 10000 }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] }}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }}
]"""


class PlainUnary(TritonUnary):
    """The plain backend's generator."""

    def _inputs(self, request: DecodeRequest) -> dict[str, Any]:
        inputs = super()._inputs(request)
        return {name: inputs[name][None] for name in ("text_input", "max_tokens")}


@dataclass(frozen=True)
class Served:
    """What one server serves, by OURS and PLAIN. letters: tokens of the generators."""

    encoders: Mapping[str, TritonModel]
    generators: Mapping[str, TritonStreams]
    letters: list[int]


@contextmanager
def served(device: Device, bert: Shape, llama: Shape, new_tokens: int, seed: int) -> Iterator[Served]:
    """A server of both models, BERT in f16 and the Llama in the device's precision; in f32 on a CPU."""
    folder = FOLDER.resolve() / "gpu" / "served"
    empty(folder)
    save(encoder(bert, seed).model, folder / "bert")
    letters = save(reference_decoder(llama, device, seed), folder / "llama")
    device.free()
    precision = "f32" if device.number is None else "f16"
    ours, plain = folder / "model_repository", folder / "plain"
    # The number of bins that `shapeshift add` writes.
    parameters = {"checkpoint": folder / "bert", "precision": precision, "max_bins": 4}
    _write(ours / _ENCODE, 'backend: "polymorph"', parameters, device)
    parameters = {"checkpoint": folder / "llama", "precision": device.precision, "max_concurrency": SLOTS}
    # A GPU uses no kernels for CPUs, which take minutes to compile.
    parameters |= {"max_length": PROMPT + new_tokens, "native": "false"}
    _write(ours / _GENERATE, 'backend: "fused_decode"', parameters, device)
    for name, text, kind, model, number in (
        (_PLAIN_ENCODE, _ENCODES, "AutoModel", "bert", precision),
        (_PLAIN_GENERATE, _GENERATES, "AutoModelForCausalLM", "llama", device.precision),
    ):
        dtype = str(DTYPES[number]).removeprefix("torch.")
        _write(plain / name, text, {"checkpoint": folder / model, "class": kind, "dtype": dtype}, device)
        shutil.copyfile(BACKEND, plain / name / "1" / "model.py")
    build = folder / "build"
    if main(["engines", "--brief", "--repository", str(ours), "--build", str(build)]):
        raise EngineError("the fronts could not be built; the lines above say why")
    models = (_ENCODE, _GENERATE, _PLAIN_ENCODE, _PLAIN_GENERATE)
    with running_server(models, (build / "repository", plain)) as server:
        wait_loaded(server.metrics_url, len(manifest.load(build / "engines" / _ENCODE).engines))
        url, tokenizer = server.grpc_url, folder / "llama" / "tokenizer.json"
        yield Served(
            {OURS: TritonModel(OURS, url, _ENCODE), PLAIN: TritonModel(PLAIN, url, _PLAIN_ENCODE)},
            {OURS: TritonStreams(url, _GENERATE, tokenizer), PLAIN: PlainUnary(url, _PLAIN_GENERATE, tokenizer)},
            letters,
        )


def _write(folder: Path, text: str, parameters: Mapping[str, object], device: Device) -> None:
    """A model that is placed on the device."""
    place = "kind: KIND_CPU" if device.number is None else f"kind: KIND_GPU gpus: [ {device.number} ]"
    entries = [
        f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(str(value))} }} }}'
        for name, value in parameters.items()
    ]
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text("\n".join([text, f"instance_group [ {{ {place} }} ]", *entries]) + "\n")
