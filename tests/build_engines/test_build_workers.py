"""The placement of engines, and the folders of workers that `make engines` generates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from shapeshift.build_engines.text import workers
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.engines.manifest import FileEntry, Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.triton import model_config

Make = Callable[..., tuple[int, str, str]]


@pytest.fixture
def make(
    tmp_path: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Make:
    """A function that builds the front `encode` with the given parameters: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(name: str = "encode", **parameters: object) -> tuple[int, str, str]:
        add_front(tmp_path / "model_repository", name, **{"bins": "16,64", **parameters})
        status = main(["engines"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def generated(root: Path, name: str = "encode") -> Any:
    return model_config.read(root / "build" / "repository" / name / "config.pbtxt")


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "build" / "repository").iterdir())


def generated_parameters(root: Path, name: str = "encode") -> dict[str, str]:
    return model_config.parameters(generated(root, name))


def test_inline_has_no_workers(make: Make, tmp_path: Path) -> None:
    status, out, _ = make()
    assert status == 0 and "placement inline: no GPU and no workers" in out
    assert "placement inline: named in config.pbtxt" in make(placement="inline")[1]
    assert folders(tmp_path) == ["encode"]
    assert not {"workers", "max_workers", "bin_edges", "plan_histogram"} & set(generated_parameters(tmp_path))


@pytest.mark.parametrize(("placement", "bin_edge"), [("resident", "0"), ("partitioned", "512")])
def test_each_worker_is_a_model(make: Make, tmp_path: Path, placement: str, bin_edge: str) -> None:
    status, out, _ = make(placement=placement, workers=2, max_workers=3, slo_ms=50, queue_rows=9)
    assert status == 0 and f"placement {placement}, 2 workers: named in config.pbtxt" in out
    assert folders(tmp_path) == ["encode", "encode_w00", "encode_w01", "encode_w02"]
    front = generated_parameters(tmp_path)
    assert (front["placement"], front["workers"], front["max_workers"]) == (placement, "2", "3")
    for name in folders(tmp_path)[1:]:
        config, own = generated(tmp_path, name), generated_parameters(tmp_path, name)
        assert (config.name, config.backend, config.max_batch_size) == (name, "polymorph", 0)
        assert (tmp_path / "build" / "repository" / name / "1").is_dir()
        inputs = [(one.name, model_config_pb2.DataType.Name(one.data_type), list(one.dims)) for one in config.input]
        assert inputs == [("INPUT_IDS", "TYPE_INT64", [-1]), ("LENGTHS", "TYPE_INT32", [-1])]
        assert [(one.name, list(one.dims)) for one in config.output] == [("EMBEDDING", [-1, 8]), ("STATE", [6])]
        (group,) = config.instance_group
        assert (group.count, group.kind) == (1, group.KIND_CPU)
        assert (own["worker_of"], own["bin"], own["generation"]) == ("encode", bin_edge, "0")
        of_the_front = {"profile", "labels", "prompts"}
        assert not of_the_front & set(own)
        copied = set(front) - of_the_front
        assert {key: own[key] for key in copied} == {key: front[key] for key in copied}
        engines = (tmp_path / "build" / "repository" / name / own["engines"]).resolve()
        assert engines == tmp_path / "build" / "engines" / "encode"


def test_initial_bins_and_histogram_of_the_sidecar(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model_repository" / "encode").mkdir(parents=True)
    (tmp_path / "model_repository" / "encode" / "h.json").write_text(json.dumps([1] * 16 + [0] * 48 + [4] * 1))
    make(placement="resident", length_histogram="h.json")
    front = generated_parameters(tmp_path)
    assert json.loads(front["bin_edges"]) == [16, 64, 512]
    assert json.loads(front["plan_histogram"]) == [0.8, 0.0, 0.2]


@pytest.mark.parametrize(
    ("parameters", "count", "most"),
    [
        ({}, "2", "2"),
        ({"max_workers": 1}, "1", "1"),
        ({"max_workers": 5}, "2", "5"),
        ({"min_workers": 3}, "3", "3"),
        ({"workers": 4}, "4", "4"),
    ],
)
def test_how_many_workers(make: Make, tmp_path: Path, parameters: dict[str, object], count: str, most: str) -> None:
    assert make(placement="resident", **parameters)[0] == 0
    front = generated_parameters(tmp_path)
    assert (front["workers"], front["max_workers"]) == (count, most)
    assert len(folders(tmp_path)) == 1 + int(most)


def test_unused_workers_are_deleted_and_others_kept(make: Make, tmp_path: Path) -> None:
    make("other", placement="resident", workers=1)
    make("encode_water")
    make(placement="resident", workers=3)
    others = ["other", "other_w00"]
    assert folders(tmp_path) == ["encode", "encode_w00", "encode_w01", "encode_w02", "encode_water", *others]
    assert "encode: up to date" in make(placement="resident", workers=1)[1]
    assert folders(tmp_path) == ["encode", "encode_w00", "encode_water", *others]
    make(placement="inline")
    assert folders(tmp_path) == ["encode", "encode_water", *others]


def test_auto_without_gpu_and_workers_is_inline(make: Make, tmp_path: Path) -> None:
    status, out, _ = make(placement="auto")
    assert status == 0 and "placement inline: no GPU and no workers requested" in out
    assert generated_parameters(tmp_path)["placement"] == "inline"
    assert generated_parameters(tmp_path)["placement_reason"].startswith("no GPU and no workers requested")


def test_auto_with_workers_depends_on_memory(make: Make, tmp_path: Path) -> None:
    assert make(placement="auto", workers=2)[0] == 0
    assert generated_parameters(tmp_path)["placement"] == "resident"
    assert "every worker holds all" in generated_parameters(tmp_path)["placement_reason"]
    # The tokenizer alone, in each of three engines, is more than that.
    status, out, _ = make(placement="auto", workers=2, memory_mb=1, slo_ms=50)
    assert status == 0 and "placement partitioned, 2 workers: 3 engines of about" in out
    assert generated_parameters(tmp_path)["placement"] == "partitioned"
    assert generated_parameters(tmp_path, "encode_w01")["bin"] == "512"
    status, out, _ = make(placement="auto", workers=2, memory_mb=1)
    assert status == 0 and "without slo_ms" in out
    assert generated_parameters(tmp_path)["placement"] == "resident"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"placement": "partitioned"}, "slo_ms: got 0.0; above 0 with placement partitioned"),
        ({"placement": "everywhere"}, "placement: got 'everywhere'; one of inline, resident, partitioned, auto"),
        ({"placement": "resident", "workers": 3, "max_workers": 2}, "max_workers: got 2; 0, or at least workers (3)"),
        ({"placement": "resident", "workers": 2, "min_workers": 3}, "min_workers: got 3; 0 to 2, the most workers"),
        ({"placement": "resident", "workers": 257}, "workers: got 257; 0 to 256"),
        ({"placement": "resident", "worker_of": "encode"}, "worker_of: got 'worker_of'; unknown parameter"),
    ],
)
def test_invalid_placements_are_named(make: Make, tmp_path: Path, parameters: dict[str, object], said: str) -> None:
    status, _, err = make(**parameters)
    assert status == 1 and said in err
    assert not list((tmp_path / "build").glob("repository/*"))


