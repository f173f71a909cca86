"""What the processes of `shapeshift serve`, `sidecar` and `gateway` log: lines of text, or JSON.

A record may have `fields`, names and values that JSON shows one by one: `log.info(text, extra={"fields": {...}})`.
"""

from __future__ import annotations

import argparse
import json
import logging
from datetime import datetime
from typing import TextIO

REQUESTS = "shapeshift.gateway.requests"
"""The log of the gateway that gets a line for each request."""
_JSON, _REQUESTS = "json", "requests"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--log`, whose value `set_up` takes."""
    parser.add_argument(
        "--log",
        type=_words,
        default="",
        metavar="WORD,...",
        help="json: lines of logs are JSON; requests: the gateway logs each request",
    )


def is_json(words: str) -> bool:
    """Whether lines are JSON with this value of `--log`."""
    return _JSON in words.split(",")


def set_up(words: str, stream: TextIO) -> None:
    """Let everything that this process logs go to `stream`. A stream that nobody reads any more ends nothing."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if is_json(words) else _TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("shapeshift").setLevel(logging.INFO)
    logging.raiseExceptions = False
    logging.getLogger(REQUESTS).setLevel(logging.INFO if _REQUESTS in words.split(",") else logging.WARNING)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  logging's name
        return _time(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "log": record.name,
            **getattr(record, "fields", {}),
            "text": record.getMessage(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")


def _words(text: str) -> str:
    for word in filter(None, text.split(",")):
        if word not in (_JSON, _REQUESTS):
            raise argparse.ArgumentTypeError(f"got {word!r}; {_JSON}, {_REQUESTS}, or both with a comma")
    return text
