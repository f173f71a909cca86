"""Packed weights in a file: mapped by all, made once, made again where they are damaged or of another layout."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.assembly import WeightStore
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.shared_weights import TensorFileWriter, WeightsKey, read, shared_weights
from shapeshift.fused_decode.settings import ON_CPU
from tests.fakes import PbUtils
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.decode_models import Tiny, batch, texts
from tests.fused_decode.fronts import arguments

SHA = "0123456789abcdef" * 4
Load = Callable[..., DecodeModel]


@pytest.fixture
def folder(kernel_cache: Path, tmp_path: Path) -> Path:
    """The compiled kernels, and no weights."""
    assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"
    library = native_operations.library(kernel_cache)
    (tmp_path / library.name).symlink_to(library)
    return tmp_path


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def load(folder: Path, logged: list[str]) -> Iterator[Load]:
    def load(tiny: Tiny, precision: str = "bf16", sha256: str = SHA) -> DecodeModel:
        return DecodeModel.load(
            tiny.folder,
            ModelOptions(
                precision=precision, slots=2, max_length=64, threads=1, cache_dir=folder, checkpoint_sha256=sha256
            ),
            logged.append,
        )

    threads = torch.get_num_threads()
    yield load
    torch.set_num_threads(threads)


def logits(model: DecodeModel) -> torch.Tensor:
    given = texts(2, seed=3, shortest=30)
    return model.forward(batch([text[:30] for text in given], [0, 1], [0, 0])).clone()


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3"])
def test_who_packs_and_who_maps_compute_the_same(
    tiny: Callable[[str], Tiny], load: Load, folder: Path, family: str, precision: str
) -> None:
    expected = logits(load(tiny(family), precision, sha256=""))
    assert files_of(folder) == []
    packed = logits(load(tiny(family), precision))
    (file,) = files_of(folder)
    written = file.stat()
    mapped = logits(load(tiny(family), precision))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns), "packed again"
    assert torch.equal(packed, expected) and torch.equal(mapped, expected)


def test_no_process_has_pages_of_its_own(tiny: Callable[[str], Tiny], load: Load, folder: Path) -> None:
    models = [load(tiny("llama")) for _ in range(2)]
    assert torch.equal(*map(logits, models))
    name, own = files_of(folder)[0].name, []
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(name):
            own += [int(next(one for one in lines if one.startswith("Anonymous:")).split()[1])]
    assert own == [0, 0], "each maps the whole file, also who has written it"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def flip_the_end(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def of_another_form(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"0")


@pytest.mark.parametrize("damage", [flip, flip_the_end, cut, of_another_form, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_made_again(
    tiny: Callable[[str], Tiny], load: Load, folder: Path, logged: list[str], damage: Callable[[Path], None]
) -> None:
    expected = logits(load(tiny("llama")))
    (path,) = files_of(folder)
    whole = path.read_bytes()
    logged.clear()
    damage(path)
    assert torch.equal(logits(load(tiny("llama"))), expected)
    assert len(logged) == 1 and logged[0].startswith(f"packed weights are made again: {path.name}: it")
    assert path.read_bytes() == whole


def test_files_of_other_layouts_leave(tiny: Callable[[str], Tiny], load: Load, folder: Path) -> None:
    load(tiny("llama"), "f32")
    (kept,) = files_of(folder)
    old = folder / f"{SHA[:16]}-bf16-0-bf16-{'0' * 16}.weights"
    other = folder / f"{'f' * 16}-bf16-0-bf16-{'0' * 16}.weights"
    old.write_bytes(b"x"), other.write_bytes(b"x")
    load(tiny("llama"), "bf16")
    assert {kept, other} < {*files_of(folder)} and not old.exists() and len(files_of(folder)) == 3


def test_a_full_disk_costs_the_sharing_alone(
    tiny: Callable[[str], Tiny], load: Load, folder: Path, logged: list[str]
) -> None:
    expected = logits(load(tiny("llama"), sha256=""))
    # Some tensors fit, and then a part of one.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        model = load(tiny("llama"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(logits(model), expected)
    assert logged == ["packed weights are not shared: [Errno 27] File too large"]
    assert not [path for path in folder.iterdir() if "weights" in path.name]


def test_thousands_of_tensors_take_few_file_descriptors(tmp_path: Path, logged: list[str]) -> None:
    """As experts have them."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), len([*Path("/proc/self/fd").iterdir()])
    expected = [torch.full((600 + number,), float(number)) for number in range(2000)]

    def build(weights: WeightStore) -> list[torch.Tensor]:
        return [weights.table(str(number), partial(expected.__getitem__, number)) for number in range(len(expected))]

    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, before[1]))
    try:
        tensors = shared_weights(WeightsKey(SHA, "f32", "x"), tmp_path, logged.append, build)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(map(torch.equal, tensors, expected)) and logged == []


