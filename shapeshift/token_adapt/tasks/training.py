"""Trains a task for a frozen model: a head for each gamma, and prompts for those above 0 (section III-B, VPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.token_adapt.model.schedule import expand
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.tasks.examples import HELD_OUT, Examples, Indices
from shapeshift.token_adapt.tasks.folder import TaskParts

Tensor = torch.Tensor
Progress = Callable[[str], None]
CachedFeatures = Callable[[int], Tensor]

_CHUNK = 64
_INITIAL_SCALE = 0.1
_HEAD_STEPS = 60
_HEAD_DECAYS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class TrainSettings:
    """How prompts are trained.

    epochs       passes over the training images
    batch        images per step
    rate         peak learning rate of Adam, with cosine decay to 0
    most_images  images per pass; 0: all
    seed         of the initial prompts and the image order
    """

    epochs: int = 10
    batch: int = 32
    rate: float = 0.002
    most_images: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        require(self.batch >= 1, "batch", self.batch, "at least 1")
        require(self.rate > 0, "rate", self.rate, "above 0")
        require(self.most_images >= 0, "most_images", self.most_images, "0 or more")


@dataclass(frozen=True)
class TrainedTask:
    """By gamma: prompts [depth, gamma, width] for gamma > 0, and the head's weight [labels, features] and bias."""

    prompts: dict[int, Tensor]
    heads: dict[int, tuple[Tensor, Tensor]]


def train(
    model: UnifiedViT,
    examples: Examples,
    gammas: Sequence[int],
    settings: TrainSettings,
    progress: Progress,
    cached: CachedFeatures | None = None,
) -> TrainedTask:
    """Train prompts and heads for every gamma; `model` stays frozen.

    The prompts of a gamma start from those of the next smaller gamma, plus new ones. cached: returns the features of
    the examples at a gamma <= 0, for a caller that has already computed them.
    """
    labels = int(examples.classes.max()) + 1
    if not set(range(labels)) <= set(examples.classes.tolist()):
        raise InvalidInputError("data", labels, "at least one image of each label")
    trained = TrainedTask({}, {})
    classes = torch.from_numpy(examples.classes)
    architecture = model.architecture
    prompts, previous = torch.empty(architecture.depth, 0, architecture.width), 0
    for gamma in sorted(gammas, key=lambda gamma: (gamma > 0, abs(gamma))):
        if gamma > 0:
            new = _initial_prompts(model, examples, gamma - prompts.shape[1], settings.seed + gamma)
            initial = torch.cat((prompts, new), 1)
            prompts = _train_prompts(model, examples, initial, trained.heads[previous], settings, progress)
            trained.prompts[gamma], previous = prompts, gamma
        progress(f"gamma {gamma}: features of {len(examples)} images")
        if cached and gamma <= 0:
            computed = cached(gamma)
        else:
            computed = features(model, examples, gamma, trained.prompts.get(gamma))
        trained.heads[gamma] = fit_head(computed, classes, labels)
    return trained


