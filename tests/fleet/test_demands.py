"""What is said of a front's wishes while no page can be read."""

from __future__ import annotations

from pathlib import Path

from shapeshift.fleet.policy.node_count import WorkerDemand
from shapeshift.fleet.sidecar.demands import FleetDemands, read
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.workers import ServerModels


def test_a_wish_for_workers_is_said_without_a_page(tmp_path: Path) -> None:
    demands = FleetDemands(tmp_path / "demand.json", 10.0)
    front = Front("enc", PolymorphSettings(placement="partitioned", slo_ms=100.0), max_workers=4)
    demands.record(front, 3)
    demands.step(ServerModels(fronts={"enc": front}, objectives={"generate": 100.0}), None, is_blocked=False)
    assert read(tmp_path / "demand.json") == {"enc": WorkerDemand(3, 4)}
    demands.step(ServerModels(), None, is_blocked=False)
    assert read(tmp_path / "demand.json") == {}


def test_the_workers_of_a_node_are_the_share_of_one(tmp_path: Path) -> None:
    demands = FleetDemands(tmp_path / "demand.json", 10.0)
    front = Front(
        "enc", PolymorphSettings(placement="partitioned", slo_ms=100.0), models=("a/enc", "b/enc"), max_workers=6
    )
    assert front.nodes == {"a", "b"}
    demands.record(front, 5)
    demands.step(ServerModels(fronts={"enc": front}), None, is_blocked=False)
    assert read(tmp_path / "demand.json") == {"enc": WorkerDemand(5, 3)}
