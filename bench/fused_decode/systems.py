"""The systems that `bench.fused_decode` compares: processes, and clients of our server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.common.models import KERNELS
from bench.common.output import BUILD, FOLDER
from bench.common.worker import Worker
from bench.fused_decode.loads import LONG_ANSWER, MAX_LENGTH, PROMPTS, Answers, Load
from bench.peers.protocol import Replayed
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged, without_torch
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.settings import QUANTISED, computed

_PEERS = Path(__file__).resolve().parents[1] / "peers"

Replay = Callable[[Load], Answers]
"""Sends every request of a load when it is due, and waits for all answers."""


class DecodeWorker(Worker):
    """A process that serves as `bench.peers.protocol.serve_decoding` does."""

    def replay(self, load: Load, **options: object) -> Answers:
        replayed = self.ask(requests=[vars(request) for request in load.requests], options=options)
        return Answers(load, Replayed(**replayed))


def start_workers(stack: ExitStack, commands: Mapping[str, Sequence[str]], part: str) -> dict[str, DecodeWorker]:
    """The processes of these commands, all of which serve; they end with `stack`. part: what their logs begin with."""
    workers = {}
    for name, command in commands.items():
        log = FOLDER / "run" / f"{part}-{name.replace(' ', '-')}.log"
        workers[name] = DecodeWorker(name, command, log)
        stack.callback(workers[name].stop)
    for worker in workers.values():
        worker.wait_ready()
    return workers


def _length(is_long: bool) -> int:
    """The most tokens of a request."""
    return max(PROMPTS) + LONG_ANSWER if is_long else MAX_LENGTH


# The commands of processes; is_long: for long prompts, which share what they begin with.


def ours_command(model: Path, precision: str, is_long: bool = False, adapters: Sequence[Path] = ()) -> list[str]:
    """Our decode loop as a process."""
    words = (model, precision, KERNELS, _length(is_long), int(is_long), *adapters)
    return [sys.executable, "-m", "bench.fused_decode.inprocess_worker", *map(str, words)]


def transformers_command(kind: str, model: Path, precision: str, is_long: bool = False) -> list[str]:
    """A worker over transformers, in this environment."""
    words = (kind, model, computed(precision), cores())
    return [sys.executable, "-m", "bench.peers.transformers_decoding", *map(str, words)]


def genai_command(checkpoint: Path, precision: str, is_long: bool = False) -> list[str]:
    """OpenVINO GenAI's worker; makes its environment (minutes) and its export of the checkpoint if missing."""
    number = computed(precision)
    python = str(PeerVenv("openvino-genai", REQUIREMENTS / "peer-openvino-genai.txt", BUILD).ensure())
    folder = _genai_export(python, checkpoint, precision if precision in QUANTISED else "f32")
    words = (folder, number, cores(), number, int(is_long))
    return [python, "-m", "bench.peers.openvino_genai_worker", *map(str, words)]


def vllm_command(checkpoint: Path, precision: str, is_long: bool = False, adapters: Sequence[Path] = ()) -> list[str]:
    """vLLM's worker; makes its environment (minutes) if missing. It shares what prompts begin with."""
    python = str(PeerVenv("vllm", REQUIREMENTS / "peer-vllm.txt", BUILD).ensure())
    words = (checkpoint, precision, _length(is_long), *adapters)
    return [python, "-m", "bench.peers.vllm_worker", *map(str, words)]


def llama_cpp_command(checkpoint: Path, precision: str, is_long: bool = False) -> list[str]:
    """llama.cpp's worker; compiles the library (minutes) and writes the checkpoint as GGUF if missing.

    Its cache has 32 bits in f32, else 16 (f16, its default).
    """
    cache = "f32" if precision == "f32" else "f16"
    python = str(without_torch("llama-cpp", BUILD).ensure())
    file = BUILD / "peers" / "llama-cpp-work" / f"{open_checkpoint(checkpoint).sha256[:16]}-{precision}.gguf"
    _export(file, lambda part: [python, _PEERS / "llama_cpp_export.py", checkpoint, part, precision])
    return [python, "-m", "bench.peers.llama_cpp_worker", str(file), str(cores()), cache, str(_length(is_long))]


def _genai_export(python: str, checkpoint: Path, weights: str) -> Path:
    """The folder with the checkpoint's export. Weights of few bits are made from those in f32."""
    folder = BUILD / "peers" / "openvino-genai-work" / f"{open_checkpoint(checkpoint).sha256[:16]}-{weights}"
    if not folder.exists():
        source = checkpoint if weights == "f32" else _genai_export(python, checkpoint, "f32")
        _export(folder, lambda part: [python, _PEERS / "openvino_genai_export.py", source, part, weights])
    return folder


def _export(target: Path, command: Callable[[Path], list[object]]) -> None:
    """Run command(unfinished), which makes a folder or file of that name; it becomes `target` when it is whole."""
    if target.exists():
        return
    unfinished = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    run_logged(f"export to {target}", command(unfinished), target.with_suffix(".log"))
    unfinished.rename(target)
