"""Questions to all nodes at once, such that a slow node holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from shapeshift.errors import ShapeshiftError

T = TypeVar("T")

# More nodes than this wait for one another.
_MOST_AT_ONCE = 1024


def nobody_answers(problems: Mapping[str, str]) -> ShapeshiftError:
    """The error where no node answers. problems: by node."""
    texts = [f"{node}: {text}" for node, text in sorted(problems.items())]
    return ShapeshiftError("; ".join(texts) or "the fleet has no nodes")


class NodeCalls(Generic[T]):
    """Calls one function for each node, each in its own thread, one at a time for a node. One thread uses it.

    limit_s: seconds until a node is late. A late answer is dropped, and the node is late until its
    call has ended: whatever it would say may have changed since.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="node")
        self._late: dict[str, Future[T]] = {}

    def ask(self, calls: Mapping[str, Callable[[], T]], patience: float = 1.0) -> tuple[dict[str, T], dict[str, str]]:
        """By node: the answers, and why each of the other nodes gave none. patience: factor on the limit."""
        limit_s = patience * self._limit_s
        self._late = {node: call for node, call in self._late.items() if not call.done()}
        problems = dict.fromkeys(self._late.keys() & calls.keys(), "its last answer is still missing")
        running = {node: self._threads.submit(call) for node, call in calls.items() if node not in problems}
        ended = wait(running.values(), limit_s).done
        answers: dict[str, T] = {}
        for node, call in running.items():
            if call not in ended:
                self._late[node] = call
                problems[node] = f"no answer within {limit_s:g} s"
            elif (error := call.exception()) is not None:
                # Whatever is wrong with one node concerns no other.
                problems[node] = " ".join(str(error).split()) or repr(error)
            else:
                answers[node] = call.result()
        return answers, problems
