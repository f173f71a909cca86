"""Building and serving call nobody: no usage reports, no look-ups, no downloads that were not asked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.families import save_model
from tests.outgoing import Outgoing, is_local, watch

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

PROJECT = Path(__file__).resolve().parents[1]
# An address of the block for documentation, which no machine has.
NOWHERE = "192.0.2.1"
CONNECT = f"import socket\ntry: socket.create_connection(({NOWHERE!r}, 9), 0.3)\nexcept OSError: pass"
# The native call of a C library, which no hook of Python sees.
NATIVE = f"""
import ctypes, socket, struct, time
libc = ctypes.CDLL(None)
number = libc.socket(socket.AF_INET, socket.SOCK_DGRAM, 0)
address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 9) + socket.inet_aton({NOWHERE!r}) + bytes(8)
libc.connect(number, address, len(address))
time.sleep(0.5)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "outgoing"
    made.mkdir()
    return made


def run(code: str, outgoing: Outgoing) -> None:
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **outgoing.environment}, check=True, cwd=PROJECT)


# That a connection would be seen.


@pytest.mark.parametrize(
    ("code", "host"),
    [
        (CONNECT, NOWHERE),
        (f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ({NOWHERE!r}, 9))", NOWHERE),
        (f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CONNECT!r}])", NOWHERE),
        ("import socket\ntry: socket.getaddrinfo('reports.invalid', 443)\nexcept OSError: pass", "reports.invalid"),
    ],
    ids=["connection", "datagram", "child", "name"],
)
def test_a_call_from_python_is_seen(folder: Path, code: str, host: str) -> None:
    with watch(folder) as outgoing, contextlib.suppress(subprocess.CalledProcessError):
        run(code, outgoing)
    # A slow look-up shows the name server, too.
    lines = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    assert outgoing.found - {line[1] for line in lines if line[:1] == ["nameserver"]} == {host}


def test_a_native_connection_is_seen(folder: Path) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((NOWHERE, 9))
        except OSError as error:
            pytest.skip(f"this machine has no way out at all: {error}")
    with watch(folder) as outgoing:
        run(NATIVE, outgoing)
    assert outgoing.found == {NOWHERE}


def test_this_machine_does_not_count(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, watch(folder) as outgoing:
        run(f"import socket; socket.create_connection({server.getsockname()!r})", outgoing)
    assert (outgoing.found, outgoing.watched) == (set(), 1)
    assert is_local("::1") and is_local("::ffff:127.0.0.1") and not is_local("::ffff:192.0.2.1")


# That none is made.

CONFIG = """
backend: "polymorph"
parameters [
  { key: "checkpoint" value { string_value: "%s" } }, { key: "max_tokens" value { string_value: "16" } },
  { key: "bins" value { string_value: "none" } }, { key: "precision" value { string_value: "f32" } }
]
"""


@pytest.mark.long
def test_a_build_calls_nobody(folder: Path, tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "checkpoint", "bert")
    front = tmp_path / "model_repository" / "small"
    front.mkdir(parents=True)
    (front / "config.pbtxt").write_text(CONFIG % checkpoint)
    # As at the first start of a user, who has neither agreed nor refused to send reports.
    home = tmp_path / "home"
    home.mkdir()
    with watch(folder) as outgoing:
        environment = {**os.environ, **outgoing.environment, "HOME": str(home)}
        for name in ("CI", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "DISABLE_TELEMETRY"):
            environment.pop(name, None)
        command = [sys.executable, "-v", "-m", "shapeshift.cli.main", "engines"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert outgoing.watched and outgoing.found == set()
    imported = set(re.findall(r"^import '([\w.]+)'", done.stderr, re.MULTILINE))
    assert {"openvino.tools.ovc", "transformers", "torch"} <= imported
    assert [name for name in imported if name.startswith("openvino_telemetry")] == []


TRITON = "import triton_python_backend_utils"


def watched_backends(folder: Path, target: Path) -> Path:
    """The backends, each of which installs the hook: the server's Python takes no heed of PYTHONPATH."""
    shutil.copytree(PROJECT / "backends", target)
    for model in target.glob("*/model.py"):
        source = model.read_text()
        assert TRITON in source
        hook = f"import sys\nsys.path.append({str(folder)!r})\nimport sitecustomize\n"
        model.write_text(source.replace(TRITON, f"{hook}{TRITON}", 1))
    return target


@pytest.mark.server
def test_serving_calls_nobody(
    folder: Path, tmp_path: Path, make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("encode", "generate")
    if not all((PROJECT / "build" / "repository" / name).is_dir() for name in models):
        pytest.skip("needs `make engines`")
    backends = watched_backends(folder, tmp_path / "backends")
    with watch(folder) as outgoing:
        for name, value in outgoing.environment.items():
            monkeypatch.setenv(name, value)
        with make_server([PROJECT / "build" / "repository"], models, tmp_path / "run", backends) as server:
            server.wait_ready()
            inputs = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}
            assert ask(f"http://{server.http_url}/v2/models/encode/infer", inputs)["outputs"]
            answer = ask(
                f"http://{server.http_url}/v2/models/generate/generate", {"text_input": "Return", "max_tokens": 2}
            )
            assert "text_output" in answer
            # The guard of the server, and the processes of both models.
            assert outgoing.watched >= 1 + len(models)
    assert outgoing.found == set()


def ask(url: str, content: Mapping[str, object]) -> dict[str, object]:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode()), timeout=60) as answer:
        return dict(json.load(answer))
