"""`generate` and `generate_unary` in a real Triton, over a small random model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from client import generate_answers, loadtest
from shapeshift.errors import EngineError
from shapeshift.triton import model_config
from shapeshift.triton.control import ModelControl
from tests import waiting
from tests.compiled import link_kernels
from tests.fused_decode.checkpoints import LONGEST, make_checkpoint
from tests.fused_decode.fronts import tensors
from tests.gauges import total
from tests.outgoing import descendants

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.02)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "build"
PROMPT = "Return the number of"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
TYPES = {np.dtype(np.int32): "INT32", np.dtype(np.int64): "INT64", np.dtype(np.float32): "FP32", np.dtype(bool): "BOOL"}


# The server.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(scope="module")
def publish(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that publishes a front of the repository over the small model; the generated repository."""
    from shapeshift.build_engines import decode
    from shapeshift.build_engines.paths import BuildPaths
    from shapeshift.build_engines.repository import front_models

    root = tmp_path_factory.mktemp("house")
    link_kernels(root / "build")

    def add(name: str, source: str = "generate", **parameters: object) -> Path:
        config = model_config.read(PROJECT / "tests" / "model_repository" / source / "config.pbtxt")
        config.name = name
        if source == "generate":
            parameters = {"checkpoint": checkpoint, "max_length": LONGEST, "precision": "f32", **parameters}
        for key, value in parameters.items():
            model_config.set_parameter(config, key, str(value))
        (root / "model_repository" / name).mkdir(parents=True)
        model_config.write(config, root / "model_repository" / name / "config.pbtxt")
        paths = BuildPaths(root, root / "build", root / "model_repository")
        (front,) = front_models(paths, {name})
        assert isinstance(front, decode.DecodeFrontConfig)
        decode.publish(front, paths, lambda step: None)
        return paths.generated

    return add


