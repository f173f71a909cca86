"""Building and verifying text engines, with a fake provider and a fake reference model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.build_engines.text import build, edges
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.edges import Curves
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.engines.interfaces import MAX_TOKENS, Array, Ids
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.engines.providers import lookup
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.polymorph.service_times import bin_edges
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.triton import model_config
from tests.polymorph import engine_models

WIDTH = 8


def vector(ids: Ids, positions: Ids) -> Array:
    """Depends on every id and its position."""
    return np.sin(np.outer(ids * 0.37 + positions * 1.3, np.arange(1, WIDTH + 1))).mean(0).astype(np.float32)


class Reference:
    """Replaces transformers. Texts start at position 2, and the id 1 is not counted."""

    family, packs_rows, position_offset = "made up", True, 2
    max_tokens, hidden, vocabulary = 512, WIDTH, 30522

    type_stride, padding = 0, 1

    def __init__(self, checkpoint: Any, *settings: Any) -> None:
        pass

    def module(self) -> str:
        return "module"

    def require_texts(self, tokenizer: TextTokenizer) -> None:
        assert tokenizer.vocabulary == self.vocabulary

    def compute(self, ids: Ids) -> dict[str, Array]:
        counted = ids != 1
        return {"EMBEDDING": vector(ids, np.cumsum(counted) * counted + 1)}


class Provider:
    """Computes like the reference, except for what a test spoils."""

    name = "onnxruntime"

    def __init__(self) -> None:
        self.spoil: Callable[[int | None, int, Array], Array] = lambda tokens, row, value: value
        self.opened: list[tuple[int | None, int | None]] = []
        self.precision = ""
        self.exported_rows = {0, 1, 2}
        self.slow_ms: dict[int | None, float] = {}

    def version(self) -> str:
        return "1.0"

    def export(self, module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
        assert module == "module" and set(example["SEGMENTS"][0]) == self.exported_rows
        (folder / "model.made_up").write_text("weights")
        return ["model.made_up"]

    def compile(
        self, folder: Path, precision: str, tokens: int | None, rows: int | None, max_tokens: int = MAX_TOKENS
    ) -> str:
        return "model.made_up"

    def open(self, folder: Path, precision: str, threads: int, device: int | None = None) -> Provider:
        assert threads == 1
        self.precision = precision
        return self

    def used_mb(self) -> float:
        return 1.0

    def engine(self, tokens: int | None, rows: int | None) -> SimpleNamespace:
        self.opened.append((tokens, rows))

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            ids, segments, positions = (inputs[name][0] for name in ("INPUT_IDS", "SEGMENTS", "POSITIONS"))
            assert tokens in (None, len(ids)) and rows in (None, len(inputs["ROWS"]))
            time.sleep(self.slow_ms.get(tokens, 0) / 1e3)
            made = np.zeros((len(inputs["ROWS"]), WIDTH), np.float32)
            for index, number in enumerate(inputs["ROWS"]):
                own = segments == number
                if own.any():
                    made[index] = self.spoil(tokens, index, vector(ids[own], positions[own]))
            return {"EMBEDDING": made}

        return SimpleNamespace(tokens=tokens, rows=rows, run=run)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    monkeypatch.setattr("shapeshift.build_engines.model_folder.PROVIDERS", {"onnxruntime": made})
    monkeypatch.setitem(
        sys.modules, "shapeshift.engines.text.reference_model", SimpleNamespace(ReferenceModel=Reference)
    )
    return made


@pytest.fixture
def make(
    tmp_path: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str]]:
    """A function that runs `make engines` for one front with the fake provider: exit status, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(kind: str = "KIND_CPU", **parameters: object) -> tuple[int, str]:
        folder = add_front(tmp_path / "model_repository", "front", **{"provider": "onnxruntime", **parameters})
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace("KIND_CPU", kind))
        return main(["engines"]), capsys.readouterr().err

    return run


