"""Several texts in one call of provider torch: each attends to itself, as if it were alone."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.execution.engine_set import pack, unpack
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers import packed_attention
from shapeshift.engines.providers.packed_attention import attend, kernels_for, offsets_of, varlen_kernels
from shapeshift.engines.text import sentence_modules
from shapeshift.engines.text.families import FAMILIES, family_of
from shapeshift.engines.verify import MIN_COSINE, compare
from tests.engines.families import CONFIGS, VOCABULARY, outputs_of_engines, save_model
from tests.engines.test_engines_torch import opened, texts
from tests.sampling import few

PACKING = [name for name in CONFIGS if FAMILIES[name].packs_rows]
LENGTHS = (7, 1, 0, 20, 4)
WINDOWS = [(-1, -1), (-1, 0), (3, 3), (3, 0)]


def reference_of(folder: Path, *outputs: str) -> Any:
    from shapeshift.engines.text.reference_model import ReferenceModel

    checkpoint = open_checkpoint(folder)
    modules = sentence_modules.read(folder).resolved("auto", "auto", family_of(checkpoint.config).pooling)
    return ReferenceModel(checkpoint, modules, outputs or ("EMBEDDING",))


def operators(folder: Path) -> int:
    program = torch.export.load(folder / "model.pt2")
    return sum("shapeshift.packed_attention" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("family", few(PACKING, ("mpnet", "modernbert")))
def test_a_pack_computes_what_each_text_gives_alone(tmp_path: Path, family: str) -> None:
    reference = reference_of(save_model(tmp_path / "model", family))
    wanted = [reference.compute(text)["EMBEDDING"] for text in texts()]
    assert min(np.ptp(wanted, axis=0)) > 1e-3, "the texts differ"
    for found in outputs_of_engines(reference, texts(), tmp_path, "torch"):
        np.testing.assert_allclose([own["EMBEDDING"] for own in found], wanted, atol=1e-5)
    layers = 0 if family == "mpnet" else CONFIGS[family].get("num_hidden_layers", CONFIGS[family].get("n_layers"))
    assert operators(tmp_path) == layers


@pytest.mark.parametrize("kind", few(("f16", "bf16"), ("bf16",)))
@pytest.mark.parametrize("family", few(("roberta", "modernbert", "qwen3"), ("roberta",)))
def test_a_pack_in_fewer_bits(tmp_path: Path, family: str, kind: str) -> None:
    reference = reference_of(save_model(tmp_path / "model", family))
    wanted = np.stack([reference.compute(text)["EMBEDDING"] for text in texts()])
    engine, total = opened(tmp_path, reference, kind).engine(None, None), sum(map(len, texts()))
    found = unpack(engine.run(pack(texts(), total, len(texts()), reference.position_offset)), texts())["EMBEDDING"]
    assert compare(found, wanted).min_cosine >= MIN_COSINE[kind]
    assert operators(tmp_path) > 0


def test_attention_that_is_an_output_is_not_left_to_the_operator(tmp_path: Path) -> None:
    reference = reference_of(save_model(tmp_path / "model", "bert"), "EMBEDDING", "IMPORTANCE")
    opened(tmp_path, reference, "f32")
    assert operators(tmp_path) == 0


def test_an_export_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    """The reference, and exports for other providers, have masks."""
    reference = reference_of(save_model(tmp_path / "model", "bert"))
    before, config = reference.compute(texts()[0])["EMBEDDING"], reference._model.config
    opened(tmp_path, reference, "f32")
    assert config._attn_implementation == "sdpa"
    np.testing.assert_array_equal(reference.compute(texts()[0])["EMBEDDING"], before)


def drawn(
    kv_heads: int = 4, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and offsets of texts of LENGTHS."""
    chance, total = torch.Generator().manual_seed(5), sum(LENGTHS)
    query, key, value = (
        torch.randn(total, heads, 8, generator=chance).to(device, dtype) for heads in (4, kv_heads, kv_heads)
    )
    return query, key, value, torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device=device)