def features(model: UnifiedViT, examples: Examples, gamma: int, prompts: Tensor | None) -> Tensor:
    """Features [n, features] of all examples at `gamma`, by the eager model."""
    layers = expand(gamma, model.architecture.patches, model.architecture.depth)
    parts = []
    with torch.inference_mode():
        folded = None if prompts is None else model.fold(prompts.unsqueeze(0))
        for chunk in np.array_split(np.arange(len(examples)), max(1, len(examples) // _CHUNK)):
            repeated = None if folded is None else [layer.expand(len(chunk), -1, -1, -1, -1) for layer in folded]
            parts.append(model(torch.from_numpy(examples.pixels(chunk)), layers, repeated))
    return torch.cat(parts).clone()


def accuracy(model: UnifiedViT, examples: Examples, gamma: int, parts: TaskParts, progress: Progress) -> float:
    """Share of the examples that a trained task labels right at `gamma`."""
    progress(f"accuracy at gamma {gamma} over {len(examples)} images")
    prompts, head = parts.prompts.get(gamma), parts.heads[gamma]
    computed = features(model, examples, gamma, None if prompts is None else torch.from_numpy(prompts)).numpy()
    labels = (computed @ head.weight.T + head.bias).argmax(axis=1)
    return float((labels == examples.classes).mean())


def fit_head(computed: Tensor, classes: Tensor, labels: int) -> tuple[Tensor, Tensor]:
    """Logistic regression: weight [labels, features] and bias, fitted by L-BFGS on standardised features.

    The weight decay is the one with the lowest loss on a held-out fifth of the rows.
    """
    mean, deviation = computed.mean(0), computed.std(0).clamp(min=1e-6)
    normal = (computed - mean) / deviation
    held_out = torch.arange(len(normal)) % HELD_OUT == HELD_OUT - 1

    def held_out_loss(decay: float) -> float:
        head = _regression(normal[~held_out], classes[~held_out], labels, decay)
        return float(functional.cross_entropy(head(normal[held_out]).detach(), classes[held_out]))

    head = _regression(normal, classes, labels, min(_HEAD_DECAYS, key=held_out_loss))
    weight = head.weight.detach() / deviation
    return weight, head.bias.detach() - weight @ mean


def _regression(normal: Tensor, classes: Tensor, labels: int, decay: float) -> nn.Linear:
    head = nn.Linear(normal.shape[1], labels)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=_HEAD_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(head(normal), classes) + decay * head.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return head


def _initial_prompts(model: UnifiedViT, examples: Examples, count: int, seed: int) -> Tensor:
    """Prompts [depth, count, width]: in each layer, the token of one patch from each of `count` images.

    Blocks normalise prompts, so only their direction matters. A common small scale makes a learning rate turn the
    prompts of all models equally far.
    """
    rng, architecture = np.random.default_rng(seed), model.architecture
    pixels = torch.from_numpy(examples.pixels(rng.integers(0, len(examples), count)))
    positions = architecture.prefix + torch.from_numpy(rng.integers(0, architecture.patches, count))
    with torch.no_grad():
        tokens = torch.stack([inputs[torch.arange(count), positions] for inputs in model.block_inputs(pixels)])
    return _INITIAL_SCALE * functional.layer_norm(tokens, tokens.shape[2:])


def _train_prompts(
    model: UnifiedViT,
    examples: Examples,
    initial: Tensor,
    initial_head: tuple[Tensor, Tensor],
    settings: TrainSettings,
    progress: Progress,
) -> Tensor:
    """Prompts [depth, gamma, width], trained from `initial` together with a head that starts from `initial_head`."""
    architecture, gamma = model.architecture, initial.shape[1]
    prompts = initial.clone().requires_grad_()
    head = [part.clone().requires_grad_() for part in initial_head]
    steps = list(_batches(len(examples), settings))
    optimiser = torch.optim.Adam([prompts, *head], settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(steps))
    layers, mean_loss = expand(gamma, architecture.patches, architecture.depth), 0.0
    for step, chosen in enumerate(steps):
        folded = [layer.expand(len(chosen), -1, -1, -1, -1) for layer in model.fold(prompts.unsqueeze(0))]
        logits = functional.linear(model(torch.from_numpy(examples.pixels(chosen)), layers, folded), *head)
        loss = functional.cross_entropy(logits, torch.from_numpy(examples.classes[chosen]))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 20 == 0 or step + 1 == len(steps):
            progress(f"gamma {gamma}: step {step + 1} of {len(steps)}, loss {mean_loss:.3f}")
    return prompts.detach()


def _batches(count: int, settings: TrainSettings) -> Iterator[Indices]:
    """The image indices of each step."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = rng.permutation(count)[: settings.most_images or count]
        yield from np.array_split(order, -(-len(order) // settings.batch))
