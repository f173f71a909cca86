"""What to build for a text front, with every `auto` resolved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.model_folder import gpus_of, is_placed, provider_of
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.text.config import TextFrontConfig, length_histogram, read_json
from shapeshift.engines import hardware, manifest
from shapeshift.engines.checkpoint import Checkpoint, open_checkpoint
from shapeshift.engines.gpu import with_cpu
from shapeshift.engines.interfaces import OUTPUT_AXES, Provider
from shapeshift.engines.providers import lookup
from shapeshift.engines.text import classifiers, heads, sentence_modules, tokenizer_files
from shapeshift.engines.text.families import family_of, has_class, hidden_size, text_config, vocabulary_size
from shapeshift.engines.text.sentence_modules import TOKEN_WEIGHTS, SentenceModules
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.files import HASHES, file_sha256
from shapeshift.polymorph.settings import ENTITIES, SPARSE_OUTPUTS, front_signature
from shapeshift.serving.model_args import DESCRIPTION, TOKENS
from shapeshift.serving.text_inputs import NUM_TOKENS, TEXT_PAIR
from shapeshift.triton import model_config

# Incremented when a change of this project makes engines that were built before wrong or worse.
_BUILD_FORMAT = 7
_RARE = ("token_dense", "token_weights", "terms", "answers", "pair_template")
_WEIGHTED = f"{TOKEN_WEIGHTS} (BGE-M3: `shapeshift convert` makes it of sparse_linear.pt)"
# Outputs that every front has: they say nothing about its engines.
_COMMON_OUTPUTS = (NUM_TOKENS.name, TOKENS.name, DESCRIPTION.name)


@dataclass(frozen=True)
class Plan:
    """A text front, and the checkpoint, provider and precision to build with.

    modules: what makes EMBEDDING, resolved; head: the file of the front's own head, if any; gpus: those that the
    engines run on, none for the CPU; rival: a further provider, taken if it is the faster one.
    """

    front: TextFrontConfig
    checkpoint: Checkpoint
    modules: SentenceModules
    provider: Provider
    precision: str
    head: Path | None = None
    gpus: Sequence[int] = ()
    rival: Provider | None = None

    @property
    def device(self) -> int | None:
        """The GPU to build on; None for the CPU."""
        return next(iter(self.gpus), None)

    @property
    def source_sha256(self) -> str:
        """The hash of what the engines compute: the checkpoint, the number of its layers, the head, dense layers."""
        layers, further = self.front.settings.layers, self.modules.files
        if not layers and self.head is None and not further:
            return self.checkpoint.sha256
        parts = [self.checkpoint.sha256, str(layers), file_sha256(self.head) if self.head else ""]
        parts += [file_sha256(file) for file in further]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names of LOGITS or TOKEN_LOGITS; empty without these outputs."""
        if not {"LOGITS", "TOKEN_LOGITS"} & set(self.engine_outputs):
            return ()
        if self.answers_pairs:
            return heads.config_labels({"num_labels": 1})
        return heads.head_labels(self.head) if self.head else heads.config_labels(self.checkpoint.config)

    @property
    def activation(self) -> str:
        """What makes scores of LOGITS; empty without this output."""
        if "LOGITS" not in self.engine_outputs:
            return ""
        config = {} if self.head else self.checkpoint.config
        return classifiers.activation(config, self.modules, len(self.labels))

    @property
    def cross_encoder(self) -> bool:
        """Whether the checkpoint's own head says how well the texts of a pair fit."""
        has_head = "LOGITS" in self.engine_outputs and self.head is None
        return has_head and (self.answers_pairs or classifiers.is_cross_encoder(self.checkpoint.config, self.modules))

    @property
    def answers_pairs(self) -> bool:
        """Whether LOGITS are those of a decoder's own tokens, such as yes and no."""
        speaks = has_class(self.checkpoint.config, "ForCausalLM")
        return speaks and self.head is None and "LOGITS" in self.engine_outputs

    @property
    def pair_template(self) -> str:
        """Jinja source of the front's own template; empty: the checkpoint's. Raises InvalidInputError."""
        name = self.front.settings.pair_template
        file = self.front.folder / name
        if not name:
            return ""
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidInputError("pair_template", name, f"a text in {self.front.folder} ({error})") from None

    @property
    def engine_outputs(self) -> tuple[str, ...]:
        """What engines compute for the outputs in config.pbtxt, in their order."""
        made_of = {**dict.fromkeys(SPARSE_OUTPUTS, self.modules.sparse_output), ENTITIES: "TOKEN_LOGITS"}
        names = [made_of.get(output.name, output.name) for output in self.front.config.output]
        return tuple(dict.fromkeys(name for name in names if name in OUTPUT_AXES))

    @property
    def pairs(self) -> bool:
        """Whether texts may be pairs."""
        return any(tensor.name == TEXT_PAIR for tensor in self.front.config.input)

    @property
    def _providers(self) -> list[Provider]:
        return [self.provider, *([self.rival] if self.rival else [])]

    def key(self) -> str:
        """Changes if, and only if, the engines must be rebuilt."""
        inputs: dict[str, Any] = {
            "format": _BUILD_FORMAT,
            "settings": _without_rare(asdict(self.front.settings)),
            "pair_template": self.pair_template,
            "histogram": length_histogram(self.front),
            "outputs": [output.name for output in self.front.config.output if output.name not in _COMMON_OUTPUTS],
            "pairs": self.pairs,
            "activation": self.activation,
            "checkpoint": self.source_sha256,
            "tokenizer": tokenizer_files.key(self.checkpoint),
            # Of those that few checkpoints have, the files count as `source_sha256`.
            "modules": _without_rare(asdict(self.modules)),
            "provider": [part for one in self._providers for part in (one.name, one.version())],
            "precision": self.precision,
            "hardware": with_cpu(self.device),
        }
        if self.front.settings.profile_file:
            inputs["profile"] = read_json(self.front.folder / self.front.settings.profile_file, "profile_file")
        # A file counts by its content, in source_sha256: a checkpoint may be moved.
        text = json.dumps(_without_rare(inputs), sort_keys=True, default=lambda path: path.name)
        return hashlib.sha256(text.encode()).hexdigest()


