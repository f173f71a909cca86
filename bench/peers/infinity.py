"""infinity-emb as a peer: its HTTP server over a local checkpoint, with its torch or its ONNX Runtime engine.

All settings of its speed (batch size, warm-up, dtype, BetterTransformer, threads) keep infinity's defaults. Only the
log of requests is off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from bench.common.texts import HttpServer
from bench.peers.venv import REQUIREMENTS, PeerVenv, run_logged, tail
from shapeshift.errors import NotFoundError, UnsupportedError
from shapeshift.triton.embedded.free_ports import free_ports

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
    environment (minutes) and the served folders below `build` if they are missing. Raises UnsupportedError with the end
    of the log if that fails, NotFoundError for a checkpoint without config.json and safetensors.
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
    folder = _served_folder(engine, checkpoint, venv, work, environment)
    command = [
        *(str(venv.folder / "bin" / "infinity_emb"), "v2"),
        *("--model-id", str(folder), "--served-model-name", checkpoint.name),
        *("--engine", engine, "--device", "cpu", "--no-trust-remote-code"),
        *("--pooling-method", "mean"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            cwd=work,
            env=environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_warm(server, url, log)
        yield HttpServer(f"infinity {engine}", url)
    finally:
        _signal_group(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        _signal_group(server.pid, signal.SIGKILL)
        server.wait()


def _environment(work: Path) -> dict[str, str]:
    """This process's environment without variables that change infinity's defaults, and offline."""
    changing = ("INFINITY_", "PYTHON", "HF_", "OMP_", "MKL_", "KMP_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return {**plain, **offline, "HF_HOME": str(work / "huggingface")}


def _served_folder(engine: Engine, checkpoint: Path, venv: PeerVenv, work: Path, environment: dict[str, str]) -> Path:
    """The folder that infinity serves as its model, made once for this checkpoint, engine and environment.

    Small files are copied, never linked: infinity writes an optimised graph and a config.json beside them.
    """
    files = sorted(file for file in checkpoint.glob("*") if file.suffix in SERVED and file.name != MODULES)
    if not {"config.json", WEIGHTS} <= {file.name for file in files} | {file.suffix for file in files}:
        raise NotFoundError(f"{checkpoint} holds no config.json with {WEIGHTS} weights")
    folder = work / f"{engine}-{_fingerprint(checkpoint, files, venv)}"
    if folder.exists():
        return folder
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for file in files:
        if file.suffix == WEIGHTS:
            (unfinished / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, unfinished / file.name)
    if engine == "optimum":
        command = [str(venv.python), str(EXPORT), str(checkpoint), str(unfinished / "onnx" / "model.onnx")]
        run_logged(f"export of {checkpoint} to ONNX", command, work / f"{engine}.log", environment, work)
    unfinished.rename(folder)
    return folder


def _fingerprint(checkpoint: Path, files: Sequence[Path], venv: PeerVenv) -> str:
    hashed = hashlib.sha256(venv.digest().encode() + EXPORT.read_bytes() + bytes(checkpoint))
    for file in files:
        hashed.update(file.name.encode())
        with file.open("rb") as content:
            hashed.update(hashlib.file_digest(content, "sha256").digest())
    return hashed.hexdigest()[:16]


def _wait_until_warm(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            ended = "is not ready" if server.returncode is None else f"exited with status {server.returncode}"
            raise UnsupportedError(f"infinity {ended} within {START_S:g} s; {log} ends\n{tail(log)}")
        time.sleep(0.2)


def _healthy(url: str) -> bool:
    """Whether the server answers; it does only when its model is loaded and warm."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
