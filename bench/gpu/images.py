"""Images a second of ViT-B/16 and L/16 by gamma, against timm with torch.compile at gamma 0.

The engines are those of provider torch, a CUDA graph of the batch for each gamma. `operations` is the share of gamma
0's multiplications, and `of the operations` the gain over gamma 0 as a share of what they would give. Rows `profile`
are the latencies of the first model by gamma and batch, which a simulator reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial

import torch

from bench.common.output import FOLDER, empty
from bench.gpu.device import Device, Step
from bench.gpu.part import Part, Row, ratio
from shapeshift.engines.interfaces import Engine
from shapeshift.engines.providers.torch import PROVIDER, TorchRuntime
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.model.schedule import count_multiplications, expand
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT


@dataclass(frozen=True)
class Sizes:
    """architectures: by timm's name of the model; gammas: of the engines; images: in a batch beside timm; batches: of
    the profile."""

    architectures: Mapping[str, Architecture]
    gammas: tuple[int, ...]
    images: int
    batches: tuple[int, ...]
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    for name, architecture in sizes.architectures.items():
        torch.manual_seed(seed)
        model = UnifiedViT(architecture).eval()
        theirs = _timm(device, name, architecture, sizes.images)
        if theirs is None:
            yield {"model": name, "timm": "cannot be imported (it needs torchvision): not compared"}
        whole = count_multiplications(expand(0, architecture.patches, architecture.depth), architecture.width)
        unmerged = 0.0
        batches = sizes.batches if name == next(iter(sizes.architectures)) else ()
        ours = _Ours(device, {*batches, sizes.images}, seed)
        for gamma in sizes.gammas:
            module = GammaModule(model, gamma).eval()
            engine = ours.engine(module)
            if batches:
                calls = {str(batch): partial(engine.run, module.example(batch, seed)) for batch in batches}
                times_ms = {batch: round(ms, 3) for batch, ms in device.in_turn(calls, sizes.rounds).items()}
                yield {"model": name, "kind": "profile", "gamma": gamma, "latency_ms": times_ms}
            steps = {"ours": partial(engine.run, module.example(sizes.images, seed))}
            times_ms = device.in_turn(steps if theirs is None else {"timm": theirs, **steps}, sizes.rounds)
            layers = expand(gamma, architecture.patches, architecture.depth)
            rates = {f"{system}, images/s": round(1e3 * sizes.images / ms, 1) for system, ms in times_ms.items()}
            operations = round(count_multiplications(layers, architecture.width) / whole, 3)
            row = {
                "model": name,
                "kind": "batch",
                "gamma": gamma,
                "images": sizes.images,
                "operations": operations,
                **rates,
            }
            # 1: as much faster than gamma 0 as there is less to compute.
            unmerged = unmerged or times_ms["ours"]
            row["of the operations"] = round(unmerged / times_ms["ours"] * operations, 2)
            yield row if theirs is None else row | {"ours / timm": ratio(times_ms["timm"], times_ms["ours"])}
        del ours, engine, steps
        device.free()


class _Ours:
    """The engines of the gammas of one model, which share its weights. On a CPU they are the code of the graphs."""

    def __init__(self, device: Device, batches: Set[int], seed: int) -> None:
        self._device, self._batches, self._seed = device, tuple(sorted(batches)), seed
        self._precision = "f32" if device.number is None else "f16"
        self._first: TorchRuntime | None = None

    def engine(self, module: GammaModule) -> Engine:
        """The engine of the module's gamma."""
        folder = FOLDER / "gpu" / "images"
        empty(folder)
        # Only the batches that are measured are captured.
        module.captured = {"images": self._batches, "tasks": (8,)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PROVIDER.export(module, module.example(2, self._seed), folder, self._precision)
        runtime = PROVIDER.open(folder, self._precision, 1, self._device.number, beside=self._first)
        self._first = self._first or runtime
        return runtime.as_on_gpu(None, None)


def _timm(device: Device, name: str, architecture: Architecture, images: int) -> Step | None:
    """A batch by timm, compiled; None where timm cannot be imported."""
    try:
        import timm
    except ImportError:
        return None
    dtype = torch.float32 if device.number is None else torch.float16
    model = timm.create_model(
        name,
        num_classes=0,
        img_size=architecture.image_size,
        embed_dim=architecture.width,
        depth=architecture.depth,
        num_heads=architecture.heads,
    )
    compiled = device.compiled(model.to(device.torch_device, dtype).eval())
    pixels = torch.randint(0, 256, (images, architecture.image_size, architecture.image_size, 3), dtype=torch.uint8)

    def step() -> object:
        with torch.inference_mode():
            # What ours does too: bytes to the device, and numbers made of them there.
            inputs = pixels.to(device.torch_device).to(dtype).permute(0, 3, 1, 2).contiguous() / 127.5 - 1
            return compiled(inputs).float().cpu()

    return step


def vit(width: int, depth: int, heads: int, image: int = 224) -> Architecture:
    """A vision transformer with patches of 16."""
    return Architecture(image_size=image, patch_size=16, width=width, depth=depth, heads=heads, mlp_width=4 * width)


PART = Part(
    "ViT-B/16 and L/16 by gamma, against timm with torch.compile",
    measure,
    Sizes(
        {"vit_base_patch16_224": vit(768, 12, 12), "vit_large_patch16_224": vit(1024, 24, 16)},
        (0, -5, -10, -15),
        images=64,
        batches=(1, 2, 4, 8, 16, 32, 64),
        rounds=15,
    ),
    Sizes({"vit_base_patch16_224": vit(48, 2, 3, image=64)}, (0, -2), images=2, batches=(1, 2), rounds=1),
    minutes=3.0,
)
