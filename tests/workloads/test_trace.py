from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.workloads import trace
from shapeshift.workloads.trace import Trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:59.9000001,374,44\r
2023-11-16 18:16:00.1000001,396,109\r
2023-11-16 19:16:00.1000002,2,7"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_optional_columns_are_typed_and_may_be_empty(file: Path) -> None:
    text = 'at_s,length,output_length,latency_ms,utility,lora_name,note\n0.5,7,3,250.5,0.2,sql,"a, b"\n1,8,,,,,\n'
    read = trace.read(write(file, text))
    assert read.output_length.tolist() == [3, 0]
    assert read.latency_ms.tolist() == [250.5, 0.0]
    assert read.utility.tolist() == [0.2, 1.0]
    assert read.lora_name.tolist() == ["sql", ""]
    assert not read.has("slo_class") and read.slo_class.tolist() == ["", ""]


def test_what_is_written_is_read(file: Path) -> None:
    read = trace.read(write(file, "lora_name,length,at_s\n\na,5,0.5\n\nb,7,0.5\n"))
    assert (read.at_s.tolist(), read.length.tolist(), read.lora_name.tolist()) == ([0.5, 0.5], [5, 7], ["a", "b"])
    read.write(file)
    again = trace.read(file)
    assert {name: column.tolist() for name, column in again.columns().items()} == {
        name: column.tolist() for name, column in read.columns().items()
    }


def test_an_azure_trace_starts_at_its_first_row(file: Path) -> None:
    read = trace.read(write(file, AZURE))
    assert read.at_s.tolist() == pytest.approx([0.0, 0.2, 3600.2000001], abs=1e-9)
    assert read.length.tolist() == [374, 396, 2]
    assert read.output_length.tolist() == [44, 109, 7]


def test_the_rate_factor_changes_only_time(file: Path) -> None:
    plain, fast = trace.read(write(file, AZURE)), trace.read(file, rate_factor=2.0)
    assert fast.at_s.tolist() == (plain.at_s / 2).tolist()
    assert fast.length.tolist() == plain.length.tolist()
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInputError, match="rate_factor"):
            plain.scaled(factor)


def test_until_keeps_requests_before_the_end(file: Path) -> None:
    cut = trace.read(write(file, AZURE)).until(0.2)
    assert len(cut) == len(cut.length) == len(cut.output_length) == 1


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("at_s,length\n0,5\n1,x\n", ["line 3", "column length", "'x'"]),
        ("at_s,length\n0,5\n1,0\n", ["line 3", "column length", "'0'"]),
        ("at_s,length\n0,5\n\n2,5\n1,5\n", ["line 5", "column at_s", "'1'"]),
        ("at_s,length\nnan,5\n", ["line 2", "column at_s", "'nan'"]),
        ("at_s,length\n-1,5\n", ["line 2", "column at_s", "'-1'"]),
        ('at_s,length,note\n0,5,"a\nb"\n1,,c\n', ["line 4", "column length", "''"]),
        ("at_s,length\n0,5,6\n", ["line 2", "columns"]),
        ("at_s,tokens\n0,5\n", ["line 1", "at_s,length", "TIMESTAMP"]),
        ("at_s,length,at_s\n0,5,0\n", ["line 1", "only once"]),
        ("at_s,length\n0,5\n1,-3\n", ["line 3", "column length", "'-3'", "1 to 2147483647"]),
        ("at_s,length,output_length\n0,5,-1\n", ["line 2", "column output_length", "'-1'", "0 to 2147483647"]),
        ("at_s,length,latency_ms\n0,5,1\n1,5,soon\n", ["line 3", "column latency_ms", "'soon'"]),
        ("at_s,length,latency\n0,5,1\n", ["line 1", "'latency'", "did you mean latency_ms?"]),
        (f"at_s,length\n0,1{'0' * 20}\n", ["line 2", "column length", "1 to 2147483647"]),
        (f"at_s,length,output_length\n0,1,1{'0' * 20}\n", ["line 2", "column output_length", "0 to 2147483647"]),
        ("at_s,length\n1700000000.5,5\n", ["line 2", "column at_s", "seconds from the start"]),
        # A gap: in a row, and of the end of one that is still being written.
        ("at_s,length\n0,5\n,5\n2,5\n", ["line 3", "column at_s", "''", "those of the row above (0.0) to"]),
        ("at_s,length\n0,5\n1,5\n2", ["line 4", "'2'", "must have 2 columns, has 1"]),
        (AZURE.replace("396", ""), ["line 3", "column ContextTokens", "''", "1 to 2147483647"]),
        ("at_s,length\n", ["no rows"]),
        ("", ["line 1"]),
        (AZURE.replace("396", "3.5"), ["line 3", "column ContextTokens", "'3.5'"]),
        (AZURE.replace("18:16", "18:61"), ["line 3", "column TIMESTAMP"]),
        (AZURE.replace("19:16", "17:16"), ["line 4", "column TIMESTAMP", "before"]),
    ],
)
def test_errors_name_file_line_and_column(file: Path, text: str, places: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        trace.read(write(file, text))
    for place in (str(file), *places):
        assert place in str(refused.value)


def test_a_file_in_another_encoding_is_refused_in_its_cell(file: Path) -> None:
    file.write_bytes(b"at_s,length\n0,5\n1,\xff\xfe\n")
    with pytest.raises(InvalidInputError, match="line 3, column length"):
        trace.read(file)


def test_a_constructed_trace_is_checked() -> None:
    with pytest.raises(InvalidInputError, match="at_s"):
        Trace(np.array([1.0, 0.5]), np.array([5, 5]))
    with pytest.raises(InvalidInputError, match="length"):
        Trace(np.array([0.0, 0.5]), np.array([5, 0]))
    with pytest.raises(InvalidInputError, match="length"):
        Trace(np.array([0.0, 0.5]), np.array([5]))


@pytest.mark.parametrize(("name", "rows"), [("conv", 19_366), ("code", 8_819)])
def test_the_public_azure_traces_are_read(name: str, rows: int) -> None:
    path = Path(os.environ.get("SHAPESHIFT_DATA", "")) / "azure_llm_2023" / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"no {path}; set SHAPESHIFT_DATA")
    read = trace.read(path)
    assert len(read) == rows
    assert 3000 < read.at_s[-1] < 3600
