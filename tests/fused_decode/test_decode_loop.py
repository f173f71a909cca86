"""The loop over a toy model, iteration by iteration: which requests run and end, and their text."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shapeshift.errors import CancelledRequestError, EngineError, OverloadedError
from shapeshift.fused_decode.engine.sampling.logit_edits import token_rules
from shapeshift.fused_decode.engine.scheduler import MODEL
from shapeshift.fused_decode.engine.slots import SlotTable
from shapeshift.fused_decode.request import ABORT, Request, Terminations
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fused_decode.toy import EOS, LETTERS, VOCABULARY, Run, ToyRuntime, ids, text_of
from tests.sampling import few
from tests.waiting import wait_for


def letters(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, longest)))


# Text.


def test_one_request_gets_the_text_of_the_model() -> None:
    run = Run()
    request = run.submit("hello", max_tokens=20)
    assert run.until_idle() == 20
    assert text_of(request) == run.runtime.text(ids("hello"), 20)
    assert (request.finish_reason, request.generated, request.error) == ("length", 20, None)
    assert run.finished == [request]
    assert all(span >= 0 for span in request.timings_ms().values())


@pytest.mark.parametrize(("max_tokens", "span"), [(20, 25), (200, 64)])
def test_the_model_learns_how_long_a_text_can_become(max_tokens: int, span: int) -> None:
    """From the first piece of its prompt on."""
    run = Run(prefill_tokens=2)
    request = run.submit("hello", max_tokens=max_tokens)
    run.loop.step()
    assert request.slot is not None and run.runtime.spans[request.slot] == span
    run.until_idle()


@pytest.mark.parametrize("seed", few(range(6), (0, 2)))
def test_requests_that_come_and_go_get_the_text_they_get_alone(seed: int) -> None:
    """Arrivals, lengths, prompts, chunks and early ends of one request never change the text of another."""
    rng = random.Random(seed)
    runtime = ToyRuntime(slots=rng.choice((1, 3, 8)), max_length=48, seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((1, 5, 64)))
    made: list[tuple[Request, str, int, bool]] = []
    for _ in range(120):
        prompt, count = letters(rng, 40), rng.randint(1, 40)
        early = rng.random() < 0.15
        request = run.submit(prompt, max_tokens=count, stream=rng.random() < 0.5)
        made.append((request, prompt, count, early))
        if early:
            for _ in range(rng.randint(0, 6)):
                run.loop.step()
            run.loop.end(request, ABORT)
        for _ in range(rng.randint(0, 3)):
            run.loop.step()
            run.loop.check_integrity()
    run.until_idle()
    assert len(run.finished) == len(made) and set(run.finished) == {request for request, *_ in made}
    for request, prompt, count, early in made:
        whole = runtime.text(ids(prompt), min(count, 48 - len(prompt)))
        assert whole.startswith(text_of(request))
        if request.finish_reason == "length":
            assert text_of(request) == whole
        else:
            assert early and request.finish_reason == ABORT and len(text_of(request)) == request.generated


def test_random_tokens_do_not_depend_on_other_requests() -> None:
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
    assert [text_of(request) for request in together] == [text_of(request) for request in alone]
    assert len({text_of(request) for request in alone}) == 5


# How an answer ends.


def test_end_of_sequence_ends_the_answer_without_text() -> None:
    run = Run()
    run.runtime.eos_at = 9
    request, continues = run.submit("abcde", max_tokens=20), run.submit("abcde", max_tokens=20, ignore_eos=True)
    run.until_idle()
    assert (request.finish_reason, request.generated) == ("stop", 5)
    assert text_of(request) == run.runtime.text(ids("abcde"), 20) and len(text_of(request)) == 4
    assert (continues.finish_reason, continues.generated) == ("length", 20)
    assert EOS in run.runtime.cache or text_of(continues) == text_of(request)


def test_a_stop_string_ends_the_answer_without_its_text() -> None:
    run = Run()
    whole = run.runtime.text(ids("abc"), 30)
    stop = whole[10:13]
    at = whole.index(stop)
    request = run.submit("abc", max_tokens=30, stop=("~~~", stop))
    never = run.submit("abc", max_tokens=30, stop=("~", whole + "x"))
    run.until_idle()
    assert (text_of(request), request.finish_reason) == (whole[:at], "stop")
    assert (text_of(never), never.finish_reason) == (whole, "length")


def test_a_full_slot_ends_the_answer() -> None:
    run = Run(ToyRuntime(max_length=16))
    request = run.submit("abcdefghij", max_tokens=100)
    last = run.submit("a" * 15, max_tokens=100)
    run.until_idle()
    assert (request.finish_reason, request.generated) == ("length", 6)
    assert (last.finish_reason, last.generated) == ("length", 1)
    assert text_of(request) == run.runtime.text(ids("abcdefghij"), 6)


def test_a_slot_is_free_in_the_iteration_after_its_request_ends() -> None:
    run = Run(ToyRuntime(slots=1))
    first, second = run.submit(max_tokens=3), run.submit(max_tokens=3)
    for _ in range(3):
        assert not first.is_finished
        run.loop.step()
    assert first.is_finished and run.finished == [first]
    run.loop.step()
    assert second.generated == 1


# Early ends.


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_terminated_request_ends_by_the_next_iteration(steps: int) -> None:
    run = Run(ToyRuntime(slots=2), prefill_tokens=3)
    other, ended = run.submit("ab", max_tokens=20), run.submit("abcdefgh", max_tokens=20)
    for _ in range(steps):
        run.loop.step()
    generated = ended.generated
    run.loop.end(ended, ABORT)
    run.loop.end(ended, ABORT)
    run.loop.step()
    assert ended.is_finished and ended.finish_reason == ABORT and ended.generated == generated and ended.slot is None
    run.loop.end(ended, CancelledRequestError("too late"))
    run.until_idle()
    assert ended.error is None and run.finished.count(ended) == 1
    assert text_of(other) == run.runtime.text(ids("ab"), 20)


def test_an_end_before_the_submission_waits_for_it() -> None:
    run = Run(ToyRuntime(slots=1))
    ended, other = run.request("abc"), run.request("de")
    run.loop.end(ended, ABORT)
    run.loop.step()
    assert not run.finished, "its submission would follow the last response"
    run.loop.submit(ended)
    run.loop.submit(other)
    run.until_idle()
    assert run.finished == [ended, other]
    assert (ended.finish_reason, ended.generated, other.generated) == (ABORT, 0, 8)


def test_an_end_of_a_request_that_is_refused_is_forgotten() -> None:
    run = Run(requests=1)
    run.submit("abc")
    refused = run.request("de")
    run.loop.end(refused, ABORT)
    with pytest.raises(OverloadedError):
        run.loop.submit(refused)
    run.until_idle()
    assert refused not in run.finished
    assert isinstance(refused.error, OverloadedError)


def test_a_request_finishes_for_the_first_reason() -> None:
    run = Run()
    request = run.submit("abc", latency_ms=1e-6)
    run.loop.end(request, ABORT)
    run.loop.end(request, CancelledRequestError("gone"))
    run.loop.step()
    assert run.finished == [request] and (request.finish_reason, request.error) == (ABORT, None)


def test_a_deadline_is_an_error_before_the_first_token_and_a_finish_reason_after_it() -> None:
    run = Run(ToyRuntime(slots=1))
    decodes, waits, patient = (
        run.submit("abc", max_tokens=50, latency_ms=60_000),
        run.submit("abc", max_tokens=50, latency_ms=60_000),
        run.submit("abc", max_tokens=50, latency_ms=600_000),
    )
    for _ in range(4):
        run.loop.step()
    late = time.monotonic() + 120
    terminations = Terminations()
    for request in (decodes, waits, patient):
        terminations.watch_deadline(request)
    for request, reason in terminations.due(late):
        run.loop.end(request, reason)
    run.loop.step()
    assert (decodes.finish_reason, decodes.error) == ("deadline", None)
    assert text_of(decodes) == run.runtime.text(ids("abc"), 4)
    assert isinstance(waits.error, OverloadedError) and "latency_ms ran out" in str(waits.error)
    assert not patient.is_finished
    run.until_idle()
    assert patient.finish_reason == "length"


def test_a_deadline_is_kept() -> None:
    run = Run(ToyRuntime(slots=1, max_length=4096))
    request = run.submit("abc", max_tokens=4000, latency_ms=300)
    run.until_idle(pause_s=0.005)
    assert request.finish_reason == "deadline" and 0 < request.generated < 4000
    assert request.finished >= request.arrived + 0.3


def steps_of_delivery(run: Run) -> list[list[Request]]:
    """The requests delivered after each step, until the loop is idle."""
    steps: list[list[Request]] = []
    while True:
        before = len(run.delivered)
        if not run.loop.step():
            return steps
        steps.append(run.delivered[before:])


def test_streams_take_turns_where_a_step_has_fewer_responses_than_streams() -> None:
    run = Run(stream_responses=2)
    streams = [run.submit(stream=True, max_tokens=9) for _ in range(4)]
    steps = steps_of_delivery(run)
    first, last = steps[0], steps[-1]
    assert set(first) == set(last) == set(streams), "first and last responses wait for no turn"
    assert all(len(step) == 2 for step in steps[1:-1])
    assert all(set(one) | set(next_one) == set(streams) for one, next_one in zip(steps[1:-2], steps[2:-1], strict=True))


def test_every_stream_has_a_response_for_each_step_without_a_limit() -> None:
    run = Run(stream_responses=0)
    streams = [run.submit(stream=True, max_tokens=5) for _ in range(4)]
    assert [set(step) for step in steps_of_delivery(run)] == [set(streams)] * 5


def test_a_stream_that_ends_goes_before_those_that_wait_for_their_turn() -> None:
    run = Run(stream_responses=1)
    long = [run.submit(stream=True, max_tokens=20) for _ in range(3)]
    short = run.submit(stream=True, max_tokens=4)
    steps = steps_of_delivery(run)
    assert short in steps[3] and len(steps[3]) == 2
    assert all(sum(request in step for step in steps) > 4 for request in long)


def test_streams_get_their_tokens_beside_requests_of_one_token_that_come_all_the_time() -> None:
    run = Run(ToyRuntime(slots=6), stream_responses=2)
    streams = [run.submit(stream=True, max_tokens=20) for _ in range(2)]
    run.loop.step()
    before = len(run.delivered)
    for _ in range(12):
        for _ in range(4):
            run.submit(max_tokens=1)
        run.loop.step()
    assert [run.delivered[before:].count(stream) for stream in streams] == [6, 6]


# Slots.


def test_a_finished_request_is_not_kept_until_its_deadline() -> None:
    run = Run()
    for _ in range(600):
        run.submit("a", max_tokens=1, latency_ms=1e12)
        late = run.submit("a", max_tokens=1, latency_ms=60_000)
        run.loop.step()
    run.until_idle()
    assert len(run.finished) == 1200 and late.finish_reason == "length"
    run.finished.clear()
    run.delivered.clear()
    gc.collect()
    assert sum(type(made) is Request for made in gc.get_objects()) < 300


def test_requests_that_end_leave_no_gaps_in_the_batch() -> None:
    run = Run(ToyRuntime(slots=4))
    made = [run.submit(max_tokens=length) for length in (3, 9, 3, 9)]
    for _ in range(4):
        run.loop.step()
    assert run.runtime.steps[-1] == ([1, 3], [1, 1])
    new = run.submit(max_tokens=3)
    run.loop.step()
    assert new.slot == 0, "the first free one"
    run.until_idle()
    assert [request.generated for request in made] == [3, 9, 3, 9]


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
        lambda: table.held.__setitem__(0, 2),
        lambda: table.held.__setitem__(0, 0),
        lambda: table.blocks.__setitem__((0, 0), 1),
        lambda: table.owners.__setitem__(0, None),
        lambda: run.loop.scheduler.prefilling.clear(),
    ]
    state = {name: values.copy() for name, values in vars(table).items() if hasattr(values, "copy")}
    for damage in damages:
        damage()
        with pytest.raises(AssertionError):
            run.loop.check_integrity()
        for name, values in state.items():
            setattr(table, name, values.copy())
        table.used = 1
        run.loop.scheduler.prefilling = dict.fromkeys(owner for owner in table.owners if owner)
        run.loop.check_integrity()
    assert isinstance(table, SlotTable)


# Prefill.


def test_a_long_prompt_is_prefilled_in_chunks_while_other_requests_decode() -> None:
    run = Run(ToyRuntime(slots=3), prefill_tokens=4)
    decodes = run.submit("ab", max_tokens=30)
    run.loop.step()
    reads = run.submit("abcdefghijk", max_tokens=3)
    for count in range(1, 4):
        before = decodes.generated
        run.loop.step()
        assert decodes.generated == before + 1
        assert reads.generated == (count == 3)
    assert [lengths for _, lengths in run.runtime.steps[1:4]] == [[1, 4], [1, 4], [1, 3]]
    run.until_idle()
    assert text_of(reads) == run.runtime.text(ids("abcdefghijk"), 3)


def test_prompts_share_the_prefill_budget_in_order_of_arrival() -> None:
    run = Run(ToyRuntime(slots=4), prefill_tokens=10)
    for length in (6, 6, 3, 1):
        run.submit("a" * length, max_tokens=2)
    run.until_idle()
    assert [lengths for _, lengths in run.runtime.steps[:2]] == [[6, 4], [1, 2, 3, 1]]


# Failures.


def test_a_failure_of_the_model_costs_the_running_requests_only() -> None:
    run = Run(ToyRuntime(slots=2))
    lost, waits = [run.submit(max_tokens=9) for _ in range(2)], run.submit(max_tokens=3)
    run.runtime.fail = RuntimeError("out of memory")
    run.loop.start()
    assert run.runtime.entered.acquire(timeout=30)
    wait_for(lambda: all(request.is_finished for request in lost))
    run.runtime.fail = None
    later = run.submit(max_tokens=3)
    wait_for(lambda: later.is_finished)
    assert all(isinstance(request.error, EngineError) and "out of memory" in str(request.error) for request in lost)
    assert later.finish_reason == "length" and waits.is_finished
    assert "out of memory" in run.log[0]
    run.loop.close()
    run.loop.check_integrity()


def test_while_a_part_of_the_model_starts_again_requests_wait() -> None:
    """Their deadlines and their ends hold; none is admitted."""
    run = Run(ToyRuntime(slots=2))
    run.runtime.is_ready = False
    waits, late, ended = run.submit(max_tokens=3), run.submit(latency_ms=1), run.submit()
    run.loop.end(ended, ABORT)
    wait_for(lambda: not run.loop.step() and late.is_finished)
    assert isinstance(late.error, OverloadedError) and ended.finish_reason == ABORT
    assert run.loop.slots.used == 0 and len(run.loop.admission) == 1 and run.runtime.steps == []
    run.runtime.is_ready = True
    run.until_idle()
    assert waits.finish_reason == "length"


def test_a_failure_between_admission_and_slot_loses_nobody() -> None:
    run = Run(ToyRuntime(slots=2))
    lost = [run.submit(max_tokens=3) for _ in range(2)]
    # What no parser lets through fails where the request gets its slot.
    lost[1].sampling_params = replace(lost[1].sampling_params, seed="no number")  # type: ignore[arg-type]
    run.loop.start()
    wait_for(lambda: all(request.is_finished for request in lost))
    later = run.submit(max_tokens=3)
    wait_for(lambda: later.is_finished)
    assert all("the decode loop failed" in str(request.error) for request in lost) and later.finish_reason == "length"
    run.loop.close()
    run.loop.check_integrity()


def test_a_failure_leaves_nothing_to_share() -> None:
    """The blocks of ended requests may have been lost with it."""
    run = Run(ToyRuntime(slots=2), caching=True)
    prompt = "x" * 40
    run.submit(prompt, max_tokens=2)
    run.until_idle()
    run.loop.start()
    run.runtime.fail = RuntimeError("lost")
    lost = run.submit("abc")
    wait_for(lambda: lost.is_finished)
    run.runtime.fail = None
    again = run.submit(prompt, max_tokens=2)
    wait_for(lambda: again.is_finished)
    assert run.loop.metrics.prefix_hits.value == 0 and again.finish_reason == "length"
    run.loop.close()
    run.loop.check_integrity()


def test_logits_that_are_not_finite_cost_their_request_only() -> None:
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
    made: list[tuple[Request, str]] = []

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
    wait_for(lambda: len(running.finished) >= 100, timeout_s=60)
    for request, prompt in made:
        assert text_of(request) == running.runtime.text(ids(prompt), request.limit)
    assert not running.log


def test_close_ends_all_requests(running: Run) -> None:
    running.runtime.open.clear()
    requests = [running.submit(max_tokens=40) for _ in range(8)]
    assert running.runtime.entered.acquire(timeout=30)
    closing = threading.Thread(target=running.loop.close, args=(30,))
    closing.start()
    wait_for(lambda: running.loop.is_closing)
    running.runtime.open.set()
    closing.join(30)
    assert all(request.is_finished for request in requests)
    assert all("being unloaded" in str(request.error) for request in requests if request.finish_reason is None)
    assert sum(request.finish_reason is None for request in requests) >= 5
    with pytest.raises(OverloadedError, match="being unloaded"):
        running.submit()
    running.loop.check_integrity()


def test_a_close_during_a_step_ends_the_thread() -> None:
    run = Run()
    closing = threading.Thread(target=run.loop.close)
    run.runtime.before = closing.start
    run.loop.start()
    run.submit(max_tokens=1)
    wait_for(lambda: not run.loop.thread.is_alive())
    closing.join(30)


def test_an_idle_loop_does_not_step() -> None:
    run = Run()
    run.loop.start()
    run.submit(max_tokens=2)
    wait_for(lambda: run.finished)
    count = len(run.runtime.steps)
    time.sleep(0.05)
    assert len(run.runtime.steps) == count == 2
    run.loop.close()


# Metrics.


def test_loop_metrics() -> None:
    run = Run(ToyRuntime(slots=2), prefill_tokens=5)
    for prompt, count in (("abcdefg", 4), ("ab", 1), ("abc", 6)):
        run.submit(prompt, max_tokens=count)
    iterations = run.until_idle()
    metrics = run.loop.metrics
    assert metrics.prompt_tokens.value == 12
    assert metrics.generated_tokens.value == 11
    assert metrics.iteration_ms.totals()[0][-1] == iterations
    assert metrics.first_token_ms.totals()[0][-1] == 3
    # Every token but the first of each request has one before it.
    assert metrics.between_tokens_ms.totals()[0][-1] == 8
    parts = sum(part.value for part in metrics.parts.values())
    assert parts == pytest.approx(metrics.iteration_ms.totals()[1])


def test_times_are_in_milliseconds() -> None:
    """A model that takes at least 10 ms for each step, and a request that waits for at least 5 ms."""
    run = Run(ToyRuntime(slots=1))
    run.runtime.before = lambda: time.sleep(0.01)
    request = run.submit("abc", max_tokens=4, latency_ms=1e9)
    time.sleep(0.005)
    run.until_idle()
    metrics, times = run.loop.metrics, request.timings_ms()
    assert times["queue_ms"] >= 5 and times["prefill_ms"] >= 10 and times["decode_ms"] >= 30
    assert sum(times.values()) == pytest.approx((request.finished - request.arrived) * 1e3)
    whole, first, between = (
        one.totals()[1] for one in (metrics.iteration_ms, metrics.first_token_ms, metrics.between_tokens_ms)
    )
    assert whole >= metrics.parts[MODEL].value >= 40
    assert first == pytest.approx(times["queue_ms"] + times["prefill_ms"]) and 30 <= between <= times["decode_ms"]
    assert request.deadline == pytest.approx(request.arrived + 1e6)


# Parameters that end an answer, or keep it from ending.


def test_a_stop_token_ends_the_answer_without_its_text() -> None:
    run = Run()
    whole = run.runtime.greedy(ids("abc"), 8)
    stops = run.submit(stop_token_ids=(whole[4], whole[6]), max_tokens=8)
    run.until_idle()
    assert "".join(stops.parts) == run.runtime.text(ids("abc"), whole.index(whole[4]))
    assert stops.finish_reason == "stop" and stops.generated == whole.index(whole[4]) + 1


class NoWords:
    """A tokenizer that is not asked."""

    def encode_piece(self, text: str) -> list[int]:
        raise AssertionError(text)


def test_before_min_tokens_there_is_no_end_of_sequence() -> None:
    run = Run()
    run.runtime.eos_at = 5
    rules = token_rules(SamplingParams(min_tokens=6), NoWords().encode_piece, VOCABULARY, run.runtime.eos_ids)
    plain, longer = run.submit(max_tokens=12), run.request(max_tokens=12, min_tokens=6)
    longer.rules = rules
    run.loop.submit(longer)
    run.until_idle()
    assert (plain.generated, plain.finish_reason) == (3, "stop")
    assert (longer.generated, longer.finish_reason) == (7, "stop")
