"""Traces as CSV files: when each request arrives, how long it is, and what it asks for.

The header selects one of two formats: that of this project, `at_s,length` and any of OPTIONAL; or that of the Azure LLM
inference traces, `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError, did_you_mean
from shapeshift.settings import require

T = TypeVar("T")

COLUMNS = ("at_s", "length")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 2**31 - 1
_LENGTHS = f"must be a whole number, 1 to {_MOST_TOKENS}"
# A later one is a date: seconds are those from the start.
_MOST_SECONDS = 366 * 86_400


class Column(NamedTuple):
    """An optional column. An empty cell is `default`."""

    kind: type
    default: Any
    parse: Callable[[str], Any]
    allowed: str


def _whole(text: str) -> int:
    if not 0 <= (number := int(text)) <= _MOST_TOKENS:
        raise ValueError
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError
    return number


OPTIONAL: Mapping[str, Column] = {
    "output_length": Column(np.int64, 0, _whole, f"must be empty or a whole number, 0 to {_MOST_TOKENS}"),
    "latency_ms": Column(np.float64, 0.0, _finite, "must be empty or a number of at least 0"),
    "utility": Column(np.float64, 1.0, _finite, "must be empty or a number of at least 0"),
    **{name: Column(np.str_, "", str, "any text") for name in ("task", "lora_name", "slo_class")},
}
# Of a column that is left out, until the trace is made.
_ABSENT: Any = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. An optional column that is left out has its default in every row.

    at_s           float64 [n], seconds, at least 0
    length         int64 [n], tokens, at least 1
    output_length  int64 [n], tokens of the answer, 0: unknown
    latency_ms     float64 [n], the time in which an answer is needed, 0: any
    utility        float64 [n], what an answer in time is worth, 1 unless stated
    task, lora_name, slo_class  str [n], the request parameters, "": none
    """

    at_s: NDArray[np.float64]
    length: NDArray[np.int64]
    output_length: NDArray[np.int64] = _ABSENT
    latency_ms: NDArray[np.float64] = _ABSENT
    utility: NDArray[np.float64] = _ABSENT
    task: NDArray[np.str_] = _ABSENT
    lora_name: NDArray[np.str_] = _ABSENT
    slo_class: NDArray[np.str_] = _ABSENT

    def __post_init__(self) -> None:
        for name, optional in OPTIONAL.items():
            if getattr(self, name) is _ABSENT:
                # One value in memory, however many rows.
                object.__setattr__(self, name, np.broadcast_to(optional.kind(optional.default), len(self.at_s)))
        for name, column in self.columns().items():
            require(len(column) == len(self.at_s), name, len(column), f"must have {len(self.at_s)} rows")
        require(bool(np.all(np.isfinite(self.at_s))), "at_s", self.at_s, "must be finite")
        require(bool(np.all(np.diff(self.at_s, prepend=0.0) >= 0)), "at_s", self.at_s, "must not decrease")
        require(bool(np.all(self.length >= 1)), "length", self.length, "must be at least 1 token")

    def __len__(self) -> int:
        return len(self.at_s)

    def columns(self) -> dict[str, NDArray[Any]]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def has(self, name: str) -> bool:
        """Whether any row has another value than the default in an optional column."""
        return bool(np.any(getattr(self, name) != OPTIONAL[name].default))

    def scaled(self, rate_factor: float) -> Trace:
        """The same requests at `rate_factor` times the rate."""
        require(math.isfinite(rate_factor) and rate_factor > 0, "rate_factor", rate_factor, "must be above 0")
        return dataclasses.replace(self, at_s=self.at_s / rate_factor)

    def until(self, end_s: float) -> Trace:
        """The requests that arrive before `end_s`."""
        count = int(np.searchsorted(self.at_s, end_s, side="left"))
        return Trace(**{name: column[:count] for name, column in self.columns().items()})

    def resampled(self, at_s: NDArray[np.float64], rng: np.random.Generator) -> Trace:
        """Requests that arrive at other times, each a random one of these in all else."""
        rows = rng.integers(0, len(self), len(at_s))
        return Trace(**{**{name: column[rows] for name, column in self.columns().items()}, "at_s": at_s})

    def write(self, path: Path) -> None:
        """Write it as a file that `read` reads. Raises OSError."""
        columns = {name: column for name, column in self.columns().items() if name in COLUMNS or self.has(name)}
        cells = [column.tolist() for column in columns.values()]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*cells, strict=True))


