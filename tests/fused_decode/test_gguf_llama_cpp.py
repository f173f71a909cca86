"""Models in GGUF beside llama.cpp: what its converter writes, and the tokens that it generates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.worker import Worker
from bench.fused_decode.questions import QUESTIONS
from bench.peers import gguf_in_f32
from bench.peers.protocol import DecodeRequest
from shapeshift.engines.gguf import families, files, folder, tensors
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from tests import llama_cpp_source
from tests.fused_decode.decode_models import VOCAB
from tests.fused_decode.families import CONFIGS

pytestmark = pytest.mark.long
PROJECT = llama_cpp_source.PROJECT
DEMO = PROJECT / "build" / "checkpoints" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = PROJECT / "build" / "checkpoints" / "gemma-3-270m-q4_k_m.gguf"
# What the files of llama.cpp do not state: its programs know it, and these are what they take.
FIXED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
}
TOKENS, TIE = 64, 1e-4
PLAIN = [
    *("Once upon a time", "def fibonacci(n):", "Die Katze", "The year 2024 was", "1, 2, 3, 4,", "In the beginning"),
    *('{"name": ', "Water boils at", "東京は", "# Title\n\n"),
]


def converted(name: str, place: Path) -> tuple[Any, Path]:
    """A random model of transformers, and the checkpoint folder of its GGUF file."""
    import transformers

    options = {key: value for key, value in (CONFIGS[name] | FIXED.get(name, {})).items() if value is not None}
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plus_one = name.startswith("gemma")
    for weight in model.parameters():
        is_norm = weight.dim() == 1
        weight.data = torch.randn_like(weight) * (0.2 if is_norm else 0.3) + (1.0 if is_norm and not plus_one else 0.0)
    source = place / "source"
    model.save_pretrained(source)
    vocabulary = {f"t{number}": number for number in range(VOCAB)}
    (source / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": []})
    )
    script = Path(__file__).parents[1] / "engines" / "llama_cpp_convert.py"
    file, sources = place / "model.gguf", llama_cpp_source.models().parent
    run = subprocess.run([sys.executable, str(script), str(sources), str(source), str(file)], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    read = files.read(file)
    entries = families.entries_of(read)
    (place / "config.json").write_text(json.dumps(families.config_of(read, entries)))
    tensors.write_index(place, entries)
    return model, place


def loaded(checkpoint: Path, length: int) -> DecodeModel:
    options = ModelOptions(precision="f32", slots=1, max_length=length, threads=2, cache_dir=PROJECT / "build/kernels")
    return DecodeModel.load(checkpoint, options)


def logits(model: DecodeModel, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Those at each of `ids`, which follow `start` tokens that the cache has."""
    slot, places = torch.zeros(1, dtype=torch.int32), torch.arange(len(ids))
    batch = StepBatch(ids, slot, slot + start, slot + len(ids), places[:0], further=places)
    return model.forward(batch).float().clone()


@pytest.mark.parametrize("name", [family.model_type for family in families.FAMILIES.values()])
def test_what_the_converter_writes_computes_as_in_transformers(name: str, tmp_path: Path) -> None:
    library, checkpoint = converted(name, tmp_path)
    ids = torch.arange(3, 60)
    with torch.inference_mode():
        expected = library(ids[None]).logits[0]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits(loaded(checkpoint, 128), ids), expected, atol=1e-4, rtol=1e-4)


def greedy(model: DecodeModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """TOKENS tokens, and by how much the logit of each exceeds the second one."""
    tokens: list[int] = []
    margins: list[float] = []
    ids, start = torch.tensor(prompt), 0
    while len(tokens) < TOKENS:
        two = logits(model, ids, start)[-1].topk(2)
        tokens.append(int(two.indices[0]))
        margins.append(float(two.values[0] - two.values[1]))
        start, ids = start + len(ids), torch.tensor(tokens[-1:])
    return tokens, margins


def require_tokens_of_llama_cpp(file: Path, prompts: list[str], work: Path, tie: float = TIE) -> None:
    """The first TOKENS greedy tokens of each prompt are equal, on the numbers of `file`; a tie is named and ends it."""
    from tokenizers import Tokenizer

    python = PROJECT / "build" / "peers" / "llama-cpp" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no llama.cpp in {python.parents[1]}: the benchmarks of fused_decode make it")
    plain = gguf_in_f32.write(file, work / f"{file.stem}-f32.gguf")
    checkpoint = folder.write(plain, work / "build" / "gguf")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    command = [str(python), "-m", "bench.peers.llama_cpp_worker", str(plain), "1", "f32", "256", "exact"]
    worker = Worker("llama.cpp", command, work / "llama.cpp.log")
    try:
        worker.wait_ready()
        requests = [vars(DecodeRequest(0.0, ids, TOKENS)) for ids in encoded]
        # One after another: a batch adds in another order.
        theirs = [worker.ask(requests=[request], options={})["tokens"][0] for request in requests]
    finally:
        worker.stop()
    model = loaded(checkpoint, 256)
    for prompt, ids, expected in zip(prompts, encoded, theirs, strict=True):
        tokens, margins = greedy(model, ids)
        other = next((place for place in range(TOKENS) if tokens[place] != expected[place]), TOKENS)
        assert other == TOKENS or margins[other] < tie, (prompt, other, margins[other])
        if other < TOKENS:
            print(f"a tie after {other} tokens of {prompt!r}: {margins[other]:.1e}")


def test_the_tokens_of_the_demo_are_those_of_llama_cpp(tmp_path: Path) -> None:
    if not DEMO.is_file():
        pytest.skip(f"no {DEMO}: `make setup` downloads it")
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in [*QUESTIONS][::4]]
    require_tokens_of_llama_cpp(DEMO, [*chats, *PLAIN], tmp_path)


def test_the_tokens_of_gemma_are_those_of_llama_cpp(tmp_path: Path) -> None:
    if not GEMMA.is_file():
        pytest.skip(f"no {GEMMA}: docs/fused_decode.md says how to get it")
    # llama.cpp takes GELU from a table in f16.
    require_tokens_of_llama_cpp(GEMMA, PLAIN, tmp_path, tie=1e-2)
