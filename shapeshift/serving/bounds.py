"""The bounds of queues, and the one form of their refusals: parameter, value, limit, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.errors import OverloadedError

# Of the newest answer in a mean of answers.
_SMOOTHING = 1 / 32
# Before the first answers, as measured under load: a queue fills before any of them comes.
_FIRST_DEVIATION = 0.03
_MAX_LATENESS = 4.0


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
            state = f"{held} {self.unit} {self.state}, {added} more would exceed {self.limit}"
            raise OverloadedError(f"{self.parameter}: {state}; retry later")

    def require_unless_empty(self, held: int, added: int) -> None:
        """As `require`, but where none are held any number fits: no limit makes a request impossible."""
        if held:
            self.require(held, added)


def require_deadline(predicted_ms: float, latency_ms: float | None) -> None:
    """Raise OverloadedError where an answer after `predicted_ms` is too late for the request's `latency_ms`."""
    if latency_ms is not None and predicted_ms > latency_ms:
        reason = f"got {latency_ms:g}, an answer is predicted after {predicted_ms:.0f} ms"
        raise OverloadedError(f"latency_ms: {reason}; retry later or elsewhere")


class TimeBound:
    """The longest time until an answer, as the setting `parameter` says; limit_ms 0: any.

    Answers come later than predicted, by how much differs with the load. So a prediction is held against the limit as
    late as hardly any recent one came true: times the smoothed ratio of taken to predicted time, plus four mean
    deviations of it. That is how RFC 6298 (section 2) bounds a round trip. Only predictions that came near the limit
    count: a short wait is off by more, and never refused.
    """

    def __init__(self, parameter: str, limit_ms: float) -> None:
        self._parameter = parameter
        self._limit_ms = limit_ms
        self._ratio, self._deviation = 1.0, _FIRST_DEVIATION

    def require(self, predicted_ms: float, latency_ms: float | None = None) -> None:
        """Raise OverloadedError where an answer that is predicted after `predicted_ms` may come beyond the limit.

        Or where it is too late for the request's `latency_ms`, which is held against the prediction as it is.
        """
        require_deadline(predicted_ms, latency_ms)
        latest_ms = predicted_ms * self._lateness
        if self._limit_ms and latest_ms > self._limit_ms:
            reason = f"an answer is predicted after {latest_ms:.0f} ms, the limit is {self._limit_ms:g} ms"
            raise OverloadedError(f"{self._parameter}: {reason}; retry later")

    def observe(self, predicted_ms: float, took_ms: float) -> None:
        """Record how long an answer took that was predicted after `predicted_ms`."""
        # Held against what is admitted now: else a time of great lateness would admit nothing that could end it.
        if predicted_ms * self._lateness < self._limit_ms / 2 or not self._limit_ms:
            return
        error = min(took_ms / predicted_ms, _MAX_LATENESS) - self._ratio
        self._deviation += _SMOOTHING * (abs(error) - self._deviation)
        self._ratio += _SMOOTHING * error

    @property
    def _lateness(self) -> float:
        return min(max(self._ratio + 4 * self._deviation, 1.0), _MAX_LATENESS)


def unloading() -> OverloadedError:
    """The error for a request that comes, or still waits, while its model is being unloaded."""
    return OverloadedError("the model is being unloaded; retry elsewhere")
