"""Requests of all kinds at once, as many minutes as SHAPESHIFT_MIXED_MINUTES says: each answer is what it is alone.

Grammars, samples, streams and shared prefixes, adapters of a registry and on first use, deadlines and clients that go,
over a cache so small that requests are preempted and adapters evicted; and the same without adapters on mixtures of
experts. In f32, with seeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shapeshift.adapter_cache.front import LoraFront
from shapeshift.adapter_cache.registry import store
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.request import Request as Answer
from shapeshift.serving.bounds import OVERTAKEN
from tests.adapter_cache.lora_models import Spec, make_adapter
from tests.fakes import PbUtils, Request, TritonError
from tests.fused_decode import families
from tests.fused_decode.checkpoints import VOCABULARY
from tests.fused_decode.fronts import arguments, ask
from tests.sampling import few

MINUTES = float(os.environ.get("SHAPESHIFT_MIXED_MINUTES", "30"))
AT_ONCE, SLOTS = 24, 6
PREFIXES = (
    "Return the number of items in a container. Open file and",
    "Raise ValueError if the value is not present; ",
)
GRAMMARS = ({"regex": "[a-z]{3,9}"}, {"json": {"type": "integer"}}, {"choice": ["number of items", "stream"]})
# Refusals that a load of this kind brings: a deadline, a full queue, a client that has gone, no such adapter.
EXPECTED = (TritonError.UNAVAILABLE, TritonError.CANCELLED, TritonError.NOT_FOUND)


class Expected(NamedTuple):
    """An answer: its tokens, how its prompt was computed, and its logprobs to the last bit."""

    tokens: list[int]
    chunks: list[int]
    bits: list[tuple[float, int, list[int], list[float]]]

    @classmethod
    def of(cls, answer: Answer) -> Expected:
        bits = [(one.logprob, one.rank, one.top.tolist(), one.top_logprobs.tolist()) for one in answer.logprobs]
        return cls(answer.token_ids, answer.chunks, bits)


class Recorded:
    """Mixed into a front: its requests by id, as the loop got them."""

    def __init__(self, *args: Any) -> None:
        self.order: list[Answer] = []
        super().__init__(*args)

    def submit(self, request: Answer) -> None:
        self.order.append(request)
        super().submit(request)  # type: ignore[misc]


class RecordedFront(Recorded, GenerateFront):
    pass


class RecordedLoraFront(Recorded, LoraFront):
    refresh_s = 0.1


def template(number: int, adapters: list[str]) -> dict[str, Any]:
    """A request, the same for the same number."""
    rng = random.Random(number)
    words = ("value", "stream", "file", "item", "Käse", "東京")
    beginning = rng.choice((*PREFIXES, ""))
    text = beginning + " ".join(rng.choice(words) for _ in range(rng.randint(1, 9)))
    fields: dict[str, Any] = {"max_tokens": rng.randint(4, 40), "logprobs": 2, "min_tokens": 2}
    if rng.random() < 0.6:
        fields |= {"temperature": rng.choice((0.7, 1.5)), "seed": number}
    if rng.random() < 0.2:
        fields |= {"structured_outputs": json.dumps(rng.choice(GRAMMARS)), "min_tokens": 0}
    elif rng.random() < 0.2:
        fields |= {"n": rng.randint(2, 4)}
    parameters = {"lora_name": rng.choice(adapters)} if adapters and rng.random() < 0.7 else {}
    return {"text": text, "stream": rng.random() < 0.5, "parameters": parameters, **fields}


class Load:
    """Keeps AT_ONCE requests in flight and holds each answer against that of the same request alone.

    preempted: answers that were preempted and have the same bits
    """

    def __init__(self, front: Any, alone: dict[int, list[Expected]], adapters: list[str], seed: int) -> None:
        self._front, self._alone, self._adapters, self._rng = front, alone, adapters, random.Random(seed)
        self._running: dict[str, tuple[int, Request]] = {}
        self.served, self.refused, self.preempted, self._number = 0, 0, 0, 0

    def run(self, goes_on: Callable[[int], bool]) -> None:
        """goes_on: asked with the number of requests so far."""
        while goes_on(self._number) or self._running:
            while goes_on(self._number) and len(self._running) < AT_ONCE:
                self._start()
            ended = [name for name, (_, request) in self._running.items() if request.sender.has_ended]
            by_id: dict[str, list[Answer]] = defaultdict(list)
            for answer in self._front.order:
                by_id[answer.id].append(answer)
            for name in ended:
                self._check(*self._running.pop(name), by_id[name])
            if ended:
                self._require_order()
                gone = set(ended)
                self._front.order[:] = [one for one in self._front.order if one.id not in gone]
            time.sleep(0.002)

    def _start(self) -> None:
        kind, name = self._rng.choice([*self._alone]), f"r{self._number}"
        fields = template(kind, self._adapters)
        odd = self._rng.random()
        if odd < 0.03:
            fields["parameters"] |= {"latency_ms": self._rng.randint(1, 60)}
        elif odd < 0.06 and self._adapters:
            fields["parameters"] |= {"lora_name": "nobody"}
        request = ask(fields.pop("text"), request_id=name, **fields)
        request.sender.cancelled = odd > 0.97
        self._running[name] = kind, request
        self._number += 1
        self._front.execute([request])

    def _check(self, kind: int, request: Request, answers: list[Answer]) -> None:
        error = next((one.error() for one in request.sender.stream() if one.has_error()), None)
        if error is not None:
            assert error.code() in EXPECTED, error.message()
            self.refused += 1
            return
        if any(answer.finish_reason == "deadline" for answer in answers):
            self.refused += 1
            return
        self.served += 1
        # A job's answers are submitted one after another.
        for answer, expected in zip(answers, self._alone[kind], strict=True):
            got = Expected.of(answer)
            assert got.tokens == expected.tokens, f"request {kind} has other tokens than alone"
            # A beginning that others have computed, or in other pieces, is the same but for rounding.
            if got.chunks == expected.chunks:
                assert got.bits == expected.bits, f"request {kind} has other bits than alone"
                self.preempted += answer.joined_with > 0

    def _require_order(self) -> None:
        """That no request is overtaken by more than those that may overtake it, and those that run beside it."""
        order = [answer for answer in self._front.order if answer.first_token]
        for place, answer in enumerate(order):
            later = sum(other.first_token < answer.first_token for other in order[place + 1 :])
            assert later <= OVERTAKEN + AT_ONCE, f"{answer.id} was overtaken {later} times"


def alone(front: Any, adapters: list[str], count: int) -> dict[int, list[Expected]]:
    """The answers to the templates, one after another."""
    answers = {}
    for number in range(count):
        fields = template(number, adapters)
        front.execute([request := ask(fields.pop("text"), request_id=f"alone{number}", **fields)])
        assert not any(response.has_error() for response in request.sender.stream())
        answers[number] = [Expected.of(answer) for answer in front.order]
        front.order.clear()
    return answers


@pytest.fixture(scope="module", params=few(("gpt_oss", "solar_open", "qwen3_5_moe_text"), ("gpt_oss",)))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_base: Path) -> Path:
    """Windows and sinks; experts by sigmoids, in groups, and a shared one; layers that keep a state. With the tokenizer
    of the small base model."""
    name = f"{request.param}, of this vocabulary"
    families.CASES[name] = {**families.CASES[request.param], "vocab_size": VOCABULARY}
    folder = families.make(name, tmp_path_factory.mktemp("mixture")).folder
    shutil.copy(small_base / "tokenizer.json", folder)
    return folder


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Fronts that are closed afterwards, and leave nothing behind."""
    fronts: list[Any] = []
    yield fronts
    for front in fronts:
        front.close()
        front.loop.check_integrity()
        assert front.loop.slots.used == len(front.loop.admission) == len(front.live) == 0


