"""What long commands print while they work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.common import output
from shapeshift.progress import Progress


def work(progress: Progress) -> None:
    for step in ("read", "train: 1 of 2", "train: 2 of 2"):
        progress(step)
    progress.done()


def test_a_file_gets_a_line_for_each_stage_and_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    work(Progress("encode"))
    assert capsys.readouterr().err == "encode:    0 s  read\nencode:    0 s  train: 1 of 2\n"
    output.progress("encode: 5/s")
    output.progress()
    assert capsys.readouterr().err == "encode: 5/s\n"


def test_a_terminal_gets_one_line_with_a_bar_that_is_cleared_at_the_end() -> None:
    terminal, end = os.openpty()
    program = "from tests.test_progress import work; from shapeshift.progress import Progress; work(Progress('encode'))"
    subprocess.run([sys.executable, "-c", program], stderr=end, check=True)
    os.close(end)
    said = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert "\n" not in said
    _, read, first, second, cleared = said.split("\r\033[K")
    assert read == "encode:    0 s  read", "no bar where it is not known how many there are"
    assert first == "encode:    0 s  [##########..........] train: 1 of 2"
    assert second == "encode:    0 s  [####################] train: 2 of 2"
    assert cleared == ""
