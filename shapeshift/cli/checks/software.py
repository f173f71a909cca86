"""What this installation can do: Python, packages, providers, compiler, the server's files and checkpoints."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from shapeshift import installation
from shapeshift.cli.checks.finding import MISSING, NOTE, OK, Finding
from shapeshift.engines import hardware
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers import lookup
from shapeshift.errors import listed
from shapeshift.fused_decode.model import kernel_build
from shapeshift.triton.embedded import wheels

_PROJECT = "shapeshift"
_MOST_LISTED = 5
_SERVER, _BACKEND = "bin/tritonserver", "backends/python"
_HUB = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def check(build: Path, triton: Path | None = None) -> list[Finding]:
    """All findings; `build`: the build folder, which may be missing; triton: the server, None for the one in there."""
    return [
        _python(),
        packages(),
        *(_provider(name) for name in PROVIDERS if name != "emulated"),
        _torch(),
        _compiler(),
        _gurobi(),
        server(triton or build / "triton"),
        _checkpoints(build),
        hub(os.environ),
    ]


def _python() -> Finding:
    version = platform.python_version()
    if not importlib.util.find_spec("packaging"):
        return Finding("python", NOTE, f"{version}, not compared: the package packaging is not installed")
    from packaging.specifiers import SpecifierSet

    required = _required_python()
    if version not in SpecifierSet(required):
        return Finding("python", MISSING, f"{version}: must be {required}; make an environment with such a Python")
    return Finding("python", OK, f"{version} ({platform.system()} {platform.machine()})")


def _required_python() -> str:
    try:
        metadata = importlib.metadata.metadata(_PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(metadata["Requires-Python"] or "")


def packages(file: Path = installation.PINS) -> Finding:
    """In a checkout the exact pins of `file`; in a wheel, which has none, what the project says it needs."""
    if not file.is_file():
        return _needed()
    pins = {project: pin.version for project, pin in wheels.read_pins(file).items()}
    versions = {project: _version(project) for project in pins}
    absent = [project for project, version in versions.items() if not version]
    other = [f"{project} {versions[project]}, not {pin}" for project, pin in pins.items() if versions[project] != pin]
    if absent:
        return Finding("packages", MISSING, f"not installed: {listed(absent, _MOST_LISTED)}; run `make setup`")
    if other:
        return Finding("packages", NOTE, f"not the versions that are tested together: {listed(other, _MOST_LISTED)}")
    return Finding("packages", OK, f"{len(pins)} as pinned in {file.name}")


def _needed() -> Finding:
    if not importlib.util.find_spec("packaging"):
        return Finding("packages", MISSING, "packaging is not installed; install shapeshift again, with what it needs")
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in importlib.metadata.requires(_PROJECT) or ()]
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [str(one) for one in needed if not one.specifier.contains(_version(one.name) or "0", prereleases=True)]
    absent = [one.name for one in needed if not _version(one.name)]
    if wrong or absent:
        return Finding("packages", MISSING, f"install: {listed(sorted({*absent, *wrong}), _MOST_LISTED)} (with pip)")
    return Finding("packages", OK, f"the {len(needed)} that the wheel needs; it pins no versions")


def _version(project: str) -> str:
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _provider(name: str) -> Finding:
    """Whether a provider's library can be imported. MISSING for the one that `auto` means."""
    label = f"provider {name}"
    try:
        return Finding(label, OK, PROVIDERS[name].version())
    except Exception as error:  # noqa: BLE001  a library that is installed badly raises anything
        reason = str(error).partition("\n")[0].removeprefix(f"{label}: ") or type(error).__name__
        return Finding(label, MISSING if name == lookup.resolve("auto", range(hardware.gpus())) else NOTE, reason)


def _torch() -> Finding:
    if not importlib.util.find_spec("torch"):
        return Finding("torch", MISSING, "not installed: builds and text generation need it; run `make setup`")
    return Finding("torch", OK, _version("torch"))


def _compiler() -> Finding:
    program = shutil.which(kernel_build.COMPILER)
    if program is None:
        text = f"no {kernel_build.COMPILER}: text generation runs without its own kernels, several times slower"
        return Finding("compiler", NOTE, f"{text}; install a C++20 compiler")
    return Finding("compiler", OK, f"{program}, for the kernels of text generation")


def _gurobi() -> Finding:
    if not importlib.util.find_spec("gurobipy"):
        return Finding("gurobi", NOTE, "not installed; only a benchmark compares with it")
    return Finding("gurobi", OK, _version("gurobipy"))


def server(triton: Path) -> Finding:
    """The server's files, which `shapeshift setup` unpacks, and the backends of this installation."""
    absent = [name for name in (_SERVER, _BACKEND) if not (triton / name).exists()]
    if absent:
        return Finding(
            "server", MISSING, f"no {triton / absent[0]}; run `shapeshift setup`, or name it: --build or --triton DIR"
        )
    if not installation.BACKENDS.is_dir():
        return Finding("server", MISSING, f"no backends at {installation.BACKENDS}; install shapeshift again")
    return Finding("server", OK, f"{triton}, backends {installation.BACKENDS}")


def _checkpoints(build: Path) -> Finding:
    counts = []
    for folder in (build / "checkpoints", Path("checkpoints")):
        held = sum(path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0
        counts.append(f"{held} in {folder}")
    return Finding("checkpoints", OK, ", ".join(counts))


def hub(environment: Mapping[str, str]) -> Finding:
    """The variables of the model hub, without any secret, and whether its client is installed."""
    shown = [f"{name}={_without_user(environment[name])}" for name in _HUB if environment.get(name)]
    shown += [f"{name} is set" for name in _SECRETS if environment.get(name)]
    text = ", ".join(shown) or "no variable of the hub is set"
    if not importlib.util.find_spec("huggingface_hub"):
        return Finding("hub", NOTE, f"huggingface_hub is not installed: a checkpoint must be a folder; {text}")
    return Finding("hub", OK, text)


def _without_user(text: str) -> str:
    parts = urlsplit(text)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else text
