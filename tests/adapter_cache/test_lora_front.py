"""The front with adapters in this process: a real small model, and a fake of Triton's side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.adapter_cache import multi_lora, registry, room
from shapeshift.adapter_cache.room import AdapterRoom
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.front import GenerateFront
from tests.adapter_cache.lora_models import Spec, make_adapter, peft_texts, save_adapter
from tests.fakes import PbUtils, Request, TritonError
from tests.fused_decode.fronts import arguments, ask, told
from tests.waiting import wait_for

MakeFront = Callable[..., GenerateFront]
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
        registry.add(made, name, source, pinned=False)
    return made


@pytest.fixture
def make_front(
    small_base: Path, folder: Path, lora_kernels: Path, pb_utils: PbUtils, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeFront]:
    """A function that starts a front; every one is closed when the test ends, and must be whole then."""
    monkeypatch.setattr(room, "_PERIOD_S", 0.05)
    started: list[GenerateFront] = []

    def make(**parameters: object) -> GenerateFront:
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
        started.append(GenerateFront(pb_utils, arguments("generate_lora", **stated), partial(AdapterRoom, pb_utils)))
        return started[-1]

    yield make
    for front in started:
        front.close()
        front.loop.check_integrity()
        cache = room_of(front).cache
        assert all(not one.users for one in cache.known.all()) and not cache.known.waiting
        assert front.loop.slots.used == len(front.loop.admission) == len(front._live) == 0
        assert not room_of(front)._live


def room_of(front: GenerateFront) -> AdapterRoom:
    assert isinstance(front._room, AdapterRoom)
    return front._room


def asking(name: str | None, text: str = PROMPT, **fields: Any) -> Request:
    return ask(text, parameters=None if name is None else {"lora_name": name}, **{"max_tokens": COUNT, **fields})


@pytest.fixture(scope="module")
def spoken(small_base: Path, mixed_adapters: dict[str, Path]) -> dict[str | None, str]:
    """What PEFT says greedily with each adapter, and without one."""
    return peft_texts(small_base, mixed_adapters, PROMPT, COUNT)


# What is served.


@pytest.mark.parametrize("options", [{}, {"native": "false"}, {"stacked_ranks": 1000}, {"scheduler": "fifo"}])
def test_every_adapter_says_what_peft_says(
    make_front: MakeFront, spoken: dict[str | None, str], options: dict[str, object]
) -> None:
    front = make_front(**options)
    requests = [(name, asking(name)) for _ in range(3) for name in spoken]
    front.execute([request for _, request in requests])
    for name, request in requests:
        assert told(request)["text_output"] == spoken[name]
    assert len(set(spoken.values())) == len(spoken), "each adapter says something else"


@pytest.mark.parametrize("scheduler", ["arrival", "chameleon", "fifo", "sjf", "wrs"])
def test_a_pool_too_small_for_all_serves_all(
    make_front: MakeFront, spoken: dict[str | None, str], small_base: Path, folder: Path, tmp_path: Path, scheduler: str
) -> None:
    for number in range(20):
        source = make_adapter(tmp_path / f"made{number}", small_base, Spec(60), seed=number)
        registry.add(folder, f"filler{number}", source, pinned=False)
    front = make_front(scheduler=scheduler)
    names = [*spoken, *(f"filler{number}" for number in range(20))] * 3
    requests = [(name, asking(name)) for name in names]
    front.execute([request for _, request in requests])
    for name, request in requests:
        text = told(request)["text_output"]
        assert name not in spoken or text == spoken[name]
    cache = room_of(front).cache
    assert sum(counter.value for counter in cache.meters.evictions.values()) > 10
    assert cache.meters.hits.value + cache.meters.misses.value == len([name for name in names if name])


def test_an_adapter_may_be_named_where_vllm_has_it(make_front: MakeFront, spoken: dict[str | None, str]) -> None:
    front = make_front()
    stated = [json.dumps({"lora_name": name, "ignore_eos": False}) for name in spoken]
    requests = [asking(None, sampling_parameters=text) for text in stated]
    twice, number = asking("small", sampling_parameters=stated[1]), asking(None, sampling_parameters='{"lora_name": 3}')
    front.execute([*requests, twice, number])
    assert [told(request)["text_output"] for request in requests] == list(spoken.values())
    assert twice.refusal() == (
        TritonError.INVALID_ARG,
        "parameter lora_name: got 'small'; once: as a parameter or elsewhere in the request",
    )
    assert number.refusal()[1] == "parameter lora_name: got 3; a text of 1 to 256 characters"


def test_metrics_tell_of_adapters(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front()
    request = asking("small")
    front.execute([request])
    told(request)
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


# What is refused, and what goes wrong.


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


def test_the_registry_changes_while_requests_run(
    make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path, spoken: dict[str | None, str]
) -> None:
    front = make_front()
    room = room_of(front)
    long = asking("small", max_tokens=40, ignore_eos=True, return_num_output_tokens=True)
    front.execute([long])
    registry.remove(folder, "small")
    registry.add(folder, "late", make_adapter(tmp_path / "late", small_base, Spec(3), seed=77), pinned=True)
    wait_for(lambda: "late" in [one.label for one in room.catalogue.all()])
    assert told(long)["num_output_tokens"] == 40
    gone = asking("small")
    front.execute([gone])
    assert gone.refusal()[0] == TritonError.NOT_FOUND
    wait_for(lambda: any(name.startswith("late@") for name in room.cache.residents()))
    registry.pin(folder, "late", False)
    wait_for(lambda: not room.cache.ahead._pinned)
    room.cache.check_integrity()


def test_bad_entries_change_nothing(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    spoken: dict[str | None, str],
    pb_utils: PbUtils,
) -> None:
    front = make_front()
    room = room_of(front)
    wrong = make_adapter(tmp_path / "wrong", small_base, Spec(4), base_model_name_or_path="other")
    for name in ("small", "fresh"):
        registry.add(folder, name, wrong, pinned=False)
    wait_for(lambda: room.cache.meters.refused.value == 2)
    known = asking("small")
    fresh = asking("fresh")
    front.execute([known, fresh])
    assert told(known)["text_output"] == spoken["small"]
    assert fresh.refusal()[0] == TritonError.NOT_FOUND
    (folder / "registry.json").write_text("{")
    wait_for(lambda: room.cache.meters.refused.value == 3)
    again = asking("small")
    front.execute([again])
    assert told(again)["text_output"] == spoken["small"]
    assert any("base_model_name_or_path" in line for line in pb_utils.Logger.lines)


def test_an_adapter_that_is_added_again_serves_again(
    make_front: MakeFront, folder: Path, mixed_adapters: dict[str, Path], spoken: dict[str | None, str]
) -> None:
    front = make_front()
    catalogue = room_of(front).catalogue
    known = {name: catalogue.find(name) for name in ("small", "large")}
    weights = registry.place(folder, registry.read(folder)["small"]) / registry.FILES[1]
    weights.write_bytes(b"damaged")
    registry.add(folder, "small", mixed_adapters["small"], pinned=False)
    wait_for(lambda: catalogue.find("small") is not known["small"])
    request = asking("small")
    front.execute([request])
    assert told(request)["text_output"] == spoken["small"]
    assert catalogue.find("large") is known["large"], "what is as it was stays loaded"


def bad_adapters(small_base: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """Folders that no server may take over, by name, and what is said of each."""
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
        "pickled": (pickled, "must be a whole safetensors file"),
        "cut": (cut, "must be a whole safetensors file"),
        "other": (changed("other", base_model_name_or_path="owner/other"), "base_model_name_or_path"),
        "ranks": (make_adapter(root / "ranks", small_base, Spec(201)), "a rank of 1 to max_rank (200)"),
        "large": (make_adapter(root / "large", small_base, Spec(160)), "do not fit into adapter_mb (1)"),
        "target": (tensors("target", weights.replace("up_", "z_"), torch.zeros(4, 64)), "a linear that the base has"),
        "nan": (tensors("nan", weights, torch.full((4, 64), float("nan"))), "NaN or infinity"),
        "scaled": (changed("scaled", lora_alpha=1e40), "NaN or infinity"),
        "unsaid": (changed("unsaid", use_rslora="yes"), "use_rslora"),
    }


def test_bad_adapters_harm_nobody(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    spoken: dict[str | None, str],
    pb_utils: PbUtils,
) -> None:
    front = make_front(max_rank=200)
    cache = room_of(front).cache
    bad = bad_adapters(small_base, tmp_path)
    for name, (source, _) in bad.items():
        registry.add(folder, f"bad_{name}", source, pinned=True)
    running: list[tuple[str | None, Request]] = []
    while cache.meters.refused.value < len(bad):
        running += [(name, asking(name)) for name in spoken]
        front.execute([request for _, request in running[-len(spoken) :]])
        assert told(running[-1][1])["text_output"] == spoken[running[-1][0]]
    assert all(told(request)["text_output"] == spoken[name] for name, request in running)
    for name, (_, said) in bad.items():
        (line,) = (line for line in pb_utils.Logger.lines if f"adapter bad_{name} is refused" in line)
        assert said in line
        request = asking(f"bad_{name}")
        front.execute([request])
        assert request.refusal()[0] == TritonError.NOT_FOUND
    assert len(room_of(front).catalogue) == len(spoken) - 1


@pytest.mark.parametrize("options", [{}, {"stacked_ranks": 1000}, {"native": "false"}])
def test_numbers_that_overflow_are_their_own_request_s(
    make_front: MakeFront,
    folder: Path,
    small_base: Path,
    tmp_path: Path,
    spoken: dict[str | None, str],
    options: dict[str, object],
) -> None:
    from safetensors.torch import load_file

    tensors = load_file(make_adapter(tmp_path / "wild", small_base, Spec(2)) / "adapter_model.safetensors")
    tensors = {name: 3e38 * tensor.sign() if "lora_A" in name else tensor for name, tensor in tensors.items()}
    registry.add(folder, "wild", save_adapter(tmp_path / "wild", small_base, Spec(2), tensors), pinned=False)
    front = make_front(**options)
    requests = [(name, asking(name)) for name in ("small", "wild", "large", None)]
    front.execute([request for _, request in requests])
    for name, request in requests:
        if name == "wild":
            code, text = request.refusal()
            assert code == TritonError.INTERNAL and "finite" in text
        else:
            assert told(request)["text_output"] == spoken[name]


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_breaks_before_it_is_loaded(
    make_front: MakeFront, folder: Path, spoken: dict[str | None, str], before: bool
) -> None:
    front = None if before else make_front()
    entry = registry.read(folder)["large"]
    weights = registry.place(folder, entry) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    front = front or make_front()
    requests = [asking("large"), asking("small"), asking("large")]
    front.execute(requests)
    assert told(requests[1])["text_output"] == spoken["small"]
    for request in (requests[0], requests[2]):
        code, text = request.refusal()
        assert code == TritonError.INTERNAL and "large" in text
    room_of(front).cache.check_integrity()


def test_an_adapter_larger_than_the_pool(
    make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path, pb_utils: PbUtils
) -> None:
    registry.add(folder, "huge", make_adapter(tmp_path / "huge", small_base, Spec(160)), pinned=False)
    registry.add(folder, "odd", make_adapter(tmp_path / "odd", small_base, Spec(201)), pinned=False)
    registry.add(folder, "fits", make_adapter(tmp_path / "fits", small_base, Spec(128)), pinned=True)
    front = make_front(max_rank=200)
    assert len(room_of(front).catalogue) == 7
    said = [line for line in pb_utils.Logger.lines if "adapter" in line]
    assert any("huge is refused" in line and "do not fit into adapter_mb (1)" in line for line in said)
    assert any("odd is refused" in line and "max_rank (200)" in line for line in said)
    assert any("fits is not pinned: adapter_mb leaves too little" in line for line in said)
    request = asking("fits")
    front.execute([request])
    assert told(request)["text_output"]


def test_many_adapters_are_known(make_front: MakeFront, folder: Path, small_base: Path, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "one", small_base, Spec(1, ("self_attn.q_proj",)))
    entry = registry.add(folder, "one", source, pinned=False)
    content = json.loads((folder / "registry.json").read_text())
    for number in range(1000):
        content["adapters"][f"n{number}"] = {"folder": entry.folder, "sha256": entry.sha256, "pinned": False}
    (folder / "registry.json").write_text(json.dumps(content))
    front = make_front()
    assert len(room_of(front).catalogue) == 1007
    requests = [asking(f"n{number}", max_tokens=1) for number in range(0, 1000, 50)]
    front.execute(requests)
    assert len({told(request)["text_output"] for request in requests}) == 1


def test_a_multi_lora_file_names_adapters(mixed_adapters: dict[str, Path], tmp_path: Path) -> None:
    version = tmp_path / "model" / "1"
    version.mkdir(parents=True)
    assert multi_lora.read(version) == {}
    (version / multi_lora.FILE).write_text(multi_lora.content({"mine": mixed_adapters["small"]}))
    assert multi_lora.read(version) == {"mine": mixed_adapters["small"]}
    for content in ('{"../x": "a"}', "[]", '{"a": 1}', "{"):
        (version / "multi_lora.json").write_text(content)
        with pytest.raises(InvalidInputError, match=r"multi_lora\.json"):
            multi_lora.read(version)