def read(path: Path, rate_factor: float = 1.0) -> Trace:
    """The trace in `path`, at `rate_factor` times its rate.

    Of an Azure trace, `length` is ContextTokens, `output_length` GeneratedTokens, and time starts at the first row.
    Raises InvalidInputError with file, line and column of the first invalid cell, or with the file if it has no rows or
    an unknown header; OSError if it cannot be read.
    """
    # What is no UTF-8 fails in its cell, or is a text.
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        table = _Table(path, file)
        if set(COLUMNS) <= set(table.names):
            trace = _read_own(table)
        elif set(AZURE_COLUMNS) <= set(table.names):
            trace = _read_azure(table)
        else:
            allowed = f"must have the columns {','.join(COLUMNS)} or {','.join(AZURE_COLUMNS)}"
            raise InvalidInputError(f"{path}, line 1", ",".join(table.names), allowed)
    require(len(trace) > 0, str(path), "no rows", "must have at least one request")
    return trace.scaled(rate_factor)


class _Table:
    """The rows of a CSV file, with line numbers for error texts."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._rows = csv.reader(file)
        self.names = [name.strip() for name in next(self._rows, [])]
        distinct = len(set(self.names)) == len(self.names)
        require(distinct, f"{path}, line 1", self.names, "must have each column name only once")

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Line number (the header is line 1) and cells of each row that is not blank."""
        for row in self._rows:
            if not row:
                continue
            line = self._rows.line_num
            if len(row) != len(self.names):
                allowed = f"must have {len(self.names)} columns, has {len(row)}"
                raise InvalidInputError(f"{self.path}, line {line}", ",".join(row), allowed)
            yield line, dict(zip(self.names, row, strict=True))

    def cell(self, line: int, name: str, text: str, parse: Callable[[str], T], allowed: str) -> T:
        """`parse(text)`; a ValueError becomes an InvalidInputError with the position of the cell."""
        try:
            return parse(text)
        except ValueError:
            raise InvalidInputError(f"{self.path}, line {line}, column {name}", text, allowed) from None


def _read_own(table: _Table) -> Trace:
    for name in table.names:
        near = did_you_mean(name, OPTIONAL)
        if name not in (*COLUMNS, *OPTIONAL) and near:
            raise InvalidInputError(f"{table.path}, line 1", name, f"unknown column{near}")
    optional = {name: column for name, column in OPTIONAL.items() if name in table.names}
    cells: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *optional)}
    earliest = 0.0
    for line, row in table:
        allowed = f"must be seconds from the start, those of the row above ({earliest}) to {_MOST_SECONDS}"
        earliest = table.cell(line, "at_s", row["at_s"], _seconds_from(earliest), allowed)
        cells["at_s"].append(earliest)
        length = table.cell(line, "length", row["length"], _tokens, _LENGTHS)
        cells["length"].append(length)
        for name, column in optional.items():
            text = row[name].strip()
            value = table.cell(line, name, text, column.parse, column.allowed) if text else column.default
            cells[name].append(value)
    kinds = {"at_s": np.float64, "length": np.int64, **{name: column.kind for name, column in optional.items()}}
    return Trace(**{name: np.array(column, dtype=kinds[name]) for name, column in cells.items()})


def _read_azure(table: _Table) -> Trace:
    stamp_name, context_name, generated_name = AZURE_COLUMNS
    stamps: list[np.datetime64] = []
    length: list[int] = []
    generated: list[int] = []
    for line, row in table:
        stamp = table.cell(line, stamp_name, row[stamp_name], _timestamp, "must be YYYY-MM-DD HH:MM:SS.f")
        if stamps and stamp < stamps[-1]:
            where = f"{table.path}, line {line}, column {stamp_name}"
            raise InvalidInputError(where, row[stamp_name], "must not be before the row above")
        stamps.append(stamp)
        text = row[context_name]
        length.append(table.cell(line, context_name, text, _tokens, _LENGTHS))
        text = row[generated_name]
        generated.append(table.cell(line, generated_name, text, _whole, f"must be a whole number, 0 to {_MOST_TOKENS}"))
    times = np.array(stamps, dtype="datetime64[ns]")
    at_s = (times - times[:1]) / np.timedelta64(1, "s")
    return Trace(at_s, np.array(length, dtype=np.int64), np.array(generated, dtype=np.int64))


def _seconds_from(earliest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not earliest <= seconds <= _MOST_SECONDS:
            raise ValueError
        return seconds

    return parse


def _tokens(text: str) -> int:
    if not 1 <= (tokens := int(text)) <= _MOST_TOKENS:
        raise ValueError
    return tokens


def _timestamp(text: str) -> np.datetime64:
    stamp = np.datetime64(text.strip(), "ns")
    if np.isnat(stamp):
        raise ValueError
    return stamp
