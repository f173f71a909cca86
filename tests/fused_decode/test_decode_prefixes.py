"""Requests that share the blocks of equal beginnings, and the pool of blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shapeshift.fused_decode.engine.blocks import BlockPool, add_hashes
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.request import ABORT
from tests.fused_decode.toy import LETTERS, Run, ToyRuntime, drive_at_random, ids, text_of
from tests.sampling import few

PREFIX = "the same beginning of every prompt"
HIT = len(PREFIX) // BLOCK_TOKENS * BLOCK_TOKENS


def sharing(slots: int = 4, blocks: int = 0) -> Run:
    return Run(ToyRuntime(slots, blocks=blocks), caching=True)


# Requests.


def test_a_request_computes_what_no_other_has_computed() -> None:
    run = sharing(slots=2)
    first = run.submit(PREFIX + "abc", max_tokens=4)
    run.until_idle()
    second = run.submit(PREFIX + "xyz", max_tokens=4)
    run.loop.step()
    assert run.runtime.steps[-1][1] == [len(PREFIX) + 3 - HIT]
    run.until_idle()
    for request, prompt in ((first, PREFIX + "abc"), (second, PREFIX + "xyz")):
        assert text_of(request) == run.runtime.text(ids(prompt), 4)
    assert (first.shared, second.shared) == (0, HIT)
    metrics = run.loop.metrics
    assert (metrics.prefix_queries.value, metrics.prefix_hits.value) == (2 * (len(PREFIX) + 3), HIT)
    assert metrics.prompt_tokens.value == 2 * (len(PREFIX) + 3) - HIT


def test_running_requests_share_blocks() -> None:
    run = sharing(slots=3)
    made = [run.submit(PREFIX + "a", max_tokens=9)]
    run.loop.step()
    made += [run.submit(PREFIX + letter, max_tokens=9) for letter in "bc"]
    run.loop.step()
    tables = [run.loop.slots.blocks[request.slot, : HIT // BLOCK_TOKENS].tolist() for request in made]
    assert tables[0] == tables[1] == tables[2]
    assert run.loop.slots.pool.held == HIT // BLOCK_TOKENS + 3
    run.loop.end(made[0], ABORT)
    run.until_idle()
    assert [text_of(request) for request in made[1:]] == [run.runtime.text(ids(PREFIX + one), 9) for one in "bc"]


def test_admission_counts_shared_blocks_once() -> None:
    """Six texts of three blocks, of which they share two, in a cache of nine. Three fit before the two are computed."""
    run = sharing(slots=6, blocks=9)
    made = [run.submit(PREFIX + letter, max_tokens=9) for letter in "abcdef"]
    for _ in range(3):
        run.loop.step()
    run.loop.check_integrity()
    assert run.loop.slots.requests == 6 and run.loop.slots.pool.held == HIT // BLOCK_TOKENS + 6
    run.until_idle()
    assert [text_of(request) for request in made] == [run.runtime.text(ids(PREFIX + one), 9) for one in "abcdef"]
    assert run.loop.metrics.preemptions.value == 0


@pytest.mark.parametrize("budget", [5, 64, 1024])
def test_prompts_that_come_together_compute_their_common_beginning_once(budget: int) -> None:
    run = Run(ToyRuntime(slots=4), caching=True, prefill_tokens=budget)
    prompts = [PREFIX + letter for letter in "abc"] + ["quite another prompt"]
    made = [run.submit(prompt, max_tokens=5) for prompt in prompts]
    run.until_idle()
    assert [text_of(request) for request in made] == [run.runtime.text(ids(prompt), 5) for prompt in prompts]
    metrics = run.loop.metrics
    assert metrics.prefix_hits.value == 2 * HIT
    assert metrics.prompt_tokens.value == sum(map(len, prompts)) - 2 * HIT


def test_a_prompt_that_waits_for_another_goes_on_when_that_one_is_cancelled() -> None:
    run = Run(ToyRuntime(slots=2), caching=True, prefill_tokens=BLOCK_TOKENS)
    first, second = (run.submit(PREFIX + letter, max_tokens=5) for letter in "ab")
    run.loop.step()
    assert second.slot is not None and run.loop.slots.cached[second.slot] == 0
    run.loop.end(first, ABORT)
    run.until_idle()
    assert text_of(second) == run.runtime.text(ids(PREFIX + "b"), 5)
    assert run.loop.metrics.prefix_hits.value == BLOCK_TOKENS


def test_a_prompt_whose_logprobs_are_wanted_is_computed() -> None:
    run = sharing(slots=2)
    run.submit(PREFIX)
    run.until_idle()
    scored = run.submit(PREFIX, prompt_logprobs=0)
    run.until_idle()
    assert len(scored.prompt_logprobs) == len(PREFIX) - 1
    assert run.loop.metrics.prefix_hits.value == 0


def test_an_answer_is_a_beginning_too() -> None:
    run = sharing(slots=1)
    first = run.submit(PREFIX, max_tokens=20)
    run.until_idle()
    run.submit(PREFIX + text_of(first), max_tokens=2)
    run.loop.step()
    known = len(PREFIX) + 20 - 1
    assert run.loop.metrics.prefix_hits.value == known // BLOCK_TOKENS * BLOCK_TOKENS
    run.until_idle()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    run = sharing(slots=1)
    prompt = "a" * 2 * BLOCK_TOKENS
    made = []
    for _ in range(2):
        made.append(run.submit(prompt, max_tokens=3))
        run.until_idle()
    assert run.loop.metrics.prefix_hits.value == BLOCK_TOKENS
    assert text_of(made[0]) == text_of(made[1]) == run.runtime.text(ids(prompt), 3)


def test_adapters_share_nothing() -> None:
    run = sharing(slots=2)
    for adapter, hits in ((-1, 0), (3, 0), (3, HIT), (4, HIT), (-1, 2 * HIT)):
        request = run.request(PREFIX)
        request.adapter_id = adapter
        run.loop.submit(request)
        run.until_idle()
        assert run.loop.metrics.prefix_hits.value == hits, adapter


def test_a_preempted_request_finds_its_blocks_again() -> None:
    run = sharing(slots=2, blocks=5)
    made = [run.submit("abcdefgh" + letter * 8, max_tokens=40) for letter in "xy"]
    run.until_idle()
    assert run.loop.metrics.preemptions.value > 0
    assert [text_of(request) for request in made] == [
        run.runtime.text(ids("abcdefgh" + letter * 8), 40) for letter in "xy"
    ]


def test_without_caching_nothing_is_shared() -> None:
    run = Run(ToyRuntime(slots=2))
    for _ in range(2):
        run.submit(PREFIX)
        run.until_idle()
    assert run.loop.metrics.prefix_hits.value == 0


@pytest.mark.parametrize("seed", few((0, 1, 2), (0,)))
def test_random_requests_that_begin_alike(seed: int) -> None:
    """Slots, blocks and references are checked after each iteration."""
    rng = random.Random(seed)
    beginnings = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(10, 60))) for _ in range(4)]
    runtime = ToyRuntime(slots=6, max_length=96, blocks=rng.randint(7, 16), seed=seed)
    run = Run(runtime, prefill_tokens=rng.choice((7, 64)), caching=True)

    def prompt() -> str:
        return rng.choice(beginnings) + "".join(rng.choice(LETTERS) for _ in range(rng.randint(0, 20)))

    drive_at_random(run, rng, 700, prompt, 40)
    assert run.loop.metrics.preemptions.value > 5 and run.loop.metrics.prefix_hits.value > 300
    assert run.loop.slots.pool.free == runtime.blocks and run.loop.slots.pool.held == 0


# The pool.


def filled(pool: BlockPool, tokens: int) -> tuple[np.ndarray, list[bytes]]:
    """Blocks of a text whose tokens are all `tokens`, remembered."""
    blocks = pool.take(2)
    hashes: list[bytes] = []
    assert blocks is not None
    add_hashes(hashes, np.full(2 * BLOCK_TOKENS, tokens, np.int32), 2, -1)
    for block, name in zip(blocks.tolist(), hashes, strict=True):
        pool.remember(block, name)
    return blocks, hashes


def test_the_least_recently_used_blocks_leave_first() -> None:
    pool = BlockPool(6)
    texts = [filled(pool, tokens) for tokens in range(3)]
    for blocks, _ in texts:
        pool.release(blocks)
    assert pool.free == 6
    again = np.array(pool.share(texts[0][1]), np.int32)
    assert again.tolist() == texts[0][0].tolist()
    pool.release(again)
    pool.take(3)
    assert pool.share(texts[1][1]) == [], "the second text has gone"
    assert pool.share(texts[2][1]) == [texts[2][0][0]], "the third text has lost its end"
    assert len(pool.share(texts[0][1])) == 2
    assert pool.free == 0 and pool.take(1) is None


def test_a_run_takes_kept_blocks_where_no_others_are_in_a_row() -> None:
    pool = BlockPool(4)
    blocks, hashes = filled(pool, 7)
    pool.release(blocks)
    assert pool.borrow(2) == 2 and pool.borrow(2) == 0 and pool.borrow(1) is None
    assert pool.share(hashes) == []
    pool.give_back(0, 2)
    pool.check_integrity([])
    assert (pool.free, pool.borrowed) == (2, 2)


def test_lost_and_double_blocks_are_found() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    assert blocks is not None
    pool.check_integrity([blocks])
    for tables, message in (([], "a block is lost"), ([blocks, blocks], "is lost"), ([blocks[[0, 0]]], "twice")):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity(tables)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="no text holds"):
        pool.release(blocks)
