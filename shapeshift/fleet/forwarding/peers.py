"""The same front on the other nodes: which of them serve, and how much work each has."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.errors import EngineError
from shapeshift.fleet.membership import open_membership
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.policy.placement import LOOK_S
from shapeshift.fleet.polling import NodePoll
from shapeshift.serving.description import told
from shapeshift.serving.front import Front
from shapeshift.serving.model_args import DESCRIPTION, ModelArgs
from shapeshift.triton.async_client import AsyncClient, ModelCall

_ANSWER_S = 5.0
# The age of its last answer at which a node gets no new requests, and at which those that it has are given up.
_LATE_PERIODS, _STUCK_PERIODS = 12.0, 40.0
# What a front says of itself that must be the same on both nodes.
_COMPARED = ("kind", "checkpoint_version", "precision", "max_tokens", "outputs")


@dataclass(frozen=True)
class _Answer:
    """What a node's front told of itself, and what this process knew of it.

    load, unread_tokens  of the front
    passed_on            requests that this process had there when it was told
    passed_tokens        prompt tokens that this process had passed on to it, ever, when it asked
    version, hop_ms      of Shapeshift; how long the way there and back took
    """

    load: float
    unread_tokens: float
    passed_on: int
    passed_tokens: float
    version: str
    hop_ms: float


class Peers:
    """Asks the front of each other node every `period_s` seconds for its work. Raises as `open_membership` does.

    A node whose front is another one (checkpoint, precision, outputs) is not used, and logged by name.
    """

    def __init__(
        self, front: Front[Any], file: Path, here: str, clients: NodeClients, period_s: float = LOOK_S
    ) -> None:
        self._front = front
        self._period_s = period_s
        self._inputs = _placeholder(front.args)
        self._passed_on: Counter[str] = Counter()
        self._passed_tokens: defaultdict[str, float] = defaultdict(float)
        membership = open_membership(file, here)
        self._poll: NodePoll[_Answer] = NodePoll(membership, clients, here, front.log.warning, self._ask, period_s)

    def loads(self) -> dict[str, float]:
        """By node that serves: requests that wait or run there, what was passed on since its answer included."""
        return {
            node: max(answer.load + self._passed_on[node] - answer.passed_on, 0.0)
            for node, answer in self._present().items()
        }

    def rows(self) -> list[tuple[str, bool, float, str, float]]:
        """By node of the fleet that has answered: name, whether it serves, work, version, ms of the way and back."""
        loads = self.loads()
        return [
            (node, node in loads, round(loads.get(node, answer.load), 1), answer.version, round(answer.hop_ms, 2))
            for node, answer in self._poll.answers.items()
        ]

    def unread_tokens(self) -> dict[str, float]:
        """By node that serves: prompt tokens without a first token, what was passed on since it was asked included."""
        return {
            node: answer.unread_tokens + self._passed_tokens[node] - answer.passed_tokens
            for node, answer in self._present().items()
        }

    def is_stuck(self, node: str) -> bool:
        """Whether a node that has requests of this process has not answered for long."""
        return self._poll.silent_s(node) > _STUCK_PERIODS * self._period_s

    def count(self, node: str, change: int) -> None:
        """A request was passed on to the node (1), or has ended there (-1). One thread at a time calls this."""
        self._passed_on[node] += change

    def add_unread(self, node: str, tokens: float) -> None:
        """A request of so many prompt tokens is passed on to the node. One thread at a time calls this."""
        self._passed_tokens[node] += tokens

    def close(self) -> None:
        """Stop asking. The clients stay."""
        self._poll.close()

    def _present(self) -> dict[str, _Answer]:
        late_s = _LATE_PERIODS * self._period_s
        return {node: answer for node, answer in self._poll.answers.items() if self._poll.silent_s(node) <= late_s}

    async def _ask(self, node: str, client: AsyncClient) -> _Answer:
        call = ModelCall(self._front.args.name, self._inputs, _ANSWER_S, (DESCRIPTION.name,))
        # Before it tells: what is passed on meanwhile may count twice until the next look, but is never missed.
        passed_tokens = self._passed_tokens[node]
        before = time.monotonic()
        answer = await client.first(call)
        hop_ms = (time.monotonic() - before) * 1e3
        theirs = told(answer)
        ours = json.loads(self._front.describe().as_json(self._front.args))
        for fact in _COMPARED:
            if theirs.get(fact) != ours.get(fact):
                difference = f"{fact} {theirs.get(fact)!r}, here {ours.get(fact)!r}"
                raise EngineError(f"its {self._front.args.name} is another one and is not used: {difference}")
        if "load" not in theirs:
            raise EngineError(f"its {self._front.args.name} is in no fleet")
        # A node that does not tell, such as one of an older version, is the last to be chosen.
        unread_tokens = float(theirs.get("unread_tokens", math.inf))
        version = str(theirs.get("shapeshift", ""))
        return _Answer(float(theirs["load"]), unread_tokens, self._passed_on[node], passed_tokens, version, hop_ms)


def _placeholder(args: ModelArgs) -> Mapping[str, Any]:
    """Triton takes a request without any input only of a model without batches."""
    nothing = np.array([[b""]], dtype=object)
    return {args.inputs[0]: nothing} if args.max_batch_size else {}
