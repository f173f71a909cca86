"""The values of the fuzz run, given to the parser of requests without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.declarations import INPUTS
from shapeshift.fused_decode.engine.sampling.grammar import GrammarCompiler
from shapeshift.fused_decode.request_parser import RequestParser
from tests.fakes import PbUtils, Request
from tests.fused_decode.fronts import tensors
from tests.fuzz.draw import drawn
from tests.fuzz.values import SAMPLING, VALUES

TOKENIZER = Path(__file__).resolve().parents[2] / "checkpoints" / "docstrings-llama" / "tokenizer.json"
# The tokenizer judges them.
PROMPTS = ("text_input",)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 1000, [0])


def test_every_input_whose_values_may_be_wrong_has_some() -> None:
    checked = {one.name for one in INPUTS if one.kind != "BOOL"}
    assert checked - {*VALUES} == {"seed", "sampling_parameters"}


@pytest.mark.parametrize(
    "name", sorted({one.name for one in INPUTS} & {*VALUES} - {*PROMPTS}) + ["sampling_parameters"]
)
def test_every_value_is_refused_with_words_of_ours(name: str, compiler: GrammarCompiler) -> None:
    """By the parser, or, for a structure that has the right form, where it is compiled."""
    parser = RequestParser(PbUtils(), 1000)
    strategy = VALUES[name] if name in VALUES else SAMPLING.map(lambda text: [text])
    prompt = {} if name == "input_ids" else {"text_input": "a"}
    for values in drawn(strategy, 60):
        request = Request(**tensors({**prompt, "max_tokens": 2, name: values}))
        with pytest.raises(InvalidInputError):
            parser.stop_id(request)
            structured = parser.parse(request).sampling_params.structured_outputs
            if structured is not None:
                compiler.template(structured)
