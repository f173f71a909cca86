"""Every family against transformers: chunks of prompts, rows that join and leave, texts beyond windows and ropes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

from shapeshift.engines.verify import MIN_COSINE
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.architecture import FAMILIES
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from tests.fused_decode.decode_models import LONGEST, WINDOW, Tiny, batch, teacher_forced, texts
from tests.fused_decode.families import CASES, CONFIGS, ORIGINAL, make, reference_logits
from tests.fused_decode.rank_groups import connected
from tests.fused_decode.toy import LETTERS, Run, ids
from tests.sampling import few

LOGITS_TOLERANCE = 1e-4
RANKS_TOLERANCE = 1e-5
TIE = 1e-3
SLOTS = 4

# Which show each thing that the operations in plain torch compute too.
IN_TORCH = ("qwen3_5_text", "phi3", "gemma2", "gpt_neox", "gpt_oss", "llama, dynamic rope")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    return cache(lambda name: make(name, tmp_path_factory.mktemp("family")))


@pytest.fixture
def load(kernel_cache: Path) -> Callable[..., DecodeModel]:
    def run(folder: Path, precision: str = "f32", native: bool = True) -> DecodeModel:
        return DecodeModel.load(
            folder,
            ModelOptions(
                precision=precision, slots=SLOTS, max_length=LONGEST, threads=1, native=native, cache_dir=kernel_cache
            ),
            lambda line: None,
        )

    return run


def test_every_family_is_tested() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize(("case", "native"), [*((case, True) for case in CASES), *((case, False) for case in IN_TORCH)])
def test_logits_along_texts(
    family: Callable[[str], Tiny], load: Callable[..., DecodeModel], case: str, native: bool
) -> None:
    """In two rounds, so that slots are used again; rows join and leave at every step."""
    model = load(family(case).folder, native=native)
    assert model.operations.name == ("native" if native else "torch")
    assert (model.fused_forward is not None) == (native and model.network.is_one_operation)
    seen = 0
    for seed in (1, 2):
        given = texts(SLOTS, seed=seed)
        assert min(map(len, given)) < ORIGINAL < max(map(len, given)) and min(map(len, given)) > WINDOW
        expected = [reference_logits(family(case), tokens) for tokens in given]
        for text, place, logits in teacher_forced(model, given, [2, 0, 3, 1], seed=seed):
            assert (logits - expected[text][place]).abs().max() < LOGITS_TOLERANCE
            seen += 1
    assert seen > 60


@pytest.mark.parametrize("case", few(CASES, IN_TORCH))
def test_greedy_texts(family: Callable[[str], Tiny], load: Callable[..., DecodeModel], case: str) -> None:
    model, new = load(family(case).folder), 64
    prompts = [tokens[:length] for tokens, length in zip(texts(3, seed=3), (20, 5, 20), strict=True)]
    spans = [len(prompt) + new for prompt in prompts]
    starts, slots, pieces, answers = [0] * 3, [3, 1, 2], prompts, list(prompts)
    for _ in range(new):
        logits = model.forward(batch(pieces, slots, starts, spans=spans))
        starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
        pieces = list(logits.argmax(dim=1, keepdim=True))
        answers = [torch.cat(both) for both in zip(answers, pieces, strict=True)]
    for prompt, answer in zip(prompts, answers, strict=True):
        best = reference_logits(family(case), answer)[len(prompt) - 1 : -1]
        chosen = best.gather(1, answer[len(prompt) :, None])[:, 0]
        assert (best.max(dim=1).values - chosen).max() < TIE


@pytest.mark.parametrize("case", few(CASES, IN_TORCH))
def test_two_ranks_compute_what_one_does(
    family: Callable[[str], Tiny],
    load: Callable[..., DecodeModel],
    case: str,
    kernel_cache: Path,
    tmp_path: Path,
) -> None:
    """Within 1e-5 of the largest logit."""
    folder, given = family(case).folder, texts(2, seed=6)
    options = {"slots": SLOTS, "max_length": LONGEST, "kernel_cache": str(kernel_cache)}
    a = load(folder).architecture
    reasons = {
        "it has experts": a.experts is not None,
        "its layers are not alike": bool(a.varied),
        "its norms are of all queries": a.qk_norm == "row",
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        refused = f"tensor_parallel_size: got 2; 1 for {a.family}: {reason}"
        with pytest.raises(InvalidInputError, match=refused), connected(folder, 2, tmp_path / "ranks", **options):
            pass
        return
    alone = teacher_forced(load(folder), given, [2, 0], seed=7)
    with connected(folder, 2, tmp_path / "ranks", **options) as ranks:
        together = teacher_forced(ranks, given, [2, 0], seed=7)
        for (*place, expected), (*same, found) in zip(alone, together, strict=True):
            assert place == same and (found - expected).abs().max() < RANKS_TOLERANCE * expected.abs().max()


class Recorder:
    """A model that keeps the text of each slot; `texts` are those that have ended, with what the model wants next."""

    def __init__(self, model: DecodeModel) -> None:
        self._model = model
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.slots, self.blocks = model.slots, model.blocks
        self.eos_ids: frozenset[int] = frozenset()
        self.longest_step_s = 0.0
        self.feed, self.copy_states = None, model.copy_states
        self.texts: list[tuple[torch.Tensor, int]] = []
        self._held: list[list[int]] = [[] for _ in range(model.slots)]

    def ready(self) -> bool:
        return True

    def forward(self, step: StepBatch) -> torch.Tensor:
        logits = self._model.forward(step)
        pieces = step.tokens.split(step.lengths.tolist())
        assert step.spans is not None
        ends = {int(step.slots[row]): int(logits[place].argmax()) for place, row in enumerate(step.logit_rows.tolist())}
        for slot, start, piece, span in zip(
            step.slots.tolist(), step.starts.tolist(), pieces, step.spans.tolist(), strict=True
        ):
            self._held[slot][start:] = piece.tolist()
            if len(self._held[slot]) == span - 1:
                self.texts.append((torch.tensor([*self._held[slot], ends[slot]]), span))
        return logits


@pytest.mark.parametrize("case", ["llama, dynamic rope", "phi3"])
def test_the_loop_gives_each_request_the_rope_of_its_longest_text(
    family: Callable[[str], Tiny], load: Callable[..., DecodeModel], case: str
) -> None:
    model = Recorder(load(family(case).folder))
    run = Run(model, prefill_tokens=16)  # type: ignore[arg-type]
    rng = random.Random(5)
    prompts = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 50))) for _ in range(12)]
    for prompt in prompts:
        run.submit(prompt, max_tokens=rng.randint(4, 40), ignore_eos=True)
    run.until_idle()
    assert len(model.texts) == len(prompts)
    assert min(span for _, span in model.texts) < ORIGINAL < max(span for _, span in model.texts)
    for text, span in model.texts:
        best = reference_logits(family(case), text)[:-1]
        chosen = best.gather(1, text[1:, None])[:, 0]
        length = next(len(one) for one in prompts if ids(one).tolist() == text[: len(one)].tolist())
        assert len(text) == span
        assert (best.max(dim=1).values - chosen)[length - 1 :].max() < TIE


@pytest.mark.parametrize("case", few(CONFIGS, IN_TORCH[:-1]))
def test_bf16_is_closer_than_that_of_transformers(
    family: Callable[[str], Tiny], load: Callable[..., DecodeModel], case: str
) -> None:
    model, given = load(family(case).folder, "bf16"), texts(SLOTS, seed=4)
    expected = [reference_logits(family(case), tokens) for tokens in given]
    steps = teacher_forced(model, given, list(range(SLOTS)), seed=5)
    own = [_error(expected[text][place], logits) for text, place, logits in steps]
    halved = replace(family(case), reference=copy.deepcopy(family(case).reference).bfloat16())
    rounded = [reference_logits(halved, tokens) for tokens in given]
    theirs = [_error(*both) for text in zip(expected, rounded, strict=True) for both in zip(*text, strict=True)]
    # Rounding gives a few tokens other experts.
    middle = fmean if model.architecture.experts is None else median
    assert 0.0 < middle(own) < min(middle(theirs), 1.0 - MIN_COSINE["bf16"])


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """1 - the cosine of two rows of logits."""
    return 1.0 - float(torch.cosine_similarity(expected, found.float(), dim=0))
