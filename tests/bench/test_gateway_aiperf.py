"""What AIPerf is told, and what is shown of its export."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.gateway import aiperf
from shapeshift.errors import UnsupportedError

OPTIONS = argparse.Namespace(url="http://localhost:1", concurrency=3, requests=9)
FAKE = """#!/bin/bash
echo "it says $1"
while (($#)); do [[ $1 == --artifact-dir ]] && folder=$2; shift; done
"""


def program(folder: Path, more: str) -> Path:
    """A program that takes AIPerf's arguments."""
    file = folder / "aiperf"
    file.write_text(FAKE + more)
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("name", aiperf.PROFILES)
def test_profiles_use_local_tokenizers(name: str) -> None:
    arguments = aiperf.command(aiperf.PROFILES[name], OPTIONS)
    (tokenizer,) = (value for option, value in zip(arguments, arguments[1:], strict=False) if option == "--tokenizer")
    assert Path(tokenizer).is_absolute() and "--url" in arguments and "9" in arguments
    assert ("--streaming" in arguments) is (name == "chat")


def test_the_export_is_read_and_a_failure_is_told(tmp_path: Path) -> None:
    export = {"request_throughput": {"unit": "requests/sec", "avg": 7.83}}
    good = program(tmp_path, f"""echo '{json.dumps(export)}' > "$folder/profile_export_aiperf.json\"""")
    assert aiperf.run(good, ["profile"], tmp_path / "out") == export
    bad = program(tmp_path, "exit 3")
    with pytest.raises(UnsupportedError, match=r"aiperf ended with status 3(?s:.*)it says profile"):
        aiperf.run(bad, ["profile"], tmp_path / "out")


def test_metrics_that_a_profile_lacks_are_left_out() -> None:
    rows = aiperf.rows(
        {
            "embeddings": {"request_throughput": {"avg": 7.83}},
            "chat": {"request_throughput": {"avg": 1.0}, "time_to_first_token": {"p50": 12.0}},
        }
    )
    assert rows == [{"": "requests/s", "embeddings": 7.83, "chat": 1.0}, {"": "first token ms, p50", "chat": 12.0}]
