"""The front from Triton's request to its response, over engines that only imitate."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import EngineSet, pack
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.providers.emulated import EmulatedRuntime
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.files import HASHES, file_sha256
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from tests.fakes import (
    PbUtils,
    Request,
    TritonError,
    as_served,
    ids_request,
    text_request,
)
from tests.serving.otlp import PARENT, Receiver
from tests.serving.otlp import receiver as receiver

if TYPE_CHECKING:
    from tests.polymorph.conftest import Gate

MakeFront = Callable[..., TextFront]
PROJECT = Path(__file__).resolve().parents[2]


def inline(front: TextFront) -> EngineExecutor:
    """The engine threads of a front that holds its engines."""
    assert isinstance(front.executor, EngineExecutor)
    return front.executor


@pytest.fixture
def expected(tmp_path: Path) -> Callable[..., np.ndarray]:
    """A function that gives the vectors that texts or rows of ids must get from a front of this test."""

    def vectors(*rows: str | Sequence[int]) -> np.ndarray:
        folder = tmp_path / "build" / "engines" / "front"
        engine = EmulatedRuntime(folder).engine(None, None)
        texts = [row.encode() for row in rows if isinstance(row, str)]
        tokenizer = TextTokenizer(folder / "tokenizer.json", 512) if texts else None
        made = []
        for row in rows:
            ids = tokenizer.encode(row.encode(), 0, True) if tokenizer and isinstance(row, str) else np.array(row)
            made.append(engine.run(pack([ids], len(ids), 1))["EMBEDDING"][0])
        return np.stack(made)

    return vectors


# What is served.


def test_texts_and_ids_get_their_vectors(make_front: MakeFront, expected: Callable[..., np.ndarray]) -> None:
    front = make_front()
    texts = ["one", "two words", "über the hills and far away"]
    requests = [text_request(*texts), text_request(texts[1]), ids_request([101, 2028, 102], [101, 102], [7])]
    front.execute(requests)
    np.testing.assert_array_equal(requests[0].vectors(), expected(*texts))
    np.testing.assert_array_equal(requests[1].vectors(), expected(texts[1]))
    np.testing.assert_array_equal(requests[2].vectors(), expected(texts[0], [101, 102], [7]))
    assert requests[0].vectors().dtype == np.float32


def test_a_request_without_inputs_is_told_what_the_model_is(make_front: MakeFront, tmp_path: Path) -> None:
    asked, bad = Request(("EMBEDDING", "DESCRIPTION")), Request()
    make_front().execute([asked, bad])
    found = json.loads(asked.vectors("DESCRIPTION").item())
    assert found["kind"] == "embedding" and found["embedding_size"] == 8 and found["pairs"] is False
    assert (found["max_tokens"], found["max_batch_size"], found["precision"]) == (512, 64, "f32")
    assert "DESCRIPTION" not in found["outputs"] and "labels" not in found
    made = tmp_path / "build" / "engines" / "front" / "manifest.json"
    assert found["engines"] == file_sha256(made)[:12]
    assert bad.refusal()[1].startswith("inputs: got 'none'; TEXT, or ")


def test_a_request_of_many_rows_shares_calls(
    make_front: MakeFront, gate: Gate, expected: Callable[..., np.ndarray]
) -> None:
    front = make_front(pack_tokens=60)
    texts = [f"text {number}" for number in range(64)]
    request = text_request(*texts)
    front.execute([request])
    vectors, packs = request.vectors(), list(gate.packs)
    np.testing.assert_array_equal(vectors, expected(*texts))
    assert sum(packs) == 64 and len(packs) < 16


def test_a_trace_shows_the_engine_call_of_a_text(receiver: Receiver, make_front: MakeFront, gate: Gate) -> None:
    front, request = make_front(), text_request("a", "b")
    request.trace_header = PARENT
    front.execute([request])
    request.vectors()
    front.close()
    (span,) = receiver.named("front")
    call = receiver.within(span)["engine call"]
    assert (call.attributes["texts"], call.attributes["tokens"]) == (2, span.attributes["tokens"])
    assert [call.attributes["size"]] == span.attributes["bins"] and call.attributes["waited_ms"] >= 0


def test_without_packing_every_text_has_its_own_call(make_front: MakeFront, gate: Gate) -> None:
    request = text_request("a", "b", "c")
    make_front(packing=False).execute([request])
    request.vectors()
    assert gate.packs == [1, 1, 1]


def test_truncate(make_front: MakeFront, expected: Callable[..., np.ndarray]) -> None:
    front = make_front()
    long = "word " * 600
    cut, refused = text_request(long, parameters={"truncate": True}), text_request(long)
    front.execute([cut, refused])
    np.testing.assert_array_equal(cut.vectors(), expected(long))
    assert refused.refusal() == (
        TritonError.INVALID_ARG,
        "row 0: TEXT: got '602 tokens'; at most 512 (or truncate=true)",
    )


def test_a_request_may_name_the_checkpoint_that_must_answer(make_front: MakeFront, tmp_path: Path) -> None:
    front = make_front()
    own = manifest.load(tmp_path / "build" / "engines" / "front").checkpoint_sha256
    served, refused = (text_request("a", parameters={"checkpoint": one}) for one in (own, "0" * 64))
    front.execute([served, refused])
    assert len(served.vectors("EMBEDDING")) == 1
    code, message = refused.refusal()
    assert code == TritonError.UNAVAILABLE and f"this model has {own} since it was loaded" in message


def test_outputs_are_those_requested(make_front: MakeFront) -> None:
    front = make_front()
    asked, silent = text_request("a", outputs=["EMBEDDING"]), text_request("a", outputs=[])
    front.execute([asked, silent])
    assert [tensor.name() for tensor in asked.sender.answer().output_tensors()] == ["EMBEDDING"]
    answer = silent.sender.answer()
    assert answer.error() is None and answer.output_tensors() == []


def test_many_requests_of_all_lengths_under_two_threads(
    make_front: MakeFront, expected: Callable[..., np.ndarray]
) -> None:
    front = make_front(engine_threads=2)
    rng = random.Random(4)
    rows = [
        [[rng.randint(1, 30000) for _ in range(rng.choice((1, 3, 9, 40, 200)))] for _ in range(rng.randint(1, 5))]
        for _ in range(150)
    ]
    requests = [ids_request(*own) for own in rows]
    for start in range(0, len(requests), 7):
        front.execute(requests[start : start + 7])
    for request, own in zip(requests, rows, strict=True):
        np.testing.assert_array_equal(request.vectors(), expected(*own))
    inline(front).queue.check_integrity()
    assert len(inline(front).queue) == 0


# What is refused.


def test_bad_requests_cost_only_themselves(make_front: MakeFront, expected: Callable[..., np.ndarray]) -> None:
    front = make_front()
    good = [text_request("first"), text_request("second", "third")]
    bad = {
        text_request("fine", ""): "row 1: TEXT: got ''; at least one character",
        text_request(b"\xff"): "row 0: TEXT: got b'\\xff'; valid UTF-8",
        ids_request([101, 30522]): "row 0: INPUT_IDS: got 30522; 0 to 30521",
        Request(): "inputs: got 'none'",
        text_request(
            "a", parameters={"trunkate": True}
        ): "parameter trunkate: got True; unknown parameter; did you mean truncate?",
        text_request("a", parameters={"latency_ms": 0}): "parameter latency_ms: got 0; above 0",
    }
    front.execute([good[0], *bad, good[1]])
    np.testing.assert_array_equal(good[0].vectors(), expected("first"))
    np.testing.assert_array_equal(good[1].vectors(), expected("second", "third"))
    for request, said in bad.items():
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG
        assert text.startswith(said)


def test_a_request_that_breaks_our_own_code_is_answered_too(make_front: MakeFront) -> None:
    front = make_front()
    broken, good = text_request("a"), text_request("a")
    broken.tensors["TEXT"] = object()  # type: ignore[assignment]
    front.execute([broken, good])
    code, text = broken.refusal()
    assert code == TritonError.INTERNAL and text.startswith("AttributeError: ")
    good.vectors()


def test_a_full_queue_is_unavailable(make_front: MakeFront, gate: Gate) -> None:
    front = make_front(queue_rows=2, packing=False)
    gate.hold()
    running, waiting, refused, also = (text_request(*["a"] * rows) for rows in (1, 2, 1, 1))
    front.execute([running])
    gate.wait_held()
    front.execute([waiting, refused])
    assert refused.refusal() == (
        TritonError.UNAVAILABLE,
        "queue_rows: 2 rows wait, 1 more would exceed 2; retry later",
    )
    gate.release()
    assert len(running.vectors()) == 1 and len(waiting.vectors()) == 2
    front.execute([also])
    also.vectors()


def test_a_deadline_that_passes_while_waiting_is_reported_at_once(make_front: MakeFront, gate: Gate) -> None:
    front = make_front(packing=False)
    gate.hold()
    running, late, patient = (
        text_request("a"),
        text_request("b", "c", parameters={"latency_ms": 20}),
        text_request("d", parameters={"latency_ms": 60_000}),
    )
    front.execute([running])
    gate.wait_held()
    front.execute([late, patient])
    # The engine is still busy with the first.
    code, text = late.refusal()
    assert code == TritonError.UNAVAILABLE and text.startswith("latency_ms ran out")
    gate.release()
    running.vectors()
    patient.vectors()
    assert gate.packs == [1, 1]


def test_a_cancelled_request_is_not_computed(make_front: MakeFront, gate: Gate) -> None:
    front = make_front(packing=False)
    gate.hold()
    running, gone, stays = text_request("a"), text_request("b", "c"), text_request("d")
    front.execute([running])
    gate.wait_held()
    front.execute([gone, stays])
    gone.sender.cancelled = True
    assert gone.refusal() == (TritonError.CANCELLED, "the caller cancelled the request")
    gate.release()
    running.vectors()
    stays.vectors()
    assert len(gate.packs) == 2


def test_an_engine_that_fails_costs_its_rows_and_the_thread_goes_on(make_front: MakeFront, gate: Gate) -> None:
    front = make_front()
    gate.fail = RuntimeError("out of luck")
    failed = [text_request("a"), text_request("b", "c")]
    front.execute(failed)
    for request in failed:
        assert request.refusal() == (TritonError.INTERNAL, "the engine failed: out of luck")
    gate.fail = None
    good = text_request("d")
    front.execute([good])
    good.vectors()


def test_close_answers_what_waits_and_ends_every_thread(make_front: MakeFront, gate: Gate, pb_utils: PbUtils) -> None:
    before = set(threading.enumerate())
    front = make_front(packing=False)
    gate.hold()
    running, waiting = text_request("a"), [text_request("b"), text_request("c", "d")]
    front.execute([running])
    gate.wait_held()
    front.execute(waiting)
    closing = threading.Thread(target=front.close)
    closing.start()
    for request in waiting:
        assert request.refusal() == (TritonError.UNAVAILABLE, "the model is being unloaded; retry elsewhere")
    gate.release()
    closing.join(30)
    running.vectors()
    assert set(threading.enumerate()) <= before
    assert pb_utils.metric("shapeshift_requests_total", code="OK") == 1
    assert pb_utils.metric("shapeshift_requests_total", code="UNAVAILABLE") == 2
    assert pb_utils.metric("shapeshift_requests_waiting") == 0


# What is counted.


def test_metrics(make_front: MakeFront, pb_utils: PbUtils, gate: Gate) -> None:
    front = make_front(packing=False)
    good, bad = ids_request([1] * 8, [2] * 9, [3] * 16), ids_request([-1])
    front.execute([good, bad])
    good.vectors()
    bad.refusal()
    gate.fail = ValueError("x")
    broken = ids_request([1] * 500)
    front.execute([broken])
    broken.refusal()
    front.close()
    count = pb_utils.metric
    assert [count("shapeshift_request_tokens_bucket", le=le) for le in ("8", "16", "496", "504", "+Inf")] == [
        1,
        3,
        3,
        4,
        4,
    ]
    assert count("shapeshift_request_tokens_sum") == 533
    codes = {code: count("shapeshift_requests_total", code=code) for code in ("OK", "INVALID_ARG", "INTERNAL")}
    assert codes == {"OK": 1, "INVALID_ARG": 1, "INTERNAL": 1}
    assert count("shapeshift_requests_total") == 3
    assert count("shapeshift_request_latency_ms_count") == 1
    assert count("shapeshift_engine_rows_total") == 4
    assert count("shapeshift_engine_calls_total") == 4
    assert all(("model", "front") in labels for _, labels in pb_utils.metrics)


def test_waiting_and_running_are_gauges(make_front: MakeFront, pb_utils: PbUtils, gate: Gate) -> None:
    front = make_front(packing=False)
    gate.hold()
    request = text_request("a", "b", "c")
    front.execute([request])
    gate.wait_held()
    front.export()
    assert pb_utils.metric("shapeshift_requests_waiting") == 2
    assert pb_utils.metric("shapeshift_requests_running") == 1
    gate.release()
    request.vectors()


# Which engines there are.


def test_further_engines_are_loaded_in_the_background(make_front: MakeFront) -> None:
    front = make_front(bins="16,32,64", engine_threads=2)
    assert inline(front).wait_loaded(30)
    for worker in inline(front).threads:
        assert worker.engines.loaded[0] == "dynamic"
        assert sorted(worker.engines.loaded[1:]) == ["16", "32", "64"]


def test_a_front_remembers_the_hashes_of_its_engines(
    front_args: Callable[..., dict[str, str]], pb_utils: PbUtils, tmp_path: Path
) -> None:
    args = model_args.read(front_args())
    for file in (tmp_path / "build" / "engines" / "front").iterdir():
        os.utime(file, (1e9, 1e9))
    (tmp_path / "build" / HASHES).unlink(missing_ok=True)
    TextFront(pb_utils, args).close()
    assert "engines/front/emulated.json" in (tmp_path / "build" / HASHES).read_text()


class Opening:
    """before: called with the tokens of each engine that is opened, and with the number of those before it."""

    def __init__(self) -> None:
        self.before: Callable[[int | None, int], object] = lambda tokens, number: None


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    """What happens before an engine is opened."""
    hook, count, open_engine = Opening(), itertools.count(), EmulatedRuntime.engine

    def engine(runtime: EmulatedRuntime, tokens: int | None, rows: int | None) -> Any:
        hook.before(tokens, next(count))
        return open_engine(runtime, tokens, rows)

    monkeypatch.setattr(EmulatedRuntime, "engine", engine)
    return hook


@pytest.fixture
def second(opening: Opening) -> Iterator[threading.Event]:
    """The dynamic engine of the second engine thread is opened once this is set."""
    allowed = threading.Event()
    opening.before = lambda tokens, number: number == 0 or allowed.wait(120)
    yield allowed
    allowed.set()


def test_a_front_serves_while_its_second_thread_gets_its_engine(
    make_front: MakeFront, second: threading.Event, pb_utils: PbUtils
) -> None:
    front = make_front(engine_threads=2)
    request = text_request("a")
    front.execute([request])
    request.vectors()
    assert len(inline(front).threads) == len(inline(front).steps) == 1
    assert inline(front).loaded == 0
    second.set()
    assert inline(front).wait_loaded(30)
    assert len(inline(front).threads) == 2
    assert inline(front).loaded == len(inline(front).threads[1].engines.loaded)
    front.export()
    stalled = [dict(labels) for name, labels in pb_utils.metrics if name == "shapeshift_thread_stalled_seconds"]
    assert {"engine-0", "engine-1"} <= {labels["thread"] for labels in stalled}, "threads that start later are watched"


def test_every_engine_thread_makes_its_first_call_before_it_serves_and_yields_to_nobody(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further threads get their engines from a thread that yields the processor, and do not inherit that.

    The scheduling policy of a thread stands for its niceness: it is inherited as that is, and what cannot be nicer can
    have another one.
    """

    def yields(thread_id: int) -> bool:
        return os.sched_getscheduler(thread_id) == os.SCHED_BATCH

    def be_nice(increment: int) -> int:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return increment

    monkeypatch.setattr(os, "nice", be_nice)
    warm: list[tuple[EngineSet, list[str], bool]] = []

    def note(engines: EngineSet) -> None:
        warm.append((engines, engines.loaded, yields(threading.get_native_id())))

    monkeypatch.setattr(EngineSet, "warm_up", note)
    front = make_front(engine_threads=2)
    assert inline(front).wait_loaded(30)
    assert [(engines, loaded) for engines, loaded, _ in warm] == [
        (thread.engines, ["dynamic"]) for thread in inline(front).threads
    ]
    assert [does for *_, does in warm] == [False, True]
    assert not any(yields(int(thread._thread.native_id or 0)) for thread in inline(front).threads)