def one_at_a_time(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What torch documents of `varlen_attn`, text after text, in plain torch."""
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    longest = int(cu_seq_q.diff()[:-1].max())
    assert len(query) >= max_q >= longest and max_k == max_q
    found, (left, right) = torch.full_like(query, float("nan")), window_size
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        # Of a longer text no program computes what it has more.
        end = min(end, start + max_q)
        own, keys, values = query[start:end], key[start:end], value[start:end]
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (left >= 0) & (distance > left) | (right >= 0) & (-distance > right)
        scores = torch.einsum("qhd,khd->hqk", own, keys) * scale
        scores = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        found[start:end] = torch.einsum("hqk,khd->qhd", scores, values)
    return found


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_mask_and_the_varlen_kernels_compute_the_same(window: tuple[int, int], kv_heads: int) -> None:
    given = drawn(kv_heads)
    masked = torch.ops.shapeshift.packed_attention(*given, 0.3, *window, 0)
    torch.testing.assert_close(attend(*given, 0.3, *window, 0, one_at_a_time), masked)
    assert masked.isfinite().all() and masked.is_contiguous()


def test_what_no_text_uses_may_be_longer_than_any_text() -> None:
    query, key, value, _ = drawn()
    given = query, key, value, torch.tensor([0, 3, 5, len(query)], dtype=torch.int32)
    masked = torch.ops.shapeshift.packed_attention(*given, 0.3, -1, -1, 3)
    found = attend(*given, 0.3, -1, -1, 3, one_at_a_time)
    torch.testing.assert_close(found[:5], masked[:5])
    assert (found[5:] == 0).all(), "an undefined value times a weight of 0 may be NaN"


def test_an_exported_engine_takes_the_varlen_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which path is taken is decided where the engine runs, not where it was exported."""
    reference = reference_of(save_model(tmp_path / "model", "qwen3"))
    engine = opened(tmp_path, reference, "f32").engine(None, None)
    # More rows and tokens than the texts take: what is left is a text too.
    inputs, calls = pack(texts(), 64, 8, reference.position_offset), list[int]()
    before = engine.run(inputs)["EMBEDDING"][: len(texts())]

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(len(args[3]))
        return one_at_a_time(*args, **named)

    monkeypatch.setattr(packed_attention, "kernels_for", lambda query: noted)
    np.testing.assert_allclose(engine.run(inputs)["EMBEDDING"][: len(texts())], before, atol=1e-5)
    assert calls == [10]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_varlen_kernels_of_this_torch_take_the_call(window: tuple[int, int]) -> None:
    """As torch traces it, without a GPU."""
    kernels = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    assert "window_size" in inspect.signature(kernels).parameters
    with torch.device("meta"):
        given = drawn(2, "meta", torch.float16)
    found = attend(*given, 0.3, *window, 0, kernels)
    assert found.shape == given[0].shape and found.dtype == torch.float16


def test_where_the_varlen_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    capability, kernels = [(8, 0)], list[Any]([one_at_a_time])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(packed_attention, "varlen_kernels", lambda: kernels[0])

    def takes(**changed: Any) -> bool:
        query = {"is_cuda": True, "dtype": torch.float16, "shape": (5, 4, 64), "device": "cuda:0", **changed}
        return kernels_for(SimpleNamespace(**query)) is not None  # type: ignore[arg-type]

    assert takes() and takes(dtype=torch.bfloat16) and takes(shape=(5, 4, 256))
    assert not takes(is_cuda=False) and not takes(dtype=torch.float32)
    assert not takes(shape=(5, 4, 12)) and not takes(shape=(5, 4, 264))
    capability[0] = (7, 5)
    assert not takes(), "a T4 has no FlashAttention"
    capability[0], kernels[0] = (9, 0), None
    assert not takes()


@pytest.mark.parametrize("missing", ["flash", "module", "window"])
def test_a_torch_without_such_kernels(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    module = None if missing == "module" else SimpleNamespace(varlen_attn=lambda query, key, value: query)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: missing != "flash")
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    varlen_kernels.cache_clear()
    try:
        assert varlen_kernels() is None
    finally:
        varlen_kernels.cache_clear()


def test_the_offsets_of_a_pack() -> None:
    inputs = pack(texts()[:3], 30, 5)
    segments, rows = (torch.from_numpy(inputs[name]) for name in ("SEGMENTS", "ROWS"))
    assert offsets_of(segments, rows).tolist() == [0, 5, 6, 23, 23, 23, 30]
    # As a graph is captured: no kernel may read beyond the pack.
    found = offsets_of(torch.ones(1, 30, dtype=torch.int64), torch.ones(5, dtype=torch.int64))
    assert found.dtype == torch.int32 and found.tolist() == [0, 30, 30, 30, 30, 30, 30]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_varlen_kernels_on_a_gpu(window: tuple[int, int], kv_heads: int) -> None:
    given = drawn(kv_heads, "cuda:0", torch.float16)
    if kernels_for(given[0]) is None:
        pytest.skip("this GPU or this torch has no varlen kernels")
    found = torch.ops.shapeshift.packed_attention(*given, 0.3, *window, 0).float().cpu()
    query, key, value, offsets = (one.cpu() for one in given)
    wide = query.float(), key.float(), value.float()
    expected = torch.ops.shapeshift.packed_attention(*wide, offsets, 0.3, *window, 0)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_a_pack_on_a_gpu(tmp_path: Path, family: str) -> None:
    """Graph and eager, in f16, with texts of other lengths in the graph than it was captured with."""
    reference = reference_of(save_model(tmp_path / "model", family))
    opened(tmp_path, reference, "f16")
    runtime, rng = PROVIDERS["torch"].open(tmp_path, "f16", 1, 0), np.random.default_rng(3)
    graph, eager = runtime.engine(64, 8), runtime.engine(None, None)
    for lengths in ((5, 1, 17, 9, 3), (48,), (1, 1, 1, 30)):
        given = [rng.integers(3, VOCABULARY, length, dtype=np.int64) for length in lengths]
        wanted = np.stack([reference.compute(text)["EMBEDDING"] for text in given])
        for engine in (graph, eager):
            inputs = pack(given, engine.tokens or sum(lengths), engine.rows or len(given), reference.position_offset)
            found = unpack(engine.run(inputs), given)["EMBEDDING"]
            assert compare(found, wanted).min_cosine >= MIN_COSINE["f16"]
