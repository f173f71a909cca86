"""Reads the server's metrics page, which has the Prometheus text format.

prometheus_client.parser (0.26) takes 15 ms for the page of our eleven demo models, 1,259 series, where `parse` takes
1.2 ms: it makes an object of each series, and reads the labels anew each time. The sidecar scrapes every server each
second. It also gives other names to series whose counter does not end in `_total`.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar
from urllib.parse import SplitResult, urlsplit

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.triton.endpoint import CA_VARIABLE, Tls

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]
K = TypeVar("K", bound=Hashable)

HEARTBEAT = "shapeshift_heartbeat_total"
# A heartbeat moves once a second, and Triton publishes it late: one that stood still for fewer scrapes may yet move.
_STALE_SCRAPES = 3

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_KEPT_LABELS = 1 << 17
_ESCAPE = re.compile(r"\\(.)")


def parse(text: str) -> Samples:
    """{(name, labels): value} of every sample in `text`; comments and timestamps are dropped.

    Raises InvalidInputError with the number of the invalid line.
    """
    samples: Samples = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        labels = _labels(match[2] or "") if match else None
        if match is None or labels is None:
            raise InvalidInputError("metrics", line, f"line {number} is not in the Prometheus text format")
        try:
            samples[match[1], labels] = float(match[3])
        except ValueError:
            raise InvalidInputError("metrics", match[3], f"line {number} must end in a number") from None
    return samples


def scrape(url: str, timeout_s: float = 2.0, tls: Tls | None = None) -> Samples:
    """The samples at `url`. Raises as `page` does, and as `parse` does."""
    return parse(page(url, timeout_s, tls))


class Heartbeats(Generic[K]):
    """Tells from one scrape after another which processes live.

    Triton keeps the series of a process that has ended, with their last values: its gauges say nothing any more, and
    its heartbeat stands still.
    """

    def __init__(self) -> None:
        # By process: its last heartbeat, and for how many scrapes it has stood still.
        self._seen: dict[K, tuple[float, int]] = {}

    def living(self, counts: Mapping[K, float]) -> frozenset[K]:
        """The processes whose heartbeat has moved within three scrapes, or is new. counts: of this scrape."""
        before = self._seen
        self._seen = {
            process: (count, before[process][1] + 1 if process in before and before[process][0] == count else 0)
            for process, count in counts.items()
        }
        return frozenset(process for process, (_, still) in self._seen.items() if still < _STALE_SCRAPES)


class LiveReader:
    """Reads the page at `url` again and again, without the gauges and counters that ended processes have left there."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._heartbeats = Heartbeats[Labels]()

    def read(self) -> Samples:
        """The samples as they are now. Raises as `scrape` does."""
        samples = scrape(self._url)
        beats = {_process(labels): value for (name, labels), value in samples.items() if name == HEARTBEAT}
        ended = beats.keys() - self._heartbeats.living(beats)
        return {key: value for key, value in samples.items() if _process(key[1]) not in ended}


def page(url: str, timeout_s: float = 2.0, tls: Tls | None = None) -> str:
    """The text at `url`, such as http://127.0.0.1:8002/metrics, without a proxy. tls: for an https:// URL.

    Raises ShapeshiftError if there is no answer with status 200 within `timeout_s`.
    """
    parts = urlsplit(url)
    connection = _connection(url, parts, timeout_s, tls)
    try:
        connection.request("GET", parts.path or "/metrics")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ShapeshiftError(f"no metrics at {url} ({error}); is the server running?") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ShapeshiftError(f"{url} answered with status {response.status}; is this the metrics port?")
    return body.decode()


def _connection(url: str, parts: SplitResult, timeout_s: float, tls: Tls | None) -> http.client.HTTPConnection:
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInputError("url", url, "must be http:// or https:// HOST:PORT/metrics")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    if tls is None:
        raise InvalidInputError("url", url, f"https:// needs certificates; set {CA_VARIABLE} and the others")
    context = tls.client_context()
    return http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=timeout_s, context=context)


def _process(labels: Labels) -> Labels:
    """Model and pid; without a pid where the series is the server's own."""
    return frozenset(label for label in labels if label[0] in ("model", "pid"))


# Each page has the labels of the page before.
@lru_cache(maxsize=_KEPT_LABELS)
def _labels(text: str) -> Labels | None:
    labels: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            return None
        labels.append((match[1], _ESCAPE.sub(_unescape, match[2])))
        position = match.end()
    return frozenset(labels)


def _unescape(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]
