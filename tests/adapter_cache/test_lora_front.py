"""The front with adapters in this process: a small real model, and a fake of Triton."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.adapter_cache.front import LoraFront
from shapeshift.adapter_cache.lora import grouped_loading
from shapeshift.adapter_cache.memory import adapter_table
from shapeshift.adapter_cache.policy.length_prediction import WordRegressor
from shapeshift.adapter_cache.registry import store
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.engine import speculation
from shapeshift.fused_decode.engine.speculation import Speculator
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.serving.metrics import Counter
from tests.adapter_cache.lora_models import MIXED, Spec, make_adapter, peft_texts, save_adapter
from tests.fakes import PbUtils, Request, TritonError
from tests.fused_decode.families import CASES
from tests.fused_decode.fronts import answer_of, arguments, ask
from tests.fused_decode.toy import FreeTokens
from tests.sampling import few
from tests.waiting import wait_for

MakeFront = Callable[..., LoraFront]
PROMPT = "Return the number of"
COUNT = 12


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def folder(tmp_path: Path, mixed_adapters: dict[str, Path]) -> Path:
    """A registry of all kinds of adapters."""
    made = tmp_path / "registry"
    for name, source in mixed_adapters.items():
        store.add(made, name, source, pinned=False)
    return made


class QuickFront(LoraFront):
    """submitted: the requests that the loop got, in order."""

    refresh_s = 0.05

    def __init__(self, *args: Any) -> None:
        self.submitted: list[Any] = []
        super().__init__(*args)

    def submit(self, request: Any) -> None:
        self.submitted.append(request)
        super().submit(request)


@pytest.fixture
def make_front(small_base: Path, folder: Path, lora_kernels: Path, pb_utils: PbUtils) -> Iterator[MakeFront]:
    """A function that starts a front; the fixture closes each front and checks its integrity."""
    started: list[LoraFront] = []

    def make(kind: str = "CPU", **parameters: object) -> LoraFront:
        stated = {
            "checkpoint": small_base,
            "adapters_dir": folder,
            "kernel_cache": lora_kernels,
            "precision": "f32",
            "max_length": 64,
            "max_concurrency": 4,
            "adapter_mb": 1,
            "starter_dir": "",
            **parameters,
        }
        given = replace(arguments("generate_lora", **stated), kind=kind)
        started.append(QuickFront(pb_utils, given))
        return started[-1]

    yield make
    for front in started:
        front.close()
        front.loop.check_integrity()
        cache = front.cache
        assert all(not one.users for one in cache.table.all()) and not cache.table.waiting
        assert front.loop.slots.used == len(front.loop.admission) == len(front.live) == 0


def asking(name: str | None, text: str = PROMPT, **fields: Any) -> Request:
    return ask(text, parameters=None if name is None else {"lora_name": name}, **{"max_tokens": COUNT, **fields})


@pytest.fixture(scope="module")
def peft_answers(small_base: Path, mixed_adapters: dict[str, Path]) -> dict[str | None, str]:
    """PEFT's greedy answers with each adapter, and without one."""
    return peft_texts(small_base, mixed_adapters, PROMPT, COUNT)


# Answers.


@pytest.mark.parametrize("options", [{}, {"native": "false"}, {"scheduler": "fifo"}])
def test_every_adapter_answers_as_in_peft(
    make_front: MakeFront, peft_answers: dict[str | None, str], options: dict[str, object]
) -> None:
    front = make_front(**options)
    requests = [(name, asking(name)) for _ in range(3) for name in peft_answers]
    front.execute([request for _, request in requests])
    for name, request in requests:
        assert answer_of(request)["text_output"] == peft_answers[name]
    assert len(set(peft_answers.values())) == len(peft_answers), "the adapters give different answers"


