"""The inputs of a request, one at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.request_parser import RETURNS, ParsedRequest, RequestParser
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fakes import PbUtils, Request
from tests.fused_decode.fronts import tensors


def request(**inputs: Any) -> Request:
    return Request(**tensors(inputs))


def read(**inputs: Any) -> ParsedRequest:
    return RequestParser(PbUtils(), 1000).parse(request(**{"text_input": "a", **inputs}))


def sampling(**given: Any) -> str:
    return json.dumps(given)


def test_defaults() -> None:
    fields = read(text_input="über")
    assert fields == ParsedRequest(
        ["über".encode()], True, True, SamplingParams(), False, False, frozenset({"text_output"})
    )


EVERYTHING: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "n": 2,
    "best_of": 4,
    "logprobs": 20,
    "prompt_logprobs": 0,
    "bad_words": ["b", " ü"],
    "stop_token_ids": [0, 999],
    "seed": -3,
    "stop": ["a", "ü"],
    "ignore_eos": True,
}


def test_inputs_and_sampling_parameters_mean_the_same() -> None:
    lists = {name: tuple(value) for name, value in EVERYTHING.items() if isinstance(value, list)}
    wanted = SamplingParams(**{**EVERYTHING, **lists, "logit_bias": ((5, -1.5), (999, 100.0))})
    biases = {"5": -1.5, "999": 100}
    assert read(**EVERYTHING, logit_bias=json.dumps(biases)).sampling_params == wanted
    assert read(sampling_parameters=sampling(**EVERYTHING, logit_bias=biases)).sampling_params == wanted
    half = {name: EVERYTHING[name] for name in ("max_tokens", "stop", "top_p")}
    others = {name: value for name, value in EVERYTHING.items() if name not in half}
    assert read(**half, sampling_parameters=sampling(**others, logit_bias=biases)).sampling_params == wanted


def test_beam_search() -> None:
    beams: dict[str, Any] = {"num_beams": 8, "length_penalty": -4.0, "num_return_sequences": 8}
    for given, meant in (("never", "never"), ("true", True), (b"false", False)):
        fields = read(**beams, early_stopping=given)
        assert fields.sampling_params == SamplingParams(**beams, early_stopping=meant)
        assert fields.outputs == {"text_output", "choice_index", "sequence_score"}
    others: dict[str, Any] = {"early_stopping": True, "temperature": 0, "top_k": -1, "seed": 3}
    given = sampling(**beams, **others, stop_token_ids=[5])
    wanted = SamplingParams(**beams, **others, stop_token_ids=(5,))
    assert read(sampling_parameters=given).sampling_params == wanted
    assert read(num_beams=2).outputs == {"text_output", "sequence_score"}


def test_numbers_may_come_as_text_in_sampling_parameters_and_null_is_the_default() -> None:
    given = sampling(max_tokens="12", temperature="0.5", ignore_eos="true", stop="x", seed=None)
    wanted = SamplingParams(max_tokens=12, temperature=0.5, ignore_eos=True, stop=("x",))
    assert read(sampling_parameters=given).sampling_params == wanted
    assert read(sampling_parameters="").sampling_params == SamplingParams()


def test_the_form_of_the_answer() -> None:
    fields = read(stream=True, exclude_input_in_output=True, **dict.fromkeys(RETURNS, True))
    assert fields.stream and not fields.echo
    assert fields.outputs == {"text_output", *(output for outputs in RETURNS.values() for output in outputs)}
    assert read(exclude_input_in_output=False).echo
    assert read(return_finish_reason=False).outputs == {"text_output"}


def test_limits_are_inclusive() -> None:
    assert read(top_k=1000).sampling_params.top_k == 1000
    assert read(top_k=-1, top_p=1.0, min_p=1.0, temperature=0.0).sampling_params.top_k == -1
    assert read(seed=2**63 - 1).sampling_params.seed == 2**63 - 1
    assert len(read(stop=["x" * 256] * 16).sampling_params.stop) == 16


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: got 0; a whole number at least 1"),
    ({"max_tokens": -4}, "max_tokens: got -4; a whole number at least 1"),
    ({"num_beams": 0}, "num_beams: got 0; a whole number at least 1 and at most 8"),
    ({"num_beams": 9}, "num_beams: got 9; a whole number at least 1 and at most 8"),
    ({"num_beams": 2, "stream": True}, "num_beams: got 2; 1 when stream is true"),
    ({"num_beams": 8, "text_input": ["a"] * 17}, "num_beams: got 8; at most 128 with all 17 prompts"),
    ({"num_return_sequences": 2}, "num_return_sequences: got 2; at most num_beams (1)"),
    ({"num_beams": 3, "num_return_sequences": 4}, "num_return_sequences: got 4; at most num_beams (3)"),
    ({"num_beams": 3, "num_return_sequences": 0}, "num_return_sequences: got 0; a whole number at least 1 and at"),
    ({"num_beams": 2, "length_penalty": 4.5}, "length_penalty: got 4.5; a number at least -4 and at most 4"),
    ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty: got nan"),
    ({"num_beams": 2, "early_stopping": "always"}, "early_stopping: got 'always'; true, false or never"),
    ({"sampling_parameters": sampling(num_beams=2, early_stopping=1)}, "early_stopping: got 1; true, false or never"),
    ({"length_penalty": 2.0}, "length_penalty: got 2.0; 1 with num_beams of 1"),
    ({"early_stopping": "never"}, "early_stopping: got 'never'; false with num_beams of 1"),
    ({"num_beams": 2, "n": 2}, "n: got 2; 1 with num_beams above 1"),
    ({"num_beams": 2, "best_of": 2}, "best_of: got 2; 1 with num_beams above 1"),
    ({"num_beams": 2, "temperature": 0.5}, "temperature: got 0.5; 0 or 1 with num_beams above 1"),
    ({"num_beams": 2, "top_k": 5}, "top_k: got 5; 0 or -1 with num_beams above 1"),
    ({"num_beams": 2, "top_p": 0.5}, "top_p: got 0.5; 1 with num_beams above 1"),
    ({"num_beams": 2, "min_p": 0.5}, "min_p: got 0.5; 0 with num_beams above 1"),
    ({"num_beams": 2, "stop": ["a"]}, "stop: got ('a',); none with num_beams above 1"),
    ({"num_beams": 2, "logprobs": 0}, "logprobs: got 0; none with num_beams above 1"),
    ({"num_beams": 2, "structured_outputs": '{"regex": "a"}'}, "structured_outputs: got StructuredOutputs(kind='regex"),
    ({"min_tokens": 17}, "min_tokens: got 17; at most max_tokens (16)"),
    ({"min_tokens": -1}, "min_tokens: got -1; a whole number at least 0"),
    ({"presence_penalty": 2.5}, "presence_penalty: got 2.5; a number at least -2 and at most 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty: got nan; a number at least -2 and at most 2"),
    ({"logit_bias": "[]"}, "logit_bias: got '[]'; a JSON object"),
    ({"logit_bias": "{"}, "logit_bias: got '{'; JSON ("),
    ({"logit_bias": '{"1000": 1}'}, "logit_bias token: got 1000; a whole number at least 0 and at most 999"),
    ({"logit_bias": '{"the": 1}'}, "logit_bias token: got 'the'; a whole number at least 0 and at most 999"),
    ({"logit_bias": '{"7": 101}'}, "logit_bias 7: got 101; a number at least -100 and at most 100"),
    ({"logit_bias": '{"7": "a"}'}, "logit_bias 7: got 'a'; a number at least -100 and at most 100"),
    ({"bad_words": [""]}, "bad_words[0]: got ''; a text of 1 to 256 characters"),
    ({"bad_words": ["a"] * 65}, "bad_words: got '65 texts'; at most 64"),
    ({"stop_token_ids": [1, 1000]}, "stop_token_ids[1]: got 1000; a whole number at least 0 and at most 999"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids: got '65 ids'; at most 64"),
    ({"temperature": -0.5}, "temperature: got -0.5; a number at least 0 and at most 1e+30"),
    ({"temperature": float("nan")}, "temperature: got nan; a number at least 0"),
    ({"temperature": float("inf")}, "temperature: got inf"),
    ({"top_k": -2}, "top_k: got -2; a whole number at least -1 and at most 1000"),
    ({"top_k": 1001}, "top_k: got 1001; a whole number at least -1 and at most 1000"),
    ({"top_p": 0.0}, "top_p: got 0.0; a number at least 1e-30 and at most 1"),
    ({"sampling_parameters": sampling(top_p=1e-50)}, "top_p: got 1e-50; a number at least 1e-30"),
    ({"top_p": 1.5}, "top_p: got 1.5"),
    ({"top_p": float("nan")}, "top_p: got nan"),
    ({"min_p": -0.5}, "min_p: got -0.5; a number at least 0 and at most 1"),
    ({"min_p": 2.0}, "min_p: got 2.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0; a number at least 1e-30"),
    ({"sampling_parameters": sampling(repetition_penalty=1e60)}, "repetition_penalty: got 1e+60; a number at least"),
    ({"sampling_parameters": sampling(repetition_penalty=1e-60)}, "repetition_penalty: got 1e-60; a number at least"),
    ({"sampling_parameters": sampling(temperature=1e60)}, "temperature: got 1e+60; a number at least 0 and at most"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty: got inf"),
    ({"stop": [""]}, "stop[0]: got ''; a text of 1 to 256 characters"),
    ({"stop": ["a", "x" * 257]}, "stop[1]: got "),
    ({"stop": [b"\xff"]}, "stop[0]: got b'\\xff'; valid UTF-8 (byte 0 is not)"),
    ({"stop": ["a"] * 17}, "stop: got '17 texts'; at most 16"),
    (
        {"stream": True, "exclude_input_in_output": False},
        "exclude_input_in_output: got False; true when stream is true",
    ),
    ({"sampling_parameters": "{"}, "sampling_parameters: got '{'; JSON ("),
    ({"sampling_parameters": "[" * 100_000}, "sampling_parameters: got "),
    ({"sampling_parameters": "[1]"}, "sampling_parameters: got '[1]'; a JSON object"),
    ({"sampling_parameters": b"\xff{}"}, "sampling_parameters: got b'\\xff{}'; valid UTF-8"),
    (
        {"sampling_parameters": sampling(nn=2)},
        "sampling_parameters nn: got 2; unknown key; known: add_special_tokens, bad_words, best_of",
    ),
    ({"sampling_parameters": sampling(max_tokens=1.5)}, "max_tokens: got 1.5; a whole number at least 1"),
    ({"sampling_parameters": sampling(max_tokens=True)}, "max_tokens: got True; a whole number"),
    ({"sampling_parameters": sampling(max_tokens="many")}, "max_tokens: got 'many'; a whole number"),
    ({"sampling_parameters": '{"temperature": NaN}'}, "temperature: got nan"),
    ({"sampling_parameters": sampling(seed=2**63)}, "seed: got 9223372036854775808"),
    ({"sampling_parameters": sampling(ignore_eos=1)}, "ignore_eos: got 1; true or false"),
    ({"sampling_parameters": sampling(stop=[1])}, "stop[0]: got 1; a text"),
    ({"sampling_parameters": sampling(stop={"a": 1})}, "stop: got {'a': 1}; a list"),
    ({"top_k": 5, "sampling_parameters": sampling(top_k=5)}, "top_k: got 5; once: as an input or in"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED)
def test_an_invalid_value_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read(**inputs)
    assert message in str(caught.value)


def test_more_than_one_value_is_refused() -> None:
    two = request(text_input="a", max_tokens=[1, 2])
    with pytest.raises(InvalidInputError, match="max_tokens: got '2 values'; one value"):
        RequestParser(PbUtils(), 10).parse(two)


def test_without_text() -> None:
    with pytest.raises(InvalidInputError, match="text_input: got None; this input or input_ids is required"):
        RequestParser(PbUtils(), 10).parse(request(max_tokens=3))


def test_stop_id() -> None:
    reader = RequestParser(PbUtils(), 10)
    assert reader.stop_id(request(text_input="a")) is None
    assert reader.stop_id(request(stop_id="me")) == "me"
    for inputs, message in (
        ({"stop_id": "me", "text_input": "a"}, "stop_id: got 'me'; alone"),
        ({"stop_id": ""}, "stop_id: got ''"),
        ({"stop_id": b"\xff"}, "stop_id: got b'\\\\xff'; valid UTF-8"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            reader.stop_id(request(**inputs))


def test_special_tokens_can_be_left_out_by_an_input_or_a_parameter() -> None:
    assert not read(sampling_parameters=sampling(add_special_tokens=False)).add_special_tokens
    assert not read(add_special_tokens=False).add_special_tokens
    with pytest.raises(InvalidInputError, match="add_special_tokens: got 3; true or false"):
        read(sampling_parameters=sampling(add_special_tokens=3))
