"""infinity-emb as a peer: its HTTP server over a local checkpoint, with its torch or its ONNX Runtime engine.

All settings of its speed (batch size, warm-up, dtype, BetterTransformer, threads) keep infinity's defaults. Only the
log of requests is off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from bench.common.output import empty
from bench.common.texts import HttpServer
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged, tail
from shapeshift.errors import NotFoundError, UnsupportedError
from shapeshift.triton.embedded.free_ports import free_ports
from shapeshift.triton.embedded.guard import die_with_parent

Engine = Literal["torch", "optimum"]
EXPORT = Path(__file__).with_name("infinity_export.py")
WEIGHTS = ".safetensors"
# Files of the checkpoint that are served: no code, no pickles, and no ONNX file, which infinity might prefer.
SERVED = {".json", ".txt", ".model", WEIGHTS}
# With this file sentence-transformers takes pooling and truncation (often 256 tokens) from the checkpoint. Without it,
# it pools by the mean and truncates at the encoder's number of positions.
MODULES = "modules.json"
START_S = 300.0
STOP_S = 15.0


@contextmanager
def infinity_servers(engines: Sequence[Engine], checkpoint: Path, build: Path) -> Iterator[list[HttpServer]]:
    """A warm infinity server for each engine name.

    Vectors are mean-pooled and normalised; texts are truncated at the encoder's number of positions. Makes infinity's
    environment (minutes) below `build` if it is missing. Raises UnsupportedError with the end of the log if that fails,
    NotFoundError for a checkpoint without config.json and safetensors.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_running(engine, checkpoint.resolve(), build)) for engine in engines]


@contextmanager
def _running(engine: Engine, checkpoint: Path, build: Path) -> Iterator[HttpServer]:
    venv = PeerVenv("infinity", REQUIREMENTS / "peer-infinity.txt", build)
    venv.ensure()
    work = venv.folder.with_name("infinity-work")
    work.mkdir(parents=True, exist_ok=True)
    log, environment, port = work / f"{engine}.log", _environment(work), next(free_ports())
    folder = work / engine
    _serve_folder(engine, checkpoint, venv, folder, environment)
    command = [
        *(str(venv.folder / "bin" / "infinity_emb"), "v2"),
        *("--model-id", str(folder), "--served-model-name", checkpoint.name),
        *("--engine", engine, "--device", "cpu", "--no-trust-remote-code"),
        *("--pooling-method", "mean"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=work, env=environment, preexec_fn=die_with_parent()
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_warm(server, url, log)
        yield HttpServer(f"infinity {engine}", url)
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        server.kill()
        server.wait()


def _environment(work: Path) -> dict[str, str]:
    """This process's environment without variables that change infinity's defaults, and offline."""
    changing = ("INFINITY_", "PYTHON", "HF_", "OMP_", "MKL_", "KMP_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return {**plain, **offline, "HF_HOME": str(work / "huggingface")}


def _serve_folder(engine: Engine, checkpoint: Path, venv: PeerVenv, folder: Path, environment: dict[str, str]) -> None:
    """Make the folder that infinity serves as its model.

    Small files are copied, never linked: infinity writes an optimised graph and a config.json beside them.
    """
    files = sorted(file for file in checkpoint.glob("*") if file.suffix in SERVED and file.name != MODULES)
    if not {"config.json", WEIGHTS} <= {file.name for file in files} | {file.suffix for file in files}:
        raise NotFoundError(f"{checkpoint} holds no config.json with {WEIGHTS} weights")
    empty(folder)
    for file in files:
        if file.suffix == WEIGHTS:
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, folder / file.name)
    if engine == "optimum":
        command = [venv.python, EXPORT, checkpoint, folder / "onnx" / "model.onnx"]
        run_logged(f"export of {checkpoint} to ONNX", command, folder.with_suffix(".log"), environment, folder.parent)


def _wait_until_warm(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the server answers, which it does only when its model is loaded and warm."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError), direct.open(f"{url}/health", timeout=2.0):
            return
        time.sleep(0.2)
    ended = "is not ready" if server.returncode is None else f"exited with status {server.returncode}"
    raise UnsupportedError(f"infinity {ended} within {START_S:g} s; {log} ends\n{tail(log)}")