@pytest.fixture(scope="module")
def server(
    publish: Callable[..., Path], make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = publish("generate")
    publish("generate_unary", source="generate_unary")
    publish("narrow", max_concurrency=1, queue_requests=2)
    models = ("generate", "generate_unary", "narrow")
    with make_server((repository,), models, tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[str, int], str]:
    """A function that gives what transformers says, greedily, after a prompt."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def say(prompt: str, count: int) -> str:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            made = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=1)
        return str(tokenizer.decode(made[0, ids.shape[1] :].tolist()))

    return say


@pytest.fixture
def gauges(server: TritonServer) -> Callable[..., float]:
    """A function that reads a metric of a model as it stands now."""

    def read(name: str, model: str = "generate", **labels: str) -> float:
        return total(server, name, model=model, **labels)

    return read


@pytest.fixture
def rests(gauges: Callable[..., float]) -> Callable[..., None]:
    """A function that waits until a model holds no request any more."""

    def wait(model: str = "generate") -> None:
        def settled() -> bool:
            return not any(gauges(name, model) for name in ("requests_running", "requests_waiting", "slot_tokens"))

        wait_for(settled)
        beat = gauges("heartbeat_total", model) + 2
        wait_for(lambda: gauges("heartbeat_total", model) >= beat)
        assert settled()

    return wait


# Requests.


def inputs(client: Any, given: dict[str, Any]) -> list[Any]:
    made = []
    for name, values in tensors(given).items():
        made.append(client.InferInput(name, list(values.shape), TYPES.get(values.dtype, "BYTES")))
        made[-1].set_data_from_numpy(values)
    return made


def plain(client: Any, connection: Any, given: dict[str, Any], model: str = "generate_unary", **options: Any) -> Any:
    return connection.infer(model, inputs(client, given), **options)


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


class GrpcStream:
    """A stream of its own; each request's responses come out of `results` in order."""

    def __init__(self, server: TritonServer) -> None:
        self.client = grpc_client.InferenceServerClient(server.grpc_url)
        self.results: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.results.put(error or result))

    def ask(self, given: dict[str, Any], model: str = "generate", **options: Any) -> None:
        self.client.async_stream_infer(model, inputs(grpc_client, given), **options)

    def until_last(self) -> list[Any]:
        """The responses of one request up to the one that is marked as the last."""
        found: list[Any] = []
        while not found or not _is_last(found[-1]):
            found.append(self.results.get(timeout=60))
            assert not isinstance(found[-1], Exception), found[-1]
        return found

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def _is_last(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


@pytest.fixture
def stream(server: TritonServer) -> Iterator[GrpcStream]:
    made = GrpcStream(server)
    yield made
    made.close()


@pytest.fixture(scope="module")
def over_grpc(server: TritonServer) -> Iterator[Any]:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        yield client


def post(server: TritonServer, path: str, body: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("POST", f"/v2/models/{path}", body if isinstance(body, bytes) else json.dumps(body))
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content


def events(content: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line]


# The same text over every protocol.


def test_http_generate(server: TritonServer, reference: Callable[[str, int], str]) -> None:
    wanted = reference(PROMPT, 24)
    for model in ("generate", "generate_unary"):
        status, content = post(server, f"{model}/generate", {"text_input": PROMPT, **GREEDY})
        assert status == 200 and json.loads(content)["text_output"] == wanted
        nested = {"text_input": PROMPT, "parameters": {**GREEDY, "return_finish_reason": True}}
        answer = json.loads(post(server, f"{model}/generate", nested)[1])
        assert (answer["text_output"], answer["finish_reason"]) == (wanted, "length")


def test_the_models_say_what_they_are(server: TritonServer, over_grpc: Any) -> None:
    (told,) = over_grpc.infer("generate_unary", [], client_timeout=120).as_numpy("DESCRIPTION")
    found = json.loads(told)
    assert (found["kind"], found["model"], found["stream"]) == ("generation", "generate_unary", "generate")
    for model in ("generate", "generate_unary"):
        status, content = post(server, f"{model}/generate", {})
        own = json.loads(json.loads(content)["DESCRIPTION"])
        assert status == 200 and own["model"] == model
        assert own["max_tokens"] == found["max_tokens"] and "text_output" not in json.loads(content)
    status, content = post(server, "generate/generate", {"max_tokens": 3})
    assert status == 400 and "text_input: got None" in content


def test_http_generate_stream(server: TritonServer, reference: Callable[[str, int], str]) -> None:
    body = {
        "text_input": PROMPT,
        "stream": True,
        "sampling_parameters": json.dumps(GREEDY),
        "return_finish_reason": True,
    }
    status, content = post(server, "generate/generate_stream", body)
    message = events(content)
    assert status == 200 and "".join(event["text_output"] for event in message) == reference(PROMPT, 24)
    assert len(message) > 1
    assert ["finish_reason" in event for event in message] == [False] * (len(message) - 1) + [True]


def test_grpc_stream(stream: GrpcStream, reference: Callable[[str, int], str]) -> None:
    for given, several in (({"stream": True}, True), ({"stream": False}, False), ({}, False)):
        stream.ask({"text_input": PROMPT, **GREEDY, **given}, request_id="mine", enable_empty_final_response=True)
        results = stream.until_last()
        assert "".join(map(text_of, results)) == reference(PROMPT, 24)
        assert (len(results) > 1) == several
        assert {result.get_response().id for result in results} == {"mine"}
    assert stream.results.empty()


# The sampling parameters that Triton's OpenAI frontend sends (python/openai, its converter for vLLM): all fields of the
# request that are not null, the defaults of OpenAI's schema among them, without those that the frontend handles itself.
COMPLETION = {"best_of": 1, "frequency_penalty": 0.0, "n": 1, "presence_penalty": 0.0, "seed": 7, "temperature": 0.0}
CHAT = {"frequency_penalty": 0.0, "logprobs": False, "n": 1, "presence_penalty": 0.0, "temperature": 0.0, "top_p": 1.0}
OLDER = {"frequency_penalty": 0.0, "n": 1, "presence_penalty": 0.0, "temperature": 0.0, "logit_bias": {}, "stop": None}
WITH_TOOL = {**CHAT, "guided_decoding": json.dumps({"json": json.dumps({"type": "integer"}), "backend": None})}


def from_frontend(sampling: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The inputs of a request of that frontend."""
    counted: dict[str, Any] = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    text = json.dumps({**sampling, "max_tokens": 12})
    return {
        "text_input": PROMPT,
        "stream": stream,
        "exclude_input_in_output": True,
        "sampling_parameters": text,
    } | counted


@pytest.mark.parametrize("sampling", [COMPLETION, CHAT, OLDER, WITH_TOOL], ids=["completion", "chat", "older", "tool"])
def test_triton_s_openai_frontend_is_answered(
    stream: GrpcStream, reference: Callable[[str, int], str], sampling: dict[str, Any]
) -> None:
    found = {}
    for streaming in (False, True):
        stream.ask(from_frontend(sampling, streaming), enable_empty_final_response=True)
        results = [one for one in stream.until_last() if one.as_numpy("text_output") is not None]
        assert streaming or len(results) == 1, "the frontend refuses more responses than one"
        # It reads one text, and adds up the counts of the responses.
        assert all(one.as_numpy("text_output").size == 1 for one in results)
        assert all(one.as_numpy("num_output_tokens").dtype == np.uint32 for one in results)
        found[streaming] = (
            "".join(map(text_of, results)),
            int(results[0].as_numpy("num_input_tokens")[0]),
            sum(int(one.as_numpy("num_output_tokens")[0]) for one in results),
        )
    assert found[False] == found[True]
    if sampling is WITH_TOOL:
        assert found[True][0].lstrip().lstrip("-").isdigit()
    else:
        assert found[True][0] == reference(PROMPT, 12) and found[True][2] == 12


def test_plain_infer(server: TritonServer, over_grpc: Any, reference: Callable[[str, int], str]) -> None:
    given = {"text_input": PROMPT, **GREEDY, "return_num_output_tokens": True, "return_timings": True}
    with http_client.InferenceServerClient(server.http_url) as over_http:
        for client, connection in ((grpc_client, over_grpc), (http_client, over_http)):
            result = plain(client, connection, given, parameters={"latency_ms": 60_000})
            assert text_of(result) == reference(PROMPT, 24)
            assert result.as_numpy("num_output_tokens").tolist() == [24]
            assert all(result.as_numpy(f"{part}_ms")[0] >= 0 for part in ("queue", "prefill", "decode"))
            assert result.as_numpy("finish_reason") is None


def test_several_answers_are_rows(
    server: TritonServer, over_grpc: Any, stream: GrpcStream, reference: Callable[[str, int], str]
) -> None:
    several: dict[str, Any] = {"text_input": [PROMPT, "The"], "n": 2, "logprobs": 3, "return_token_ids": True}
    wanted = [reference(prompt, 24) for prompt in (PROMPT, PROMPT, "The", "The")]
    result = plain(grpc_client, over_grpc, {**GREEDY, **several, "return_logprobs": True})
    assert [text.decode() for text in result.as_numpy("text_output")] == wanted
    assert result.as_numpy("choice_index").tolist() == [0, 1, 2, 3]
    tokens = len(result.as_numpy("token_ids"))
    assert result.as_numpy("top_logprobs").shape == result.as_numpy("top_token_ids").shape == (tokens, 3)
    listed = [len(json.loads(each)) for each in result.as_numpy("logprobs")]
    assert sum(listed) == tokens
    bias = json.dumps({result.as_numpy("token_ids").tolist()[0]: -100})
    other = plain(grpc_client, over_grpc, {**GREEDY, "text_input": PROMPT, "logit_bias": bias})
    assert text_of(other) != wanted[0]
    stream.ask({**GREEDY, **several, "stream": True}, enable_empty_final_response=True)
    texts = [""] * 4
    for response in stream.until_last():
        rows = response.as_numpy("choice_index").tolist()
        for row, text in zip(rows, response.as_numpy("text_output"), strict=True):
            texts[row] += text.decode()
    assert texts == wanted
    body = {"text_input": PROMPT, "n": 2, "stream": True, "return_token_ids": True, **GREEDY}
    status, content = post(server, "generate/generate_stream", body)
    assert status == 200
    texts = ["", ""]
    for event in events(content):
        rows, pieces = (value if isinstance(value, list) else [value] for value in map(event.get, _ROWS))
        for row, text in zip(rows, pieces, strict=True):
            texts[row] += text
    assert texts == [reference(PROMPT, 24)] * 2
    sampling = {"n": 2, "logit_bias": {"5": 1}, "bad_words": ["the"], "stop_token_ids": [3], **GREEDY}
    status, content = post(
        server, "generate/generate", {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)}
    )
    assert status == 200 and len(json.loads(content)["text_output"]) == 2


def test_answers_in_json(server: TritonServer, over_grpc: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"count": {"type": "integer", "maximum": 99}, "kind": {"enum": ["word", "letter"]}},
        "required": ["count", "kind"],
        "additionalProperties": False,
    }
    structured = json.dumps({"json": schema, "disable_any_whitespace": True})
    given: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 200, "n": 4, "seed": 1, "return_finish_reason": True}
    result = plain(grpc_client, over_grpc, {**given, "structured_outputs": structured})
    for text, reason in zip(result.as_numpy("text_output"), result.as_numpy("finish_reason"), strict=True):
        # A number may have any number of digits.
        assert reason == b"stop" or text.startswith(b'{"count":'), text
        if reason == b"stop":
            answer = json.loads(text)
            assert answer["count"] <= 99 and answer["kind"] in ("word", "letter") and len(answer) == 2
    assert b"stop" in result.as_numpy("finish_reason").tolist()
    with pytest.raises(InferenceServerException, match="structured_outputs json: .*Unsatisfiable schema"):
        plain(grpc_client, over_grpc, {**given, "structured_outputs": '{"json": "false"}'})
    generate_answers.show(generate_answers.generate(over_grpc, PROMPT, n=2, logprobs=2, max_tokens=4), True)


_ROWS = ("choice_index", "text_output")


def test_concurrent_requests_get_the_text_they_get_alone(
    server: TritonServer, over_grpc: Any, reference: Callable[[str, int], str], rests: Callable[..., None]
) -> None:
    rng = random.Random(0)
    prompts = ["".join(rng.choice("abcdefgh .,é東") for _ in range(rng.randint(1, 150))) for _ in range(6)]
    wanted = {prompt: reference(prompt, 20) for prompt in prompts}
    answers: queue.Queue[tuple[str, Any]] = queue.Queue()
    streams = [GrpcStream(server) for _ in range(6)]
    for number in range(48):
        prompt = prompts[number % len(prompts)]
        given = {"text_input": prompt, "temperature": 0.0, "max_tokens": 20}
        if number % 2:
            note = lambda result, error, prompt=prompt: answers.put((prompt, error or result))  # noqa: E731
            over_grpc.async_infer("generate_unary", inputs(grpc_client, given), note)
        elif number < 12:
            options: dict[str, Any] = {"request_id": str(number), "enable_empty_final_response": True}
            streams[number // 2].ask({**given, "stream": True}, **options)
        else:
            answers.put((prompt, post(server, "generate/generate", given)[1]))
    for number, each in enumerate(streams):
        assert "".join(map(text_of, each.until_last())) == wanted[prompts[2 * number % len(prompts)]]
        each.close()
    for _ in range(42):
        prompt, answer = answers.get(timeout=60)
        assert not isinstance(answer, Exception), answer
        message = json.loads(answer)["text_output"] if isinstance(answer, str) else text_of(answer)
        assert message == wanted[prompt]
    rests()


def test_a_seed_gives_the_same_text_beside_any_requests(server: TritonServer, stream: GrpcStream) -> None:
    given = {"text_input": PROMPT, "max_tokens": 40, "seed": 11, "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    alone = json.loads(post(server, "generate/generate", given)[1])["text_output"]
    for number in range(8):
        stream.ask({"text_input": "abc" * (number + 1), "max_tokens": 150, "ignore_eos": True})
    assert json.loads(post(server, "generate/generate", given)[1])["text_output"] == alone
    assert json.loads(post(server, "generate/generate", given | {"seed": 12})[1])["text_output"] != alone
    for _ in range(8):
        stream.results.get(timeout=60)


def test_stop_strings(server: TritonServer, reference: Callable[[str, int], str]) -> None:
    whole = reference(PROMPT, 24)
    stop = whole[len(whole) // 2 :][:3]
    body = {"text_input": PROMPT, **GREEDY, "stop": ["~~~", stop], "return_finish_reason": True}
    answer = json.loads(post(server, "generate/generate", body)[1])
    assert (answer["text_output"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")


# Invalid requests.

TEXT = {"text_input": PROMPT}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"text_input": ""}, "text_input: got ''; at least one character"),
    "prompt beyond the slot": ({"text_input": "東" * LONGEST}, f"text_input: got .*at most {LONGEST - 1}"),
    "no tokens": ({**TEXT, "max_tokens": 0}, "max_tokens: got 0; a whole number at least 1"),
    "fewer than none": ({**TEXT, "max_tokens": -5}, "max_tokens: got -5; a whole number at least 1"),
    "cold": ({**TEXT, "temperature": -0.1}, r"temperature: got -0\.1.*; a number at least 0"),
    "beyond the vocabulary": ({**TEXT, "top_k": 401}, "top_k: got 401; a whole number at least -1 and at most 400"),
    "no share": ({**TEXT, "top_p": 0}, "top_p: got 0.0"),
    "broken JSON": ({**TEXT, "sampling_parameters": '{"top_k": '}, "sampling_parameters: got .*; JSON"),
    "unknown key": ({**TEXT, "sampling_parameters": '{"beams": 2}'}, "sampling_parameters beams: got 2; unknown key"),
    "not a number": ({**TEXT, "sampling_parameters": '{"min_p": NaN}'}, "min_p: got nan"),
    "unknown parameter": ({**TEXT, "nonsense": 1}, "parameter nonsense: got 1; unknown parameter"),
    "stop of nobody": ({"stop_id": "nobody"}, "stop_id: no request 'nobody' waits or runs"),
    "nothing": ({"max_tokens": 3}, "text_input: got None; this input or input_ids is required"),
}


@pytest.fixture
def good_traffic(server: TritonServer, reference: Callable[[str, int], str]) -> Iterator[Callable[[], int]]:
    """Valid requests in the background; a function that waits for two more answers and returns their number so far."""
    served = 0
    wrong: list[object] = []
    stop = threading.Event()
    wanted = reference(PROMPT, 5)

    def work() -> None:
        nonlocal served
        while not stop.is_set():
            status, content = post(server, "generate/generate", {**TEXT, "temperature": 0, "max_tokens": 5})
            if status != 200 or json.loads(content)["text_output"] != wanted:
                wrong.append((status, content))
                return
            served += 1

    def more() -> int:
        before = served
        wait_for(lambda: served >= before + 2 or wrong)
        assert not wrong
        return served

    thread = threading.Thread(target=work)
    thread.start()
    yield more
    stop.set()
    thread.join()


@pytest.mark.parametrize("model", ["generate", "generate_unary"])
def test_invalid_requests_get_errors_and_others_are_served(
    server: TritonServer, good_traffic: Callable[[], int], rests: Callable[..., None], model: str
) -> None:
    for kind, (body, message) in BAD.items():
        status, content = post(server, f"{model}/generate", body)
        assert status in (400, 404), (kind, content)
        assert re.search(message, json.loads(content)["error"]), (kind, content)
        good_traffic()
    assert server.is_running


def test_invalid_utf8(server: TritonServer, over_grpc: Any, stream: GrpcStream) -> None:
    with pytest.raises(InferenceServerException, match="text_input: got .*valid UTF-8") as caught:
        plain(grpc_client, over_grpc, {"text_input": b"\xff\xfe"})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    stream.ask({"text_input": b"\xff"})
    assert "valid UTF-8" in str(stream.results.get(timeout=60))


def test_an_error_of_a_stream_comes_as_an_event(server: TritonServer) -> None:
    status, content = post(server, "generate/generate_stream", {**TEXT, "stream": True, "max_tokens": 0})
    assert status == 400 and events(content) == [{"error": "max_tokens: got 0; a whole number at least 1"}]


# Early ends.


def test_stop_id_ends_a_request(
    server: TritonServer, stream: GrpcStream, over_grpc: Any, gauges: Callable[..., float], rests: Callable[..., None]
) -> None:
    long = {"text_input": PROMPT, "max_tokens": LONGEST, "ignore_eos": True, "return_finish_reason": True}
    stream.ask({**long, "stream": True}, request_id="streamed", enable_empty_final_response=True)
    answers: queue.Queue[Any] = queue.Queue()
    note = lambda result, error: answers.put(error or result)  # noqa: E731
    over_grpc.async_infer("generate_unary", inputs(grpc_client, long), note, request_id="plain")
    wait_for(lambda: gauges("requests_running") == 2)
    for model, name in (("generate", "streamed"), ("generate_unary", "plain")):
        status, content = post(server, f"{model}/generate", {"stop_id": name})
        assert (status, json.loads(content)["text_output"]) == (200, "")
    assert text_of(stream.until_last()[-1]) is not None
    result = answers.get(timeout=60)
    assert result.as_numpy("finish_reason")[0] == b"abort"
    rests()


def test_cancelled_requests_free_their_slots(
    server: TritonServer, over_grpc: Any, gauges: Callable[..., float], rests: Callable[..., None]
) -> None:
    """A cancelled plain call, a closed gRPC stream, and an HTTP stream whose client disconnects."""
    long = {"text_input": PROMPT, "max_tokens": LONGEST, "ignore_eos": True}
    before = gauges("generated_tokens_total")
    call = over_grpc.async_infer("generate_unary", inputs(grpc_client, long), lambda result, error: None)
    stream = GrpcStream(server)
    stream.ask({**long, "stream": True})
    reader = http.client.HTTPConnection(server.http_url, timeout=60)
    reader.request("POST", "/v2/models/generate/generate_stream", json.dumps({**long, "stream": True}))
    assert reader.getresponse().read(50)
    wait_for(lambda: gauges("requests_running") == 3)
    call.cancel()
    stream.close(cancel=True)
    reader.sock.close()
    reader.close()
    rests()
    rests("generate_unary")
    assert gauges("generated_tokens_total") - before < 3 * (LONGEST - 100)
    assert gauges("requests_total", code="CANCELLED") >= 2


def test_a_deadline_ends_the_answer(server: TritonServer, rests: Callable[..., None]) -> None:
    body = {"text_input": PROMPT, "max_tokens": LONGEST, "ignore_eos": True, "return_finish_reason": True}
    status, content = post(server, "generate/generate", {**body, "latency_ms": 400})
    assert status == 200 and json.loads(content)["finish_reason"] == "deadline"
    rests()


def test_a_full_queue_refuses_at_once(
    server: TritonServer, stream: GrpcStream, gauges: Callable[..., float], rests: Callable[..., None]
) -> None:
    long = {"text_input": PROMPT, "max_tokens": 500, "ignore_eos": True}
    for number in range(12):
        stream.ask(long, "narrow", request_id=str(number), enable_empty_final_response=True)
    ends: list[Any] = []
    while len(ends) < 12:
        result = stream.results.get(timeout=60)
        if isinstance(result, Exception) or _is_last(result):
            ends.append(result)
    refused = [end for end in ends if isinstance(end, Exception)]
    # One runs and two wait. How many more get in once one has ended depends on the machine.
    assert refused
    assert all("queue_requests: 2 requests wait, 1 more would exceed 2; retry later" in str(error) for error in refused)
    rests("narrow")
    assert gauges("requests_total", "narrow", code="UNAVAILABLE") == len(refused)


# The example client.


@pytest.mark.parametrize("model", ["generate", "generate_unary"])
def test_the_load_test_measures_it(server: TritonServer, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests=8", "--tokens=3", "--concurrency=2", f"--build={BUILD}"]
    assert loadtest.main([f"--url={server.grpc_url}", f"--model={model}", *options]) == 0
    said = capsys.readouterr().out
    assert re.search(r"concurrency +2: +[\d.]+ requests/s", said)
    assert ("first response ms" in said) == (model == "generate")


def test_the_example_retries_and_ends_unfinished_requests(
    server: TritonServer, stream: GrpcStream, reference: Callable[[str, int], str], rests: Callable[..., None]
) -> None:
    from client import generate_grpc

    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        pieces = list(generate_grpc.generate(client, PROMPT, max_tokens=100, temperature=0.0))
        assert "".join(pieces) == reference(PROMPT, 100) and len(pieces) > 1
        with pytest.raises(InferenceServerException, match="max_tokens: got 0") as caught:
            list(generate_grpc.generate(client, PROMPT, max_tokens=0))
        assert caught.value.message().startswith("[INVALID_ARG] ")
        unfinished = generate_grpc.generate(client, PROMPT, max_tokens=LONGEST, ignore_eos=True)
        next(unfinished)
        unfinished.close()
        rests()


# Metrics.


def test_metrics(server: TritonServer, gauges: Callable[..., float], rests: Callable[..., None]) -> None:
    rests()
    names = ("generated_tokens_total", "iteration_ms_count", "first_token_ms_count", "between_tokens_ms_count")
    before = [gauges(name) for name in names]
    assert post(server, "generate/generate", {"text_input": PROMPT, "max_tokens": 30, "ignore_eos": True})[0] == 200
    rests()
    assert [gauges(name) - old for name, old in zip(names, before, strict=True)] == [30, 30, 1, 29]
    assert gauges("slots") == 32
    assert gauges("iteration_part_ms_total", part="model") > 0


# Loading and unloading.


@pytest.fixture(scope="module")
def control(server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(server.grpc_url, server.key) as connection:
        yield connection


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_concurrency": "4096", "memory_mb": "100"}, r"max_concurrency: got 4096; at most \d+ with max_length"),
        ({"checkpoint_sha256": "0" * 64}, "has changed; run `shapeshift engines`"),
    ],
)
def test_an_invalid_model_is_not_loaded(
    server: TritonServer, control: ModelControl, parameters: dict[str, str], message: str
) -> None:
    repository = server.settings.repositories[0]
    config = model_config.read(repository / "generate" / "config.pbtxt")
    name = f"bad_{len(list(repository.iterdir()))}"
    config.name = name
    for key, value in parameters.items():
        model_config.set_parameter(config, key, value)
    # With the tokenizer.
    shutil.copytree(repository / "generate" / "1", repository / name / "1")
    model_config.write(config, repository / name / "config.pbtxt")
    with pytest.raises(EngineError, match=message):
        control.load(name)
    assert not control.is_ready(name) and control.is_ready("generate")


def test_unloading_completes_running_requests(
    server: TritonServer, control: ModelControl, publish: Callable[..., Path]
) -> None:
    publish("brief")
    control.load("brief")
    stream = GrpcStream(server)
    given = {"text_input": PROMPT, "max_tokens": 1500, "ignore_eos": True, "return_num_output_tokens": True}
    stream.ask({**given, "stream": True}, "brief", enable_empty_final_response=True)
    results = [stream.results.get(timeout=60)]
    control.unload("brief")
    results += stream.until_last()
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 1500
    # The server keeps a model while a stream that has used it is open.
    stream.close()
    control.wait_unloaded("brief")


def ranks() -> list[int]:
    """The processes of further ranks below this one."""
    command = b"shapeshift.fused_decode.rank\0"
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            found += [pid] if command in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


@pytest.mark.kills
def test_a_model_on_two_processes(
    server: TritonServer, control: ModelControl, publish: Callable[..., Path], reference: Callable[[str, int], str]
) -> None:
    """A rank that is killed costs the running request; unloading ends the ranks."""
    publish("split", tensor_parallel_size=2)
    control.load("split")
    body = {"text_input": PROMPT, **GREEDY}
    assert json.loads(post(server, "split/generate", body)[1])["text_output"] == reference(PROMPT, 24)
    stream = GrpcStream(server)
    endless = {"text_input": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    stream.ask(endless, "split", enable_empty_final_response=True)
    stream.results.get(timeout=60)
    (killed,) = ranks()
    os.kill(killed, signal.SIGKILL)
    while not isinstance(result := stream.results.get(timeout=60), Exception):
        pass
    assert f"rank 1 (pid {killed}) has ended with -9" in str(result)
    assert json.loads(post(server, "split/generate", body)[1])["text_output"] == reference(PROMPT, 24)
    assert len(ranks()) == 1 and ranks() != [killed]
    stream.close()
    control.unload("split")
    control.wait_unloaded("split")
    wait_for(lambda: not ranks())
