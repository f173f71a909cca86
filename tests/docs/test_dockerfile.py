"""The Dockerfile and the scripts beside it: linted, and its steps run in a plain folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.docs_pages import PROJECT

DOCKER = PROJECT / "docker"
TOOLS = Path(sys.executable).parent
# Stands for `python3 -m pip install --target FOLDER -r FILE` where nothing is downloaded: links what is installed here.
LINKED = """
import sys
from importlib import metadata
from pathlib import Path
given = sys.argv[1:]
target = Path(given[given.index("--target") + 1])
target.mkdir(parents=True)
for line in Path(given[given.index("-r") + 1]).read_text().split():
    name, _, version = line.partition("==")
    # The build for GPUs of the same package.
    found = metadata.distribution(name.removesuffix("-gpu"))
    assert found.version.partition("+")[0] == version.partition("+")[0], (line, found.version)
    for top in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
        if not (target / top).exists():
            (target / top).symlink_to(Path(found.locate_file(top)))
"""


@pytest.mark.parametrize(
    "command",
    [("hadolint", "Dockerfile", "Dockerfile.cpu"), ("shellcheck", "entrypoint.sh", "drain.sh")],
    ids=lambda one: one[0],
)
def test_linters_find_nothing(command: tuple[str, ...]) -> None:
    done = subprocess.run([TOOLS / command[0], *command[1:]], cwd=DOCKER, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile: word and the rest, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest


class PlainFolder:
    """A folder that stands for the root of the container. Each step does here what it would do there."""

    def __init__(self, root: Path, downloads: bool, **arguments: str) -> None:
        """arguments: those of the build."""
        self.root = root
        self.variables: dict[str, str] = {}
        self._arguments = arguments
        self.entrypoint = ""
        self._bin = root / "usr" / "bin"
        self._bin.mkdir(parents=True)
        (root / "tmp").mkdir()
        venv.create(root / "venv", symlinks=True, with_pip=downloads)
        python = root / "venv" / "bin" / "python3"
        (root / "linked.py").write_text(LINKED)
        pip = f'[[ $1 == -m && $2 == pip ]] && exec "{sys.executable}" "{root}/linked.py" "$@"\n'
        self._program("python3", f'{"" if downloads else pip}exec "{python}" "$@"\n')
        # Only root may give files to others.
        self._program("install", 'arguments=("${@/--owner/}")\nmkdir -p "${arguments[-1]}"\n')
        self._program("tritonserver", 'printf "%s\\n" "$@"\n')

    def follow(self, dockerfile: str) -> None:
        """Do all steps but the installation of the distribution's packages."""
        for word, rest in instructions(dockerfile):
            if word in ("ARG", "ENV"):
                for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', rest):
                    self.variables[name] = self._arguments.get(name, " ".join(value.strip('"').split()))
            elif word == "COPY":
                self._copy(*rest.split())
            elif word == "ENTRYPOINT":
                self.entrypoint = self.inside(rest.strip('["]'))
            elif word == "RUN" and not rest.startswith("apt-get update && apt-get install "):
                self.run("bash", "-c", self.inside(rest))
            else:
                assert word in ("RUN", "FROM", "USER", "EXPOSE"), word

    def inside(self, text: str) -> str:
        """`text` with the container's paths replaced by those of this folder."""
        return re.sub(r"(?<![\w.])/(opt|tmp)/", rf"{self.root}/\1/", text)

    def run(self, *command: str, **variables: str) -> str:
        """The output of a command that succeeds."""
        given = {**os.environ, **self.variables, **variables, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        given = {name: value for name, value in given.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, cwd=self.root, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def _copy(self, *paths: str) -> None:
        *sources, target = paths
        place = self.root / target.lstrip("/")
        for source in (PROJECT / one for one in sources):
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                whole = place / source.name if target.endswith("/") else place
                whole.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, whole)

    def _program(self, name: str, text: str) -> None:
        (self._bin / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (self._bin / name).chmod(0o755)


@pytest.mark.parametrize(
    ("downloads", "arguments"),
    [
        (False, {}),
        pytest.param(False, {"GPU": "1", "FLEET": "1"}, marks=pytest.mark.long),
        pytest.param(True, {}, marks=pytest.mark.long),
    ],
)
def test_the_steps_of_the_image_make_a_server(tmp_path: Path, downloads: bool, arguments: dict[str, str]) -> None:
    folder = PlainFolder(tmp_path / "root", downloads, **arguments)
    folder.follow((DOCKER / "Dockerfile").read_text())
    assert sorted(
        one.name for one in (folder.root / "opt" / "tritonserver" / "backends").iterdir() if one.is_dir()
    ) == [
        "adapter_cache",
        *("cascade", "fused_decode", "polymorph", "token_adapt"),
    ]
    assert list((folder.root / "tmp").iterdir()) == []
    # The interpreter finds library and packages without any variable, and both in the folders of the image.
    found = folder.run("python3", "-c", "import shapeshift, numpy; print(shapeshift.__file__, numpy.__path__[0])")
    library, package = found.split()
    assert library == f"{folder.root}/opt/shapeshift/shapeshift/__init__.py"
    assert package == f"{folder.root}/opt/shapeshift/packages/numpy"
    assert list((folder.root / "opt" / "shapeshift" / "shapeshift" / "__pycache__").glob("errors.*.pyc"))
    (folder.root / "repository" / "one").mkdir(parents=True)
    (folder.root / "repository" / "one" / "config.pbtxt").touch()
    (folder.root / "key").write_text("0123456789abcdef" * 2)
    given = folder.run(folder.entrypoint, REPOSITORY=f"{folder.root}/repository", KEY_FILE=f"{folder.root}/key")
    assert "--load-model=one" in given.split()
    for program, option in (("sidecar", "--plan-period"), ("gateway", "--api-keys")):
        assert option in folder.run(folder.entrypoint, program, "--help", KEY_FILE=f"{folder.root}/key")
    served = "import shapeshift.gateway.http.server, torch, onnxruntime, llguidance; print(torch.__path__[0])"
    assert folder.run("python3", "-c", served).strip() == f"{folder.root}/opt/shapeshift/packages/torch"
    assert ("ray" in {one.name for one in (folder.root / "opt/shapeshift/packages").iterdir()}) == (
        "FLEET" in arguments
    )


@pytest.mark.parametrize(
    ("arguments", "has", "lacks"),
    [
        ({}, {"torch==2.13.0+cpu", "onnxruntime==1.31.1", "numpy==1.26.4"}, {"ray==2.60.0"}),
        ({"GPU": "1"}, {"torch==2.13.0", "onnxruntime-gpu==1.31.1"}, {"onnxruntime==1.31.1", "torch==2.13.0+cpu"}),
        ({"NUMPY": "2.3.5"}, {"numpy==2.3.5"}, {"numpy==1.26.4"}),
    ],
)
def test_the_arguments_of_the_image_choose_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, str], has: set[str], lacks: set[str]
) -> None:
    folder = PlainFolder(tmp_path / "root", downloads=False, **arguments)
    # In place of the installation: what is asked for, and how.
    (folder.root / "linked.py").write_text(
        "import sys; from pathlib import Path; given = sys.argv[1:]\n"
        "asked = Path(given[given.index('-r') + 1]).read_text()\n"
        "Path(sys.argv[0]).with_name('asked').write_text(' '.join(given) + '\\n' + asked)\n"
    )
    steps = (DOCKER / "Dockerfile").read_text()
    folder.follow(steps[: steps.index("COPY shapeshift")])
    how, *asked = (folder.root / "asked").read_text().splitlines()
    assert has <= set(asked) and not lacks & set(asked)
    # The libraries of CUDA are dependencies of torch; all others are pinned.
    assert ("--no-deps" in how) == ("GPU" not in arguments)


