"""A rolling upgrade: one node at a time, the first ones watched, and all of them back where they answer with errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.fleet.supervision.ray_fleet import RayFleet
from shapeshift.settings import require
from shapeshift.triton.metrics import Samples
from shapeshift.triton.names import worker_front

Say = Callable[[str], None]

# Triton counts what a front of ours answers with an error as a success: the process has taken it.
_TAKEN, _NOT_TAKEN = "nv_inference_request_success", "nv_inference_request_failure"
_ANSWERS = "shapeshift_requests_total"
# The other codes are the caller's fault, or wish.
_FAULTS = ("INTERNAL", "UNAVAILABLE")
# To end the requests of a node, and to load everything again.
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class UpgradeSettings:
    """How an upgrade goes on.

    canary      share of the nodes that are upgraded first and watched, at least one node
    watch_s     seconds for which they serve before the others follow
    max_errors  share of the requests to the canaries that may fail meanwhile
    Raises InvalidInputError with the name of the field.
    """

    canary: float = 0.1
    watch_s: float = 60.0
    max_errors: float = 0.01

    def __post_init__(self) -> None:
        require(0 < self.canary <= 1, "canary", self.canary, "must be above 0, at most 1")
        require(0 <= self.watch_s <= 86400, "watch_s", self.watch_s, "must be 0 to 86400 seconds")
        require(0 <= self.max_errors <= 1, "max_errors", self.max_errors, "must be 0 to 1")


def upgrade(
    fleet: RayFleet,
    commands: Sequence[NodeCommand],
    settings: UpgradeSettings,
    say: Say,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Serve each node as its command says. Raises ShapeshiftError after taking back all that were upgraded.

    A node that fails, canaries that answer too many requests with errors, and Ctrl-C end the upgrade. The error names
    the nodes that could not be taken back. pause: waits seconds.
    """
    num_canaries = math.ceil(settings.canary * len(commands))
    done: list[NodeCommand] = []
    try:
        for command in commands:
            done.append(fleet.present_command(command.name))
            fleet.drain(command.name, _TIMEOUT_S, say)
            fleet.start(command, _TIMEOUT_S, say)
            if len(done) == num_canaries:
                _watch(fleet, [one.name for one in done], settings, say, pause)
    except (ShapeshiftError, KeyboardInterrupt) as error:
        reason = str(error) or "it was interrupted"
        say(f"going back: {reason}\n")
        if left := _go_back(fleet, done, say):
            raise ShapeshiftError(f"the upgrade failed: {reason}; not taken back: {', '.join(left)}") from error
        raise ShapeshiftError(f"the upgrade was taken back: {reason}") from error


def _go_back(fleet: RayFleet, before: Sequence[NodeCommand], say: Say) -> list[str]:
    """Serve the nodes as before, the last one first. Returns which failed, each with its reason."""
    left = []
    for index, command in reversed(list(enumerate(before))):
        try:
            fleet.drain(command.name, _TIMEOUT_S, say)
            fleet.start(command, _TIMEOUT_S, say)
        except ShapeshiftError as error:
            left.append(f"{command.name} ({error})")
        except KeyboardInterrupt:
            return [*left, *(f"{one.name} (interrupted)" for one in reversed(before[: index + 1]))]
    return left


def _watch(
    fleet: RayFleet, names: Sequence[str], settings: UpgradeSettings, say: Say, pause: Callable[[float], None]
) -> None:
    """Let the canaries serve for a while. Raises ShapeshiftError where too many of their requests fail."""
    before = [requests(fleet.page(name)) for name in names]
    say(f"watching {', '.join(names)} for {settings.watch_s:g} s\n")
    pause(settings.watch_s)
    after = [requests(fleet.page(name)) for name in names]
    for name, old, new in zip(names, before, after, strict=True):
        # Counters begin anew with a server.
        if new[0] < old[0] or new[1] < old[1]:
            raise ShapeshiftError(f"the server of {name} was started again meanwhile")
    answered, failed = (
        sum(new[index] - old[index] for old, new in zip(before, after, strict=True)) for index in (0, 1)
    )
    say(f"{answered + failed:g} requests, {failed:g} failed\n")
    if failed > settings.max_errors * (answered + failed):
        share = failed / (answered + failed)
        raise ShapeshiftError(
            f"{share:.1%} of the requests to {', '.join(names)} failed; the limit is {settings.max_errors:.1%}"
        )


def requests(page: Samples) -> tuple[float, float]:
    """Requests of all models but workers since the server's start: answered, and failed for another reason than the
    caller's.
    """
    taken = failed = 0.0
    for (name, labels), value in page.items():
        label_values = dict(labels)
        # What a worker refuses, its router asks of another one.
        if worker_front(label_values.get("model", "")) is not None:
            continue
        if name == _TAKEN:
            taken += value
        elif name == _NOT_TAKEN and label_values.get("reason") != "CANCELED":
            taken += value
            failed += value
        elif name == _ANSWERS and label_values.get("code") in _FAULTS:
            failed += value
    return taken - failed, failed
