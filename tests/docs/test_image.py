"""The image of `make image` in real containers: it serves, heals, stops in order, and keeps to its memory.

Needs Docker and the image `shapeshift`: where no registry can be reached, BASE=NAME make image starts from another
image. It takes the host's network, since a daemon without iptables has no other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import http as triton

from docker.image import NAME, materials
from tests.docs.docs_pages import PROJECT

pytestmark = [pytest.mark.long, pytest.mark.server]
HTTP, GRPC, METRICS, GATEWAY = 18100, 18101, 18102, 18180
# A folder of the project, as it is mounted.
READ_ONLY = ("model_repository", "checkpoints")
GENERATED = ("repository", "engines", "adapters", "tasks", "checkpoints", "sources", "kernels")

Start = Callable[..., str]


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=check)


@pytest.fixture(scope="module", autouse=True)
def image() -> dict[str, Any]:
    """What Docker says of the image."""
    if shutil.which("docker") is None or docker("info", check=False).returncode:
        pytest.skip("no Docker runs here")
    found = docker("image", "inspect", NAME, check=False)
    if found.returncode:
        pytest.skip("no image: `make image`")
    about: dict[str, Any] = json.loads(found.stdout)[0]
    return about


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the build folder, which the container's user owns."""
    folder = tmp_path_factory.mktemp("image") / "build"
    for name in filter(lambda one: (PROJECT / "build" / one).is_dir(), GENERATED):
        shutil.copytree(PROJECT / "build" / name, folder / name, symlinks=True)
    # Docker would make the mount point of a run folder, as root.
    (folder / "run").mkdir()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 1000, 1000, follow_symlinks=False)
    folder.parent.chmod(0o755)
    return folder


@pytest.fixture
def start(build: Path) -> Iterator[Start]:
    """Starts a container of the server, with limits and options of `serve`. Returns its name."""
    names: list[str] = []

    def run(limits: tuple[str, ...], *options: str) -> str:
        name = f"shapeshift-test-{len(names)}-{os.getpid()}"
        names.append(name)
        volumes = [f"--volume={PROJECT / folder}:/srv/{folder}:ro" for folder in READ_ONLY]
        ports = [f"--{kind}-port={port}" for kind, port in (("http", HTTP), ("grpc", GRPC), ("metrics", METRICS))]
        sealed = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--network=host", "--shm-size=512m")
        command = ["serve", "--triton=/opt/tritonserver", *ports, f"--gateway-port={GATEWAY}", *options]
        docker(
            "run",
            "--detach",
            f"--name={name}",
            *limits,
            *sealed,
            f"--volume={build}:/srv/build",
            *volumes,
            NAME,
            *command,
        )
        return name

    yield run
    for name in names:
        docker("rm", "--force", name, check=False)


def is_ready(model: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/models/{model}/ready", timeout=5):
            return True
    except OSError:
        return False


def wait(condition: Callable[[], bool], name: str, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, docker("logs", name, check=False).stdout[-4000:]
        time.sleep(0.5)


def embedding(text: str) -> np.ndarray[Any, Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{HTTP}") as client:
        tensor = triton.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], object))
        result: np.ndarray[Any, Any] = client.infer("encode", [tensor]).as_numpy("EMBEDDING")
        return result[0]


def chat(text: str) -> str:
    body = {"model": "chat", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{GATEWAY}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
        return answer


def gateway_answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{GATEWAY}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def processes(name: str) -> list[int]:
    """The processes of `encode`, by their numbers in the container."""
    listed = (
        "import pathlib, os; lines = {int(file.parent.name): file.read_bytes() for file in"
        " pathlib.Path('/proc').glob('[0-9]*/cmdline')}; print([pid for pid, line in lines.items()"
        " if b'/encode' in line and b'python_backend_stub' in line and pid != os.getpid()])"
    )
    pids: list[int] = json.loads(docker("exec", name, "python3", "-c", listed).stdout)
    return pids


def test_the_image_says_what_it_is_and_holds_no_index(image: dict[str, Any]) -> None:
    config = image["Config"]
    assert config["User"] == "1000:1000" and config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image["Size"] < 2.5e9
    inside = docker("run", "--rm", "--network=none", "--entrypoint=cat", NAME, "/opt/tritonserver/sbom.json").stdout
    assert json.loads(inside) == materials()
    tools = "import importlib.util as util; print(util.find_spec('pip'), util.find_spec('setuptools'))"
    assert docker("run", "--rm", "--network=none", "--entrypoint=python3", NAME, "-c", tools).stdout == "None None\n"


def test_a_container_serves_heals_and_stops_in_order(start: Start) -> None:
    run_folder = "--tmpfs=/srv/build/run:size=64m,uid=1000,gid=1000,exec"
    name = start(("--memory=8g", "--env=MODEL=encode", run_folder), "--models=encode,chat,generate_unary")
    wait(lambda: is_ready("encode") and is_ready("chat"), name)
    before = embedding("a text")
    assert before.shape == (384,) and abs(np.linalg.norm(before) - 1) < 1e-3
    # It starts once the models are ready.
    wait(gateway_answers, name)
    assert "Paris" in chat("What is the capital of France? Answer in 2026, 100% sure: {city}")
    health = json.loads(docker("inspect", name).stdout)[0]["Config"]["Healthcheck"]["Test"]
    check = [part.replace(":8000", f":{HTTP}") for part in health[1:]]
    assert docker("exec", name, *check, check=False).returncode == 0
    # The sidecar, inside, loads a model whose process was killed, also where the disk of the run folder is full.
    docker("exec", name, "sh", "-c", "cat /dev/zero > /srv/build/run/full; test $? -ne 0")
    killed = processes(name)
    assert killed
    docker("exec", name, "python3", "-c", f"import os; [os.kill(pid, 9) for pid in {killed}]")

    def serves() -> bool:
        try:
            return bool(np.allclose(embedding("a text"), before, atol=1e-5))
        except (OSError, triton.InferenceServerException):
            return False

    wait(lambda: not {*killed} & {*processes(name)} and serves(), name)
    docker("restart", "--time=30", name)
    wait(serves, name)
    docker("stop", "--time=30", name)
    assert json.loads(docker("inspect", name).stdout)[0]["State"]["ExitCode"] == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/health/live", timeout=5)


def test_what_does_not_fit_into_a_small_container_is_named_and_left_out(start: Start) -> None:
    name = start(("--memory=2g", "--memory-swap=2g", "--cpus=1"))

    def log() -> str:
        done = docker("logs", name)
        return done.stdout + done.stderr

    wait(lambda: is_ready("encode"), name)
    wait(lambda: "how to call them" in log(), name)
    said = log()
    assert "which does not fit: " in said, said
    state = json.loads(docker("inspect", name).stdout)[0]["State"]
    assert state["Running"] and not state["OOMKilled"], said
    assert embedding("a text").shape == (384,)
