"""The lines of the project's own processes, as text and as JSON."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from shapeshift import process_log
from shapeshift.sidecar.journal import Journal


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root, raises = logging.getLogger(), logging.raiseExceptions
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(level)
    for name in ("shapeshift", process_log.REQUESTS):
        logging.getLogger(name).setLevel(logging.NOTSET)


def written(words: str) -> list[str]:
    stream = io.StringIO()
    process_log.set_up(words, stream)
    log = logging.getLogger("shapeshift.sidecar")
    journal = Journal(log, lambda report: None, {})
    journal.log("start", "sidecar", "100%s")
    journal.log_once("metrics", "server", "no answer", logging.WARNING)
    logging.getLogger(process_log.REQUESTS).info("GET /")
    logging.getLogger("library").info("a step")
    log.debug("a detail")
    try:
        raise ValueError("so")
    except ValueError:
        log.exception("failed")
    return stream.getvalue().splitlines()


def test_a_line_of_text_has_time_and_level() -> None:
    first, second, third, *traceback = written("")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}[+-]\d\d:\d\d INFO start sidecar: 100%s", first)
    assert second.endswith(" WARNING metrics server: no answer") and third.endswith(" ERROR failed")
    assert traceback[-1] == "ValueError: so"


def test_a_line_of_json_has_its_fields() -> None:
    lines = [json.loads(line) for line in written("json")]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert (lines[1]["kind"], lines[1]["subject"], lines[1]["log"]) == ("metrics", "server", "shapeshift.sidecar")
    assert lines[1]["text"] == "metrics server: no answer" and lines[2]["traceback"].endswith("ValueError: so")


@pytest.mark.parametrize(("words", "count"), [("", 0), ("json", 0), ("requests", 1), ("json,requests", 1)])
def test_requests_are_logged_where_the_option_says_so(words: str, count: int) -> None:
    assert sum("GET /" in line for line in written(words)) == count


def test_a_reader_that_has_gone_ends_nothing() -> None:
    stream = io.StringIO()
    process_log.set_up("", stream)
    stream.close()
    logging.getLogger("shapeshift").error("unread")


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    process_log.add_option(parser)
    assert parser.parse_args(["--log", "json,requests"]).log == "json,requests"
    with pytest.raises(SystemExit):
        parser.parse_args(["--log", "xml"])
    assert "got 'xml'; json, requests, or both" in capsys.readouterr().err
