"""The configuration of a text front: its config.pbtxt and the JSON files beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import PolymorphSettings


@dataclass(frozen=True)
class TextFrontConfig:
    """A folder of the model repository: its parsed config.pbtxt, and the settings of engines and of serving in it.

    adapters: those of adapters; None for a model without adapters.
    """

    name: str
    folder: Path
    config: Any
    settings: TextEngineSettings
    serving: PolymorphSettings
    adapters: AdapterSettings | None = None


def length_histogram(front: TextFrontConfig) -> list[float]:
    """The weight of each length 1..max_tokens: from the front's own file, or every octave equally likely."""
    longest = front.settings.max_tokens
    if not front.settings.length_histogram:
        return [1.0 / length for length in range(1, longest + 1)]
    path = front.folder / front.settings.length_histogram
    counts = read_json(path, "length_histogram")
    valid = isinstance(counts, list) and len(counts) <= longest
    if not valid or not all(isinstance(c, int | float) and c >= 0 for c in counts) or not any(counts):
        raise InvalidInputError("length_histogram", str(path), f"a list of 1 to {longest} counts, not all zero")
    return [*counts, *[0.0] * (longest - len(counts))]


def read_json(path: Path, field: str) -> Any:
    """The JSON in `path`. Raises InvalidInputError naming the setting `field` if it is unreadable or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(field, str(path), f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInputError(field, str(path), f"JSON ({error})") from None
