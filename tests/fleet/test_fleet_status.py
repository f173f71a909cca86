"""`shapeshift fleet status`: where it looks, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.fleet import settings
from shapeshift.fleet.cli.status import format_fleet, sidecar_directory

NODE = '[[nodes]]\nname = "a"\ngrpc = "h:1"\nmetrics = "http://h:2/metrics"\n'


@pytest.mark.parametrize(
    ("source", "build"),
    [(NODE, "build"), ('[ray]\nfolder = "machines"\n', "fleets/machines/sidecar")],
    ids=["nodes", "ray"],
)
def test_the_status_finds_the_sidecar_that_fleet_up_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, build: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("fleets/fleet.toml")
    file.parent.mkdir()
    file.write_text(f'name = "demo"\n{source}')
    fleet = settings.read(file)
    assert sidecar_directory(file, fleet).resolve() == tmp_path / build / "fleet" / "demo"
    assert sidecar_directory(file, fleet, Path("other")) == Path("other/fleet/demo")


def test_the_status_shows_each_node() -> None:
    node = {"state": "serving", "version": "2.51.0", "workers": 1, "texts_per_s": 0.0, "problem": ""}
    shown = {
        "nodes": [{"name": "a", **node}, {"name": "b", **node, "version": None, "problem": "gone"}],
        "sidecar": {"pid": None, "frozen": False, "decisions": []},
        "fronts": [],
        "workers": [],
        "models": [],
        "problems": {},
    }
    rows = [line.split() for line in format_fleet("demo", shown).splitlines()]
    assert ["a", "serving", "2.51.0", "1", "0.0"] in rows
    assert ["b", "serving", "-", "1", "0.0", "gone"] in rows
