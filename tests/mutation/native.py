"""Single changes of the native kernels, and the tests that compute with each of them."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = (
    *("shapeshift/kernels", "shapeshift/engines/native/kernels"),
    *("shapeshift/fused_decode/model/kernels", "shapeshift/adapter_cache/lora/kernels"),
)
PLUGIN = "tests.mutation.quick_kernels"
_DECODE, _LORA = "tests/fused_decode/test_decode_", "tests/adapter_cache/test_lora_"
_ENCODE = "tests/engines/test_engines_native.py"
_TESTS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (f"{_LORA}kernels.py", f"{_LORA}batch.py"): ("low_rank", "terms", "lora"),
    (f"{_DECODE}quantised.py",): ("level_tiles", "levels", "linear_levels", "packed_levels", "quantised_rows", "tiles"),
    (f"{_DECODE}native.py", f"{_DECODE}model.py"): (
        *("attention", "attention_arguments", "attention_few", "attention_layer", "attention_prompt"),
        *("attention_rows", "attention_scores", "attention_tiles", "checks", "common", "decode", "linear"),
        *("linear_bf16", "network", "operand", "packed", "rows", "team", "unrolled", "wide"),
    ),
    (f"{_DECODE}experts.py",): ("experts",),
    (f"{_DECODE}states.py",): ("delta_net",),
    (_ENCODE,): ("encoder", "encoder_levels", "encoder_places", "encoder_attention", "encoder_rows", "helpers"),
    (f"{_DECODE}sampling.py",): ("draw",),
    (f"{_DECODE}sampling.py", f"{_DECODE}logprobs.py"): ("columns",),
    (f"{_DECODE}logprobs.py",): ("likeliest",),
    (f"{_DECODE}model.py", f"{_LORA}batch.py"): ("added",),
}
# Who compiles the kernels of a test, by how its name starts.
_LIBRARIES = {
    _LORA: "adapter_cache.lora.native",
    _DECODE: "fused_decode.model.native_operations",
    _ENCODE: "engines.native.encoder",
}

# A condition turned round or moved by one, a sum turned into a difference, a bound chosen from the other end, an index
# or a size moved by one, a loop over whole vectors that takes one element of its tail: what a person mistakes about
# tails and bounds.
_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_CALCULATED = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*"}
_LOGICAL = {"&&": "||", "||": "&&"}
_ENDS = {"std::min": "std::max", "std::max": "std::min"}
_PATTERNS: Mapping[str, tuple[re.Pattern[str], Callable[[str], str]]] = {
    # Of these loops another bound than one too far means nothing: the loop behind them computes what they leave.
    "tail": (re.compile(r"\+ k[A-Z]\w* <= "), lambda found: found.replace("<=", "- 1 <=")),
    # With spaces: those without are templates, pointers and shifts.
    "comparison": (re.compile(r"(?<= )(<|<=|>|>=|==|!=)(?= )"), _COMPARED.__getitem__),
    "operation": (re.compile(r"(?<= )[-+*/%](?= )"), _CALCULATED.__getitem__),
    "logic": (re.compile(r"(?<= )(&&|\|\|)(?= )"), _LOGICAL.__getitem__),
    "end": (re.compile(r"\bstd::(min|max)\b(?=[(\0])"), _ENDS.__getitem__),
    "number": (re.compile(r"(?<![\w.'])\d+(?![\w.'])"), lambda found: str(int(found) + 1)),
}
# Where a change means nothing, does not compile, or is one of speed: constants, words, templates, what the
# preprocessor reads, and checks of types. A zero in braces begins sums that are assigned.
_SILENT = re.compile(
    r"^\s*(#|//|static_assert|template|TORCH_LIBRARY|library\.|using |namespace )|constexpr|asm volatile"
)
_WORDS = re.compile(r'//.*$|"(?:[^"\\]|\\.)*"|template\s*<[^>]*>|<[^<>()]*>(?=[(:\w])')


@dataclass(frozen=True)
class NativeChange:
    """One change of one line. file: relative to the project; line: from 1; column: from 0, where `before` stands."""

    file: str
    line: int
    kind: str
    column: int
    before: str

    def apply(self, source: str) -> str:
        """The changed source."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        end = self.column + len(self.before)
        assert text[self.column : end] == self.before, self
        lines[self.line - 1] = text[: self.column] + _PATTERNS[self.kind][1](self.before) + text[end:]
        return "".join(lines)


def changes(file: str, source: str) -> Iterator[NativeChange]:
    """Every change of `source` by these operators that may mean something."""
    for number, line in enumerate(source.splitlines(), 1):
        if _SILENT.search(line):
            continue
        plain = _WORDS.sub(_blank, line)
        for kind, (pattern, _) in _PATTERNS.items():
            for found in pattern.finditer(plain):
                yield NativeChange(file, number, kind, found.start(), found[0])
            if kind == "tail":
                plain = pattern.sub(_blank, plain)


def files(project: Path, stems: Collection[str] | None = None) -> list[str]:
    """The kernels and headers of these names; None for all."""
    found = (file for folder in FOLDERS for file in (project / folder).iterdir() if file.suffix in (".h", ".cpp"))
    return sorted(str(file.relative_to(project)) for file in found if stems is None or file.stem in stems)


def tests_of(file: str) -> tuple[str, ...]:
    """The tests that compute with the kernel of this file. Raises LookupError for a file that no test is named for."""
    stem = Path(file).stem
    return next(tests for tests, stems in _TESTS.items() if stem in stems)


def compile_kernel(file: str, cache_dir: Path) -> int:
    """Compile the library of which `file` is a part, as tests with PLUGIN do; 1 where the compiler refuses."""
    importlib.import_module(PLUGIN)
    first = tests_of(file)[0]
    name = next(name for start, name in _LIBRARIES.items() if first.startswith(start))
    module: Any = importlib.import_module(f"shapeshift.{name}")
    try:
        module.library(cache_dir)
    except subprocess.CalledProcessError as error:
        sys.stdout.write(error.stderr)
        return 1
    return 0


def sample(project: Path, names: Sequence[str], count: int, seed: int) -> list[NativeChange]:
    """`count` changes, at most one of a line: of each file as many as of the others, and each kind as likely.

    The same ones for the same sources and seed.
    """
    rng = random.Random(seed)
    chosen: list[NativeChange] = []
    for attempt in range(20 * count):
        if len(chosen) == count:
            break
        file = names[attempt % len(names)]
        by_kind: dict[str, list[NativeChange]] = {}
        for change in changes(file, (project / file).read_text()):
            if (file, change.line) not in {(one.file, one.line) for one in chosen}:
                by_kind.setdefault(change.kind, []).append(change)
        if by_kind:
            chosen.append(rng.choice(by_kind[rng.choice(sorted(by_kind))]))
    return chosen


def _blank(found: re.Match[str]) -> str:
    return "\0" * len(found[0])