@pytest.mark.parametrize("has_kernels", [True, False])
def test_as_on_a_gpu_with_and_without_kernels(
    make_front: MakeFront,
    peft_answers: dict[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
    pb_utils: PbUtils,
    has_kernels: bool,
) -> None:
    """The GPU's runtime, hook, kernels in plain torch and host tier, on a CPU. Without kernels a step with an adapter
    has no graph, and gives the same."""
    ran: list[bool] = []

    def load_runtime(*given: Any, extra_bytes: int) -> GraphedModel:
        folder, decode, _, device, _, _ = given
        assert device == "cuda:0"
        sizes = {"slots": decode.max_concurrency, "max_length": decode.max_length, "extra_elements": extra_bytes // 4}
        model = GraphedModel.load_on("cpu", folder, precision="f32", **sizes)
        eagerly = model._run_eagerly

        def noted(batch: Any) -> torch.Tensor:
            ran.append(batch.adapters is not None)
            return eagerly(batch)

        model._run_eagerly = noted  # type: ignore[method-assign]
        return model

    def refused() -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(loading, "load_runtime", load_runtime)
    if not has_kernels:
        monkeypatch.setattr(
            grouped_loading, "load", lambda ranks, memory, log: grouped_loading.verified(refused, ranks, memory, log)
        )
    front = make_front(kind="GPU")
    requests = [(name, asking(name)) for _ in range(2) for name in peft_answers]
    front.execute([request for _, request in requests])
    for name, request in requests:
        assert answer_of(request)["text_output"] == peft_answers[name]
    # Whether the requests above share every step with adapters depends on when each of them joins.
    front.execute([alone := asking(None)])
    assert answer_of(alone)["text_output"] == peft_answers[None]
    runtime = front.runtime
    assert isinstance(runtime, GraphedModel) and runtime.graphs
    assert any(bounds.linears for bounds in runtime.graphs) == has_kernels
    assert has_kernels or any(ran)


@pytest.mark.parametrize(("options", "stays"), [({}, True), ({"eviction": "unused"}, False)])
def test_an_idle_adapter_stays_unless_caching_is_off(
    make_front: MakeFront, options: dict[str, object], stays: bool
) -> None:
    front = make_front(**options)
    cache, name = front.cache, next(iter(MIXED))
    for _ in range(2):
        asked = asking(name)
        front.execute([asked])
        answer_of(asked)
        (adapter,) = [one for one in cache.table.all() if one.label == name]
        wait_for(partial(_is_idle, adapter, stays))
    assert (cache.metrics.misses.value, cache.metrics.hits.value) == ((1, 1) if stays else (2, 0))


def _is_idle(adapter: adapter_table.Adapter, stays: bool) -> bool:
    return not adapter.users and (stays or adapter.state == adapter_table.ABSENT)


@pytest.mark.parametrize(("options", "loads"), [({}, False), ({"prefetch": "true"}, True)])
def test_nothing_is_loaded_before_it_is_asked_for_by_default(
    make_front: MakeFront, options: dict[str, object], loads: bool
) -> None:
    assert (make_front(**options).adapters.prefetcher is not None) is loads


@pytest.mark.parametrize("scheduler", ["arrival", "chameleon"])
def test_beam_search_finds_what_peft_finds(
    make_front: MakeFront, small_base: Path, mixed_adapters: dict[str, Path], scheduler: str
) -> None:
    expected = peft_texts(small_base, mixed_adapters, PROMPT, COUNT, num_beams=3)
    front = make_front(scheduler=scheduler)
    requests = [(name, asking(name, num_beams=3)) for name in expected]
    others = [asking(name) for name in expected]
    front.execute([request for pair in zip((one for _, one in requests), others, strict=True) for request in pair])
    for name, request in requests:
        assert answer_of(request)["text_output"] == expected[name]
    assert all(answer_of(other)["text_output"] for other in others)


@pytest.mark.parametrize("native", ["true", "false"])
def test_a_dora_answers_as_in_peft(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    peft_answers: dict[str | None, str],
    native: str,
) -> None:
    source = make_adapter(tmp_path / "dora", small_base, Spec(4, dora=True), seed=9)
    store.add(folder, "dora", source, pinned=False)
    expected = {**peft_answers, **peft_texts(small_base, {"dora": source}, PROMPT, COUNT)}
    front = make_front(native=native)
    requests = [(name, asking(name)) for name in ("dora", None, "small", "dora")]
    front.execute([request for _, request in requests])
    for name, request in requests:
        assert answer_of(request)["text_output"] == expected[name]


@pytest.mark.parametrize("kv_cache_tokens", [0, 80])
@pytest.mark.parametrize("scheduler", few(("arrival", "chameleon", "fifo", "sjf", "wrs"), ("arrival", "chameleon")))
def test_a_memory_too_small_for_all_adapters_serves_all_requests(
    make_front: MakeFront,
    peft_answers: dict[str | None, str],
    small_base: Path,
    folder: Path,
    tmp_path: Path,
    scheduler: str,
    kv_cache_tokens: int,
) -> None:
    for number in range(20):
        source = make_adapter(tmp_path / f"made{number}", small_base, Spec(60), seed=number)
        store.add(folder, f"filler{number}", source, pinned=False)
    front = make_front(scheduler=scheduler, kv_cache_tokens=kv_cache_tokens)
    names = [*peft_answers, *(f"filler{number}" for number in range(20))] * 3
    requests = [(name, asking(name)) for name in names]
    front.execute([request for _, request in requests])
    for name, request in requests:
        text = answer_of(request)["text_output"]
        assert name not in peft_answers or text == peft_answers[name]
    cache = front.cache
    evictions = [one for one in front.metrics() if isinstance(one, Counter) and "evictions" in one.name]
    assert sum(one.value for one in evictions) > 10
    assert cache.metrics.hits.value + cache.metrics.misses.value == len([name for name in names if name])


def test_a_cache_in_int8_shares_its_memory_with_adapters(
    make_front: MakeFront, small_base: Path, folder: Path, tmp_path: Path
) -> None:
    """The same answers where adapters and texts push one another out of the blocks."""
    alone = make_front(kv_precision="int8")
    for number in range(12):
        source = make_adapter(tmp_path / f"made{number}", small_base, Spec(60), seed=number)
        store.add(folder, f"filler{number}", source, pinned=False)
    small = make_front(kv_precision="int8", kv_cache_tokens=80)
    answers = []
    for front, others in ((alone, 0), (small, 12)):
        requests = [asking(name) for name in (None, *MIXED)]
        front.execute([*(asking(f"filler{number}") for number in range(others)), *requests])
        answers.append([answer_of(request)["text_output"] for request in requests])
    assert answers[0] == answers[1] and len(set(answers[0])) == len(answers[0])


@pytest.mark.parametrize("kv_precision", ["auto", "int8"])
def test_proposed_tokens_change_no_answer(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch, kv_precision: str
) -> None:
    monkeypatch.setattr(speculation, "Speculator", partial(Speculator, times=FreeTokens()))
    # The text of a model with random weights repeats itself where few tokens are possible.
    few: dict[str, Any] = {"max_tokens": 40, "logit_bias": json.dumps({str(token): 100 for token in range(40, 45)})}
    fields = [few, {**few, "temperature": 1.0, "seed": 1}, {"max_tokens": 40}]
    proposing: dict[str, object] = {"num_speculative_tokens": 8}
    answers = []
    for options in ({}, proposing):
        front = make_front(**options, kv_precision=kv_precision)
        requests = [asking(name, **given) for given in fields for name in (None, *MIXED)]
        front.execute(requests)
        answers.append([answer_of(request)["text_output"] for request in requests])
    assert answers[0] == answers[1]
    metrics = front.loop.metrics
    assert metrics.draft_tokens.value > metrics.accepted_tokens.value > 20


def test_an_adapter_may_be_named_where_vllm_has_it(make_front: MakeFront, peft_answers: dict[str | None, str]) -> None:
    front = make_front()
    stated = [json.dumps({"lora_name": name, "ignore_eos": False}) for name in peft_answers]
    requests = [asking(None, sampling_parameters=text) for text in stated]
    twice, number = asking("small", sampling_parameters=stated[1]), asking(None, sampling_parameters='{"lora_name": 3}')
    front.execute([*requests, twice, number])
    assert [answer_of(request)["text_output"] for request in requests] == list(peft_answers.values())
    assert twice.refusal() == (
        TritonError.INVALID_ARG,
        "parameter lora_name: got 'small'; once: as a parameter or elsewhere in the request",
    )
    assert number.refusal()[1] == "parameter lora_name: got 3; a text of 1 to 256 characters"


def test_metrics_of_adapters(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front()
    request = asking("small")
    front.execute([request])
    answer_of(request)
    wait_for(lambda: _metric(pb_utils, "shapeshift_adapter_requests_total", adapter="small") == 1)
    wait_for(lambda: _metric(pb_utils, "shapeshift_adapter_misses_total") == 1)
    wait_for(lambda: _metric(pb_utils, "shapeshift_adapters_known") == 6)
    wait_for(lambda: _metric(pb_utils, "shapeshift_lora_requests_info", max_lora="4") > 1e9)
    wait_for(lambda: _metric(pb_utils, "shapeshift_adapter_loaded_bytes_total") > 0)


def _metric(pb_utils: PbUtils, name: str, **labels: str) -> float:
    try:
        return pb_utils.metric(name, **labels)
    except KeyError:
        return -1.0


# Refusals and failures.


def test_unknown_adapters_are_named(make_front: MakeFront) -> None:
    front = make_front()
    requests = [asking(name) for name in ("nobody", "../small", "/etc/passwd", "")]
    front.execute(requests)
    code, text = requests[0].refusal()
    assert code == TritonError.NOT_FOUND
    assert "no adapter 'nobody'; known: attention, large, mlp, one_layer, queries, small" in text
    for request in requests[1:]:
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG and "lora_name" in text


def test_a_mixture_of_experts_is_refused_before_it_is_loaded(
    make_front: MakeFront, small_base: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3_moe"]))
    shutil.copy(small_base / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidInputError, match="num_experts: got 6; 0 in a base model of adapters: qwen3_moe"):
        make_front(checkpoint=tmp_path)


def test_beams_beyond_slots_and_memory_are_refused(make_front: MakeFront) -> None:
    front = make_front(kv_cache_tokens=96, max_concurrency=6)
    many, long, other = asking("small", num_beams=7), asking("small", num_beams=4, max_tokens=40), asking("small")
    front.execute([many, long, other])
    for request, limit in (
        (many, "num_beams: got 7; at most max_concurrency (6)"),
        (long, "num_beams: got 4; at most"),
    ):
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG and limit in text
    assert answer_of(other)["text_output"]


def test_the_registry_changes_while_requests_run(
    make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path, peft_answers: dict[str | None, str]
) -> None:
    front = make_front()
    long = asking("small", max_tokens=40, ignore_eos=True, return_num_output_tokens=True)
    front.execute([long])
    store.remove(folder, "small")
    store.add(folder, "late", make_adapter(tmp_path / "late", small_base, Spec(3), seed=77), pinned=True)
    wait_for(lambda: "late" in [one.label for one in front.catalogue.all()])
    assert answer_of(long)["num_output_tokens"] == 40
    gone = asking("small")
    front.execute([gone])
    assert gone.refusal()[0] == TritonError.NOT_FOUND
    wait_for(lambda: any(name.startswith("late@") for name in front.cache.resident_names()))
    store.pin(folder, "late", False)
    wait_for(lambda: not any(one.pinned for one in front.catalogue.all()))
    front.cache.check_integrity()


def test_a_request_that_cannot_be_started_is_forgotten(make_front: MakeFront, folder: Path) -> None:
    class Broken:
        def predict(self, request: object) -> int:
            raise RuntimeError("broken")

    front = make_front()
    front.predictor = Broken()  # type: ignore[assignment]
    front.execute([request := asking("small")])
    assert request.refusal()[0] == TritonError.INTERNAL
    store.remove(folder, "small")
    wait_for(lambda: not any(one.label == "small" for one in front.cache.table.all()))


def test_bad_entries_change_nothing(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    peft_answers: dict[str | None, str],
    pb_utils: PbUtils,
) -> None:
    front = make_front()
    wrong = make_adapter(tmp_path / "wrong", small_base, Spec(4), base_model_name_or_path="other")
    for name in ("small", "fresh"):
        store.add(folder, name, wrong, pinned=False)
    wait_for(lambda: front.cache.metrics.refused.value == 2)
    known = asking("small")
    fresh = asking("fresh")
    front.execute([known, fresh])
    assert answer_of(known)["text_output"] == peft_answers["small"]
    assert fresh.refusal()[0] == TritonError.NOT_FOUND
    (folder / "registry.json").write_text("{")
    wait_for(lambda: front.cache.metrics.refused.value == 3)
    again = asking("small")
    front.execute([again])
    assert answer_of(again)["text_output"] == peft_answers["small"]
    assert any("base_model_name_or_path" in line for line in pb_utils.Logger.lines)


def test_an_adapter_that_is_added_again_serves_again(
    make_front: MakeFront, folder: Path, mixed_adapters: dict[str, Path], peft_answers: dict[str | None, str]
) -> None:
    front = make_front()
    catalogue = front.catalogue
    known = {name: catalogue.find(name) for name in ("small", "large")}
    weights = store.entry_folder(folder, store.read(folder)["small"]) / store.FILES[1]
    weights.write_bytes(b"damaged")
    store.add(folder, "small", mixed_adapters["small"], pinned=False)
    wait_for(lambda: catalogue.find("small") is not known["small"])
    request = asking("small")
    front.execute([request])
    assert answer_of(request)["text_output"] == peft_answers["small"]
    assert catalogue.find("large") is known["large"], "an unchanged adapter stays loaded"


def bad_adapters(small_base: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """Invalid adapter folders by name, and the error of each."""
    from safetensors.torch import load_file

    def changed(name: str, **config: Any) -> Path:
        return make_adapter(root / name, small_base, Spec(4), **config)

    def tensors(name: str, tensor: str, value: Any) -> Path:
        found = load_file(changed(name) / "adapter_model.safetensors")
        return save_adapter(root / name, small_base, Spec(4), {**found, tensor: value})

    weights = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    pickled, cut = changed("pickled"), changed("cut")
    torch.save({}, pickled / "adapter_model.safetensors")
    whole = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(whole[:-9])
    return {
        "pickled": (pickled, "must be a complete safetensors file"),
        "cut": (cut, "must be a complete safetensors file"),
        "other": (changed("other", base_model_name_or_path="owner/other"), "base_model_name_or_path"),
        "ranks": (make_adapter(root / "ranks", small_base, Spec(201)), "a rank of 1 to max_rank (200)"),
        "large": (make_adapter(root / "large", small_base, Spec(160)), "do not fit into adapter_mb (1)"),
        "target": (tensors("target", weights.replace("up_", "z_"), torch.zeros(4, 64)), "a linear of the base model"),
        "nan": (tensors("nan", weights, torch.full((4, 64), float("nan"))), "NaN or infinity"),
        "scaled": (changed("scaled", lora_alpha=1e40), "NaN or infinity"),
        "unsaid": (changed("unsaid", use_rslora="yes"), "use_rslora"),
    }


def test_bad_adapters_are_refused_while_others_are_served(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    peft_answers: dict[str | None, str],
    pb_utils: PbUtils,
) -> None:
    front = make_front(max_rank=200)
    cache = front.cache
    bad = bad_adapters(small_base, tmp_path)
    for name, (source, _) in bad.items():
        store.add(folder, f"bad_{name}", source, pinned=True)
    running: list[tuple[str | None, Request]] = []
    while cache.metrics.refused.value < len(bad):
        running += [(name, asking(name)) for name in peft_answers]
        front.execute([request for _, request in running[-len(peft_answers) :]])
        assert answer_of(running[-1][1])["text_output"] == peft_answers[running[-1][0]]
    assert all(answer_of(request)["text_output"] == peft_answers[name] for name, request in running)
    for name, (_, said) in bad.items():
        (line,) = (line for line in pb_utils.Logger.lines if f"adapter bad_{name} is refused" in line)
        assert said in line
        request = asking(f"bad_{name}")
        front.execute([request])
        assert request.refusal()[0] == TritonError.NOT_FOUND
    assert len(front.catalogue) == len(peft_answers) - 1


@pytest.mark.parametrize("options", [{}, {"native": "false"}])
def test_an_overflow_fails_only_its_own_request(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    peft_answers: dict[str | None, str],
    options: dict[str, object],
) -> None:
    from safetensors.torch import load_file

    tensors = load_file(make_adapter(tmp_path / "wild", small_base, Spec(2)) / "adapter_model.safetensors")
    tensors = {name: 3e38 * tensor.sign() if "lora_A" in name else tensor for name, tensor in tensors.items()}
    store.add(folder, "wild", save_adapter(tmp_path / "wild", small_base, Spec(2), tensors), pinned=False)
    front = make_front(**options)
    requests = [(name, asking(name)) for name in ("small", "wild", "large", None)]
    front.execute([request for _, request in requests])
    for name, request in requests:
        if name == "wild":
            code, text = request.refusal()
            assert code == TritonError.INTERNAL and "finite" in text
        else:
            assert answer_of(request)["text_output"] == peft_answers[name]


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_is_damaged_before_it_is_loaded(
    make_front: MakeFront, folder: Path, peft_answers: dict[str | None, str], before: bool
) -> None:
    front = None if before else make_front()
    entry = store.read(folder)["large"]
    weights = store.entry_folder(folder, entry) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    front = front or make_front()
    requests = [asking("large"), asking("small"), asking("large")]
    front.execute(requests)
    assert answer_of(requests[1])["text_output"] == peft_answers["small"]
    for request in (requests[0], requests[2]):
        code, text = request.refusal()
        assert code == TritonError.INTERNAL and "large" in text
    front.cache.check_integrity()


def test_a_read_error_that_passes_costs_little(
    make_front: MakeFront, folder: Path, peft_answers: dict[str | None, str]
) -> None:
    front = make_front()
    weights = store.entry_folder(folder, store.read(folder)["large"]) / "adapter_model.safetensors"
    away = weights.rename(folder / "away")
    first, second = asking("large"), asking("large")
    front.execute([first])
    code, text = first.refusal()
    assert code == TritonError.UNAVAILABLE and "No such file" in text and "retry later" in text
    front.execute([second])
    assert second.refusal()[0] == TritonError.UNAVAILABLE, "the file is left alone for a while"
    away.rename(weights)
    # As if the while were over.
    front.catalogue.find("large").retry_at = 0.0
    third = asking("large")
    front.execute([third])
    assert answer_of(third)["text_output"] == peft_answers["large"]


def test_the_words_of_a_prompt_predict_its_answer(make_front: MakeFront, tmp_path: Path) -> None:
    prompts = [b"one word", b"a story"] * 10
    WordRegressor.train(prompts, [2, 40] * 10, ridge=0.1).save(tmp_path / "weights.npy")
    front = make_front(predictor_weights=tmp_path / "weights.npy")
    assert isinstance(front, QuickFront)
    requests = [asking(None, "one word"), asking(None, "a story"), asking(None, "a story", max_tokens=4)]
    front.execute(requests)
    for request in requests:
        answer_of(request)
    assert [request.predicted_tokens for request in front.submitted] == [2, COUNT, 4]
    with pytest.raises(InvalidInputError, match="predictor_weights"):
        make_front(predictor_weights=tmp_path / "absent.npy")


def test_an_adapter_larger_than_the_pool(
    make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path, pb_utils: PbUtils
) -> None:
    store.add(folder, "huge", make_adapter(tmp_path / "huge", small_base, Spec(160)), pinned=False)
    store.add(folder, "odd", make_adapter(tmp_path / "odd", small_base, Spec(201)), pinned=False)
    store.add(folder, "fits", make_adapter(tmp_path / "fits", small_base, Spec(128)), pinned=True)
    front = make_front(max_rank=200)
    assert len(front.catalogue) == 7
    said = [line for line in pb_utils.Logger.lines if "adapter" in line]
    assert any("huge is refused" in line and "do not fit into adapter_mb (1)" in line for line in said)
    assert any("odd is refused" in line and "max_rank (200)" in line for line in said)
    assert any("fits is not pinned: adapter_mb leaves too little" in line for line in said)
    request = asking("fits")
    front.execute([request])
    assert answer_of(request)["text_output"]


def test_many_adapters_are_known(make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "one", small_base, Spec(1, ("self_attn.q_proj",)))
    entry = store.add(folder, "one", source, pinned=False)
    content = json.loads((folder / "registry.json").read_text())
    for number in range(1000):
        content["entries"][f"n{number}"] = {"folder": entry.folder, "sha256": entry.sha256, "pinned": False}
    (folder / "registry.json").write_text(json.dumps(content))
    front = make_front()
    assert len(front.catalogue) == 1007
    requests = [asking(f"n{number}", max_tokens=1) for number in range(0, 1000, 50)]
    front.execute(requests)
    assert len({answer_of(request)["text_output"] for request in requests}) == 1


def test_a_multi_lora_file_names_adapters(mixed_adapters: dict[str, Path], tmp_path: Path) -> None:
    version = tmp_path / "model" / "1"
    version.mkdir(parents=True)
    assert store.read_multi_lora(version) == {}
    (version / store.MULTI_LORA).write_text(store.multi_lora_text({"mine": mixed_adapters["small"]}))
    assert store.read_multi_lora(version) == {"mine": mixed_adapters["small"]}
    for content in ('{"../x": "a"}', "[]", '{"a": 1}', "{"):
        (version / "multi_lora.json").write_text(content)
        with pytest.raises(InvalidInputError, match=r"multi_lora\.json"):
            store.read_multi_lora(version)


def test_a_line_of_the_log_names_the_adapter(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=1)
    requests = [asking("small"), asking(None), asking("nobody")]
    front.execute(requests)
    for request in requests[:2]:
        answer_of(request)
    lines = pb_utils.Logger.requests(3)
    assert [line.get("adapter") for line in sorted(lines, key=lambda line: line.get("adapter", ""))] == [
        None,
        None,
        "small",
    ]
    assert sorted(line["outcome"] for line in lines) == ["NOT_FOUND", "OK", "OK"]


def test_an_adapter_that_was_not_loaded_is_no_hit(make_front: MakeFront, folder: Path, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=1)
    weights = store.entry_folder(folder, store.read(folder)["large"]) / "adapter_model.safetensors"
    weights.rename(folder / "away")
    front.execute([request := asking("large")])
    assert request.refusal()[0] == TritonError.UNAVAILABLE
    (line,) = pb_utils.Logger.requests(1)
    assert (line["adapter"], line["adapter_hit"]) == ("large", False)
