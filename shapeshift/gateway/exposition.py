"""Metrics pages of several servers as one page, in the Prometheus text format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{)?")


def merged(pages: Mapping[str, str]) -> str:
    """The pages by server: each family once, its samples with the label `server`; other comments at the end."""
    heads: dict[str, dict[str, str]] = defaultdict(dict)
    samples: dict[str, list[str]] = defaultdict(list)
    comments: list[str] = []
    for server, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ")
                heads[family].setdefault(kind, line)
            elif line.startswith("#"):
                comments.append(line)
            elif found := _SAMPLE.match(line):
                name = found[1]
                own = family if family and name.startswith(family) else name
                rest = line[found.end() :]
                label = f'{name}{{server="{server}"'
                samples[own].append(f"{label},{rest}" if found[2] else f"{label}}}{rest}")
    lines = [line for own in {**heads, **samples} for line in (*heads[own].values(), *samples[own])]
    return "".join(f"{line}\n" for line in [*lines, *comments])
