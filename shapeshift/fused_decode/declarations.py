"""The inputs and outputs of a model that generates: one table for config.pbtxt, for the checks and for the docs."""

from __future__ import annotations

from dataclasses import dataclass, field

from shapeshift.serving.model_args import TOKENS, Tensor

# Sampling computes in FLOAT32: beyond these, a parameter or a penalised logit becomes 0 or infinity.
LEAST, MOST = 1e-30, 1e30
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_STOP_IDS = 64
MAX_BIASES, MAX_BIAS = 1024, 100
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20
MAX_GRAMMAR = 65536
MAX_PROMPTS, MAX_CHOICES = 64, 128
# A length to this power is a FLOAT32.
MAX_BEAMS, MAX_LENGTH_PENALTY = 8, 4


@dataclass(frozen=True)
class Output:
    """An output.

    kind    the type's name in the inference protocol
    shape   its dims, one word each; every word but 1 stands for a number that differs between responses
    always  of an output: see `model_args.Tensor`
    """

    name: str
    kind: str
    shape: str = "1"
    always: bool = field(default=False, kw_only=True)

    def tensor(self) -> Tensor:
        """As config.pbtxt declares it."""
        dims = tuple(1 if word == "1" else -1 for word in self.shape.split(", "))
        kind, optional = f"TYPE_{self.kind.replace('BYTES', 'STRING')}", isinstance(self, Input)
        return Tensor(self.name, kind, dims, optional=optional, always=self.always)


@dataclass(frozen=True)
class Input(Output):
    """An input.

    default      what is used without it, in words; empty: it has to be given
    least, most  bounds of a number
    allowed      in words what no bounds say
    """

    default: str = ""
    least: float | None = None
    most: float | None = None
    allowed: str = ""

    @property
    def range(self) -> str:
        """The allowed values in words."""
        if self.allowed or self.kind == "BOOL":
            return self.allowed or "true or false"
        return f"at least {self.least:.10g}" if self.most is None else f"{self.least:.10g} to {self.most:.10g}"


def _flag(name: str, default: str = "false") -> Input:
    return Input(name, "BOOL", default=default)


INPUTS = (
    Input(
        "text_input", "BYTES", "prompts", allowed=f"1 to {MAX_PROMPTS} texts of 1 to `max_length` - 1 tokens of UTF-8"
    ),
    Input("input_ids", "INT32", "tokens", "none", allowed="ids of tokens, instead of `text_input`"),
    Input("input_lengths", "INT32", "prompts", "one prompt", allowed="numbers of at least 1 that divide `input_ids`"),
    _flag("stream"),
    Input("sampling_parameters", "BYTES", default="{}", allowed="a JSON object"),
    _flag("add_special_tokens", "true"),
    Input("max_tokens", "INT32", default="16", least=1),
    Input("n", "INT32", default="1", allowed=f"1 to {MAX_CHOICES}, and so for prompts times `best_of`"),
    Input("best_of", "INT32", default="`n`", allowed=f"`n` to {MAX_CHOICES}; with `stream` equal to `n`"),
    Input("num_beams", "INT32", default="1", least=1, most=MAX_BEAMS),
    Input("length_penalty", "FP32", default="1.0", least=-MAX_LENGTH_PENALTY, most=MAX_LENGTH_PENALTY),
    Input("early_stopping", "BYTES", default="false", allowed="`true`, `false` or `never`"),
    Input("num_return_sequences", "INT32", default="1", allowed="1 to `num_beams`"),
    Input("min_tokens", "INT32", default="0", allowed="0 to `max_tokens`"),
    Input("temperature", "FP32", default="1.0", least=0, most=MOST),
    Input("top_k", "INT32", default="0", allowed="-1 to the size of the vocabulary"),
    Input("top_p", "FP32", default="1.0", least=LEAST, most=1),
    Input("min_p", "FP32", default="0.0", least=0, most=1),
    Input("repetition_penalty", "FP32", default="1.0", least=LEAST, most=MOST),
    Input("presence_penalty", "FP32", default="0.0", least=-2, most=2),
    Input("frequency_penalty", "FP32", default="0.0", least=-2, most=2),
    Input(
        "logit_bias",
        "BYTES",
        default="{}",
        allowed=f"a JSON object of at most {MAX_BIASES} token ids and numbers from -{MAX_BIAS} to {MAX_BIAS}",
    ),
    Input(
        "bad_words",
        "BYTES",
        "texts",
        "none",
        allowed=f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_LENGTH} characters",
    ),
    Input("seed", "INT64", default="a new one", allowed="any"),
    Input("stop", "BYTES", "texts", "none", allowed=f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"),
    Input("stop_token_ids", "INT32", "ids", "none", allowed=f"at most {MAX_STOP_IDS} ids of tokens"),
    _flag("ignore_eos"),
    Input(
        "structured_outputs",
        "BYTES",
        default="none",
        allowed=f"a JSON object with a json, json_object, regex, choice or grammar of at most {MAX_GRAMMAR} characters",
    ),
    Input("logprobs", "INT32", default="none", least=0, most=MAX_LOGPROBS),
    Input("prompt_logprobs", "INT32", default="none", least=0, most=MAX_LOGPROBS),
    _flag("exclude_input_in_output", "true"),
    _flag("return_finish_reason"),
    _flag("return_num_input_tokens"),
    _flag("return_num_output_tokens"),
    _flag("return_token_ids"),
    _flag("return_logprobs"),
    _flag("return_request_id"),
    _flag("return_timings"),
    Input("stop_id", "BYTES", default="none", allowed="the id of a request"),
)
OUTPUTS = (
    Output("text_output", "BYTES", "choices"),
    Output("choice_index", "INT32", "choices"),
    Output("sequence_score", "FP32", "choices"),
    Output("finish_reason", "BYTES", "choices"),
    Output("stop_reason", "BYTES", "choices", always=True),
    Output("num_input_tokens", "UINT32", "choices"),
    Output("num_cached_tokens", "UINT32", "choices"),
    Output("num_output_tokens", "UINT32", "choices"),
    Output("token_ids", "INT32", "tokens"),
    Output("prompt_token_ids", "INT32", "tokens"),
    Output("token_logprobs", "FP32", "tokens"),
    Output("top_token_ids", "INT32", "tokens, logprobs"),
    Output("top_logprobs", "FP32", "tokens, logprobs"),
    Output("logprobs", "BYTES", "choices"),
    Output("prompt_logprobs", "BYTES", "prompts"),
    Output("request_id", "BYTES"),
    Output("queue_ms", "FP32", "choices"),
    Output("prefill_ms", "FP32", "choices"),
    Output("decode_ms", "FP32", "choices"),
    Output(TOKENS.name, "BYTES", "prompts", always=True),
)