class Page(BaseHTTPRequestHandler):
    """A metrics page with the next of `held` requests in flight; the last number stays."""

    held: list[int]
    looks: list[int]

    def do_GET(self) -> None:  # noqa: N802  http.server's name
        number = self.held.pop(0) if len(self.held) > 1 else self.held[0]
        self.looks.append(number)
        # The process of another pid has ended with a request: its heartbeat stands still.
        page = (
            f'shapeshift_requests_running{{model="encode",pid="2"}} {number}\nup 1\n'
            f'shapeshift_heartbeat_total{{model="encode",pid="2"}} {len(self.looks)}\n'
            'shapeshift_requests_running{model="encode",pid="1"} 1\n'
            'shapeshift_heartbeat_total{model="encode",pid="1"} 7\n'
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  http.server's name
        """Nothing is logged."""


def drained(page: str, drain_s: int) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "METRICS_URL": page, "LEAVE_S": "0", "DRAIN_S": str(drain_s)}
    subprocess.run([DOCKER / "drain.sh"], env=given, check=True, timeout=60)


def test_the_drain_waits_until_no_request_is_held() -> None:
    handler: type[Page] = type("Own", (Page,), {"held": [2, 0, 1, 0, 0, 0], "looks": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = f"http://127.0.0.1:{server.server_port}/metrics"
        drained(page, 60)
        # Three pages in turn without a request, and no look after them.
        assert handler.held == [0]
        handler.held = [5, 5, 5, 5, 5]
        drained(page, 2)
        assert len(handler.held) < 5
        server.shutdown()
    # A server that has ended holds nothing.
    drained(page, 60)