def settings(kernels: Path, **others: object) -> dict[str, object]:
    fixed = {"kernel_cache": kernels, "precision": "f32", "max_length": 128, "max_concurrency": SLOTS, "threads": 2}
    return {**fixed, **others}


RUNS = [(40, 200, 0.0), pytest.param(300, 0, MINUTES, marks=[pytest.mark.long, pytest.mark.timeout(90 * 60)])]


def goes_on(count: int, minutes: float) -> Callable[[int], bool]:
    end = time.monotonic() + 60 * minutes
    return lambda number: number < count or time.monotonic() < end


@pytest.mark.parametrize(("templates", "count", "minutes"), RUNS)
def test_with_adapters(
    small_base: Path,
    mixed_adapters: dict[str, Path],
    lora_kernels: Path,
    tmp_path: Path,
    started: list[Any],
    templates: int,
    count: int,
    minutes: float,
) -> None:
    for name in ("small", "attention", "mlp"):
        store.add(tmp_path / "registry", name, mixed_adapters[name], pinned=False)
    for number in range(12):
        make_adapter(tmp_path / "shelf" / f"first{number}", small_base, Spec(8 + 4 * number), seed=number)
    adapters = ["small", "attention", "mlp", *(f"first{number}" for number in range(12))]

    def front(**others: object) -> RecordedLoraFront:
        options = settings(
            lora_kernels,
            checkpoint=small_base,
            adapters_dir=tmp_path / "registry",
            adapter_sources=tmp_path / "shelf",
            adapter_mb=1,
            starter_dir="",
            **others,
        )
        started.append(RecordedLoraFront(PbUtils(), arguments("generate_lora", **options)))
        return started[-1]

    load = Load(
        scarce := front(kv_cache_tokens=176),
        alone(front(enable_prefix_caching="false"), adapters, templates),
        adapters,
        seed=1,
    )
    load.run(goes_on(count, minutes))
    assert load.served > 5 * load.refused and load.preempted > 0
    assert len(scarce.catalogue) > 10, "most were fetched"
    assert scarce.cache.metrics.misses.value > 20, "adapters came and went"


@pytest.mark.parametrize(("templates", "count", "minutes"), RUNS)
def test_with_experts(
    mixture: Path, lora_kernels: Path, started: list[Any], templates: int, count: int, minutes: float
) -> None:
    def front(**others: object) -> RecordedFront:
        options = settings(lora_kernels, checkpoint=mixture, **others)
        started.append(RecordedFront(PbUtils(), arguments("generate", **options)))
        return started[-1]

    load = Load(front(kv_cache_tokens=176), alone(front(enable_prefix_caching="false"), [], templates), [], seed=2)
    load.run(goes_on(count, minutes))
    assert load.served > 5 * load.refused and load.preempted > 0
