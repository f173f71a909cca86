"""docs/architecture.md names modules that exist."""

from __future__ import annotations

import re

from tests.docs.docs_pages import PROJECT, prose
from tests.docs.docs_sources import modules

PAGE = PROJECT / "docs" / "architecture.md"


def test_modules_that_the_page_names_exist() -> None:
    known = set(modules("shapeshift"))
    packages = {name.rpartition(".")[0] for name in known}
    ends = known | packages
    named = {name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", prose(PAGE)) if not name.endswith(".pbtxt")}
    missing = {name for name in named if not any(f".{end}".endswith(f".{name}") for end in ends)}
    assert not missing
