"""The parts of the drill that need no server: accounting, recovery, gates, the schedule, what processes hold."""

from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.drill.drill import Result, every_fault, record, rounds, row
from bench.drill.faults import resources
from bench.drill.outcomes import (
    CODED,
    CUT,
    INTERNAL,
    KINDS,
    LOST,
    RIGHT,
    WRONG,
    Cost,
    Outcome,
    cost,
    is_whole,
    kind_of_error,
    kind_of_refusal,
    p99_by_front,
    time_until_whole,
)
from bench.drill.questions import Judge, Question, make
from bench.drill.site import Footprint
from bench.drill.soak import not_flat
from bench.drill.traffic import TIMEOUT_S, is_evicted

USUAL = {"encode": 0.1, "generate": 0.2}


def outcome(
    at_s: float, kind: str = RIGHT, took_s: float = 0.05, front: str = "encode", extra: bool = False
) -> Outcome:
    return Outcome(front, kind, at_s, at_s, at_s + took_s, "why" if kind != RIGHT else "", extra)


def steady(start: float, end: float, per_s: float = 20.0, **changes: object) -> list[Outcome]:
    made = [outcome(at_s) for at_s in np.arange(start, end, 1 / per_s).tolist()]
    return [replace(one, **changes) for one in made]  # type: ignore[arg-type]


def a_cost(**changes: object) -> Cost:
    return replace(Cost(0, dict.fromkeys(KINDS, 0), 0, 1.0), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "text", "took_s", "kind"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", TIMEOUT_S, LOST),
        ("DEADLINE_EXCEEDED", "latency_ms ran out", 0.2, CODED),
        ("UNAVAILABLE", "queue_rows: got 9", 0.0, CODED),
        ("UNAVAILABLE", "Socket closed", 3.0, CUT),
        ("UNAVAILABLE", "failed to connect to all addresses", 0.0, CUT),
        ("INTERNAL", "Stub process 'x' is not healthy.", 1.0, INTERNAL),
        ("UNKNOWN", "", 0.0, INTERNAL),
        ("NOT_FOUND", "no adapter", 0.0, CODED),
    ],
)
def test_errors_have_a_kind(code: str, text: str, took_s: float, kind: str) -> None:
    assert kind_of_error(code, text, took_s, TIMEOUT_S) == kind


def test_a_stream_of_a_model_that_is_not_loaded_is_refused() -> None:
    assert kind_of_refusal("Request for unknown model: 'generate' has no available versions") == CODED
    assert kind_of_refusal("Stub process 'generate_0_0' is not healthy.") == INTERNAL


def test_a_refusal_on_a_stream_has_its_code_in_its_text() -> None:
    assert kind_of_refusal("[NOT_FOUND] lora_name: got 'coming-and-going'") == CODED
    assert kind_of_refusal("[INTERNAL] RuntimeError: it is not ready") == INTERNAL


def test_an_unanswered_request_is_lost_and_only_its_holder_excuses_it() -> None:
    outcomes = [
        outcome(0.0),
        outcome(9.9, took_s=0.3),
        outcome(9.8, LOST, TIMEOUT_S),
        outcome(9.8, LOST, TIMEOUT_S, front="generate"),
        outcome(10.5, LOST, TIMEOUT_S),
        outcome(12.0, LOST, TIMEOUT_S),
        outcome(11.0, WRONG),
    ]
    found = cost(outcomes, 10.0, ("encode",), held_s=1.0, whole_s=2.0)
    assert found.in_flight == 3
    assert (found.counts[RIGHT], found.counts[LOST], found.counts[WRONG]) == (1, 4, 1)
    assert found.excused == 2
    assert found.errors == {"encode: lost: why": 3, "generate: lost: why": 1, "encode: wrong: why": 1}


