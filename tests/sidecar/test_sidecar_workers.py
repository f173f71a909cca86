"""The models of one server: what is read of each, and when its configuration is asked for."""

from __future__ import annotations

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.front_config import ALL_BINS
from shapeshift.sidecar.workers import ServerModelReader, Worker
from shapeshift.triton.model_state import ModelState
from tests.sidecar.fakes import EDGES, FakeServer, config


class CountingServer(FakeServer):
    """asked: the models whose configurations were asked for; gone: those that are unloaded at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.gone: set[str] = set()
        self.versions: list[ModelState] = []

    def index(self, timeout_s: float = 5.0) -> list[ModelState]:
        return super().index(timeout_s) + self.versions

    def parameters(self, name: str, timeout_s: float = 5.0) -> dict[str, str]:
        self.asked.append(name)
        if name in self.gone:
            raise ShapeshiftError(f"{name} is not loaded")
        return super().parameters(name, timeout_s)

    def taken(self) -> list[str]:
        """What was asked for since the last time."""
        found, self.asked = sorted(self.asked), []
        return found


@pytest.fixture
def server() -> CountingServer:
    """A front with two workers, the second loaded with the first bin, and a model beside them."""
    made = CountingServer()
    made.add_front(models=2, workers=2)
    made.load("enc_w01", config("enc_w01", worker_of="enc", bin=EDGES[0], generation=3))
    made.loaded["lora"] = config("lora")
    return made


def test_fronts_workers_and_others_are_told_apart(server: CountingServer) -> None:
    found = ServerModelReader(server).read()
    assert list(found.fronts) == ["enc"]
    assert found.workers == {"enc": (Worker("enc_w00", ""), Worker("enc_w01", "READY", EDGES[0], 3))}
    assert found.states == {"enc": "READY", "enc_w00": "", "enc_w01": "READY", "lora": "READY"}
    assert found.problems == {}


def test_workers_are_ordered_by_their_numbers(server: CountingServer) -> None:
    for name in ("enc_w100", "enc_w02"):
        server.files[name] = config(name, worker_of="enc")
    found = ServerModelReader(server).read()
    assert [worker.name for worker in found.workers["enc"]] == ["enc_w00", "enc_w01", "enc_w02", "enc_w100"]


def test_a_configuration_is_asked_for_once_and_again_after_its_model_was_gone(server: CountingServer) -> None:
    reader = ServerModelReader(server)
    reader.read()
    assert server.taken() == ["enc", "enc_w01", "lora"]
    reader.read()
    assert server.taken() == []
    server.states["enc_w01"] = "LOADING"
    reader.read()
    del server.states["enc_w01"]
    reader.read()
    assert server.taken() == ["enc_w01"]


def test_forgotten_models_are_asked_for_again(server: CountingServer) -> None:
    reader = ServerModelReader(server)
    reader.read()
    server.taken()
    # A model that nobody knows is no error.
    reader.forget("lora", "other")
    reader.read()
    assert server.taken() == ["lora"]
    reader.forget()
    reader.read()
    assert server.taken() == ["enc", "enc_w01", "lora"]


def test_a_front_that_is_unloaded_meanwhile_hides_no_later_one(server: CountingServer) -> None:
    server.add_front("fnc", models=0)
    server.gone = {"enc"}
    found = ServerModelReader(server).read()
    assert (list(found.fronts), found.problems) == (["fnc"], {})


def test_a_worker_that_is_unloaded_meanwhile_is_unknown_and_later_ones_are_read(server: CountingServer) -> None:
    server.load("enc_w00")
    server.gone = {"enc_w00"}
    first, second = ServerModelReader(server).read().workers["enc"]
    assert first == Worker("enc_w00", "UNKNOWN")
    assert not first.is_ready and not first.is_unloaded
    assert second.is_ready and second.generation == 3


def test_an_invalid_front_is_a_problem_and_later_ones_are_read(server: CountingServer) -> None:
    server.add_front("abc", models=0, slo_ms="soon")
    found = ServerModelReader(server).read()
    assert list(found.fronts) == ["enc"] and list(found.workers) == ["enc"]
    assert found.problems["abc"].startswith("ignored: slo_ms: got 'soon'")


def test_a_worker_of_another_front_is_a_problem_and_later_ones_are_read(server: CountingServer) -> None:
    server.load("enc_w00", config("enc_w00", worker_of="fnc"))
    found = ServerModelReader(server).read()
    assert [worker.name for worker in found.workers["enc"]] == ["enc_w01"]
    assert found.problems == {"enc_w00": "ignored: worker_of: got 'fnc'; must be 'enc'"}


def test_a_worker_without_its_parameters_has_all_bins(server: CountingServer) -> None:
    server.load("enc_w00", config("enc_w00"))
    found = ServerModelReader(server).read()
    assert found.workers["enc"][0] == Worker("enc_w00", "READY", ALL_BINS, 0)


@pytest.mark.parametrize("name", ["bin", "generation"])
def test_a_number_that_is_none_is_a_problem_and_the_worker_is_kept(server: CountingServer, name: str) -> None:
    stated = {"bin": 64, "generation": 2, name: "many"}
    server.load("enc_w00", config("enc_w00", worker_of="enc", **stated))
    found = ServerModelReader(server).read()
    assert found.workers["enc"][0] == Worker("enc_w00", "READY", ALL_BINS, 0)
    assert found.problems["enc_w00"].startswith("bin and generation must be whole numbers: got {")


def test_an_inline_front_has_no_workers(server: CountingServer) -> None:
    server.loaded["enc"] = config("enc", placement="inline")
    assert ServerModelReader(server).read().workers == {}


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        (("UNAVAILABLE", "READY", "LOADING"), "READY"),
        (("UNLOADING", "LOADING"), "LOADING"),
        (("", "UNAVAILABLE"), "UNAVAILABLE"),
        (("UNAVAILABLE", "UNLOADING"), "UNLOADING"),
        (("something new",), ""),
    ],
)
def test_of_several_versions_the_state_nearest_to_ready_counts(
    server: CountingServer, versions: tuple[str, ...], state: str
) -> None:
    server.files["many"] = config("many")
    server.versions = [ModelState("many", str(number), one, "") for number, one in enumerate(versions, 2)]
    if "READY" in versions:
        server.loaded["many"] = config("many")
    assert ServerModelReader(server).read().states["many"] == state


@pytest.mark.parametrize(("state", "unloaded"), [("", True), ("UNAVAILABLE", True), ("UNLOADING", False)])
def test_a_worker_can_be_loaded_where_it_is_neither_loaded_nor_on_its_way(state: str, unloaded: bool) -> None:
    assert Worker("w", state).is_unloaded is unloaded and not Worker("w", state).is_ready
