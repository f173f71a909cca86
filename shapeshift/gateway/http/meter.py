"""What requests use: on the page of metrics, by model and key, and held against the limits of their keys."""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Iterator
from typing import Any

import prometheus_client as prometheus
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter

from shapeshift.gateway.errors import MESSAGES, ApiError
from shapeshift.gateway.http.api_keys import Key

_REQUESTS, _TOKENS = "requests", "tokens"
_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 3e4, 6e4, 6e5)
# Tokens of one request that are counted at once, and at its end.
_AT_ONCE = 32


class GatewayMetrics:
    """The gateway's own metrics. in_flight: requests that are being served."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.broken_key_lines = 0
        self._registry = prometheus.CollectorRegistry()
        # Samples that say when each of the others began.
        prometheus.disable_created_metrics()
        options: dict[str, Any] = {"namespace": "shapeshift_gateway", "registry": self._registry}
        gauge, counter, histogram = prometheus.Gauge, prometheus.Counter, prometheus.Histogram
        gauge("requests_running", "Requests in flight", **options).set_function(lambda: self.in_flight)
        broken = gauge("broken_key_lines", "Lines of the file of keys that are left out", **options)
        broken.set_function(lambda: self.broken_key_lines)
        self.answers = counter("answers", "Answers by HTTP status", ["status"], **options)
        self.rate_limited = counter("rate_limited", "Requests beyond a limit of their key", ["key", "limit"], **options)
        names = ["model", "key"]
        self.prompt_tokens = counter("prompt_tokens", "Tokens that models read", names, **options)
        self.generation_tokens = counter("generation_tokens", "Tokens that models generated", names, **options)
        of_model: dict[str, Any] = {"labelnames": ["model"], "buckets": _MS, **options}
        self.request_ms = histogram("request_latency_ms", "Time of a request to its whole answer", **of_model)
        self.first_ms = histogram("first_token_ms", "Time of a request to the first text of its stream", **of_model)
        self.between_ms = histogram("between_tokens_ms", "Time between two texts of a stream", **of_model)

    def page(self) -> str:
        """In the Prometheus text format."""
        return prometheus.generate_latest(self._registry).decode()


class RateLimits:
    """The requests and tokens of each key in the last minute, in the memory of this process.

    How many tokens a request takes is known when they are there. What goes beyond the limit is owed, and paid first.
    """

    def __init__(self) -> None:
        storage = MemoryStorage()
        # Exact, with a record of each request; tokens are too many for that.
        self._requests = MovingWindowRateLimiter(storage)
        self._tokens = SlidingWindowCounterRateLimiter(storage)
        self._owed: Counts[str] = Counts()

    def admit(self, key: Key) -> str | None:
        """Take a request; the name of the limit that it is beyond, in which case it is not taken."""
        if key.tokens_per_minute is not None:
            self.pay(key, 0)
            if self._owed[key.name] or self._left(key, _TOKENS)[0] < 1:
                return _TOKENS
        if key.requests_per_minute is not None and not self._requests.hit(
            RateLimitItemPerMinute(key.requests_per_minute), _REQUESTS, key.name
        ):
            return _REQUESTS
        return None

    def pay(self, key: Key, tokens: int) -> None:
        """Count tokens that a request has used."""
        assert key.tokens_per_minute is not None
        owed = self._owed[key.name] + tokens
        paid = min(owed, self._left(key, _TOKENS)[0])
        if paid and not self._tokens.hit(RateLimitItemPerMinute(key.tokens_per_minute), _TOKENS, key.name, cost=paid):
            paid = 0
        self._owed[key.name] = owed - paid

    def refusal(self, key: Key, limit: str) -> ApiError:
        """The answer to a request beyond this limit."""
        wait_s = max(1, math.ceil(self._left(key, limit)[1]))
        most = key.tokens_per_minute if limit == _TOKENS else key.requests_per_minute
        text = f"rate limit: key {key.name} may use {most} {limit} a minute; retry after {wait_s} s"
        return ApiError(429, text, limit, code="rate_limit_exceeded", headers={"retry-after": str(wait_s)})

    def headers(self, key: Key, path: str) -> Iterator[tuple[bytes, bytes]]:
        """What is left of each limit, as OpenAI says it, or below its path Anthropic; reset: when more is."""
        for name, most in ((_REQUESTS, key.requests_per_minute), (_TOKENS, key.tokens_per_minute)):
            if most is None:
                continue
            left, reset_s = self._left(key, name)
            header, reset = f"x-ratelimit-{{}}-{name}", f"{reset_s:.3f}s"
            if path.startswith(MESSAGES):
                header = f"anthropic-ratelimit-{name}-{{}}"
                reset = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(time.time() + reset_s)))
            for word, value in (("limit", most), ("remaining", left), ("reset", reset)):
                yield header.format(word).encode(), str(value).encode()

    def _left(self, key: Key, limit: str) -> tuple[int, float]:
        """How many are left, and the seconds until there are more."""
        most = key.tokens_per_minute if limit == _TOKENS else key.requests_per_minute
        assert most is not None
        limiter: RateLimiter = self._tokens if limit == _TOKENS else self._requests
        stats = limiter.get_window_stats(RateLimitItemPerMinute(most), limit, key.name)
        owed_s = 60 * self._owed[key.name] / most if limit == _TOKENS else 0.0
        return int(stats.remaining), max(0.0, stats.reset_time - time.time()) + owed_s


class Meter:
    """One request, and what it uses. key: of its client, None where no key is asked for; model: that it calls."""

    def __init__(self, metrics: GatewayMetrics, limits: RateLimits) -> None:
        self.key: Key | None = None
        self._metrics = metrics
        self._limits = limits
        self._began = self._last = time.monotonic()
        self._model = ""
        # Between the texts of a stream, once there is one.
        self._between: prometheus.Histogram | None = None
        # Not counted yet.
        self._read = self._generated = 0

    def admit(self, key: Key) -> ApiError | None:
        """Take the request for its key; the answer where it is beyond a limit."""
        self.key = key
        if (limit := self._limits.admit(key)) is None:
            return None
        self._metrics.rate_limited.labels(key.name, limit).inc()
        return self._limits.refusal(key, limit)

    def count(self, model: str, read: int, generated: int = 0, streams: bool = False) -> None:
        """Tokens that the model has read and generated since the last time; streams: they are sent as they come."""
        self._model = model
        self._read += read
        self._generated += generated
        if streams:
            now = time.monotonic()
            (self._between or self._metrics.first_ms.labels(model)).observe((now - self._last) * 1e3)
            self._between = self._between or self._metrics.between_ms.labels(model)
            self._last = now
        if self._read + self._generated >= _AT_ONCE or not streams:
            self._add()

    def headers(self, path: str) -> list[tuple[bytes, bytes]]:
        """Those of every answer to its key from this path."""
        return [] if self.key is None else [*self._limits.headers(self.key, path)]

    def end(self) -> None:
        """The request has its whole answer, or its client has left."""
        # Without one, such as looks at health, it says nothing of any model.
        if self._model:
            self._metrics.request_ms.labels(self._model).observe((time.monotonic() - self._began) * 1e3)
        self._add()

    def _add(self) -> None:
        name = "" if self.key is None else self.key.name
        if self._read:
            self._metrics.prompt_tokens.labels(self._model, name).inc(self._read)
        if self._generated:
            self._metrics.generation_tokens.labels(self._model, name).inc(self._generated)
        tokens = self._read + self._generated
        if tokens and self.key is not None and self.key.tokens_per_minute is not None:
            self._limits.pay(self.key, tokens)
        self._read = self._generated = 0
