"""Logprobs of answers and prompts, against torch and against transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from shapeshift.fused_decode.engine import batching
from shapeshift.fused_decode.engine.beam_search import Ranking, ranking
from shapeshift.fused_decode.engine.sampling.sampler import logprobs_of
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.model import native_operations
from tests.fakes import PbUtils, Request, values_of
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.fronts import MakeFront, arguments, ask
from tests.fused_decode.toy import LETTERS, ToyRuntime, ids
from tests.waiting import wait_for

PROMPT = "Return the number of the words in the text, and of its letters."


@pytest.fixture(params=["numpy", "native"])
def rank(request: pytest.FixtureRequest, kernel_cache: Path) -> Ranking:
    """The ranking in numpy, and by the kernel."""
    is_native = request.param == "native"
    if is_native:
        assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"
        assert hasattr(torch.ops.shapeshift_decode, "likeliest")
    return ranking(is_native)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (3, 3), (70, 20), (1000, 8), (1000, 700), (6464, 20)])
def test_the_largest_values_of_a_row(size: int, count: int, rank: Ranking) -> None:
    values = np.random.default_rng(size).standard_normal((9, size)).astype(np.float32)
    values[::2] = np.round(values[::2])
    values[3, 1:] = -np.inf
    values[4] = 0
    values[5, ::7] = np.nan
    finite = np.arange(9) != 5
    norms, places = rank(values, count)
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    assert (places[finite] == order[finite]).all()
    wanted = torch.from_numpy(values).double().logsumexp(dim=1).numpy()
    assert norms[finite] == pytest.approx(wanted[finite], rel=2e-6, abs=2e-6)
    assert np.isnan(norms[5])


def test_a_row_that_is_not_finite_has_no_norm(rank: Ranking) -> None:
    values = np.zeros((4, 200), np.float32)
    values[0, 199], values[1, 3], values[2] = np.inf, np.nan, -np.inf
    norms, _ = rank(values, 8)
    assert np.isnan(norms).tolist() == [True, True, True, False]


def test_likely_tokens_beside_a_hundred_thousand_unlikely_ones(rank: Ranking) -> None:
    values = np.full((2, 128256), -20.0, np.float32)
    values[1, [70_000, 5, 128_255]] = 30, 30, 31
    norms, places = rank(values, 3)
    assert places[1].tolist() == [128_255, 5, 70_000]
    assert norms == pytest.approx([np.log(128256) - 20, 31 + np.log1p(2 / np.e)], rel=1e-6)


def test_they_are_those_of_torch_and_alone_the_same_as_together() -> None:
    rng = np.random.default_rng(0)
    for vocabulary in (3, 64, 1000):
        logits = (rng.standard_normal((9, vocabulary)) * 5).astype(np.float32)
        # Many are equal.
        logits[::2] = np.round(logits[::2])
        tokens, listed = rng.integers(0, vocabulary, 9), np.minimum(rng.integers(0, 21, 9), vocabulary)
        found = logprobs_of(logits, tokens, listed)
        wanted = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
        for row, own in enumerate(found):
            order = np.lexsort((np.arange(vocabulary), -logits[row].astype(np.float64)))
            assert own.logprob == pytest.approx(wanted[row, tokens[row]], abs=1e-5)
            assert own.rank == 1 + (logits[row] > logits[row, tokens[row]]).sum()
            equal = np.isin(logits[row, own.top], logits[row, order[: listed[row]]])
            assert len(own.top) == listed[row] and equal.all()
            np.testing.assert_allclose(own.top_logprobs, wanted[row, own.top], atol=1e-5)
            assert (np.diff(own.top_logprobs) <= 0).all()
            (alone,) = logprobs_of(logits[row : row + 1], tokens[row : row + 1], listed[row : row + 1])
            assert alone.logprob == own.logprob and alone.top.tolist() == own.top.tolist()
            assert alone.top_logprobs.tobytes() == own.top_logprobs.tobytes()


# A real model, beside transformers.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("logprobs") / "small")


@pytest.fixture(scope="module")
def front(checkpoint: Path, kernel_cache: Path) -> Iterator[GenerateFront]:
    stated = {"checkpoint": checkpoint, "precision": "f32", "max_length": 200, "max_concurrency": 4}
    made = GenerateFront(PbUtils(), arguments("generate", kernel_cache=kernel_cache, prefill_tokens=16, **stated))
    yield made
    made.close()
    made.loop.check_integrity()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """A function that gives what transformers says after each token of a text, as logprobs [tokens, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    def say(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=1).numpy()

    return say


def answered(front: GenerateFront, **given: Any) -> dict[str, np.ndarray]:
    request = ask(PROMPT, return_token_ids=True, return_logprobs=True, **given)
    front.execute([request])
    return values_of(request.sender.answer())


def test_answers_have_the_logprobs_of_transformers(front: GenerateFront, reference: Any, checkpoint: Path) -> None:
    penalties = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": '{"7": 5}'}
    for given in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, **penalties}):
        values = answered(front, max_tokens=20, logprobs=5, **given)
        prompt, tokens = values["prompt_token_ids"].tolist(), values["token_ids"].tolist()
        assert prompt == Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(PROMPT).ids
        wanted = reference(prompt + tokens)[len(prompt) - 1 : -1]
        places = np.arange(len(tokens))
        np.testing.assert_allclose(values["token_logprobs"], wanted[places, tokens], atol=1e-4)
        best = np.sort(wanted, axis=1)[:, ::-1][:, :5]
        assert values["top_token_ids"].shape == values["top_logprobs"].shape == (len(tokens), 5)
        np.testing.assert_allclose(values["top_logprobs"], best, atol=1e-4)
        np.testing.assert_allclose(wanted[places[:, None], values["top_token_ids"]], best, atol=1e-4)
        listed = json.loads(values["logprobs"][0])
        assert [next(iter(entry)) for entry in listed] == [str(token) for token in tokens]
        for entry, token, logprob in zip(listed, tokens, values["token_logprobs"].tolist(), strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-6)
            assert len(entry) in (5, 6) and {own["rank"] for own in entry.values()} >= {1, 2, 3, 4, 5}


