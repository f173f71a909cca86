"""Engines on the native kernels, compared with the reference model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.execution.engine_set import pack, unpack
from shapeshift.engines.interfaces import PROVIDERS, Array, Engine, Ids, ThreadedEngine
from shapeshift.engines.native import export
from shapeshift.engines.native.encoder import WEIGHTS, description, value_type
from shapeshift.engines.native.layouts import LAYOUTS
from shapeshift.engines.settings import POOLINGS
from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.families import FAMILIES, family_of
from shapeshift.engines.verify import ReferenceTexts
from shapeshift.errors import EngineError, UnsupportedError
from shapeshift.fused_decode.model.quantised import LevelLinear
from shapeshift.kernels import kernel_build
from shapeshift.kernels.levels import quantise
from tests.engines.families import VOCABULARY, kernels_beside, save_model, save_modules
from tests.engines.test_engines_vectors import save_token_heads
from tests.fused_decode import kernel_tests

FILE = "tests/engines/test_engines_native.py"
# Of one part of a text's attention, of some, and of many.
LENGTHS = (5, 1, 17, 129, 64, 330)
MOST = 400
GROUP = 128


def reference_of(folder: Path, *outputs: str) -> Any:
    from shapeshift.engines.text.reference_model import ReferenceModel

    checkpoint = open_checkpoint(folder)
    modules = sentence_modules.read(folder).resolved("auto", "auto", family_of(checkpoint.config).pooling)
    return ReferenceModel(checkpoint, modules, outputs or ("EMBEDDING",))


def exported(reference: Any, folder: Path, precision: str = "f32") -> Path:
    """The folder of the engines of a model."""
    target = kernels_beside(folder)
    offset = reference.position_offset
    PROVIDERS["native"].export(reference.module(), pack(texts(7, 9), 24, 2, offset), target, precision)
    return target


def opened(folder: Path, precision: str = "f32", tokens: int | None = None, threads: int = 1) -> Engine:
    return PROVIDERS["native"].open(folder, precision, threads).engine(tokens, None if tokens is None else 16)


def texts(*lengths: int) -> list[Ids]:
    return [np.random.default_rng(length).integers(4, VOCABULARY, length) for length in lengths]


def computed(engine: Engine, rows: Sequence[Ids], offset: int = 0) -> dict[str, Array]:
    """The outputs of a pack of `rows`."""
    inputs = pack(rows, engine.tokens or sum(map(len, rows)), engine.rows or len(rows), offset)
    return unpack(engine.run(inputs), rows)


@pytest.mark.parametrize("family", LAYOUTS)
def test_packs_are_computed_as_transformers_computes_each_text(family: str, tmp_path: Path) -> None:
    task = "AutoModelForSequenceClassification" if FAMILIES[family].classifies else "AutoModel"
    folder = save_model(tmp_path / "model", family, task, max_position_embeddings=MOST, num_hidden_layers=2)
    outputs = ("EMBEDDING", "LOGITS") if FAMILIES[family].classifies else ("EMBEDDING",)
    reference, rows = reference_of(folder, *outputs), texts(*LENGTHS)
    expected = [reference.compute(row) for row in rows]
    engines = exported(reference, tmp_path)
    # One that is longer than its texts, and one whose two threads share the work.
    for engine in (opened(engines), opened(engines, tokens=600), opened(engines, threads=2)):
        found = computed(engine, rows, reference.position_offset)
        for name in outputs:
            np.testing.assert_allclose(found[name], [one[name] for one in expected], atol=1e-4, rtol=0)
    vectors = [one["EMBEDDING"] for one in expected]
    assert np.ptp(vectors, axis=0).max() > 0.05, "the model tells the texts apart"


@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.995), ("int8", 0.98)])
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "qwen3", "deberta-v2"])
def test_fewer_bits_are_as_close_as_they_allow(
    family: str, precision: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "cpu_has_bf16", lambda: True)
    folder = save_model(tmp_path / "model", family, max_position_embeddings=MOST, hidden_size=64)
    reference, rows = reference_of(folder), texts(*LENGTHS)
    engines = exported(reference, tmp_path, precision)
    assert value_type(engines) is torch.bfloat16
    found = computed(opened(engines, precision), rows, reference.position_offset)
    cosines = [
        float(one @ reference.compute(row)["EMBEDDING"]) for one, row in zip(found["EMBEDDING"], rows, strict=True)
    ]
    assert min(cosines) > least


# Of the random models, those whose vectors change most where words are levels: to 0.945 and 0.968.
SENSITIVE = ("qwen2", "llama")


class _LevelLinear(torch.nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self._linear = LevelLinear(quantise(linear.weight, 8, GROUP), linear.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)


@pytest.mark.parametrize("family", LAYOUTS)
def test_levels_are_multiplied_as_torch_multiplies_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against the library's model with linears and words of levels, loosely against that of the checkpoint."""
    monkeypatch.setattr(export, "cpu_has_bf16", lambda: False)
    # The MLP has inputs of two groups, of which the second is not full.
    sizes: Any = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "max_position_embeddings": MOST}
    folder = save_model(tmp_path / "model", family, **sizes)
    reference, rows = reference_of(folder), texts(*LENGTHS)
    plain = [reference.compute(row)["EMBEDDING"] for row in rows]
    found = computed(opened(exported(reference, tmp_path, "int8"), "int8"), rows, reference.position_offset)
    model, layout = reference.module().model, LAYOUTS[family]
    words = model.get_submodule(layout.words)
    words.weight.data = quantise(words.weight, 8, GROUP).weight()
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and path.startswith((layout.layers, layout.project or "no such")):
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, _LevelLinear(module))
    # What linears make of DeBERTa's places is no row of a text: ours are in f32.
    least = 0.99 if layout.places else 0.9999
    for vector, row, one in zip(found["EMBEDDING"], rows, plain, strict=True):
        assert vector @ reference.compute(row)["EMBEDDING"] > least
        assert vector @ one > (0.9 if family in SENSITIVE else 0.97)


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("family", "task", "outputs"),
    [
        ("bert", "AutoModelForTokenClassification", ("TOKEN_LOGITS",)),
        ("xlm-roberta", "AutoModel", ("EMBEDDING", "TOKEN_EMBEDDING", "TOKEN_WEIGHTS")),
        ("qwen3", "AutoModel", ("TOKEN_EMBEDDING",)),
        ("bert", "AutoModelForMaskedLM", ("TERM_WEIGHTS",)),
        ("modernbert", "AutoModelForSequenceClassification", ("EMBEDDING", "LOGITS")),
    ],
)
def test_every_output_passes_the_verification(
    family: str, task: str, outputs: Sequence[str], precision: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family, task)
    if "TOKEN_WEIGHTS" in outputs:
        save_token_heads(folder)
    reference = reference_of(folder, *outputs)
    offset = reference.position_offset
    verified = ReferenceTexts(reference.compute, 2, 3, VOCABULARY, reference.padding, offset - 1 if offset else None)
    engines = exported(reference, tmp_path, precision)
    packs = [[40], [1], [2], *([[5, 9, 17]] if reference.packs_rows else [])]
    for tokens in (None, 64):
        engine = opened(engines, precision, tokens)
        verified.deviation(partial(computed, engine, offset=offset), packs).require_within(precision, family)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_is_that_of_the_library(pooling: str, tmp_path: Path) -> None:
    folder = save_modules(save_model(tmp_path / "model", "bert"), pooling, normalize=pooling == "mean")
    reference, rows = reference_of(folder), texts(5, 1, 17)
    for engine in (opened(exported(reference, tmp_path)), opened(exported(reference, tmp_path), tokens=64)):
        found = computed(engine, rows)["EMBEDDING"]
        np.testing.assert_allclose(found, [reference.compute(row)["EMBEDDING"] for row in rows], atol=1e-4, rtol=0)