def _without_rare(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what most models leave empty, which came later: their engines stay."""
    return {name: value for name, value in values.items() if value or name not in _RARE}


def plan(front: TextFrontConfig, paths: BuildPaths) -> Plan:
    """Resolve checkpoint, provider, precision and head. Raises ShapeshiftError."""
    settings = front.settings
    checkpoint, modules = _checkpoint(front, paths)
    named = settings.provider
    if settings.precision == "int8" and named == "auto":
        named = "native"
        if is_placed(front.folder) and gpus_of(front.folder):
            raise InvalidInputError("precision", "int8", "of a front on a CPU: KIND_CPU; provider native computes it")
    provider, gpus = provider_of(front.folder, named)
    resolved = hardware.resolve_precision(settings.precision, provider.name, next(iter(gpus), None))
    head = find_head(settings.head, paths) if settings.head else None
    # These ask for engines of several lengths, and native has one for all.
    by_length = settings.explicit_edges() or front.serving.placement == "partitioned"
    rival = None if by_length and not gpus else lookup.rival(named, gpus, checkpoint.config)
    return Plan(front, checkpoint, modules, provider, resolved, head, gpus, rival)


def _checkpoint(front: TextFrontConfig, paths: BuildPaths) -> tuple[Checkpoint, SentenceModules]:
    """The checkpoint, and its sentence modules with the settings of the front."""
    settings = front.settings
    source = find_checkpoint(settings.checkpoint, paths)
    modules = sentence_modules.read(source.folder)
    transformer = source.folder / modules.transformer
    checkpoint = open_checkpoint(transformer, (), source.origin, paths.build / HASHES)
    checkpoint = replace(checkpoint, config=text_config(checkpoint.config))
    family = family_of(checkpoint.config)
    modules = (modules.for_head() if settings.head else modules).resolved(
        settings.pooling, settings.normalize, family.pooling
    )
    modules = modules if settings.head else modules.with_projection(transformer, family.projection)
    modules.check(hidden_size(checkpoint.config))
    return checkpoint, modules


def find_head(name: str, paths: BuildPaths) -> Path:
    """The file `name`: a path, or below the folders of checkpoints. Raises NotFoundError."""
    candidates = [Path(name), *(folder / name for folder in paths.checkpoints)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise NotFoundError(f"head: no file {', '.join(map(str, candidates))}")


def is_current(planned: Plan, folder: Path) -> bool:
    """Whether `folder` holds exactly what `planned` would build, undamaged."""
    try:
        built = manifest.load(folder)
        built.check_files(folder)
    except EngineError:
        return False
    return built.build_key == planned.key()


def engine_outputs(planned: Plan, hidden: int) -> dict[str, tuple[int, ...]]:
    """The outputs that engines compute: dims without the row axis, -1 for one value per token.

    hidden: the width of the token vectors. Raises InvalidInputError if config.pbtxt lists none of them, or states other
    dims.
    """
    modules, config = planned.modules, planned.checkpoint.config
    sizes = {
        "width": modules.width(hidden),
        "labels": len(planned.labels),
        "tokens": -1,
        "token_width": modules.token_width(hidden),
        "vocabulary": vocabulary_size(config),
    }
    dims = {name: tuple(sizes[axis] for axis in axes) for name, axes in OUTPUT_AXES.items()}
    with_dims(planned.front.config, dims)
    if not planned.engine_outputs:
        raise InvalidInputError("output", [], f"at least one of {', '.join((*OUTPUT_AXES, *SPARSE_OUTPUTS))}")
    if "TOKEN_WEIGHTS" in planned.engine_outputs and modules.token_weights is None:
        raise InvalidInputError("output", "TOKEN_WEIGHTS", f"of a checkpoint with {_WEIGHTED}")
    if "TERM_WEIGHTS" in planned.engine_outputs and not has_class(config, "ForMaskedLM"):
        allowed = (
            f"of a masked language model (SPLADE: architectures ...ForMaskedLM), or of a checkpoint with {_WEIGHTED}"
        )
        raise InvalidInputError("output", "SPARSE_INDICES", allowed)
    return {name: dims[name] for name in planned.engine_outputs}


def with_dims(config: Any, dims: Mapping[str, tuple[int, ...]]) -> Any:
    """The front's configuration with these dims of its outputs. Raises InvalidInputError if it states others."""
    return model_config.complete(config, front_signature(model_config.parameters(config)).with_dims(dims))
