"""Adapters that are fetched when a request first names them: from folders, and from a hub that may fail or lie."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shapeshift.adapter_cache.front import LoraFront
from shapeshift.adapter_cache.registry import store
from shapeshift.fused_decode.request import ABORT
from tests.adapter_cache.lora_models import Spec, make_adapter, peft_texts, save_adapter
from tests.build_engines import hub_server
from tests.build_engines.hub_server import Hub
from tests.fakes import PbUtils, Request, TritonError
from tests.fused_decode.fronts import answer_of, arguments, ask
from tests.waiting import wait_for

PROMPT, COUNT = "Return the number of", 12
CONFIG, WEIGHTS = store.FILES
MakeFront = Callable[..., LoraFront]


class PatientFront(LoraFront):
    refresh_s = 0.05


class HastyFront(PatientFront):
    """Long enough for a process to begin a download."""

    fetch_s = 8.0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the processes of a front ask, with a cache of the test."""
    with hub_server.serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


@pytest.fixture
def shelf(tmp_path: Path, small_base: Path) -> Path:
    """An allowed folder with the adapters `one` and `two`."""
    for seed, name in enumerate(("one", "two")):
        make_adapter(tmp_path / "shelf" / name, small_base, Spec(4 + seed), seed=50 + seed)
    return tmp_path / "shelf"


@pytest.fixture
def make_front(small_base: Path, lora_kernels: Path, tmp_path: Path, mixed_adapters: dict[str, Path]) -> Iterator[Any]:
    """A function that starts a front with the registered adapter `small`; what it leaves behind is checked."""
    started: list[LoraFront] = []
    registry = tmp_path / "registry"
    store.add(registry, "small", mixed_adapters["small"], pinned=False)

    def make(sources: object, front: type[LoraFront] = PatientFront, **parameters: object) -> LoraFront:
        options = {
            "checkpoint": small_base,
            "adapters_dir": registry,
            "adapter_sources": sources,
            "kernel_cache": lora_kernels,
            "precision": "f32",
            "max_length": 64,
            "max_concurrency": 4,
            "adapter_mb": 1,
            "starter_dir": "",
            **parameters,
        }
        started.append(front(PbUtils(), arguments("generate_lora", **options)))
        return started[-1]

    yield make
    for front in started:
        front.close()
        front.loop.check_integrity()
        assert all(not one.users for one in front.cache.table.all()) and not front.cache.table.waiting
        assert front.loop.slots.used == len(front.loop.admission) == len(front.live) == 0


def asking(name: str | None, **fields: Any) -> Request:
    parameters = fields.pop("parameters", {}) | ({} if name is None else {"lora_name": name})
    return ask(PROMPT, parameters=parameters, **{"max_tokens": COUNT, **fields})


def refusal(front: LoraFront, name: str) -> tuple[int, str]:
    front.execute([request := asking(name)])
    return request.refusal()


def test_adapters_of_folders_and_of_a_hub_answer_as_in_peft(
    make_front: MakeFront, hub: Hub, shelf: Path, small_base: Path, mixed_adapters: dict[str, Path], tmp_path: Path
) -> None:
    """One fetch for all requests; a later front takes the same commit from the cache, without the hub."""
    commit = hub.add("mine/styles", mixed_adapters["mlp"])
    sources = f"{shelf}, mine/st"
    folders = {"one": shelf / "one", "mine/styles": mixed_adapters["mlp"], "small": mixed_adapters["small"]}
    expected = peft_texts(small_base, folders, PROMPT, COUNT)
    assert len(set(expected.values())) == len(expected)
    front = make_front(sources)
    requests = [(name, asking(name, **fields)) for name in expected for fields in ({}, {"n": 1}, {"num_beams": 1})]
    front.execute([request for _, request in requests])
    for name, request in requests:
        assert answer_of(request)["text_output"] == expected[name]
    assert sorted(hub.downloaded()) == [CONFIG, WEIGHTS]
    assert front.describe().adapters == ["mine/styles", "one", "small"], "nothing is fetched that nobody names"
    assert front.describe().registry == make_front(sources).describe().registry
    hub.repositories.clear()
    # As the hub's library does where repositories have equal files.
    for blob in (tmp_path / "hf" / "hub").glob("*/blobs/*"):
        blob.rename(tmp_path / ("ab" * 32 + blob.name[:2]))
        blob.symlink_to(tmp_path / ("ab" * 32 + blob.name[:2]))
    later = make_front(sources)
    later.execute([request := asking("mine/styles")])
    assert answer_of(request)["text_output"] == expected["mine/styles"]
    assert any(commit in str(adapter.source.folder) for adapter in later.catalogue.all())


def test_nothing_is_fetched_by_default(make_front: MakeFront, hub: Hub, mixed_adapters: dict[str, Path]) -> None:
    hub.add("mine/styles", mixed_adapters["mlp"])
    front = make_front("")
    assert refusal(front, "mine/styles")[0] == TritonError.INVALID_ARG
    assert refusal(front, "one") == (TritonError.NOT_FOUND, "lora_name: no adapter 'one'; known: small")
    assert not hub.asked


