"""The container files, as far as they can be checked without a container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shapeshift.triton import keys, model_config
from shapeshift.triton.embedded.command_line import AS_WRITTEN
from shapeshift.triton.settings import ALLOW_PUBLIC
from tests.docs.docs_pages import PROJECT
from tests.docs.docs_sources import modules

DOCKER = PROJECT / "docker"
KEY = "0123456789abcdef" * 2


@pytest.fixture
def start(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function that runs the entrypoint with a tritonserver that only prints its arguments, one a line."""
    server = tmp_path / "bin" / "tritonserver"
    server.parent.mkdir()
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    server.chmod(0o755)
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # A worker is loaded by the sidecar, with the bin of its plan.
    for name in ("one", "two", "two_w00", "two_w01"):
        (tmp_path / "repository" / name).mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").touch()

    def run(key: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "key").write_text(key)
        environment = {
            **os.environ,
            "PATH": f"{server.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "REPOSITORY": str(tmp_path / "repository"),
            "KEY_FILE": str(tmp_path / "key"),
            **variables,
        }
        command = ["bash", str(DOCKER / "entrypoint.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_entrypoint_restricts_what_serve_restricts(start) -> None:  # type: ignore[no-untyped-def]
    given = start(f"{KEY}\n", "--log-verbose=1").stdout.split()
    restriction = f"{keys.RESTRICTED}:{keys.HTTP_HEADER}={KEY}"
    assert f"--http-restricted-api={restriction}" in given
    assert f"--grpc-restricted-protocol={restriction}" in given
    assert "--model-control-mode=explicit" in given
    assert f"--{AS_WRITTEN}" in given
    assert [option for option in given if "load-model" in option] == ["--load-model=one", "--load-model=two"]
    assert given[-1] == "--log-verbose=1"


def test_entrypoint_loads_what_is_named(start) -> None:  # type: ignore[no-untyped-def]
    given = start(KEY, MODELS="two").stdout.split()
    assert [option for option in given if "load-model" in option] == ["--load-model=two"]


def test_entrypoint_starts_nothing_without_models(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty").mkdir()
    done = start(KEY, REPOSITORY=str(tmp_path / "empty"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no models in" in done.stderr


_IMPORTED = """
import sys
import tomllib
from importlib.metadata import packages_distributions
import shapeshift.cli.sidecar, shapeshift.sidecar.sidecar, shapeshift.triton.async_client
owners = packages_distributions()
print(*sorted({owner for name in list(sys.modules) for owner in owners.get(name.partition(".")[0], ())}))
"""


@pytest.mark.parametrize("program", ["sidecar", "gateway"])
def test_entrypoint_starts_what_stands_beside_the_server(start, program: str) -> None:  # type: ignore[no-untyped-def]
    given = start(KEY, program, "--help")
    assert given.returncode == 0 and f"shapeshift {program}" in given.stdout
    assert "hexadecimal" in start("short", program, "--help").stderr


def test_image_has_what_the_sidecar_imports() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True, cwd=PROJECT)
    # ml_dtypes is optional: protobuf's and numpy's users import it where it is installed.
    needed = set(done.stdout.split()) - {"shapeshift", "ml_dtypes", "setuptools"}
    assert {"tritonclient", "grpcio"} <= needed
    assert needed <= set(image_packages())


@pytest.mark.parametrize("key", ["", "short", f"{KEY} --allow-client-shm=true"])
def test_entrypoint_starts_nothing_without_a_key(start, key: str) -> None:  # type: ignore[no-untyped-def]
    done = start(key)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "hexadecimal" in done.stderr


def test_the_context_of_the_image_is_what_it_copies() -> None:
    lines = (PROJECT / ".dockerignore").read_text().split()
    context = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert {Path(source).parts[0] for sources in copies for source in sources.split()} == context
    assert "*" in lines


def test_the_server_of_24_10_listens_where_only_this_machine_reaches_it() -> None:
    service = yaml.safe_load((DOCKER / "compose.cpu.yaml").read_text())["services"]["triton"]
    assert "0.0.0.0" in service["command"] and service["environment"] == {ALLOW_PUBLIC: "1"}
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (started,) = re.findall(r"^docker run (?:.*\\\n)*.*$", (DOCKER / "README.md").read_text(), re.MULTILINE)
    assert f"-e {ALLOW_PUBLIC}=1" in started and started.count("-p 127.0.0.1:") == started.count(" -p ")


def test_compose_keeps_its_promises() -> None:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["triton"]
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writable == ["kernels:/opt/shapeshift/build/kernels"]
    assert service["healthcheck"]["test"][-1].endswith("/v2/health/live")


def test_compose_starts_what_stands_beside_the_server() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert compose["services"]["gateway"]["ports"] == ["127.0.0.1:8080:8080"]
    for name in ("sidecar", "gateway"):
        service = compose["services"][name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["command"][0] == name and "triton:8001" in service["command"]
        assert not {"network_mode", "pid"} & service.keys(), "the server's would be gone when it starts again"
    # The gateway listens to others, which needs keys.
    keys_file = compose["services"]["gateway"]["command"][-1]
    assert keys_file.removeprefix("/run/secrets/") in compose["services"]["gateway"]["secrets"]
    assert set(compose["services"]["gateway"]["secrets"]) <= set(compose["secrets"])
    gpu = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]
    (device,) = gpu["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and set(device["capabilities"]) == {"gpu", "utility"}


def test_compose_mounts_what_generated_configurations_name() -> None:
    configs = sorted((PROJECT / "build" / "repository").glob("*/config.pbtxt"))
    if not configs:
        pytest.skip("needs `make engines`")
    volumes = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["triton"]["volumes"]
    inside = {volume.removesuffix(":ro").split(":")[1] for volume in volumes}
    for host, place in (volume.removesuffix(":ro").split(":") for volume in volumes if volume.startswith("../")):
        assert place == f"/opt/shapeshift/{host.removeprefix('../')}", "outside and inside the layout is the same"
    named = {
        Path(os.path.normpath(f"/opt/shapeshift/build/repository/{config.parent.name}/{value}"))
        for config in configs
        for value in model_config.parameters(model_config.read(config)).values()
        if value.startswith("../")
    }
    assert named
    assert [place for place in named if not any(place.is_relative_to(folder) for folder in inside)] == []
    stated = [value for config in configs for value in model_config.parameters(model_config.read(config)).values()]
    assert [value for value in stated if value.startswith(f"{PROJECT}/")] == []


def image_packages(argument: str = "PACKAGES") -> list[str]:
    """The packages that the image installs, torch not counted."""
    packages = re.search(rf'^ARG {argument}="([^"]+)"$', (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert packages is not None
    return packages[1].replace("\\", "").split()


def test_image_has_what_serving_imports(tmp_path: Path) -> None:
    for package in (*image_packages(), *image_packages("GATEWAY_PACKAGES"), "torch"):
        distribution = metadata.distribution(package)
        for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(Path(str(distribution.locate_file(name))))
    # The library beside them as in the image, and nothing else; -S: no site-packages.
    (tmp_path / "shapeshift").symlink_to(PROJECT / "shapeshift")
    path = [entry for entry in sys.path if "site-packages" not in entry and Path(entry or ".").resolve() != PROJECT]
    script = f"import sys; sys.path = {[str(tmp_path), *path]!r}; import {', '.join(serving_modules())}"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def serving_modules() -> list[str]:
    """All that a server's processes may import: the packages that serve, and what the providers import when used."""
    folders = ("serving", "engines", "polymorph", "token_adapt", "fused_decode", "adapter_cache", "cascade", "gateway")
    found = modules(*(f"shapeshift/{folder}" for folder in folders))
    assert "shapeshift.fused_decode.unary" in found
    # Their language comes with torch for CUDA (GPU=1).
    names = [name for name in found if not name.endswith((".gpu_kernels", ".row_kernels"))]
    return [*names, "openvino", "onnxruntime", "torch", "llguidance"]


def test_image_installs_pinned_packages_and_copies_what_exists() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    pinned = set(re.findall(r"^([\w-]+)==", (PROJECT / "requirements" / "lock.txt").read_text(), re.MULTILINE))
    assert {*image_packages(), *image_packages("GATEWAY_PACKAGES"), *image_packages("FLEET_PACKAGES")} <= pinned
    gpu = (PROJECT / "requirements" / "torch-gpu.txt").read_text()
    assert set(re.findall(r"^([\w-]+)==", gpu, re.MULTILINE)) == {"torch", "onnxruntime-gpu"}
    assert re.search(r"^torch==", (PROJECT / "requirements" / "torch-cpu.txt").read_text(), re.MULTILINE)
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((PROJECT / source).exists() for source in sources.split()), sources


def needed(name: str) -> set[str]:
    """The package and all that it needs in turn, without extras."""
    given = [Requirement(text) for text in metadata.requires(name) or []]
    own = [one.name for one in given if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(name)}.union(*(needed(one) for one in own))


def test_image_of_a_fleet_has_all_that_ray_needs() -> None:
    listed = re.findall(r"^([\w-]+)==", (PROJECT / "requirements" / "fleet.txt").read_text(), re.MULTILINE)
    kinds = ("PACKAGES", "GATEWAY_PACKAGES", "FLEET_PACKAGES")
    own = {canonicalize_name(name) for name in (*listed, *(one for kind in kinds for one in image_packages(kind)))}
    assert needed("ray") | needed("cryptography") <= own


def test_image_has_all_that_the_gateway_needs() -> None:
    stated = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gateway"]
    own = {canonicalize_name(name) for name in (*image_packages(), *image_packages("GATEWAY_PACKAGES"))}
    assert set().union(*map(needed, stated)) <= own
