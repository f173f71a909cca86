"""The processes that `bench.fused_decode` compares with our server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bench.common.worker import Worker
from bench.fused_decode.loads import Load, check
from bench.peers.protocol import Replayed
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.fused_decode.model.precision import QUANTISED, computed

_PEERS = Path(__file__).resolve().parents[1] / "peers"


class DecodeSystem(Protocol):
    """A system that generates text."""

    name: str

    def replay(self, load: Load) -> Replayed:
        """Send every request of `load` when it is due, and wait for all answers."""
        ...


class DecodeWorker(Worker):
    """A process that serves as `bench.peers.protocol.serve_decoding` does."""

    def replay(self, load: Load, **options: object) -> Replayed:
        replayed = Replayed(**self.ask(requests=[vars(request) for request in load.requests], options=options))
        check(load, replayed)
        return replayed


class ConfiguredWorker:
    """A worker with options of its `replay`."""

    def __init__(self, name: str, worker: DecodeWorker, **options: object) -> None:
        self.name = name
        self._worker = worker
        self._options = options

    def replay(self, load: Load) -> Replayed:
        return self._worker.replay(load, **self._options)


def genai_command(checkpoint: Path, precision: str, kv_precision: str, threads: int, build: Path) -> list[str]:
    """OpenVINO GenAI's worker; makes its environment (minutes) and its export of the checkpoint if missing.

    Its cache has 8 bits where ours has, else the precision of the computation.
    """
    number = computed(precision)
    cache = "u8" if kv_precision == "int8" else number
    python = str(PeerVenv("openvino-genai", REQUIREMENTS / "peer-openvino-genai.txt", build).ensure())
    folder = _genai_export(python, checkpoint, precision if precision in QUANTISED else "f32", build)
    return [python, "-m", "bench.peers.openvino_genai_worker", str(folder), number, str(threads), cache]


def llama_cpp_command(
    checkpoint: Path, precision: str, kv_precision: str, max_length: int, threads: int, build: Path
) -> list[str]:
    """llama.cpp's worker; compiles the library (minutes) and writes the checkpoint as GGUF if missing.

    Its cache has 8 bits where ours has, 32 in f32, else 16 (f16, its default).
    """
    cache = "q8_0" if kv_precision == "int8" else "f32" if precision == "f32" else "f16"
    python = str(PeerVenv("llama-cpp", REQUIREMENTS / "peer-llama-cpp.txt", build, torch=None).ensure())
    file = build / "peers" / "llama-cpp-work" / f"{open_checkpoint(checkpoint).sha256[:16]}-{precision}.gguf"
    if not file.exists():
        _export(
            checkpoint, file, lambda part: [python, str(_PEERS / "llama_cpp_export.py"), checkpoint, part, precision]
        )
    return [python, "-m", "bench.peers.llama_cpp_worker", str(file), str(threads), cache, str(max_length)]


def _genai_export(python: str, checkpoint: Path, weights: str, build: Path) -> Path:
    """The folder with the checkpoint's export. Weights of few bits are made from those in f32."""
    folder = build / "peers" / "openvino-genai-work" / f"{open_checkpoint(checkpoint).sha256[:16]}-{weights}"
    if not folder.exists():
        source = checkpoint if weights == "f32" else _genai_export(python, checkpoint, "f32", build)
        _export(
            checkpoint, folder, lambda part: [python, str(_PEERS / "openvino_genai_export.py"), source, part, weights]
        )
    return folder


def _export(checkpoint: Path, target: Path, command: Callable[[Path], list[object]]) -> None:
    """Run command(unfinished), which makes a folder or file of that name; it becomes `target` when it is whole."""
    unfinished = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    run_logged(f"export of {checkpoint}", command(unfinished), target.with_suffix(".log"))
    unfinished.rename(target)


def transformers_command(kind: str, *arguments: object) -> list[str]:
    """A worker over transformers, in this environment."""
    return [sys.executable, "-m", "bench.peers.transformers_decoding", kind, *map(str, arguments)]
