"""Reads the server's metrics page, which has the Prometheus text format."""

from __future__ import annotations

import http.client
import re
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.triton.endpoint import CA_VARIABLE, Tls

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]

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


# Each page has the labels of the page before.
@lru_cache(maxsize=_KEPT_LABELS)
def _labels(text: str) -> Labels | None:
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            return None
        found.append((match[1], _ESCAPE.sub(_unescape, match[2])))
        position = match.end()
    return frozenset(found)


def _unescape(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]
