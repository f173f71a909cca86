"""The libraries of `encoding_worker` as commands, each with its environment and its form of the checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from bench.peers.infinity import EXPORT
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged, without_torch


def commands(checkpoint: Path, build: Path) -> dict[str, list[str]]:
    """The command of each, by its name in tables. Makes what is missing of their environments (minutes)."""
    openvino = PeerVenv("openvino-genai", REQUIREMENTS / "peer-openvino-genai.txt", build)
    vllm = PeerVenv("vllm", REQUIREMENTS / "peer-vllm.txt", build)
    peers = {
        "sentence-transformers": (openvino, checkpoint),
        "vllm": (vllm, checkpoint),
        "fastembed": (without_torch("fastembed", build), _with_onnx(checkpoint, build)),
    }
    module = "bench.peers.encoding_worker"
    return {name: [str(venv.ensure()), "-m", module, name, str(files)] for name, (venv, files) in peers.items()}


def _with_onnx(checkpoint: Path, build: Path) -> Path:
    """A folder with the small files of the checkpoint and its encoder as model.onnx."""
    folder = build.resolve() / "peers" / "fastembed-work" / checkpoint.name
    if not (folder / "model.onnx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in checkpoint.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        part = folder / "part.onnx"
        run_logged("export to ONNX", [sys.executable, EXPORT, checkpoint, part], folder / "export.log")
        part.rename(folder / "model.onnx")
    return folder
