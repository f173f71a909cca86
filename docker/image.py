"""Builds the image of Dockerfile.cpu from packages that it collects: `python -m docker.image [options of docker]`.

No index and no cache of pip is in the image. BASE, in the environment, is another image to start from: it needs the
Python that runs this, and Debian's apt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

import shapeshift

PROJECT = Path(__file__).resolve().parents[1]
CONTEXT = PROJECT / "build" / "image"
NAME = "shapeshift"
_PINS = ("lock.txt", "torch-cpu.txt")


def main(options: list[str]) -> int:
    """Build the image `shapeshift`. Returns the status of docker."""
    collect()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    base = os.environ.get("BASE") or f"python:{version}-slim-bookworm"
    arguments = [f"BASE={base}", f"VERSION={shapeshift.__version__}"]
    command = ["docker", "build", "--tag", NAME, "--file", str(PROJECT / "docker" / "Dockerfile.cpu")]
    command += [option for argument in arguments for option in ("--build-arg", argument)]
    return subprocess.run([*command, *options, str(CONTEXT)], check=False).returncode


def collect() -> None:
    """Make the context: the wheels of all packages and of this project, the server, and the list of what is in it."""
    packages = CONTEXT / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    pip += ["--wheel-dir", str(packages), "--find-links", str(packages)]
    index = os.environ.get("TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"
    lock, torch = (str(PROJECT / "requirements" / name) for name in _PINS)
    subprocess.run([*pip, "--requirement", lock], check=True)
    subprocess.run([*pip, "--retries", "1", "--extra-index-url", index, "--requirement", torch], check=True)
    remove_others(packages)
    subprocess.run([*pip, "--no-build-isolation", str(PROJECT)], check=True)
    # Without files of an earlier server.
    shutil.rmtree(CONTEXT / "triton", ignore_errors=True)
    shutil.copytree(PROJECT / "build" / "triton", CONTEXT / "triton", symlinks=True)
    (CONTEXT / "sbom.json").write_text(json.dumps(materials(), indent=1) + "\n")


def remove_others(packages: Path) -> None:
    """Remove wheels that are not pinned, such as those of an earlier pin: pip takes no two versions of a package."""
    pinned = {(canonicalize_name(name), Version(version)) for name, version in _pins()}
    for wheel in packages.glob("*.whl"):
        if parse_wheel_filename(wheel.name)[:2] not in pinned:
            wheel.unlink()


def materials() -> dict[str, Any]:
    """The Python packages of the image, as a bill of materials of CycloneDX 1.6."""
    components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
            "licenses": [{"license": {"name": _licence(name)}}],
        }
        for name, version in _pins()
    ]
    subject = {"type": "container", "name": NAME, "version": shapeshift.__version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }


def _pins() -> list[list[str]]:
    """Name and version of each pinned package."""
    lines = [line for name in _PINS for line in (PROJECT / "requirements" / name).read_text().splitlines()]
    return [line.split("==") for line in lines if "==" in line and not line.startswith("#")]


def _licence(name: str) -> str:
    about = metadata.metadata(name).json
    classifiers = [one for one in about.get("classifier", ()) if one.startswith("License ::")]
    stated = about.get("license_expression") or (classifiers[0].rpartition(" :: ")[2] if classifiers else "")
    # Some packages put the whole text there.
    return str(stated or about.get("license") or "not stated").splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
