"""The loop over a toy model, iteration by iteration: who is in, who leaves, and what each is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from shapeshift.errors import CancelledRequestError, EngineError, OverloadedError
from shapeshift.fused_decode.sequence import ABORT, Sequence
from shapeshift.fused_decode.slots import SlotTable
from tests.fused_decode.toy import EOS, LETTERS, Run, ToyRuntime, ids
from tests.waiting import wait_for


def text_of(sequence: Sequence) -> str:
    return "".join(sequence.parts)


def letters(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, longest)))


# What is said.


def test_one_request_says_what_the_model_says() -> None:
    run = Run()
    sequence = run.submit("hello", max_tokens=20)
    assert run.until_idle() == 20
    assert text_of(sequence) == run.runtime.text(ids("hello"), 20)
    assert (sequence.finish, sequence.generated, sequence.error) == ("length", 20, None)
    assert run.ended == [sequence]
    assert all(span >= 0 for span in sequence.timings_ms().values())


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_and_go_say_what_they_say_alone(seed: int) -> None:
    """Any arrivals, lengths, prompts, chunks, stop strings and early ends: the others never notice."""
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=rng.choice((1, 3, 8)), max_length=48, seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((1, 5, 64)), compaction=rng.random() < 0.7)
    made: list[tuple[Sequence, str, int, bool]] = []
    for _ in range(120):
        prompt, count = letters(rng, 40), rng.randint(1, 40)
        early = rng.random() < 0.15
        sequence = run.submit(prompt, max_tokens=count, stream=rng.random() < 0.5)
        made.append((sequence, prompt, count, early))
        if early:
            for _ in range(rng.randint(0, 6)):
                run.loop.step()
            run.loop.end(sequence, ABORT)
        for _ in range(rng.randint(0, 3)):
            run.loop.step()
            run.loop.check_integrity()
    run.until_idle()
    assert len(run.ended) == len(made) and set(run.ended) == {sequence for sequence, *_ in made}
    for sequence, prompt, count, early in made:
        whole = runtime.text(ids(prompt), min(count, 48 - len(prompt)))
        assert whole.startswith(text_of(sequence))
        if sequence.finish == "length":
            assert text_of(sequence) == whole
        else:
            assert early and sequence.finish == ABORT and len(text_of(sequence)) == sequence.generated


def test_draws_are_the_same_in_any_company() -> None:
    alone = []
    for seed in range(5):
        run = Run(ToyRuntime(slots=1))
        alone.append(run.submit("abc", max_tokens=30, temperature=1.0, seed=seed, top_p=0.9))
        run.until_idle()
    run = Run(ToyRuntime(slots=3), prefill_tokens=2)
    rng = random.Random(0)
    together = []
    for seed in range(5):
        run.submit(letters(rng, 20), max_tokens=rng.randint(1, 40), temperature=2.0)
        together.append(run.submit("abc", max_tokens=30, temperature=1.0, seed=seed, top_p=0.9))
        run.loop.step()
    run.until_idle()
    assert [text_of(sequence) for sequence in together] == [text_of(sequence) for sequence in alone]
    assert len({text_of(sequence) for sequence in alone}) == 5


# How an answer ends.


def test_end_of_sequence_ends_it_and_is_not_said() -> None:
    run = Run()
    run.runtime.eos_at = 9
    sequence, goes_on = run.submit("abcde", max_tokens=20), run.submit("abcde", max_tokens=20, ignore_eos=True)
    run.until_idle()
    assert (sequence.finish, sequence.generated) == ("stop", 5)
    assert text_of(sequence) == run.runtime.text(ids("abcde"), 20) and len(text_of(sequence)) == 4
    assert (goes_on.finish, goes_on.generated) == ("length", 20)
    assert EOS in run.runtime.cache[goes_on.prompt.size - 5] or text_of(goes_on) == text_of(sequence)


def test_a_stop_string_ends_it_and_is_not_said() -> None:
    run = Run()
    whole = run.runtime.text(ids("abc"), 30)
    stop = whole[10:13]
    at = whole.index(stop)
    sequence = run.submit("abc", max_tokens=30, stop=("~~~", stop))
    never = run.submit("abc", max_tokens=30, stop=("~", whole + "x"))
    run.until_idle()
    assert (text_of(sequence), sequence.finish) == (whole[:at], "stop")
    assert (text_of(never), never.finish) == (whole, "length")


def test_a_full_slot_ends_it() -> None:
    run = Run(ToyRuntime(max_length=16))
    sequence = run.submit("abcdefghij", max_tokens=100)
    last = run.submit("a" * 15, max_tokens=100)
    run.until_idle()
    assert (sequence.finish, sequence.generated) == ("length", 6)
    assert (last.finish, last.generated) == ("length", 1)
    assert text_of(sequence) == run.runtime.text(ids("abcdefghij"), 6)


def test_who_leaves_makes_room_in_the_next_iteration() -> None:
    run = Run(ToyRuntime(slots=1))
    first, second = run.submit(max_tokens=3), run.submit(max_tokens=3)
    for _ in range(3):
        assert not first.ended
        run.loop.step()
    assert first.ended and run.ended == [first]
    run.loop.step()
    assert second.generated == 1


# Leaving early.


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_who_is_told_to_leave_is_gone_by_the_next_iteration(steps: int) -> None:
    run = Run(ToyRuntime(slots=2), prefill_tokens=3)
    stays, leaves = run.submit("ab", max_tokens=20), run.submit("abcdefgh", max_tokens=20)
    for _ in range(steps):
        run.loop.step()
    generated = leaves.generated
    run.loop.end(leaves, ABORT)
    run.loop.end(leaves, ABORT)
    run.loop.step()
    assert leaves.ended and leaves.finish == ABORT and leaves.generated == generated and leaves.slot is None
    run.loop.end(leaves, CancelledRequestError("too late"))
    run.until_idle()
    assert leaves.error is None and run.ended.count(leaves) == 1
    assert text_of(stays) == run.runtime.text(ids("ab"), 20)


def test_a_deadline_while_waiting_is_an_error_and_while_speaking_an_end() -> None:
    run = Run(ToyRuntime(slots=1))
    speaks, waits, patient = (
        run.submit("abc", max_tokens=50, latency_ms=60_000),
        run.submit("abc", max_tokens=50, latency_ms=60_000),
        run.submit("abc", max_tokens=50, latency_ms=600_000),
    )
    for _ in range(4):
        run.loop.step()
    late = time.monotonic() + 120
    run.loop._let_go(late)
    assert (speaks.finish, speaks.error) == ("deadline", None)
    assert text_of(speaks) == run.runtime.text(ids("abc"), 4)
    assert isinstance(waits.error, OverloadedError) and "latency_ms ran out" in str(waits.error)
    assert not patient.ended
    run.until_idle()
    assert patient.finish == "length"


def test_a_deadline_is_kept_by_the_clock() -> None:
    run = Run(ToyRuntime(slots=1, max_length=4096))
    sequence = run.submit("abc", max_tokens=4000, latency_ms=300)
    run.until_idle(pause_s=0.005)
    assert sequence.finish == "deadline" and 0 < sequence.generated < 4000
    assert sequence.finished >= sequence.arrived + 0.3


# Slots.


def test_waiting_requests_fill_the_holes_and_nothing_moves() -> None:
    run = Run(ToyRuntime(slots=4))
    lengths = [3, 9, 3, 9, 9, 9]
    for length in lengths:
        run.submit(max_tokens=length)
    run.until_idle()
    # The first and third leave two holes at once, which the two that wait fill.
    slots_used = [sorted(slots) for slots, _ in run.runtime.steps[:6]]
    assert slots_used == [[0, 1, 2, 3]] * 6


def test_when_nobody_waits_the_holes_are_closed_with_the_fewest_moves() -> None:
    run = Run(ToyRuntime(slots=6))
    for length in (20, 3, 20, 4, 20, 20):
        run.submit("abc", max_tokens=length)
    run.until_idle()
    # Slot 1 falls free first, then slot 3; each time the last one moves, with what it has by then.
    assert run.runtime.moves == [(5, 1, 5), (4, 3, 6)]
    assert (run.loop.meters.moves.value, run.loop.meters.moved_tokens.value) == (2, 11)


def test_a_newcomer_gets_the_place_below_the_others() -> None:
    run = Run(ToyRuntime(slots=4))
    run.submit(max_tokens=2)
    run.submit(max_tokens=9)
    for _ in range(3):
        run.loop.step()
    newcomer = run.submit(max_tokens=3)
    run.loop.step()
    assert newcomer.slot == 0 and run.runtime.moves == []
    another = run.submit(max_tokens=2)
    run.loop.step()
    assert another.slot == 2
    run.until_idle()


def test_without_compaction_nothing_moves() -> None:
    run = Run(ToyRuntime(slots=6), compaction=False)
    for length in (20, 3, 20, 20, 4, 20):
        run.submit("abc", max_tokens=length)
    run.until_idle()
    assert run.runtime.moves == []


def test_integrity_is_checked_column_by_column() -> None:
    run = Run(ToyRuntime(slots=3), prefill_tokens=4)
    table = run.loop.slots
    run.submit("abcdefgh", max_tokens=9)
    run.loop.step()
    run.loop.check_integrity()
    damages = [
        lambda: table.phase.__setitem__(0, 2),
        lambda: table.phase.__setitem__(1, 1),
        lambda: table.cached.__setitem__(0, 9),
        lambda: table.length.__setitem__(0, 5),
        lambda: table.length.__setitem__(2, 1),
        lambda: setattr(table, "used", 2),
        lambda: table.owners.__setitem__(0, None),
        lambda: run.loop._reading.clear(),
    ]
    state = {name: values.copy() for name, values in vars(table).items() if hasattr(values, "copy")}
    for damage in damages:
        damage()
        with pytest.raises(AssertionError):
            run.loop.check_integrity()
        for name, values in state.items():
            setattr(table, name, values.copy())
        table.used = 1
        run.loop._reading = dict.fromkeys(owner for owner in table.owners if owner)
        run.loop.check_integrity()
    assert isinstance(table, SlotTable)


# Long prompts.


def test_a_long_prompt_is_read_in_chunks_while_the_others_go_on() -> None:
    run = Run(ToyRuntime(slots=3), prefill_tokens=4)
    speaks = run.submit("ab", max_tokens=30)
    run.loop.step()
    reads = run.submit("abcdefghijk", max_tokens=3)
    for count in range(1, 4):
        before = speaks.generated
        run.loop.step()
        assert speaks.generated == before + 1
        assert reads.generated == (count == 3)
    assert [lengths for _, lengths in run.runtime.steps[1:4]] == [[1, 4], [1, 4], [1, 3]]
    run.until_idle()
    assert text_of(reads) == run.runtime.text(ids("abcdefghijk"), 3)


def test_prompts_share_the_budget_the_first_come_first() -> None:
    run = Run(ToyRuntime(slots=4), prefill_tokens=10)
    for length in (6, 6, 3, 1):
        run.submit("a" * length, max_tokens=2)
    run.until_idle()
    assert [lengths for _, lengths in run.runtime.steps[:2]] == [[6, 4], [1, 2, 3, 1]]


# Faults.


def test_a_model_that_fails_costs_what_runs_and_the_loop_goes_on() -> None:
    run = Run(ToyRuntime(slots=2))
    lost, waits = [run.submit(max_tokens=9) for _ in range(2)], run.submit(max_tokens=3)
    run.runtime.fail = RuntimeError("out of memory")
    run.loop.start()
    assert run.runtime.entered.acquire(timeout=30)
    wait_for(lambda: all(sequence.ended for sequence in lost))
    run.runtime.fail = None
    follows = run.submit(max_tokens=3)
    wait_for(lambda: follows.ended)
    assert all(isinstance(sequence.error, EngineError) and "out of memory" in str(sequence.error) for sequence in lost)
    assert follows.finish == "length" and waits.ended
    assert "out of memory" in run.log[0]
    run.loop.close()
    run.loop.check_integrity()


def test_logits_that_are_not_finite_cost_their_row() -> None:
    run = Run(ToyRuntime(slots=3))
    good, bad = run.submit("abc", max_tokens=6), run.submit("xyz", max_tokens=6)
    row = run.runtime.row

    def poisoned(context: list[int]) -> object:
        made = row(context)
        if list(context[:3]) == list(ids("xyz")) and len(context) == 5:
            made[:] = float("nan")
        return made

    run.runtime.row = poisoned  # type: ignore[assignment, method-assign]
    run.until_idle()
    assert isinstance(bad.error, EngineError) and "not finite" in str(bad.error)
    assert bad.generated == 3
    run.runtime.row = row  # type: ignore[method-assign]
    assert text_of(good) == run.runtime.text(ids("abc"), 6)


# The thread.


@pytest.fixture
def running() -> Iterator[Run]:
    run = Run(ToyRuntime(slots=3))
    run.loop.start()
    yield run
    run.runtime.open.set()
    run.loop.close()


def test_requests_from_many_threads(running: Run) -> None:
    made: list[tuple[Sequence, str]] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            prompt = letters(rng, 12)
            made.append((running.submit(prompt, max_tokens=rng.randint(1, 12)), prompt))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: len(running.ended) >= 100, timeout_s=60)
    for sequence, prompt in made:
        assert text_of(sequence) == running.runtime.text(ids(prompt), sequence.limit)
    assert not running.log


def test_close_tells_everybody(running: Run) -> None:
    running.runtime.open.clear()
    sequences = [running.submit(max_tokens=40) for _ in range(8)]
    assert running.runtime.entered.acquire(timeout=30)
    closing = threading.Thread(target=running.loop.close, args=(30,))
    closing.start()
    wait_for(lambda: running.loop._closing)
    running.runtime.open.set()
    closing.join(30)
    assert all(sequence.ended for sequence in sequences)
    assert all("being unloaded" in str(sequence.error) for sequence in sequences if sequence.finish is None)
    assert sum(sequence.finish is None for sequence in sequences) >= 5
    with pytest.raises(OverloadedError, match="being unloaded"):
        running.submit()
    running.loop.check_integrity()


def test_a_close_between_looks_is_heard() -> None:
    loop = Run().loop
    clear = loop._wake.clear

    def close_meanwhile() -> None:
        loop._closing = True
        loop._wake.set()
        clear()

    loop._wake.clear = close_meanwhile  # type: ignore[method-assign]
    loop.wake()
    loop.start()
    loop._thread.join(30)
    assert not loop._thread.is_alive()


def test_an_idle_loop_rests() -> None:
    run = Run()
    run.loop.start()
    run.submit(max_tokens=2)
    wait_for(lambda: run.ended)
    count = len(run.runtime.steps)
    time.sleep(0.05)
    assert len(run.runtime.steps) == count == 2
    run.loop.close()


# What is counted.


def test_meters() -> None:
    run = Run(ToyRuntime(slots=2), prefill_tokens=5)
    for prompt, count in (("abcdefg", 4), ("ab", 1), ("abc", 6)):
        run.submit(prompt, max_tokens=count)
    iterations = run.until_idle()
    meters = run.loop.meters
    assert meters.prompt_tokens.value == 12
    assert meters.generated_tokens.value == 11
    assert meters.iteration_ms.totals()[0][-1] == iterations
    assert meters.first_token_ms.totals()[0][-1] == 3
    # Every token but the first of each request has one before it.
    assert meters.between_tokens_ms.totals()[0][-1] == 8
    parts = sum(part.value for part in meters.parts.values())
    assert parts == pytest.approx(meters.iteration_ms.totals()[1])