def test_failed_placement_keeps_the_previous_folders(make: Make, tmp_path: Path) -> None:
    make(placement="resident", workers=1)
    before = folders(tmp_path), generated_parameters(tmp_path)
    assert make(placement="resident", workers=257)[0] == 1
    assert (folders(tmp_path), generated_parameters(tmp_path)) == before


def test_front_with_the_name_of_a_worker(make: Make) -> None:
    make(placement="resident", workers=1)
    status, out, err = make("encode_w7")
    assert status == 1 and "encode: up to date" in out
    assert "encode_w7: name: got 'encode_w7'; another name: a worker of encode may have this one" in err.splitlines()


# GPUs, emulated by the manifest.


@pytest.fixture
def on_gpu(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The manifest of a front's engines as if built for two GPUs: 300 MiB in 3 files."""
    make(placement="resident", workers=3)
    made = manifest.load(tmp_path / "build" / "engines" / "encode")
    entries = tuple(dataclasses.replace(entry, file=entry.name) for entry in made.engines)
    files = {entry.name: FileEntry(100 * 2**20, "") for entry in entries}
    return dataclasses.replace(made, provider="tensorrt", engines=entries, files=files)


def test_workers_are_spread_over_the_gpus(on_gpu: Manifest, tmp_path: Path) -> None:
    repository = tmp_path / "build" / "repository"
    workers.write_workers(generated(tmp_path), on_gpu, repository, [0, 2])
    groups = [generated(tmp_path, f"encode_w0{number}").instance_group[0] for number in range(3)]
    assert all(group.kind == group.KIND_GPU and group.count == 1 for group in groups)
    assert [list(group.gpus) for group in groups] == [[0], [2], [0]]


@pytest.mark.parametrize(
    ("memory_mb", "slo_ms", "name"), [(300, 9, "resident"), (299, 9, "partitioned"), (299, 0, "resident")]
)
def test_auto_counts_gpus_and_the_memory_of_all_engines(
    on_gpu: Manifest, memory_mb: int, slo_ms: float, name: str
) -> None:
    settings = PolymorphSettings(placement="auto", memory_mb=memory_mb, slo_ms=slo_ms)
    placed = workers.choose_placement(settings, on_gpu, 2)
    assert (placed.name, placed.workers) == (name, 2)
    assert placed.reason.startswith(f"3 engines of about 100 MiB, {memory_mb} MiB a worker")


def test_each_engine_of_a_shared_file_counts_its_memory(on_gpu: Manifest) -> None:
    shared = dataclasses.replace(
        on_gpu,
        engines=tuple(dataclasses.replace(entry, file="all") for entry in on_gpu.engines),
        files={"all": FileEntry(100 * 2**20, "")},
    )
    own = PolymorphSettings(placement="auto", memory_mb=299)
    # Measured, they have their weights in common.
    measured = dataclasses.replace(shared, device_mb=120.0)
    assert workers.choose_placement(own, measured, 2).reason.startswith("3 engines of about 40 MiB, 299 MiB a worker")
    assert workers.choose_placement(own, shared, 2) == workers.choose_placement(own, on_gpu, 2)


def test_one_worker_per_gpu_by_default(on_gpu: Manifest) -> None:
    assert workers.choose_placement(PolymorphSettings(placement="resident"), on_gpu, 2).workers == 2
    assert workers.choose_placement(PolymorphSettings(placement="resident", workers=5), on_gpu, 2).workers == 5
    with pytest.raises(InvalidInputError, match="max_workers"):
        PolymorphSettings(placement="resident", workers=5, max_workers=4)