def test_verified_engines_are_published(
    provider: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, err = make(bins="8,32,512")
    assert status == 0, err
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    made.check_files(tmp_path / "build" / "engines" / "front")
    assert set(made.files) == {"model.made_up", "reference.json", "tokenizer.json", "tokenizer_config.json"}
    assert [(entry.tokens, entry.rows) for entry in made.engines] == [(None, None), (8, 2), (32, 8), (512, 16)]
    assert all(entry.max_error < 1e-6 and entry.min_cosine > 0.999999 for entry in made.engines)
    assert [point.tokens for point in made.engines[2].latency] == [32]
    assert len(made.engines[0].latency) > 5 and made.engines[0].latency[-1].tokens == 512
    assert (made.packs_rows, made.position_offset, made.vocabulary) == (True, 2, 30522)
    assert "compile and verify: the dynamic engine, 0 of 4 done" in err


def test_on_a_gpu_packs_grow_as_long_as_a_token_gets_cheaper(
    provider: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(gpus=1)
    # Of a token: 39, 21, 15 and 14 microseconds, the last not a tenth less than the one before.
    provider.slow_ms = {512: 20.0, 1024: 22.0, 2048: 30.0, 4096: 58.0}
    status, err = make("KIND_GPU", bins="16,512")
    assert status == 0, err
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    shapes = [(entry.tokens, entry.rows) for entry in made.engines]
    assert shapes == [(None, None), (16, 4), (512, 16), (1024, 128), (2048, 256)]
    assert (made.max_tokens, made.pack_tokens) == (512, 2048) and bin_edges(made) == [16, 512]
    assert all(entry.min_cosine > 0.999999 for entry in made.engines)


def small_error(value: Array) -> Array:
    return value + np.float32(0.05) * np.abs(value).max() * np.array([1, -1] * (WIDTH // 2), np.float32)


@pytest.mark.parametrize(
    ("spoiled", "spoil", "named"),
    [
        (32, lambda row, value: -value, "32 tokens"),
        (32, lambda row, value: value * np.float32(np.nan), "32 tokens"),
        (512, lambda row, value: small_error(value), "512 tokens"),
        (None, lambda row, value: small_error(value), "the dynamic engine"),
        # Only what shares a sequence with another row is wrong.
        (32, lambda row, value: value if row == 0 else -value, "32 tokens"),
    ],
)
def test_an_engine_that_differs_from_the_reference_is_named_and_not_published(
    provider: Provider,
    make: Callable[..., tuple[int, str]],
    tmp_path: Path,
    spoiled: int | None,
    spoil: Callable[[int, Array], Array],
    named: str,
) -> None:
    assert make(bins="8,32,512")[0] == 0
    before = manifest.load(tmp_path / "build" / "engines" / "front")
    provider.spoil = lambda tokens, row, value: spoil(row, value) if tokens == spoiled else value
    with np.errstate(invalid="ignore"):
        status, err = make(bins="8,32,512", pooling="cls")
    assert status == 1
    assert f"front: {named} (onnxruntime, f32) differs from the reference: cosine " in err
    assert "must be at least 0.99999" in err
    assert err.rstrip().endswith("not published: front")
    # What was published before is still there, whole.
    assert manifest.load(tmp_path / "build" / "engines" / "front") == before


def test_engines_that_differ_from_the_reference_in_bf16_are_built_in_f32(
    provider: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(bf16=True)
    provider.spoil = lambda tokens, row, value: (
        small_error(value) if (provider.precision, tokens) == ("bf16", 32) else value
    )
    status, err = make(bins="8,32", precision="bf16")
    assert status == 0, err
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    assert made.precision == "f32" and made.tolerance.startswith("cosine with the reference at least 0.99999 ")
    assert made.note.startswith("32 tokens (onnxruntime, bf16) differs from the reference: cosine ")
    assert made.note.endswith("; built in f32")
    assert [entry.tokens for entry in made.engines] == [None, 8, 32]
    generated = model_config.parameters(model_config.read(tmp_path / "build/repository/front/config.pbtxt"))
    assert generated["precision"] == "f32"
    # It is current: bf16 is not tried again until something changes.
    provider.opened.clear()
    assert make(bins="8,32", precision="bf16")[0] == 0 and not provider.opened
    # What misses f32 too is refused.
    provider.spoil = lambda tokens, row, value: small_error(value)
    status, err = make(bins="8,16", precision="bf16")
    assert status == 1 and "(onnxruntime, f32) differs from the reference" in err


def test_without_packing_an_engine_has_one_row(
    provider: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    provider.exported_rows = {0, 1}
    status, err = make(bins="8,32", packing=False)
    assert status == 0, err
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    assert [entry.rows for entry in made.engines] == [None, 1, 1] and not made.packs_rows


def test_max_tokens_beyond_the_model(provider: Provider, make: Callable[..., tuple[int, str]]) -> None:
    status, err = make(max_tokens=513)
    assert status == 1 and "max_tokens: got 513; at most 512 for this checkpoint" in err


def test_static_engines_that_are_no_faster_are_dropped(
    provider: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    # Every static engine is far slower than the dynamic one.
    provider.slow_ms = dict.fromkeys(range(1, 33), 5.0)
    status, err = make(bins="histogram", max_tokens=32, max_bins=3)
    assert status == 0, err
    assert [entry.name for entry in manifest.load(tmp_path / "build" / "engines" / "front").engines] == ["dynamic"]


# The choice of edges.


def front(**settings: Any) -> TextFrontConfig:
    return TextFrontConfig("front", Path(), None, TextEngineSettings("x", **settings), PolymorphSettings())


def never(lengths: Sequence[int]) -> Curves:
    raise AssertionError("nothing is to be timed")


def test_explicit_edges_need_no_timing() -> None:
    assert edges.choose_edges(front(bins="3,9"), never) == [3, 9]
    assert edges.choose_edges(front(bins="none"), never) == []


def test_probe_lengths_include_the_longest() -> None:
    for settings in ({"max_tokens": 5}, {"max_tokens": 300}, {"max_tokens": 300, "bins": "staircase"}):
        lengths = edges.probe_lengths(front(**settings))
        assert lengths == sorted(set(lengths)) and lengths[0] >= 1
        assert lengths[-1] == settings["max_tokens"]


def test_edges_from_curves() -> None:
    def straight(lengths: Sequence[int]) -> Curves:
        return Curves(list(lengths), [1.0 + length for length in lengths], None)

    chosen = edges.choose_edges(front(max_bins=4), straight)
    assert len(chosen) == 4 and chosen == sorted(set(chosen)) and chosen[-1] == 512

    def with_dynamic(factor: float) -> Callable[[Sequence[int]], Curves]:
        return lambda lengths: Curves(list(lengths), [1.0 + n for n in lengths], [factor * (1.0 + n) for n in lengths])

    # A dynamic engine that is as fast at every length leaves nothing for static ones.
    assert edges.choose_edges(front(max_bins=4), with_dynamic(0.5)) == [512]
    assert len(edges.choose_edges(front(max_bins=4), with_dynamic(5.0))) == 4


@pytest.mark.parametrize("dynamic_ms", [None, 1.0])
def test_what_no_choice_of_lengths_makes_fast_enough_is_told(dynamic_ms: float | None) -> None:
    def probe(lengths: Sequence[int]) -> Curves:
        return Curves(list(lengths), [2.0] * len(lengths), [dynamic_ms] * len(lengths) if dynamic_ms else None)

    least = dynamic_ms or 2.0
    assert edges.choose_edges(front(), probe, least + 0.01)
    with pytest.raises(edges.TooSlowError, match=f"a text takes at least {least:.3g} ms"):
        edges.choose_edges(front(), probe, least - 0.01)


def entry(tokens: int | None, *points: tuple[int, float]) -> EngineEntry:
    latency = tuple(Latency(tokens=at, rows=1, median_ms=ms, p99_ms=ms, best_ms=ms) for at, ms in points)
    return EngineEntry("file", tokens, None, 0.0, 1.0, latency)


def test_only_engines_that_are_faster_over_their_bin_are_kept() -> None:
    dynamic = entry(None, (1, 1.0), (64, 64.0))
    fast, slow, last = entry(8, (8, 2.0)), entry(32, (32, 31.5)), entry(64, (64, 40.0))
    chosen = front(max_tokens=64)
    assert edges.keep_faster(chosen, [fast, slow, last], dynamic) == [fast, last]
    assert edges.keep_faster(chosen, [slow], None) == [slow]
    assert edges.keep_faster(front(max_tokens=64, bins="8,32"), [fast, slow], dynamic) == [fast, slow]


# Two providers of which the faster one is taken.


@pytest.fixture
def rival(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    made.name = "tensorrt"
    monkeypatch.setattr(lookup, "rival", lambda requested, gpus, config: made)
    return made


@pytest.mark.parametrize("slow", ["tensorrt", "onnxruntime"])
def test_the_provider_with_the_faster_profile_is_taken(
    provider: Provider, rival: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path, slow: str
) -> None:
    (provider if slow == provider.name else rival).slow_ms = {None: 8.0}
    status, err = make(bins="none")
    assert status == 0, err
    folder = tmp_path / "build" / "engines" / "front"
    made, taken = manifest.load(folder), "onnxruntime" if slow == "tensorrt" else "tensorrt"
    made.check_files(folder)
    assert made.provider == taken and provider.opened and rival.opened
    assert (
        made.note.startswith(f"provider auto: {taken}, ") and f" ms a text by the profile; {slow} takes " in made.note
    )
    generated = model_config.parameters(model_config.read(tmp_path / "build/repository/front/config.pbtxt"))
    assert generated["provider"] == taken
    assert sorted(path.name for path in folder.parent.iterdir()) == ["front"], "nothing of the other is left"
    # It is current as it is.
    provider.opened.clear()
    assert make(bins="none")[0] == 0 and not provider.opened


def test_engines_that_are_slower_at_every_length_are_not_all_built(
    provider: Provider, rival: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    provider.slow_ms = {None: 8.0, **dict.fromkeys(probed := [8, 16, 32, 64, 128, 256, 512], 6.0)}
    assert make()[0] == 0
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    assert made.provider == "tensorrt" and "; onnxruntime takes at least " in made.note
    assert [tokens for tokens, _ in provider.opened] == [*probed, None], "none but to be timed"


def test_a_rival_that_fails_is_left(
    provider: Provider, rival: Provider, make: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    provider.slow_ms = {None: 2.0}
    rival.spoil = lambda tokens, row, value: -value
    assert make(bins="none")[0] == 0
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    assert made.provider == "onnxruntime"
    assert made.note.startswith(
        "provider auto: onnxruntime, because tensorrt failed: the dynamic engine (tensorrt, f32)"
    )


@pytest.mark.parametrize("asked", [{"bins": "8,32"}, {"placement": "partitioned", "slo_ms": 50}])
def test_who_asks_for_engines_of_lengths_gets_them(
    provider: Provider, rival: Provider, make: Callable[..., tuple[int, str]], asked: dict[str, object]
) -> None:
    status, err = make(**asked)
    assert status == 0, err
    assert provider.opened and not rival.opened


def profiled(provider: str, dynamic_ms: Sequence[float], static: Mapping[int, float]) -> Manifest:
    """Engines that were measured at 1 and 64 tokens, and static ones."""

    def entry(tokens: int | None, times: Mapping[int, float]) -> EngineEntry:
        return EngineEntry("", tokens, 1, 0.0, 1.0, tuple(Latency(at, 1, ms, ms, ms) for at, ms in times.items()))

    entries = [entry(None, dict(zip((1, 64), dynamic_ms, strict=True)))]
    entries += [entry(tokens, {tokens: ms}) for tokens, ms in static.items()]
    return replace(engine_models.made(provider), engines=tuple(entries))


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        # Short texts are faster on torch's graph of 16 tokens, long ones on TensorRT.
        ({8: 1.0}, "torch"),
        ({60: 1.0}, "tensorrt"),
        ({8: 9.0, 60: 1.0}, "torch"),
        ({8: 1.0, 60: 9.0}, "tensorrt"),
    ],
)
def test_a_profile_counts_as_texts_are_long(lengths: Mapping[int, float], taken: str) -> None:
    torch = profiled("torch", (2.0, 4.0), {16: 0.5})
    tensorrt = profiled("tensorrt", (1.0, 3.0), {16: 0.7})
    weights = [lengths.get(length, 0.0) for length in range(1, 65)]
    assert build.faster(torch, tensorrt, weights)[0].provider == taken
    assert build.faster(torch, replace(torch, provider="tensorrt"), weights)[0].provider == "torch", "as fast"
    assert build.faster(torch, replace(torch, provider="native"), weights)[0].provider == "native", "as fast, and one"