def out_of_memory() -> None:
    raise RuntimeError("out of memory")


def test_a_thread_that_gets_no_engine_is_logged_and_the_first_serves(
    make_front: MakeFront, pb_utils: PbUtils, opening: Opening
) -> None:
    opening.before = lambda tokens, number: out_of_memory() if number == 1 else None
    front = make_front(bins="16", engine_threads=3)
    assert inline(front).wait_loaded(30)
    assert [thread.engines.loaded for thread in inline(front).threads] == [["dynamic", "16"]]
    assert any("thread 1 cannot be started" in line and "out of memory" in line for line in pb_utils.Logger.lines)
    request = text_request("a", "b")
    front.execute([request])
    request.vectors()


def test_an_engine_that_does_not_load_is_logged_and_others_take_its_lengths(
    make_front: MakeFront, pb_utils: PbUtils, opening: Opening
) -> None:
    opening.before = lambda tokens, number: out_of_memory() if tokens == 32 else None
    front = make_front(bins="16,32,64")
    assert inline(front).wait_loaded(30)
    assert inline(front).threads[0].engines.loaded[0] == "dynamic"
    assert sorted(inline(front).threads[0].engines.loaded[1:]) == ["16", "64"]
    assert any("engine 32 cannot be loaded" in line and "out of memory" in line for line in pb_utils.Logger.lines)
    request = ids_request([1] * 30)
    front.execute([request])
    request.vectors()