def test_gates() -> None:
    good = a_cost(counts=dict.fromkeys(KINDS, 0) | {LOST: 2, CODED: 9}, excused=2)
    assert list(good.missed(3.0)) == []
    assert list(a_cost(counts=dict.fromkeys(KINDS, 0) | {WRONG: 1}).missed(3.0)) == ["1 wrong answers"]
    lost = a_cost(counts=dict.fromkeys(KINDS, 0) | {LOST: 3}, excused=2)
    assert list(lost.missed(3.0)) == ["1 requests lost that no killed process held"]
    for late in (3.1, math.inf):
        assert len(list(a_cost(whole_s=late).missed(3.0))) == 1


def soaked(values: Sequence[float], what: str) -> list[str]:
    usual = Footprint(1, 100.0, 10, 10)
    return list(not_flat({"p": [usual._replace(**{what: value}) for value in values]}))  # type: ignore[arg-type]


def test_a_soak_must_be_flat() -> None:
    assert soaked([100.0, 101.9, 100.0, 101.9], "rss_mb") == []
    assert soaked([100.0, 103.0, 99.0, 102.5], "rss_mb") == ["p: rss_mb grew from 100 to 102.5"]
    assert soaked([100.0, 90.0, 80.0, 70.0], "rss_mb") == []
    assert soaked([10, 10, 10, 11], "fds") == ["p: fds grew from 10 to 11"]
    assert soaked([10, 12, 10, 10], "threads") == []


def test_whole_where_nothing_happened_and_after_a_gap() -> None:
    assert time_until_whole(steady(0, 20), 5.0, 20.0, USUAL) == 0.0
    gap = [*steady(0, 5), *steady(5, 8, kind=CODED), *steady(8, 20)]
    assert time_until_whole(gap, 5.0, 20.0, USUAL) == pytest.approx(3.0, abs=0.11)
    assert time_until_whole(steady(0, 8) + steady(8, 20, kind=LOST), 8.0, 20.0, USUAL) == math.inf


def test_slow_answers_are_not_whole() -> None:
    slow = [*steady(0, 5), *(outcome(at, took_s=0.3) for at in np.arange(5, 9, 0.05)), *steady(9, 20)]
    assert time_until_whole(slow, 5.0, 20.0, USUAL) == pytest.approx(4.0, abs=0.11)


def test_it_must_stay_whole() -> None:
    flapping = [*steady(0, 7.5), *steady(7.5, 8.5, kind=CODED), *steady(8.5, 20)]
    assert time_until_whole(flapping, 5.0, 20.0, USUAL) == pytest.approx(3.5, abs=0.11)


def test_one_dead_front_among_busy_ones_is_noticed() -> None:
    window = [*steady(0, 2, per_s=100.0), outcome(1.0, CODED, front="generate")]
    assert not is_whole(window, USUAL)
    assert is_whole([*window, outcome(1.5, front="generate")], USUAL)
    assert not is_whole(steady(0, 0.2), USUAL), "a few requests tell nothing"


def test_bursts_say_nothing_about_latency() -> None:
    assert p99_by_front([outcome(0.0), outcome(1.0, took_s=9.0, extra=True), outcome(2.0, LOST)]) == {"encode": 0.05}
    quiet = steady(0, 20) + [outcome(at, took_s=5.0, extra=True) for at in range(5, 10)]
    assert time_until_whole(quiet, 5.0, 20.0, USUAL) == 0.0


