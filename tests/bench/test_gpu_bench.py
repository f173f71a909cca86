"""`make gpu`, rehearsed on the CPU, so that its first run on a GPU does not fail on a typo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu_bench
from bench.gpu.device import Device
from bench.gpu.part import Part, Row
from shapeshift.errors import InvalidInputError
from tests.sources import closure, imports
from tests.token_adapt import timm_models

PROJECT = Path(__file__).resolve().parents[2]
# The modules of the part that needs a server, and says so where there is none.
SERVED = {"__main__.py", "served.py", "behind_triton.py"}
NEEDED = {"torch", "transformers", "peft", "timm"}
# What these bring: numpy with each, safetensors with transformers.
BROUGHT = {"numpy", "safetensors", "tokenizers"}


@pytest.mark.long
@pytest.mark.server
def test_every_part_runs_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timm_models.vision_transformer()
    if not (PROJECT / "build" / "triton").is_dir():
        pytest.skip("no server in build/triton: run `make setup`")
    (tmp_path / "build").mkdir()
    for name in ("backends", "build/triton"):
        (tmp_path / name).symlink_to(PROJECT / name)
    monkeypatch.chdir(tmp_path)
    assert gpu_bench.main(["--rehearse", "--seed", "3"]) == 0
    written = {
        json.loads(file.read_text())["part"]: file
        for file in (tmp_path / "build" / "bench" / "gpu" / "rehearsal").iterdir()
    }
    assert set(written) == set(gpu_bench.PARTS)
    for file in written.values():
        profile = json.loads(file.read_text())
        assert profile["rows"] and profile["rehearsal"] and profile["seed"] == 3
        assert profile["command"] == "python -m bench.gpu --rehearse --seed 3" and profile["hardware"]["cpu"]
    rows = {part: json.loads(file.read_text())["rows"] for part, file in written.items()}
    assert {row["kind"] for row in rows["engines"]} == {"step curve", "pack", "batch"}
    assert {"dynamic / ours", "torch.compile / ours", "transformers / ours"} <= rows["engines"][-1].keys()
    assert any("of the bound" in row for row in rows["decode"]) and rows["decode"][-1]["kind"] == "long texts"
    assert rows["decode"][-1]["gathering / ours"] > 0
    assert [row["chunk"] for row in rows["decode"] if row["kind"] == "beside a prompt"] == [9]
    assert {row["system"] for row in rows["adapters"]} == {"ours", "PEFT"} and "eager / graph" in rows["adapters"][0]
    assert [(row["kind"], row["gamma"]) for row in rows["images"]] == [
        *(("profile", 0), ("batch", 0)),
        *(("profile", -2), ("batch", -2)),
    ]
    assert rows["images"][0]["latency_ms"]["2"] > 0
    assert rows["images"][1]["of the operations"] == 1.0 and rows["images"][3]["of the operations"] > 0
    assert "ours / timm" in rows["images"][-1] and "file / pinned" in rows["memory"][0]
    assert rows["onnx"][0]["cosine"] > 0.999 and "ONNX Runtime, dynamic / graphs" in rows["onnx"][0]
    law, *systems = rows["trace"]
    assert law["constant, ms"] > 0 and law["adapters, GB/s"] > 0
    assert [row["S-LoRA's order / it"] for row in systems][0] == 1.0 and len(systems) == 4
    assert all(row["first token p99, ms"] > 0 for row in systems)
    assert [(row["kind"], row["in flight"]) for row in rows["served"]] == [
        *(("texts", 1), ("texts", 2)),
        *(("at once", 1), ("at once", 2)),
    ]
    assert all(row["ours / plain"] > 0 for row in rows["served"])
    assert rows["served"][0]["plain, failed"] == 0 and rows["served"][2]["plain, first token ms"] > 0
    assert "static graphs, ms" in capsys.readouterr().out


def test_without_a_server_nothing_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = gpu_bench.run(gpu_bench.PARTS["served"], Device(None), 0)
    assert "run `make setup`" in row["not measured"]


def test_a_part_ends_after_its_minutes_and_one_that_fails_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def endless(device: Device, sizes: str, seed: int) -> Iterator[Row]:
        while True:
            yield {"sizes": sizes}

    def broken(device: Device, sizes: str, seed: int) -> Iterator[Row]:
        yield {"sizes": sizes}
        raise RuntimeError("out of memory")

    parts = {"broken": Part("one", broken, "full", "small", 1.0), "endless": Part("two", endless, "full", "small", 0.0)}
    monkeypatch.chdir(tmp_path)
    assert gpu_bench.main(["--rehearse", "--parts", "broken,endless"], parts) == 1
    out, err = capsys.readouterr()
    assert "stopped after 0 minutes" in out and "failed: broken" in err and "out of memory" in err
    files = [*(tmp_path / "build" / "bench" / "gpu" / "rehearsal").iterdir()]
    assert [json.loads(file.read_text())["rows"] for file in files] == [[{"sizes": "small"}]] * 2
    with pytest.raises(InvalidInputError, match="--parts: got 'all'; some of broken, endless"):
        gpu_bench.main(["--parts", "all"], parts)


def test_the_parts_fit_in_the_time_that_is_stated() -> None:
    minutes = [part.minutes for part in gpu_bench.PARTS.values()]
    assert max(minutes) <= 8 and sum(minutes) <= 29


def test_nothing_else_need_be_installed() -> None:
    starts = [file for file in (PROJECT / "bench" / "gpu").glob("*.py") if file.name not in SERVED]
    files = {found for file in starts for found in closure(file, PROJECT)}
    tops = {module.partition(".")[0] for file in files for module, _ in imports(file, PROJECT)}
    outside = {top for top in tops if top not in sys.stdlib_module_names and not (PROJECT / top).is_dir()}
    # Imported for a checkpoint from a GGUF file, of which the benchmark has none.
    assert outside <= NEEDED | BROUGHT | {"gguf"}
    lacking = "dict.fromkeys(['tritonclient', 'grpc', 'google', 'aiohttp', 'psutil'])"
    script = f"import sys; sys.modules.update({lacking}); import bench.gpu.__main__"
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True)