def test_memory_limits_how_many_engines_are_loaded(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(bins="16,32,64", memory_mb=1)
    assert inline(front).wait_loaded(30)
    assert inline(front).threads[0].engines.loaded == ["dynamic"]
    assert any("memory_mb" in line for line in pb_utils.Logger.lines)
    request = text_request("still served")
    front.execute([request])
    request.vectors()


def test_without_a_dynamic_engine_the_longest_is_ready_first(
    make_front: MakeFront, gate: Gate, expected: Callable[..., np.ndarray]
) -> None:
    front = make_front(dynamic=False, bins="16,32", max_tokens=32)
    assert inline(front).threads[0].engines.loaded[0] == "32"
    assert inline(front).wait_loaded(30)
    # 12 rows of 3 tokens are within 32 tokens only in part, and the engine has 8 slots.
    request = ids_request(*[[101, number, 102] for number in range(1, 13)])
    front.execute([request])
    vectors = request.vectors()
    assert max(gate.packs) <= 8
    np.testing.assert_array_equal(vectors, expected(*[[101, number, 102] for number in range(1, 13)]))


def test_packs_never_exceed_the_longest_engine(make_front: MakeFront) -> None:
    front = make_front(dynamic=False, bins="16,32", max_tokens=32, pack_tokens=500)
    request = ids_request(*[[1] * 20] * 6)
    front.execute([request])
    assert len(request.vectors()) == 6


# What is not loaded at all.


def damaged(args: dict[str, str], **parameters: str | None) -> dict[str, str]:
    """The same `args` with other parameters in the config."""
    config = json.loads(args["model_config"])
    for name, value in parameters.items():
        config["parameters"].pop(name, None)
        if value is not None:
            config["parameters"][name] = {"string_value": value}
    return {**args, "model_config": json.dumps(config)}


@pytest.mark.parametrize(
    ("parameters", "kind", "said"),
    [
        ({"engines": None}, InvalidInputError, "engines: .*a folder of engines; run `shapeshift engines`"),
        ({"engines": "../absent"}, EngineError, "no engine manifest .*; run `shapeshift engines`"),
        ({"manifest_sha256": "0" * 64}, EngineError, "not the one that the model's config names"),
        ({"checkpoint_sha256": "0" * 64}, EngineError, "come from another checkpoint"),
        ({"queue_row": "1"}, InvalidInputError, "queue_row: .*unknown parameter; did you mean queue_rows. known: "),
        ({"queue_rows": "0"}, InvalidInputError, "queue_rows: got 0; at least 1"),
        ({"engine_threads": "many"}, InvalidInputError, "engine_threads: got 'many'; must be a whole number"),
        ({"engine_threads": "1000"}, InvalidInputError, "engine_threads: got 1000; 0 to 256"),
        ({"pack_tokens": "-1"}, InvalidInputError, "pack_tokens: got -1; 0 or more"),
        ({"placement": "everywhere"}, InvalidInputError, "placement: got 'everywhere'; one of inline"),
    ],
)
def test_an_invalid_config_is_refused(
    front_args: Callable[..., dict[str, str]],
    pb_utils: PbUtils,
    parameters: dict[str, str | None],
    kind: type[Exception],
    said: str,
) -> None:
    before = set(threading.enumerate())
    args = model_args.read(damaged(front_args(), **parameters))
    with pytest.raises(kind, match=said):
        TextFront(pb_utils, args)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, .* in the manifest"),
        (lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]), "content differs from the manifest"),
        (lambda file: file.unlink(), "is missing"),
    ],
)
def test_changed_engines_are_refused(
    front_args: Callable[..., dict[str, str]],
    pb_utils: PbUtils,
    tmp_path: Path,
    damage: Callable[[Path], object],
    said: str,
) -> None:
    args = front_args()
    damage(tmp_path / "build" / "engines" / "front" / "tokenizer.json")
    with pytest.raises(EngineError, match=f"tokenizer.json.*{said}.*run `shapeshift engines`"):
        TextFront(pb_utils, model_args.read(args))


