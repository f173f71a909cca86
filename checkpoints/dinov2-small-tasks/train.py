"""Make the tasks of `classify_image`: `python checkpoints/dinov2-small-tasks/train.py`, after `make engines`.

cifar10 (10 classes), animal (or vehicle) and digits (scikit-learn's), each at the resolution of the encoder. Features
are computed once for an image and a gamma, by the engines that serve, and kept in the work folder, where a run that was
stopped goes on. A head is a logistic regression over those of gamma 0, and serves at all gammas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cifar-vit"))
from images import CLASSES, cifar, digits

from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.tasks import examples, training, writing
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks.examples import Examples
from shapeshift.token_adapt.tasks.training import TrainedTask

HERE = Path(__file__).resolve().parent
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
# By task: the images that it shares, its labels, and its latency_ms and utility.
TASKS = {
    "cifar10": ("cifar", CLASSES, (1000.0, 1.0)),
    "animal": ("cifar", ("animal", "vehicle"), (500.0, 0.3)),
    "digits": ("digits", tuple("0123456789"), (2000.0, 0.6)),
}
_BATCH = 25


def main() -> None:
    """Compute features, train and profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--engines", type=Path, default=Path("build/engines/classify_image"))
    parser.add_argument("--work", type=Path, default=Path("build/dinov2-small"), help="images and features")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shown", type=int, default=5000, help="training images of CIFAR-10 (%(default)s)")
    parser.add_argument("--profiled", type=int, default=2000, help="its test images (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    features = Features(options)
    for name, (images, labels, (latency_ms, utility)) in TASKS.items():
        sets = features.sets[images]
        classes = {part: torch.from_numpy(one.classes) for part, one in sets.items()}
        if name == "animal":
            vehicle = torch.tensor([label not in ANIMALS for label in CLASSES]).long()
            classes = {part: vehicle[one] for part, one in classes.items()}
        weight, bias = training.fit_head(features.of(images, "shown", 0), classes["shown"], len(labels))
        accuracy = {}
        for gamma in features.gammas:
            correct = (features.of(images, "held", gamma) @ weight.T + bias).argmax(1) == classes["held"]
            accuracy[str(gamma)] = round(float(correct.float().mean()), 4)
        folder, backbone = options.to / name, features.manifest.checkpoint_sha256
        description = {"name": name, "labels": list(labels), "backbone": backbone}
        defaults = {"latency_ms": latency_ms, "utility": utility}
        writing.write_task(folder, {**description, **defaults}, TrainedTask({}, {0: (weight, bias)}))
        command = f"python checkpoints/dinov2-small-tasks/train.py, engines in {features.manifest.precision}"
        counts = {"images": len(sets["held"]), "trained_on": len(sets["shown"])}
        writing.write_object(folder / task_folder.PROFILE_FILE, {"accuracy": accuracy, **counts, "command": command})
        sys.stdout.write(f"| {name} | {' | '.join(f'{100 * share:.1f}' for share in accuracy.values())} |\n")


class Features:
    """Of all images at all gammas, computed once and kept in files."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._work = options.work
        self.manifest = image_manifest.load(options.engines)
        provider, self._engines = PROVIDERS[self.manifest.provider], {}
        for entry in self.manifest.engines:
            runtime = provider.open(options.engines / entry.folder, entry.precision, options.threads)
            self._engines[entry.gamma] = runtime.engine(None, None)
        self.gammas = tuple(self._engines)
        enlarge = partial(enlarged, size=self.manifest.preprocessing.size)
        data, rng = cifar(options.work / "cifar10.npz"), np.random.default_rng(0)
        chosen = {
            part: Examples(classes.numpy(), enlarge(images.numpy())).subset(rng.permutation(len(classes))[:count])
            for (part, (images, classes)), count in zip(data.items(), (options.shown, options.profiled), strict=True)
        }
        pixels, classes = digits()
        figures = examples.split(Examples(classes, enlarge(pixels)))
        self.sets = {
            "cifar": {"shown": chosen["train"], "held": chosen["test"]},
            "digits": dict(zip(("shown", "held"), figures, strict=True)),
        }

    def of(self, images: str, part: str, gamma: int) -> torch.Tensor:
        """Those of a set of images, [n, features]."""
        file = self._work / f"{images}-{part}-{gamma}.npy"
        if not file.is_file():
            print(f"{images}: features at gamma {gamma} ({part})", file=sys.stderr, flush=True)
            one, engine = self.sets[images][part], self._engines[gamma]
            chunks = np.array_split(np.arange(len(one)), -(-len(one) // _BATCH))
            computed = [engine.run({"PIXELS": one.pixels(chunk)})["FEATURES"].copy() for chunk in chunks]
            np.save(file, np.concatenate(computed))
        return torch.from_numpy(np.load(file))


def enlarged(pixels: np.ndarray, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from indices to images of this size, resized as a server does."""

    def read(indices: np.ndarray) -> np.ndarray:
        resized = [Image.fromarray(one).resize((size, size), Image.Resampling.BICUBIC) for one in pixels[indices]]
        return np.stack([np.asarray(one) for one in resized])

    return read


if __name__ == "__main__":
    main()
