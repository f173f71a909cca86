"""The processes that `bench.fused_decode` compares with our server."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bench.fused_decode.loads import Load, check
from bench.peers.decode_worker import Replayed
from bench.peers.venv import REQUIREMENTS, PeerVenv, tail
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.model.precision import QUANTISED, computed

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_STOP_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]
_PEERS = Path(__file__).resolve().parents[1] / "peers"


class DecodeSystem(Protocol):
    """A system that generates text."""

    name: str

    def replay(self, load: Load) -> Replayed:
        """Send every request of `load` when it is due, and wait for all answers."""
        ...


class DecodeWorker:
    """A process that follows the protocol of bench.peers.decode_worker; its standard error goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"},
                text=True,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        self._answer()

    def replay(self, load: Load, **options: object) -> Replayed:
        assert self._process.stdin is not None
        message = {"requests": [dataclasses.asdict(request) for request in load.requests], "options": options}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        replayed = Replayed(**self._answer())
        check(load, replayed)
        return replayed

    def memory_mb(self) -> tuple[float, float]:
        """Resident memory of the process now, and the most it had, in MiB."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now, most = (int(fields[name].split()[0]) / 2**10 for name in ("VmRSS", "VmHWM"))
        return now, most

    def stop(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise UnsupportedError(f"{self.name} exited with status {code}; {self._log} ends\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


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
    stated = computed(precision)
    kept = "u8" if kv_precision == "int8" else stated
    python = str(PeerVenv("openvino-genai", REQUIREMENTS / "peer-openvino-genai.txt", build).ensure())
    folder = _genai_export(python, checkpoint, precision if precision in QUANTISED else "f32", build)
    return [python, "-m", "bench.peers.openvino_genai_worker", str(folder), stated, str(threads), kept]


def llama_cpp_command(
    checkpoint: Path, precision: str, kv_precision: str, max_length: int, threads: int, build: Path
) -> list[str]:
    """llama.cpp's worker; compiles the library (minutes) and writes the checkpoint as GGUF if missing.

    Its cache has 8 bits where ours has, 32 in f32, else 16 (f16, its default).
    """
    kept = "q8_0" if kv_precision == "int8" else "f32" if precision == "f32" else "f16"
    python = str(PeerVenv("llama-cpp", REQUIREMENTS / "peer-llama-cpp.txt", build, torch=None).ensure())
    file = build / "peers" / "llama-cpp-work" / f"{open_checkpoint(checkpoint).sha256[:16]}-{precision}.gguf"
    if not file.exists():
        _export(
            checkpoint, file, lambda part: [python, str(_PEERS / "llama_cpp_export.py"), checkpoint, part, precision]
        )
    return [python, "-m", "bench.peers.llama_cpp_worker", str(file), str(threads), kept, str(max_length)]


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
    unfinished, log = target.with_suffix(".part"), target.with_suffix(".log")
    target.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    with log.open("wb") as output:
        stated = [str(word) for word in command(unfinished)]
        code = subprocess.run(stated, stdout=output, stderr=output, check=False).returncode
    if code != 0:
        raise UnsupportedError(f"export of {checkpoint} failed with exit status {code}; the log ends\n{tail(log)}")
    unfinished.rename(target)


def transformers_command(module: str, *arguments: object) -> list[str]:
    """A worker over transformers, in this environment."""
    return [sys.executable, "-m", f"bench.peers.transformers_{module}", *map(str, arguments)]
