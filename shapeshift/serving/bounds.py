"""The bounds of queues, and the one form of their refusals: parameter, value, limit, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.errors import OverloadedError


@dataclass(frozen=True)
class Bound:
    """The most `unit` that may wait or run, set by the parameter `parameter`."""

    parameter: str
    limit: int
    unit: str
    state: str = "wait"

    def require(self, held: int, added: int = 1) -> None:
        """Raise OverloadedError where `added` more do not fit beside the `held` ones."""
        if held + added > self.limit:
            found = f"{held} {self.unit} {self.state}, {added} more would exceed {self.limit}"
            raise OverloadedError(f"{self.parameter}: {found}; retry later")

    def require_unless_empty(self, held: int, added: int) -> None:
        """As `require`, but where none are held any number fits: no limit makes a request impossible."""
        if held:
            self.require(held, added)


@dataclass(frozen=True)
class TimeBound:
    """The longest time until an answer, as the setting `parameter` says; limit_ms 0: any."""

    parameter: str
    limit_ms: float

    def require(self, predicted_ms: float, latency_ms: float | None = None) -> None:
        """Raise OverloadedError where an answer after `predicted_ms` is too late, or for the request's `latency_ms`."""
        if latency_ms is not None and predicted_ms > latency_ms:
            found = f"got {latency_ms:g}, an answer is predicted after {predicted_ms:.0f} ms"
            raise OverloadedError(f"latency_ms: {found}; retry later or elsewhere")
        if self.limit_ms and predicted_ms > self.limit_ms:
            found = f"an answer is predicted after {predicted_ms:.0f} ms, the limit is {self.limit_ms:g} ms"
            raise OverloadedError(f"{self.parameter}: {found}; retry later")


def unloading() -> OverloadedError:
    """The error for a request that comes, or still waits, while its model is being unloaded."""
    return OverloadedError("the model is being unloaded; retry elsewhere")
