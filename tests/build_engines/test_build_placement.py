"""On which GPUs the build places a front, by its instance_group and those of this machine, which are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.build_engines import model_folder
from shapeshift.errors import InvalidInputError
from shapeshift.triton import model_config


@pytest.fixture
def source(tmp_path: Path, machine: Callable[..., None]) -> Path:
    """The folder of a front, on a machine with three GPUs."""
    machine(gpus=3)
    return tmp_path


def state(source: Path, group: str) -> None:
    (source / "config.pbtxt").write_text(f"instance_group [ {{ {group} }} ]" if group else "")


@pytest.mark.parametrize(
    ("group", "gpus", "provider", "used"),
    [
        ("", [0, 1, 2], "torch", [0, 1, 2]),
        ("kind: KIND_GPU", [0, 1, 2], "torch", [0, 1, 2]),
        ("kind: KIND_GPU gpus: [ 2, 1 ]", [2, 1], "torch", [2, 1]),
        ("kind: KIND_CPU", [], "openvino", ()),
    ],
)
def test_auto_takes_the_gpus_that_a_front_may_use(
    source: Path, group: str, gpus: list[int], provider: str, used: object
) -> None:
    state(source, group)
    assert model_folder.gpus_of(source) == gpus
    found, on = model_folder.provider_of(source, "auto")
    assert (found.name, on) == (provider, used)


def test_a_provider_of_cpus_needs_no_gpu_and_gets_none(source: Path) -> None:
    state(source, "")
    assert model_folder.provider_of(source, "openvino")[1] == ()
    state(source, "kind: KIND_GPU")
    with pytest.raises(InvalidInputError, match="provider: got 'openvino'; with KIND_GPU one of onnxruntime, tensorrt"):
        model_folder.provider_of(source, "openvino")


def test_without_a_gpu_nothing_is_placed_on_one(source: Path, machine: Callable[..., None]) -> None:
    machine(gpus=0)
    state(source, "")
    assert model_folder.provider_of(source, "auto")[0].name == "openvino"


@pytest.mark.parametrize(("group", "device", "placed"), [("", 1, [1]), ("", None, []), ("kind: KIND_CPU", 1, [])])
def test_the_generated_front_is_placed_where_none_is_stated(
    source: Path, tmp_path: Path, group: str, device: int | None, placed: list[int]
) -> None:
    state(source, group)
    completed = model_config.read(source / "config.pbtxt")
    if not group:
        completed.instance_group.add(kind=completed.instance_group.add().KIND_CPU)
        del completed.instance_group[0]
    made = model_folder.write_front(source, completed, tmp_path / "made", {}, "", device=device)
    assert list(made.instance_group[0].gpus) == placed
    assert made.instance_group[0].kind == (
        made.instance_group[0].KIND_GPU if placed else made.instance_group[0].KIND_CPU
    )
