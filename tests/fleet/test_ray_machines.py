"""A fleet with a sidecar on a Ray cluster of several machines, all of them here: what is killed comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bench.fleet.machines import Machines
from bench.fleet.member_load import MemberLoad, steady
from bench.fleet.site import FRONT, SETTLE_S, Site
from tests import waiting

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three machines, and a fleet that has joined its third node while it ran."""
    folder = tmp_path_factory.mktemp("machines")
    with Machines(folder / "ray", 3) as machines:
        found = Site(folder, machines)
        try:
            found.up()
            found.join()
            yield found
        finally:
            found.down()


def last_log(site: Site) -> str:
    """What the present sidecar has logged."""
    return site.sidecar_log.read_text().rpartition("start sidecar")[2]


@pytest.mark.parametrize("kill", [Site.kill_sidecar, Site.kill_membership])
def test_the_next_sidecar_keeps_the_workers(site: Site, kill: Callable[[Site], None]) -> None:
    process = last_log(site).partition(",")[0]
    with MemberLoad(site.members, steady(20.0), FRONT) as load:
        kill(site)
        waiting.wait_for(lambda: last_log(site).partition(",")[0] != process)
        waiting.wait_for(lambda: "keeps the loaded workers" in last_log(site))
    assert load.results and load.failed == []
    assert "change node" not in last_log(site)


def test_a_killed_machine_is_planned_around_and_comes_back(site: Site) -> None:
    with MemberLoad(site.members, steady(20.0), FRONT) as load:
        waiting.wait_for(lambda: len(load.results) > SETTLE_S * 20.0)
        site.kill_machine()
        site.whole()
    assert site.take_replanned_s() is not None
    assert [one for one in load.failed if one.node != site.killed] == []
    assert f"node {site.killed} has joined" in last_log(site)
