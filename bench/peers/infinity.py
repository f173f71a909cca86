"""infinity-emb as a peer: its HTTP server over a local checkpoint, with its torch or its ONNX Runtime engine.

All settings of its speed (batch size, warm-up, dtype, BetterTransformer, threads) keep infinity's defaults. Only the
log of requests is off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from bench.peers.venv import REQUIREMENTS, PeerVenv, tail
from shapeshift.errors import NotFoundError, UnsupportedError
from shapeshift.settings import require

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


class Infinity:
    """A context in which an infinity server runs and answers at `url`.

    Vectors are mean-pooled and normalised; texts are truncated at the encoder's number of positions. `port` 0 means any
    free port. Entering makes infinity's environment (minutes) and the served folder below `build` if they are missing,
    and waits until the model is warm. Raises UnsupportedError with the end of the log if that fails, NotFoundError for
    a checkpoint without config.json and safetensors.
    """

    def __init__(self, engine: Engine, checkpoint: Path, build: Path, port: int = 0, start_s: float = START_S) -> None:
        require(engine in get_args(Engine), "engine", engine, f"one of {', '.join(get_args(Engine))}")
        self.engine = engine
        self.checkpoint = checkpoint.resolve()
        self.venv = PeerVenv("infinity", REQUIREMENTS / "peer-infinity.txt", build)
        self.work = self.venv.folder.with_name("infinity-work")
        self.log = self.work / f"{engine}.log"
        self.port = port
        self.start_s = start_s
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.venv.ensure()
        self.work.mkdir(parents=True, exist_ok=True)
        self.port = _free_port(self.port)
        folder = self._served_folder()
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(
                self.command(folder),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.work,
                env=self._environment(),
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._server)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self, folder: Path) -> list[str]:
        """The server's command line over a folder made by `_served_folder`."""
        return [
            *(str(self.venv.folder / "bin" / "infinity_emb"), "v2"),
            *("--model-id", str(folder), "--served-model-name", self.checkpoint.name),
            *("--engine", self.engine, "--device", "cpu", "--no-trust-remote-code"),
            *("--pooling-method", "mean"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"),
        ]

    def stop(self) -> None:
        """End the server and all that it started; does nothing if it has ended."""
        server, self._server = self._server, None
        if server is None:
            return
        _signal_group(server.pid, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
        finally:
            _signal_group(server.pid, signal.SIGKILL)
            server.wait()

    def _environment(self) -> dict[str, str]:
        """This process's environment without variables that change infinity's defaults, and offline."""
        changing = ("INFINITY_", "PYTHON", "HF_", "OMP_", "MKL_", "KMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        return {**kept, **offline, "HF_HOME": str(self.work / "huggingface")}

    def _served_folder(self) -> Path:
        """The folder that infinity serves as its model, made once for this checkpoint, engine and environment.

        Small files are copied, never linked: infinity writes an optimised graph and a config.json beside them.
        """
        folder = self.work / f"{self.engine}-{self._fingerprint()}"
        if folder.exists():
            return folder
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for file in self._files():
            if file.suffix == WEIGHTS:
                (unfinished / file.name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, unfinished / file.name)
        if self.engine == "optimum":
            self._export(unfinished / "onnx" / "model.onnx")
        unfinished.rename(folder)
        return folder

    def _files(self) -> list[Path]:
        files = sorted(file for file in self.checkpoint.glob("*") if file.suffix in SERVED and file.name != MODULES)
        if not {"config.json", WEIGHTS} <= {file.name for file in files} | {file.suffix for file in files}:
            raise NotFoundError(f"{self.checkpoint} holds no config.json with {WEIGHTS} weights")
        return files

    def _fingerprint(self) -> str:
        hashed = hashlib.sha256(self.venv.digest().encode() + EXPORT.read_bytes() + bytes(self.checkpoint))
        for file in self._files():
            hashed.update(file.name.encode())
            with file.open("rb") as content:
                hashed.update(hashlib.file_digest(content, "sha256").digest())
        return hashed.hexdigest()[:16]

    def _export(self, target: Path) -> None:
        command = [str(self.venv.python), str(EXPORT), str(self.checkpoint), str(target)]
        with self.log.open("wb") as log:
            code = subprocess.run(
                command, stdout=log, stderr=log, cwd=self.work, env=self._environment(), check=False
            ).returncode
        if code != 0:
            raise UnsupportedError(
                f"export of {self.checkpoint} to ONNX failed with exit status {code}; the log ends\n{tail(self.log)}"
            )

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_s
        while not _healthy(self.url):
            if server.poll() is not None:
                raise UnsupportedError(
                    f"infinity ({self.engine}) exited with status {server.returncode} while starting; "
                    f"{self.log} ends\n{tail(self.log)}"
                )
            if time.monotonic() > deadline:
                raise UnsupportedError(
                    f"infinity ({self.engine}) did not answer within {self.start_s:g} s; "
                    f"{self.log} ends\n{tail(self.log)}"
                )
            time.sleep(0.2)


def _free_port(port: int) -> int:
    """`port`, or any free port for 0. Raises UnsupportedError if the port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UnsupportedError(f"port {port} on 127.0.0.1 is unavailable: {error}") from error
        return int(probe.getsockname()[1])


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