def test_prompts_have_the_logprobs_of_transformers(front: GenerateFront, reference: Any) -> None:
    others = [ask(PROMPT[:20], max_tokens=40) for _ in range(3)]
    front.execute(others)
    values = answered(front, max_tokens=3, temperature=0.0, prompt_logprobs=2)
    assert "token_logprobs" not in values and values["logprobs"].tolist() == [b"null"]
    prompt = values["prompt_token_ids"].tolist()
    assert len(prompt) > 17, "the prompt takes several iterations"
    wanted = reference(prompt)
    (first, *listed) = json.loads(values["prompt_logprobs"][0])
    assert first is None and len(listed) == len(prompt) - 1
    for place, (entry, token) in enumerate(zip(listed, prompt[1:], strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(wanted[place, token], abs=1e-4)
        for name, own in entry.items():
            assert own["logprob"] == pytest.approx(wanted[place, int(name)], abs=1e-4)
        assert len(entry) in (2, 3)
    text = b"".join(bytes(entry[str(token)]["bytes"]) for entry, token in zip(listed, prompt[1:], strict=True))
    assert PROMPT.encode().endswith(text) and len(text) > 30
    for request in others:
        request.sender.answer()


def test_samples_and_streams_have_them_too(front: GenerateFront, reference: Any) -> None:
    flags: dict[str, Any] = {"return_token_ids": True, "return_num_output_tokens": True, "stream": True}
    request = ask(PROMPT, n=3, logprobs=1, prompt_logprobs=0, max_tokens=9, temperature=1.0, seed=1, **flags)
    front.execute([request])
    tokens: list[list[int]] = [[], [], []]
    logprobs: list[list[float]] = [[], [], []]
    responses = [values_of(response) for response in request.sender.stream()]
    for values in responses:
        ends = np.cumsum(values["num_output_tokens"])[:-1].astype(np.int64)
        pieces = zip(np.split(values["token_ids"], ends), np.split(values["token_logprobs"], ends), strict=True)
        for row, (own, said) in zip(values["choice_index"].tolist(), pieces, strict=True):
            tokens[row] += own.tolist()
            logprobs[row] += said.tolist()
    prompt = responses[0]["prompt_token_ids"].tolist()
    assert len(json.loads(responses[0]["prompt_logprobs"][0])) == len(prompt)
    for ids_of_one, found in zip(tokens, logprobs, strict=True):
        wanted = reference(prompt + ids_of_one)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(found, wanted[np.arange(len(ids_of_one)), ids_of_one], atol=1e-4)


# The loop.


def test_a_preempted_request_has_each_logprob_once(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.pace = threading.Semaphore(0)
    front = make_front(prefill_tokens=4)
    request: Request = ask("hello world", max_tokens=6, logprobs=0, prompt_logprobs=0, return_token_ids=True)
    front.execute([request])
    (live,) = front.live
    asked: list[Any] = []
    squash = front.loop.admission.squash

    def once() -> list[Any]:
        if live.generated == 2 and not asked:
            asked.append(live)
            front.loop.admission.submit(live)
            return [live]
        return squash()

    front.loop.admission.squash = once  # type: ignore[method-assign]
    toy.pace.release(100)
    wait_for(lambda: live.is_finished)
    values = values_of(request.sender.answer())
    assert asked and values["token_ids"].tolist() == toy.greedy(ids("hello world"), 6)
    assert len(values["token_logprobs"]) == 6
    listed = json.loads(values["prompt_logprobs"][0])
    assert len(listed) == 11 and [next(iter(entry)) for entry in listed[1:]] == [
        str(LETTERS.index(letter)) for letter in "ello world"
    ]
    for place, entry in enumerate(listed[1:], 1):
        row = toy.row(ids("hello world")[:place].tolist())
        token = LETTERS.index("hello world"[place])
        assert entry[str(token)]["logprob"] == pytest.approx(float(torch.tensor(row).log_softmax(0)[token]), abs=1e-5)


def test_the_first_response_of_a_stream_has_them_all(
    make_front: MakeFront, toy: ToyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples beside the one that scores the prompt take it in fewer pieces, and are ahead."""
    monkeypatch.setattr(batching, "_MOST_SCORED", 4)
    toy.pace = threading.Semaphore(0)
    prompts = ["hello world " * 4, "abc " * 9]
    front = make_front(prefill_tokens=256)
    flags: dict[str, Any] = {"return_num_output_tokens": True, "stream": True}
    request = ask(None, text_input=prompts, n=2, prompt_logprobs=0, max_tokens=9, temperature=0.0, **flags)
    front.execute([request])
    live = front.live
    toy.pace.release(4)
    wait_for(lambda: live[1].generated >= 2)
    assert not live[0].generated and live[0].job.next_response() is None
    toy.pace.release(100)
    first, *others = [values_of(response) for response in request.sender.stream()]
    assert [len(json.loads(own)) for own in first["prompt_logprobs"]] == [*map(len, prompts)]
    assert not any("prompt_logprobs" in values for values in others)
    assert sum(int(values["num_output_tokens"].sum()) for values in (first, *others)) == 36