def test_a_silent_hub_delays_no_other_request(
    make_front: MakeFront, hub: Hub, small_base: Path, mixed_adapters: dict[str, Path]
) -> None:
    for number in range(5):
        hub.add(f"mine/{number}", mixed_adapters["mlp"])
        hub.silent.add(f"mine/{number}")
    front = make_front("mine/", HastyFront)
    waiting = [asking(f"mine/{number}") for number in (0, 0, 1, 2, 3)]
    front.execute(waiting)
    queued = [asking(f"mine/{number}") for number in range(4, 64)]
    front.execute(queued)
    code, text = refusal(front, "mine/64")
    assert code == TritonError.UNAVAILABLE and "64 adapters wait to be fetched, the most at once" in text
    late, gone = asking("mine/0", parameters={"latency_ms": 200}), asking("mine/1")
    front.execute([late, gone])
    gone.sender.cancelled = True
    assert late.refusal()[0] == TritonError.UNAVAILABLE and "latency_ms" in late.refusal()[1]
    assert gone.refusal()[0] == TritonError.CANCELLED
    expected = peft_texts(small_base, {"small": mixed_adapters["small"]}, PROMPT, COUNT)
    for name in ("small", None, "small"):
        front.execute([request := asking(name)])
        assert answer_of(request)["text_output"] == expected[name]
    assert not any(request.sender.has_ended for request in waiting)
    for request in waiting:
        code, text = request.refusal()
        assert code == TritonError.UNAVAILABLE and "not fetched within 8 s; retry later" in text
    assert "not fetched within" in refusal(front, "mine/0")[1], "the failure is remembered"
    front.adapters.first_use.close()
    assert all(request.refusal()[0] in (TritonError.UNAVAILABLE, TritonError.NOT_FOUND) for request in queued)


def test_a_front_that_is_unloaded_ends_its_fetches(
    make_front: MakeFront, hub: Hub, mixed_adapters: dict[str, Path]
) -> None:
    hub.add("mine/styles", mixed_adapters["mlp"])
    hub.silent.add("mine/styles")
    front = make_front("mine/")
    front.execute([request := asking("mine/styles")])
    wait_for(lambda: any(path.endswith(CONFIG) for _, path in hub.asked))
    front.adapters.first_use.close()
    assert request.refusal() == (TritonError.UNAVAILABLE, "the model is being unloaded; retry elsewhere")


def test_all_that_waits_is_answered_before_a_front_has_ended(
    make_front: MakeFront, hub: Hub, mixed_adapters: dict[str, Path]
) -> None:
    for number in range(6):
        hub.add(f"mine/{number}", mixed_adapters["mlp"])
        hub.silent.add(f"mine/{number}")
    front = make_front("mine/")
    requests = [asking(f"mine/{number}") for number in range(60)]
    front.execute(requests)
    front.close()
    assert all(request.sender.has_ended for request in requests)


def test_what_waits_for_its_adapter_is_ended_by_its_id(
    make_front: MakeFront, hub: Hub, mixed_adapters: dict[str, Path]
) -> None:
    hub.add("mine/styles", mixed_adapters["mlp"])
    hub.silent.add("mine/styles")
    front = make_front("mine/")
    request, other = asking("mine/styles", request_id="mine", return_finish_reason=True), asking("mine/styles")
    front.execute([request, other])
    front.execute([ask(None, stop_id="mine")])
    assert answer_of(request)["finish_reason"] == ABORT
    assert not other.sender.has_ended