def test_the_schedule_comes_from_the_seed() -> None:
    faults = every_fault(quick=False)
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names) >= 30

    def drawn(seed: int) -> list[str]:
        order = rounds(faults, np.random.default_rng(seed))
        return [fault.name for _ in range(2) for fault in next(order)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert sorted(drawn(1)) == sorted(names * 2)
    assert {fault.name for fault in every_fault(quick=True)} < set(names)


def test_every_target_gets_every_signal() -> None:
    names = [fault.name for fault in every_fault(quick=False)]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        assert sum(name.startswith(f"{number.name} ") for name in names) == 7


def test_answers_are_judged() -> None:
    judge = Judge({"encode": 0.99})
    vector = Question("encode", b"", right={"EMBEDDING": np.array([[1.0, 0.0]])})
    assert judge.accepts(vector, {"EMBEDDING": np.array([[2.0, 0.02]])})
    assert not judge.accepts(vector, {"EMBEDDING": np.array([[1.0, 0.5]])})
    assert not judge.accepts(vector, {"EMBEDDING": np.array([[1.0, 0.0], [1.0, 0.0]])})
    text = Question("generate", b"", right={"text_output": np.array([b"a b"], dtype=object)})
    assert judge.accepts(text, {"text_output": np.array([b"a b"], dtype=object)})
    assert not judge.accepts(text, {"text_output": np.array([b"a"], dtype=object)})
    assert not judge.accepts(text, {})
    assert not judge.accepts(replace(text, right=None), {"text_output": np.array([b"a b"], dtype=object)})


def test_an_evicted_image_is_refused_and_not_wrong() -> None:
    assert is_evicted({"LABEL": np.array([[b""]], dtype=object)})
    assert not is_evicted({"LABEL": np.array([[b"7"]], dtype=object)})
    assert not is_evicted({"EMBEDDING": np.zeros((1, 2))})


def test_what_a_process_holds() -> None:
    before = Footprint.of(os.getpid())
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with Path(os.devnull).open():
            now = Footprint.of(os.getpid())
    finally:
        ended.set()
        thread.join()
    assert (now.processes, now.threads, now.fds) == (1, before.threads + 1, before.fds + 1)
    assert now.rss_mb > 1
    assert Footprint.of(2**22 + 1) == Footprint()
    assert Footprint.total([os.getpid(), os.getpid()], []).processes == 2


def test_regions_are_counted_by_prefix(tmp_path: Path) -> None:
    for name in ("ours_1", "ours_2", "other"):
        (tmp_path / name).touch()
    assert Footprint.total([], ["ours_"], tmp_path).regions == 2
    assert Footprint.total([], [], tmp_path).regions == 0


def test_the_clock_is_stepped_for_those_who_preload_it(tmp_path: Path) -> None:
    library, reason = resources.compile_clock(tmp_path)
    if reason:
        pytest.skip(reason)
    file = tmp_path / "clock"
    resources.set_clock(file, 0)
    program = """if True:
        import sys, threading, time
        before, steady = time.time(), time.monotonic()
        print(flush=True)
        sys.stdin.readline()
        print(round(time.time() - before - (time.monotonic() - steady)))
        begun = time.monotonic()
        threading.Event().wait(timeout=0.05)
        assert time.monotonic() - begun < 20
    """
    environment = {**os.environ, "LD_PRELOAD": str(library), "DRILL_CLOCK": str(file)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        resources.set_clock(file, -3600)
        assert process.communicate("\n", timeout=60)[0].strip() == "-3600"
    assert process.returncode == 0
    assert struct.unpack("q", file.read_bytes()) == (-3600,)


def test_the_table_has_a_line_for_each_fault() -> None:
    counts = dict(zip(KINDS, range(11, 17), strict=True))
    done = Result("one", 3.0, Cost(5, counts, 2, 1.25), Footprint(10, 100.0), Footprint(11, 90.0), ("missed",))
    never = replace(done, name="two", cost=a_cost(whole_s=math.inf), missed=())
    skipped = Result("three", 3.0, skipped="needs root")
    rows = [row(result) for result in (done, never, skipped)]
    assert list(rows[0].values())[:9] == ["one", 5, 11, 12, 13, 14, 15, 16, 2]
    assert rows[0]["whole s"] == "1.2" and rows[0][""] == "MISSED" and rows[0]["RSS MB"] == -10
    assert rows[1]["whole s"] == "never" and rows[1][""] == ""
    assert rows[2] == {"fault": "three", "": "left out: needs root"}
    assert record(never)["cost"]["whole_s"] is None


def test_questions_need_no_server_and_come_from_the_seed() -> None:
    first, again = (make(3, Path("checkpoints/cifar-vit/tasks")) for _ in range(2))
    assert {front: [one.payload for one in found] for front, found in first.items()} == {
        front: [one.payload for one in found] for front, found in again.items()
    }
    assert all(found for found in first.values())
    assert all(
        one.streams == (front in ("generate", "generate_lora")) for front, found in first.items() for one in found
    )
