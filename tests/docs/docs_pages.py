"""What the documentation's tests read from markdown: fenced blocks, tables, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path for folder in (".", "docs", "docker", "client/ensemble") for path in (PROJECT / folder).glob("*.md")
)

TECHNIQUES = ("polymorph", "token_adapt", "fused_decode", "adapter_cache", "cascade")

# A block that no test runs has a comment before it: <!-- not run: the reason -->
_FENCE = re.compile(r"(?:^ *<!-- not run: (.+?) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, line, heading above it, language and text without the indentation.

    not_run: why no test runs it; empty for one that a test runs or reads.
    """

    page: Path
    line: int
    heading: str
    language: str
    text: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of `page`, those of `languages` only where given, in order."""
    content = page.read_text()
    found = []
    for match in _FENCE.finditer(content):
        reason, indentation, language, text = match.groups(default="")
        text = re.sub(rf"^{indentation}", "", text, flags=re.MULTILINE)
        above = [heading[1] for heading in _HEADING.finditer(_FENCE.sub(_blank, content[: match.start()]))]
        line = content[: match.start(3)].count("\n") + 1
        found.append(Block(page, line, above[-1] if above else "", language, text, reason))
    return [block for block in found if not languages or block.language in languages]


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def section(page: Path, heading: str) -> str:
    """The text under `heading`, up to the next heading of any level."""
    parts = re.split(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under `heading`, without its header."""
    rows: list[list[str]] = []
    for line in section(page, heading).splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            break
    return rows[2:]


def code(cell: str) -> str:
    """The first piece of code in a cell, or the cell itself where it has none."""
    match = re.search(r"`([^`]*)`", cell)
    return match[1] if match else cell


def links(page: Path) -> list[str]:
    """The targets of the page's links that stay within the project."""
    return [target for target in _LINK.findall(prose(page)) if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(page))}