def test_a_manifest_without_its_hash_in_the_config_is_accepted(
    front_args: Callable[..., dict[str, str]], pb_utils: PbUtils, tmp_path: Path
) -> None:
    args = damaged(front_args(), manifest_sha256=None, checkpoint_sha256=None)
    folder = tmp_path / "build" / "engines" / "front"
    dataclasses.replace(manifest.load(folder), max_tokens=4).save(folder)
    front = as_served(TextFront(pb_utils, model_args.read(args)))
    request = ids_request([1] * 5)
    front.execute([request])
    assert "at most 4" in request.refusal()[1]
    front.close()


def test_a_request_has_a_line_in_the_log_where_the_setting_says_so(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=1, bins="16,64")
    texts = ids_request([101, 2028, 102], [7], parameters={"slo_class": "batch"}, request_id="r1")
    front.execute([texts, Request(), text_request("a", parameters={"nobody": 1})])
    texts.vectors()
    answered, *refused = sorted(pb_utils.Logger.requests(3), key=lambda line: "ms" not in line)
    assert (answered["id"], answered["slo_class"], answered["outcome"]) == ("r1", "batch", "OK")
    assert (answered["texts"], answered["tokens"]) == (2, 4)
    assert {*answered["bins"]} <= {0, 16, 64}
    assert answered["ms"] >= answered["compute_ms"] > 0 and answered["queue_ms"] >= 0
    assert refused == [{"outcome": "INVALID_ARG"}] * 2


