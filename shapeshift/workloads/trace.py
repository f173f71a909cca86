"""Traces as CSV files: when each request arrives and how many tokens it has.

The header selects one of two formats: that of this project (`at_s,length` and any further columns), or that of the
Azure LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`).
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

T = TypeVar("T")

COLUMNS = ("at_s", "length")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Trace:
    """at_s: float64[n], arrivals in seconds, sorted, at least 0; length: int64[n], tokens, at least 1; extra: further
    columns by name, each str[n] as in the file."""

    at_s: NDArray[np.float64]
    length: NDArray[np.int64]
    extra: Mapping[str, NDArray[np.str_]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in (("length", self.length), *self.extra.items()):
            require(len(column) == len(self.at_s), name, len(column), f"must have {len(self.at_s)} rows")
        require(bool(np.all(np.isfinite(self.at_s))), "at_s", self.at_s, "must be finite")
        require(bool(np.all(np.diff(self.at_s, prepend=0.0) >= 0)), "at_s", self.at_s, "must not decrease")
        require(bool(np.all(self.length >= 1)), "length", self.length, "must be at least 1 token")

    def __len__(self) -> int:
        return len(self.at_s)

    def scaled(self, rate_factor: float) -> Trace:
        """The same requests at `rate_factor` times the rate."""
        require(math.isfinite(rate_factor) and rate_factor > 0, "rate_factor", rate_factor, "must be above 0")
        return dataclasses.replace(self, at_s=self.at_s / rate_factor)

    def until(self, end_s: float) -> Trace:
        """The requests that arrive before `end_s`."""
        count = int(np.searchsorted(self.at_s, end_s, side="left"))
        return Trace(
            self.at_s[:count],
            self.length[:count],
            {name: column[:count] for name, column in self.extra.items()},
        )


def read(path: Path, rate_factor: float = 1.0) -> Trace:
    """The trace in `path`, at `rate_factor` times its rate.

    For an Azure trace, `length` is ContextTokens, the extra column `generated` is GeneratedTokens, and time starts at
    the first row. Raises InvalidInputError with file, line and column of the first invalid cell, or with the file if it
    has no rows or an unknown header; OSError if it cannot be read.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
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
    at_s: list[float] = []
    length: list[int] = []
    extra: dict[str, list[str]] = {name: [] for name in table.names if name not in COLUMNS}
    for line, row in table:
        earliest = at_s[-1] if at_s else 0.0
        allowed = f"must be seconds, at least those of the row above ({earliest})"
        at_s.append(table.cell(line, "at_s", row["at_s"], _seconds_from(earliest), allowed))
        length.append(table.cell(line, "length", row["length"], _tokens, "must be a whole number of at least 1"))
        for name, column in extra.items():
            column.append(row[name])
    columns = {name: np.array(column, dtype=np.str_) for name, column in extra.items()}
    return Trace(np.array(at_s, dtype=np.float64), np.array(length, dtype=np.int64), columns)


def _read_azure(table: _Table) -> Trace:
    stamp_name, context_name, generated_name = AZURE_COLUMNS
    stamps: list[np.datetime64] = []
    length: list[int] = []
    generated: list[str] = []
    for line, row in table:
        stamp = table.cell(line, stamp_name, row[stamp_name], _timestamp, "must be YYYY-MM-DD HH:MM:SS.f")
        if stamps and stamp < stamps[-1]:
            where = f"{table.path}, line {line}, column {stamp_name}"
            raise InvalidInputError(where, row[stamp_name], "must not be before the row above")
        stamps.append(stamp)
        text = row[context_name]
        length.append(table.cell(line, context_name, text, _tokens, "must be a whole number of at least 1"))
        generated.append(row[generated_name])
    times = np.array(stamps, dtype="datetime64[ns]")
    at_s = (times - times[:1]) / np.timedelta64(1, "s")
    return Trace(at_s, np.array(length, dtype=np.int64), {"generated": np.array(generated, dtype=np.str_)})


def _seconds_from(earliest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not (math.isfinite(seconds) and seconds >= earliest):
            raise ValueError
        return seconds

    return parse


def _tokens(text: str) -> int:
    tokens = int(text)
    if tokens < 1:
        raise ValueError
    return tokens


def _timestamp(text: str) -> np.datetime64:
    stamp = np.datetime64(text.strip(), "ns")
    if np.isnat(stamp):
        raise ValueError
    return stamp
