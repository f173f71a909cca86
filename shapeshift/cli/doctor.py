"""`shapeshift doctor`: what this machine and this installation can do, and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shapeshift import installation
from shapeshift.cli import gateway
from shapeshift.engines import capacity, hardware
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers import lookup
from shapeshift.errors import listed
from shapeshift.kernels import kernel_build
from shapeshift.triton.embedded import wheels
from shapeshift.triton.embedded.free_ports import why_taken
from shapeshift.triton.settings import ServerSettings

OK, NOTE, MISSING = "ok", "note", "missing"
_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_PCI, _NVIDIA = Path("/sys/bus/pci/devices"), "0x10de"
_SHARED_MEMORY = Path("/dev/shm")
# A model's process begins with a megabyte and grows with its requests; Docker gives a container 64 MiB.
_LEAST_SHARED, _FEW_SHARED = 16 * 2**20, 256 * 2**20
_LEAST_DISK, _LITTLE_DISK = _GIB, 5 * _GIB
_PROJECT = "shapeshift"
_MOST_LISTED = 5
_SERVER, _BACKEND = "bin/tritonserver", "backends/python"
_HUB = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True)
class Finding:
    """state: OK; NOTE: what serving does without; MISSING: what serving needs. text: what there is, why not, remedy."""

    name: str
    state: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift doctor`."""
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--triton", type=Path, metavar="DIR", help="the server of `serve --triton`")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write one line for each finding; returns 1 if something is missing that serving needs."""
    findings = check(options.build, options.triton)
    usable = all(one.state != MISSING for one in findings)
    if options.json:
        shown = {"usable": usable, "findings": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(shown) + "\n")
        return int(not usable)
    width = max(len(one.name) for one in findings)
    sys.stdout.write("".join(f"{one.state:8}{one.name:{width}}  {one.text}\n" for one in findings))
    return int(not usable)


def check(build: Path, triton: Path | None = None) -> list[Finding]:
    """All findings; `build`: the build folder, which may be missing; triton: the server, None for the one in there."""
    return [
        *(_cpu(), _precision(), _capacity(), shared_memory(_free(_SHARED_MEMORY)), _gpu(), _disk(build), ports()),
        *(_python(), packages()),
        *(_provider(name) for name in PROVIDERS if name != "emulated"),
        *(_torch(), _compiler(), server(triton or build / "triton"), hub(os.environ)),
    ]


def _cpu() -> Finding:
    flags = hardware.cpu_model()
    if platform.machine() != "x86_64" or "avx2" not in flags:
        return Finding("cpu", MISSING, f"{flags}: the server and its libraries need x86-64 with avx2")
    return Finding("cpu", OK, flags)


def _precision() -> Finding:
    auto = hardware.resolve_precision("auto")
    why = "" if auto == "bf16" else ": no avx512_bf16 and no AMX, so bf16 would be emulated"
    return Finding("precision", OK, f"auto is {auto} for openvino and text generation, f32 for onnxruntime{why}")


def _capacity() -> Finding:
    machine = capacity.this_machine()
    return Finding("capacity", OK, capacity.fit((), machine)[0].partition(";")[0])


def shared_memory(free: int) -> Finding:
    """Of `free` bytes."""
    text = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if free < _LEAST_SHARED:
        return Finding("shared memory", MISSING, f"{text}: each model needs some; in Docker set --shm-size=1g")
    if free < _FEW_SHARED:
        return Finding("shared memory", NOTE, f"{text}: large batches need more; in Docker set --shm-size=1g")
    return Finding("shared memory", OK, text)


def _gpu() -> Finding:
    count = hardware.gpus()
    if not count:
        absent = "no NVIDIA device in /dev: models run on the CPU"
        if _DRIVER.exists():
            absent += "; there is a driver: a container gets the devices with `docker run --gpus all`"
        elif any(file.read_text().strip() == _NVIDIA for file in _PCI.glob("*/vendor")):
            absent += "; the machine has a card of NVIDIA, but no driver: install it"
        return Finding("gpu", NOTE, absent)
    try:
        version = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text())
    except OSError:
        version = None
    return Finding("gpu", OK, f"{count} NVIDIA devices, driver {version[1] if version else 'unknown'}")


def _disk(folder: Path) -> Finding:
    """Of the file system that holds `folder`, or its nearest parent that exists."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    usage = shutil.disk_usage(place)
    return disk(place, usage.free, usage.total)


def disk(place: Path, free: int, total: int) -> Finding:
    """Of a folder, on a file system with so many bytes."""
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", NOTE, f"{text}, which this user cannot write: nothing can be built there")
    if free < _LEAST_DISK:
        return Finding("disk", MISSING, f"{text}: logs, engines and kernels need at least {_LEAST_DISK / _GIB:.0f} GiB")
    if free < _LITTLE_DISK:
        return Finding("disk", NOTE, f"{text}: a set-up and the engines of the demo take about 3 GiB")
    return Finding("disk", OK, text)


def ports(
    numbers: Iterable[int] = (
        ServerSettings.http_port,
        ServerSettings.grpc_port,
        ServerSettings.metrics_port,
        gateway.DEFAULT_PORT,
    ),
) -> Finding:
    """Whether the server and its gateway can bind to these ports of 127.0.0.1."""
    taken = [number for number in numbers if why_taken("127.0.0.1", number)]
    if taken:
        listed = ", ".join(map(str, taken))
        return Finding(
            "ports",
            NOTE,
            f"in use: {listed}; `serve` needs others, by --http-port, --gateway-port and the like",
        )
    return Finding("ports", OK, f"{', '.join(map(str, numbers))} are free")


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


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