def test_questions_of_the_sidecar_are_counted_apart(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=1)
    questions = [ids_request([101, 102], parameters={"check": before}) for before in ("right", "wrong")]
    other = ids_request([101, 102], parameters={"check": "nobody knows"})
    front.execute([*questions, other])
    for question in questions:
        question.vectors()
    assert "one of right, wrong" in other.refusal()[1]
    outcomes = {line["outcome"] for line in pb_utils.Logger.requests(3)}
    assert outcomes == {"CHECK", "CHECK_WRONG", "INVALID_ARG"}
    metrics = front.request_metrics
    counted = {code for code, counter in metrics.answered.items() if counter.value}
    assert counted == outcomes
    assert metrics.latency_ms.totals()[0][-1] == 0 and metrics.lengths.totals()[0][-1] == 0


def test_requests_are_not_logged_by_default(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front()
    request = text_request("a")
    front.execute([request, Request()])
    request.vectors()
    front.close()
    assert not any(": request " in line for line in pb_utils.Logger.lines)


def test_a_share_of_requests_is_logged(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=0.25)
    front.execute([Request() for _ in range(2000)])
    assert 300 < len(pb_utils.Logger.requests(1)) < 700


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_a_share_beyond_all_is_refused(make_front: MakeFront, share: str) -> None:
    with pytest.raises(InvalidInputError, match="log_requests: got .*; 0 to 1"):
        make_front(log_requests=share)