def test_a_folder_that_cannot_be_written_costs_the_sharing_alone(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").write_text("")
    assert shared_weights(WeightsKey(SHA, "bf16", "x"), tmp_path / "file", logged.append, type) is WeightStore
    assert len(logged) == 2 and logged[1].startswith("packed weights are not shared: ")


@pytest.mark.parametrize("share", [True, False])
def test_a_front_shares_what_make_engines_has_hashed(folder: Path, tmp_path: Path, share: bool) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    sha256 = open_checkpoint(checkpoint).sha256
    stated = {"checkpoint": checkpoint, "kernel_cache": folder, "precision": "f32", "max_length": 32}
    threads = torch.get_num_threads()
    given = arguments("generate", **stated, checkpoint_sha256=sha256, share_weights=share, threads=1, slo_ms=0)
    front = GenerateFront(PbUtils(), given)
    front.close()
    torch.set_num_threads(threads)
    assert [path.name[:16] for path in files_of(folder)] == [sha256[:16]] * share


def test_one_process_packs_while_others_wait(tmp_path: Path, logged: list[str]) -> None:
    """Each opens the lock by itself, as processes do."""
    key, made = WeightsKey(SHA, "bf16", "x"), torch.arange(12.0).view(3, 4)
    found: list[torch.Tensor] = []

    def wait() -> None:
        found.append(embedding(key, lambda: pytest.fail("made twice")))

    def make() -> torch.Tensor:
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and not found
        return made

    def embedding(key: WeightsKey, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return shared_weights(key, tmp_path, logged.append, lambda weights: weights.table("embedding", make))

    waiting = threading.Thread(target=wait)
    assert torch.equal(embedding(key, make), made)
    waiting.join(10)
    assert torch.equal(found[0], made) and logged == []


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, logged: list[str]) -> None:
    key = WeightsKey(SHA, "f32", "x")
    left = key.path(tmp_path).with_name(f".{key.path(tmp_path).name}")
    left.write_bytes(b"half" * 5000)
    with left.open("rb") as mapped:
        shared_weights(key, tmp_path, logged.append, lambda weights: weights.table("embedding", lambda: torch.ones(3)))
        assert len(mapped.read()) == 20_000, "its pages are still those of who maps them"
    assert not left.exists() and read(key.path(tmp_path)).tensors["embedding"].tolist() == [1, 1, 1]


def test_what_failed_leaves_nothing(tmp_path: Path, logged: list[str]) -> None:
    def fail(weights: WeightStore) -> None:
        weights.table("embedding", lambda: torch.ones(3))
        raise ValueError("a checkpoint that is damaged")

    with pytest.raises(ValueError, match="damaged"):
        shared_weights(WeightsKey(SHA, "f32", "x"), tmp_path, logged.append, fail)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_tensors_come_back(tmp_path: Path) -> None:
    given = {
        "a": torch.arange(5000.0).view(50, 100),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(256, dtype=torch.uint8)[None],
    }
    writer = TensorFileWriter(tmp_path / "file")
    mapped = {name: writer.add(name, tensor) for name, tensor in given.items()}
    writer.finish({"x": [1, "y"]})
    found = read(tmp_path / "file")
    assert found.notes == {"x": [1, "y"]} and [*found.tensors] == [*given]
    for name, tensor in given.items():
        assert torch.equal(found.tensors[name], tensor) and torch.equal(mapped[name], tensor)
        assert found.tensors[name].data_ptr() % 4096 == 0
    # A write stays in the process.
    found.tensors["b"].fill_(0)
    assert torch.equal(read(tmp_path / "file").tensors["b"], given["b"])