def test_a_text_has_the_same_vector_in_every_pack(tmp_path: Path) -> None:
    """To the bit: answers depend on no other client."""
    reference = reference_of(save_model(tmp_path / "model", "modernbert", max_position_embeddings=MOST))
    for precision, error in (("f32", 1e-6), ("bf16", 1e-2), ("int8", 1e-6)):
        engine = opened(exported(reference, tmp_path, precision), precision)
        rows = texts(*LENGTHS)
        together = computed(engine, rows)["EMBEDDING"]
        alone = [computed(engine, [row])["EMBEDDING"][0] for row in rows]
        np.testing.assert_allclose(together, alone, atol=error, rtol=0)


@pytest.fixture
def threads_of_the_process() -> Iterator[None]:
    """torch gives a thread this number when it is first asked for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_of_the_process")
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8"])
def test_threads_change_no_bit(precision: str, tmp_path: Path) -> None:
    reference = reference_of(save_model(tmp_path / "model", "modernbert", max_position_embeddings=MOST))
    engine = opened(exported(reference, tmp_path, precision), precision)
    rows = texts(*LENGTHS)
    assert isinstance(engine, ThreadedEngine)
    found = {}

    def compute() -> None:
        # The setting is that of the calling thread.
        for threads in (1, 2, 3, 8):
            engine.use(threads)
            found[torch.get_num_threads()] = computed(engine, rows)["EMBEDDING"].copy()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [*found] == [1, 2, 3, 8] and all((one == found[1]).all() for one in found.values())


def test_a_call_that_gives_up_threads_computes_the_same(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", max_position_embeddings=MOST, num_hidden_layers=2)
    engine = opened(exported(reference_of(folder), tmp_path))
    assert isinstance(engine, ThreadedEngine)
    rows, found = texts(*LENGTHS), []
    expected = computed(engine, rows)["EMBEDDING"].copy()

    def compute() -> None:
        for _ in range(100):
            engine.use(4)
            found.append(computed(engine, rows)["EMBEDDING"].copy())

    thread = threading.Thread(target=compute)
    thread.start()
    while thread.is_alive():
        engine.use(1)
    assert len(found) == 100 and all((one == expected).all() for one in found)


def test_weights_packed_on_another_cpu_are_packed_again(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    reference, rows = reference_of(save_model(tmp_path / "model", "bert")), texts(5, 9)
    engines = exported(reference, tmp_path)
    expected = computed(opened(engines), rows)["EMBEDDING"]
    file = engines / "encoder.safetensors"
    with safe_open(file, framework="pt") as content:
        description = json.loads(content.metadata()["description"])
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    panel, other = description["panel"], description["panel"] // 2
    for name, (_, inputs) in description["sizes"].items():
        tensors[name] = tensors[name].view(-1, inputs, 2, other).transpose(1, 2).reshape(-1).contiguous()
    save_file(tensors, file, {"description": json.dumps({**description, "panel": other})})
    np.testing.assert_array_equal(computed(opened(engines), rows)["EMBEDDING"], expected)
    save_file(tensors, file, {"description": json.dumps({**description, "panel": panel})})
    assert np.abs(computed(opened(engines), rows)["EMBEDDING"] - expected).max() > 0.01


@pytest.mark.parametrize(
    ("family", "outputs", "precision", "said"),
    [
        ("bert", ("EMBEDDING", "IMPORTANCE"), "f32", "IMPORTANCE"),
        ("bert", ("EMBEDDING",), "f16", "precision: provider native computes in f32, bf16, int8, not f16"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(
    family: str, outputs: Sequence[str], precision: str, said: str, tmp_path: Path
) -> None:
    reference = reference_of(save_model(tmp_path / "model", family), *outputs)
    with pytest.raises(UnsupportedError, match=said):
        exported(reference, tmp_path, precision)


def test_a_family_without_a_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_of(save_model(tmp_path / "model", "electra"))
    monkeypatch.delitem(LAYOUTS, "electra")
    with pytest.raises(UnsupportedError, match="model_type: provider native computes bert, .*, not 'electra'"):
        exported(reference, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_buckets": -1},
        {"max_relative_positions": 50},
        {"pos_att_type": ["c2p"]},
        {"pos_att_type": ["p2c"], "share_att_key": False},
        {"share_att_key": False},
        {"norm_rel_ebd": "none"},
        {"relative_attention": False, "position_biased_input": True},
        {"position_buckets": 256, "max_position_embeddings": 700},
    ],
)
def test_every_kind_of_deberta(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "deberta-v2", **{"max_position_embeddings": MOST, **changes})
    reference = reference_of(folder)
    rows = texts(*LENGTHS, *([690] if changes.get("max_position_embeddings") else []))
    found = computed(opened(exported(reference, tmp_path)), rows)["EMBEDDING"]
    np.testing.assert_allclose(found, [reference.compute(row)["EMBEDDING"] for row in rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv_kernel_size": 3, "conv_act": "gelu"}, "conv_kernel_size"),
        ({"embedding_size": 8}, "embedding_size"),
        ({"position_buckets": 8, "max_relative_positions": 4}, "position_buckets 8, max_relative_positions 4"),
        (
            {"max_relative_positions": 8},
            "position_buckets 8, max_relative_positions 8: provider native computes no distances that skip",
        ),
    ],
)
def test_a_deberta_that_the_kernels_do_not_compute_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    reference = reference_of(save_model(tmp_path / "model", "deberta-v2", **changes))
    with pytest.raises(UnsupportedError, match=said):
        exported(reference, tmp_path)


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    engines = exported(reference_of(save_model(tmp_path / "model", "bert")), tmp_path)
    described = description(engines)
    del described["values"]
    save_file(load_file(engines / WEIGHTS), engines / WEIGHTS, {"description": json.dumps(described)})
    with pytest.raises(EngineError, match="built by another version; run `shapeshift engines`"):
        opened(engines)


def test_ids_and_positions_outside_of_the_tables_are_refused(tmp_path: Path) -> None:
    engine = opened(exported(reference_of(save_model(tmp_path / "model", "bert")), tmp_path))
    for wrong in ([VOCABULARY], [-1], [5] * 65):
        with pytest.raises(RuntimeError, match=f"must be 0 to {VOCABULARY - 1}"):
            computed(engine, [np.array(wrong)])
    assert computed(engine, texts(64))["EMBEDDING"].shape == (1, 16)


def test_a_text_longer_than_the_table_of_distances_is_refused(tmp_path: Path) -> None:
    reference = reference_of(save_model(tmp_path / "model", "mpnet"))
    engine = opened(exported(reference, tmp_path))
    inputs = pack([np.arange(4, 40)] * 2, 72, 2, reference.position_offset)
    with pytest.raises(RuntimeError, match="segments: at most 64 alike"):
        engine.run({**inputs, "SEGMENTS": np.ones((1, 72), np.int64)})


def test_without_a_compiler_there_are_no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"provider native: no g\+\+; install a C\+\+ compiler"):
        PROVIDERS["native"].version()


@pytest.mark.long
@pytest.mark.skipif("avx2" not in kernel_build.cpu_flags().split(), reason="needs AVX2")
def test_kernels_of_avx2_compute_the_same() -> None:
    kernel_tests.passed("tests.fused_decode.avx2", FILE, "-m", "not long")


@pytest.mark.long
@pytest.mark.skipif("avx512_bf16" not in kernel_build.cpu_flags().split(), reason="needs avx512_bf16")
def test_kernels_of_amx_compute_the_same() -> None:
    kernel_tests.passed("tests.fused_decode.amx", FILE, "-m", "not long")
