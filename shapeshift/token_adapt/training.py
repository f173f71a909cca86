"""Making a task for a frozen model: a head for every gamma, and prompts for those above 0 (section III-B, VPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.token_adapt.examples import HELD_OUT, Examples, Indices
from shapeshift.token_adapt.schedule import expand
from shapeshift.token_adapt.unified import UnifiedViT

Tensor = torch.Tensor
Progress = Callable[[str], None]
Plain = Callable[[int], Tensor]

_CHUNK = 64
_SPREAD = 0.1
_HEAD_STEPS = 60
_HEAD_DECAYS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class TrainSettings:
    """How prompts are trained.

    epochs      passes over the training images
    batch       images a step
    rate        highest learning rate of Adam; it falls to 0 along a cosine
    most_images images of one pass; 0: all
    seed        of the first prompts and of the order
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
class Trained:
    """Prompts [depth, gamma, width] by gamma > 0, and a head's weight [labels, features] and bias by gamma."""

    prompts: dict[int, Tensor]
    heads: dict[int, tuple[Tensor, Tensor]]


def train(
    model: UnifiedViT,
    examples: Examples,
    gammas: Sequence[int],
    settings: TrainSettings,
    progress: Progress,
    plain: Plain | None = None,
) -> Trained:
    """Train prompts and heads for every gamma over the frozen `model`; `progress` is told what is being done.

    The prompts of a gamma begin as those of the one before, with more of them. plain: the features of the examples at
    a gamma up to 0, for a caller that has them from another task.
    """
    labels = int(examples.classes.max()) + 1
    if not set(range(labels)) <= set(examples.classes.tolist()):
        raise InvalidInputError("data", labels, "at least one image of every label")
    made = Trained({}, {})
    classes = torch.from_numpy(examples.classes)
    prompts, before = torch.empty(model.made.depth, 0, model.made.width), 0
    for gamma in sorted(gammas, key=lambda gamma: (gamma > 0, abs(gamma))):
        if gamma > 0:
            prompts = torch.cat((prompts, _tokens(model, examples, gamma - prompts.shape[1], settings.seed + gamma)), 1)
            prompts = _prompts(model, examples, prompts, made.heads[before], settings, progress)
            made.prompts[gamma], before = prompts, gamma
        progress(f"gamma {gamma}: features of {len(examples)} images")
        known = plain(gamma) if plain and gamma <= 0 else features(model, examples, gamma, made.prompts.get(gamma))
        made.heads[gamma] = fit_head(known, classes, labels)
    return made


def features(model: UnifiedViT, examples: Examples, gamma: int, prompts: Tensor | None) -> Tensor:
    """The eager model's features [n, features] of all examples at `gamma`."""
    layers = expand(gamma, model.made.patches, model.made.depth)
    found = []
    with torch.inference_mode():
        folded = None if prompts is None else model.fold(prompts.unsqueeze(0))
        for chunk in np.array_split(np.arange(len(examples)), max(1, len(examples) // _CHUNK)):
            own = None if folded is None else [part.expand(len(chunk), -1, -1, -1, -1) for part in folded]
            found.append(model(torch.from_numpy(examples.pixels(chunk)), layers, own))
    return torch.cat(found).clone()


def fit_head(computed: Tensor, classes: Tensor, labels: int) -> tuple[Tensor, Tensor]:
    """Logistic regression over features: weight [labels, features] and bias, by L-BFGS on standardised features.

    Its weight decay is the one whose fit to four fifths of the rows tells the last fifth best.
    """
    mean, deviation = computed.mean(0), computed.std(0).clamp(min=1e-6)
    normal = (computed - mean) / deviation
    held = torch.arange(len(normal)) % HELD_OUT == HELD_OUT - 1

    def wrong(decay: float) -> float:
        head = _regression(normal[~held], classes[~held], labels, decay)
        return float(functional.cross_entropy(head(normal[held]).detach(), classes[held]))

    head = _regression(normal, classes, labels, min(_HEAD_DECAYS, key=wrong))
    weight = head.weight.detach() / deviation
    return weight, head.bias.detach() - weight @ mean


def _regression(normal: Tensor, classes: Tensor, labels: int, decay: float) -> nn.Linear:
    head = nn.Linear(normal.shape[1], labels)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=_HEAD_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        wrong = functional.cross_entropy(head(normal), classes) + decay * head.weight.square().sum()
        wrong.backward()  # type: ignore[no-untyped-call]
        return wrong

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return head


def _tokens(model: UnifiedViT, examples: Examples, count: int, seed: int) -> Tensor:
    """First prompts [depth, count, width]: in every layer what one patch each of `count` images is there.

    Blocks normalise prompts, so that only their direction counts: they are made small, and a step of any rate turns
    those of all models as far.
    """
    drawn = np.random.default_rng(seed)
    pixels = torch.from_numpy(examples.pixels(drawn.integers(0, len(examples), count)))
    places = model.made.prefix + torch.from_numpy(drawn.integers(0, model.made.patches, count))
    with torch.no_grad():
        tokens = torch.stack([entering[torch.arange(count), places] for entering in model.entering(pixels)])
    return _SPREAD * functional.layer_norm(tokens, tokens.shape[2:])


def _prompts(
    model: UnifiedViT,
    examples: Examples,
    first: Tensor,
    first_head: tuple[Tensor, Tensor],
    settings: TrainSettings,
    progress: Progress,
) -> Tensor:
    """Prompts [depth, gamma, width], trained from `first` together with a head that starts as `first_head`."""
    made, gamma = model.made, first.shape[1]
    prompts = first.clone().requires_grad_()
    head = [part.clone().requires_grad_() for part in first_head]
    steps = list(_order(len(examples), settings))
    optimiser = torch.optim.Adam([prompts, *head], settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(steps))
    layers, mean = expand(gamma, made.patches, made.depth), 0.0
    for step, chosen in enumerate(steps):
        folded = [part.expand(len(chosen), -1, -1, -1, -1) for part in model.fold(prompts.unsqueeze(0))]
        logits = functional.linear(model(torch.from_numpy(examples.pixels(chosen)), layers, folded), *head)
        wrong = functional.cross_entropy(logits, torch.from_numpy(examples.classes[chosen]))
        optimiser.zero_grad()
        wrong.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        mean = wrong.item() if step == 0 else 0.98 * mean + 0.02 * wrong.item()
        if step % 20 == 0 or step + 1 == len(steps):
            progress(f"gamma {gamma}: step {step + 1} of {len(steps)}, loss {mean:.3f}")
    return prompts.detach()


def _order(count: int, settings: TrainSettings) -> Iterator[Indices]:
    """The indices of each step."""
    shuffler = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = shuffler.permutation(count)[: settings.most_images or count]
        yield from np.array_split(order, -(-len(order) // settings.batch))