def test_a_refused_name_keeps_no_request(make_front: MakeFront, shelf: Path) -> None:
    """A remembered error is the answer to many requests, none of which it may hold: they hold Triton's senders."""
    front = make_front(shelf)
    requests = [asking("nobody") for _ in range(3)]
    for request in requests:
        front.execute([request])
        assert request.refusal()[0] == TritonError.NOT_FOUND
    wait_for(lambda: not front.live)
    senders = [weakref.ref(request.sender) for request in requests]
    del request
    requests.clear()
    # The thread that sent the last one holds it until it has another.
    front.execute([last := asking("small")])
    assert answer_of(last)["text_output"]
    gc.collect()
    assert [sender() for sender in senders] == [None] * 3


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("mine/lies", "INVALID_ARG", "the hash that the hub states"),
        ("mine/other", "INVALID_ARG", "base_model_name_or_path: got 'owner/other'; a folder with the weights"),
        ("mine/shapes", "INVALID_ARG", "got (4, 65); shape must be (rank, 128)"),
        ("mine/huge", "INVALID_ARG", "hub id mine/huge: got '1000000000.. bytes'; at most 1048576 bytes"),
        ("mine/endless", "INTERNAL", "sends more than the size that it states"),
        ("mine/pickled", "INVALID_ARG", "adapter_model.safetensors; this is no adapter of PEFT"),
        ("mine/nobody", "NOT_FOUND", "has no such repository"),
        ("mine/nan", "INTERNAL", "lora_A.weight: got 'NaN or infinity'; finite weights"),
    ],
)
def test_a_hub_that_lies_is_refused(
    make_front: MakeFront, hub: Hub, small_base: Path, tmp_path: Path, name: str, code: str, said: str
) -> None:
    """With the field, its value and the limit; the adapters that are registered are served afterwards."""
    source = make_adapter(tmp_path / "source", small_base, Spec(4), seed=3)
    tensors = load_file(source / WEIGHTS)
    first = next(iter(sorted(tensors)))
    whole = (source / WEIGHTS).read_bytes()
    kind = name.partition("/")[2]
    if kind == "lies":
        hub.sent[WEIGHTS] = whole[:-4] + b"\0\0\0\0"
    elif kind == "other":
        make_adapter(source, small_base, Spec(4), base_model_name_or_path="owner/other")
    elif kind == "shapes":
        save_adapter(source, small_base, Spec(4), {**tensors, first: torch.zeros(4, 65)})
    elif kind == "nan":
        save_adapter(source, small_base, Spec(4), {**tensors, first: tensors[first] * float("nan")})
    elif kind == "huge":
        hub.stated[WEIGHTS] = 10**12
    elif kind == "endless":
        hub.sent[WEIGHTS], hub.stated[WEIGHTS] = whole + bytes(4 << 20), len(whole)
    elif kind == "pickled":
        (source / WEIGHTS).rename(source / "adapter_model.bin")
    if kind != "nobody":
        hub.add(name, source)
    front = make_front("mine/")
    status, text = refusal(front, name)
    assert status == getattr(TritonError, code), text
    assert all(part in text for part in said.split("..")), text
    assert name not in (front.describe().adapters or ())
    front.execute([request := asking("small")])
    assert answer_of(request)["text_output"]


def test_what_was_sent_wrongly_is_fetched_again(
    make_front: MakeFront, hub: Hub, small_base: Path, mixed_adapters: dict[str, Path]
) -> None:
    hub.add("mine/styles", mixed_adapters["mlp"])
    whole = (mixed_adapters["mlp"] / WEIGHTS).read_bytes()
    hub.sent[WEIGHTS] = whole[:-4] + b"\0\0\0\0"
    assert "the hash that the hub states" in refusal(make_front("mine/"), "mine/styles")[1]
    hub.sent.clear()
    front = make_front("mine/")
    front.execute([request := asking("mine/styles")])
    expected = peft_texts(small_base, {"styles": mixed_adapters["mlp"]}, PROMPT, COUNT)
    assert answer_of(request)["text_output"] == expected["styles"]


def test_names_outside_of_the_sources_are_refused(
    make_front: MakeFront, hub: Hub, shelf: Path, tmp_path: Path, mixed_adapters: dict[str, Path]
) -> None:
    hub.add("theirs/styles", mixed_adapters["mlp"])
    hub.add("mine/styles", mixed_adapters["mlp"], revision="refs/pr/1")
    outside = shelf.parent / "outside"
    (shelf / "two" / WEIGHTS).rename(outside)
    (shelf / "two" / WEIGHTS).symlink_to(outside)
    (shelf / "linked").symlink_to(mixed_adapters["mlp"])
    (shelf / "empty").mkdir()
    front = make_front(f"{shelf},mine/")
    for name in ("theirs/styles", "mine/styles@refs/pr/1", "mine/../styles", "/etc/passwd", "mine/", "min/x"):
        code, text = refusal(front, name)
        assert code == TritonError.INVALID_ARG
        assert "that begins as adapter_sources allows: mine/" in text, name
    for name, said in (
        ("two", "adapter_model.safetensors is a link out of it"),
        ("linked", "adapter_config.json is a link out of it"),
        ("empty", "with adapter_config.json"),
    ):
        code, text = refusal(front, name)
        assert code == TritonError.INVALID_ARG and f"lora_name: got '{name}'" in text and said in text
    assert refusal(front, "..")[0] == TritonError.INVALID_ARG
    assert refusal(front, "nobody")[0] == TritonError.NOT_FOUND
    assert not hub.asked


def test_an_adapter_whose_files_change_is_fetched_again(
    make_front: MakeFront, shelf: Path, small_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = make_front(shelf, eviction="unused")
    front.execute([request := asking("one")])
    first = answer_of(request)["text_output"]
    wait_for(lambda: not front.cache.resident_names())
    make_adapter(shelf / "one", small_base, Spec(9), seed=90)
    assert "has changed since it was registered" in refusal(front, "one")[1]
    later = make_front(shelf)
    later.execute([request := asking("one")])
    assert answer_of(request)["text_output"] != first


@pytest.mark.parametrize("source", ["mine", "s3://bucket/x", "../adapters", "owner/name@main"])
def test_sources_are_folders_or_beginnings_of_ids(make_front: MakeFront, source: str) -> None:
    with pytest.raises(Exception, match="adapter_sources: got .*; absolute folders and beginnings of hub ids"):
        make_front(source)
