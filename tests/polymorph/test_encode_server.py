"""The `encode` front in a real Triton, with its real engines."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from shapeshift.engines import manifest
from shapeshift.engines.verify import compare
from shapeshift.errors import EngineError
from shapeshift.triton import model_config
from shapeshift.triton.control import ModelControl
from shapeshift.workloads.text import TextMaker
from tests import precision

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from shapeshift.triton.embedded.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

# Around the edges of powers of two, where static engines begin and end.
LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 48, 56, 63, 64, 65, 80, 96, 100]
LENGTHS += [120, 127, 128, 129, 150, 182, 192, 200, 230, 255, 256, 257, 300, 333, 384, 430, 500, 511]
ODD_TEXTS = [
    " ",
    "\u00a0\t\n",
    "a",
    "!?",
    "E = mc\u00b2; \u00bd \u2260 \u00bc",
    "Der Käse, größer als Übermut",
    "cafe\u0301 versus caf\u00e9",
    "東京は日本の首都です。",
    "Москва слезам не верит",
    "مرحبا بالعالم",
    "🙂🙃 👩‍👩‍👧‍👦 🇫🇷",
    "\u200b\ufeffzero width\u00ad",
    "control \x07 and nul \x00 characters",
    "x" * 300,
    "a " * 510,
]
SLOW = "encode_slow"


@pytest.fixture(scope="module")
def reference(demo_checkpoint: Path) -> SentenceTransformer:
    """The checkpoint as sentence-transformers runs it, for texts of up to 512 tokens."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(demo_checkpoint), device="cpu")
    model.max_seq_length = 512
    return model


@pytest.fixture(scope="module")
def texts(reference: SentenceTransformer) -> list[str]:
    """About 60 texts of 2 to 512 tokens."""
    maker = TextMaker(np.random.default_rng(5), lambda text: len(ids_of(reference, text)))
    made = [*ODD_TEXTS, *(maker.text(length) for length in LENGTHS)]
    lengths = sorted(len(ids_of(reference, text)) for text in made)
    assert lengths[0] == 2 and lengths[-1] == 512 and len(set(lengths)) > 40
    return made


@pytest.fixture(scope="module")
def vectors(reference: SentenceTransformer, texts: list[str]) -> np.ndarray:
    """The reference's vector of each of `texts`, computed alone."""
    return np.stack([reference.encode(text) for text in texts])


@pytest.fixture(scope="module")
def min_cosine(encode_server: TritonServer) -> float:
    """What the served precision promises of every vector."""
    return precision.least_cosine_with_reference(encode_server.settings.repositories[0], "encode")


@pytest.fixture(scope="module")
def over_grpc(encode_server: TritonServer) -> Iterator[Any]:
    with grpc_client.InferenceServerClient(encode_server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def control(encode_server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(encode_server.grpc_url, encode_server.key) as connection:
        yield connection


def ids_of(reference: SentenceTransformer, text: str) -> list[int]:
    return list(reference.tokenizer(text)["input_ids"])


def text_input(client: Any, texts: Sequence[str]) -> list[Any]:
    tensor = client.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=object))
    return [tensor]


def ids_input(client: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    length = max(map(len, rows))
    arrays = {
        "INPUT_IDS": np.array([[*row, *[0] * (length - len(row))] for row in rows], dtype=np.int64),
        "ATTENTION_MASK": np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], dtype=np.int64),
    }
    made = []
    for name, values in arrays.items():
        made.append(client.InferInput(name, values.shape, "INT64"))
        made[-1].set_data_from_numpy(values)
    return made


def post(server: TritonServer, body: dict[str, Any], model: str = "encode") -> tuple[int, dict[str, Any]]:
    """Status and body of one JSON request over a connection of its own."""
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def json_text(*texts: str) -> dict[str, Any]:
    return {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": list(texts)}


def json_ids(ids: list[int], mask: list[int], rows: int = 1) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": [rows, len(values) // rows], "datatype": "INT64", "data": values}
        for name, values in (("INPUT_IDS", ids), ("ATTENTION_MASK", mask))
    ]


def assert_near(got: np.ndarray, wanted: np.ndarray, min_cosine: float) -> None:
    """Every row on its own, by direction and by length."""
    assert got.shape == wanted.shape
    assert got.dtype == np.float32
    assert compare(got, wanted).min_cosine >= min_cosine
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=2e-3)


# Right answers.


def test_every_text_alone(over_grpc: Any, texts: list[str], vectors: np.ndarray, min_cosine: float) -> None:
    got = [over_grpc.infer("encode", text_input(grpc_client, [text])).as_numpy("EMBEDDING") for text in texts]
    assert_near(np.concatenate(got), vectors, min_cosine)


def test_the_model_says_what_it_is(encode_server: TritonServer, over_grpc: Any) -> None:
    # Triton's Python backend wants an input of a model with a batch axis; its value is not read.
    wanted = [grpc_client.InferRequestedOutput("DESCRIPTION")]
    answer = over_grpc.infer("encode", text_input(grpc_client, [""]), outputs=wanted, client_timeout=60)
    (told,) = answer.as_numpy("DESCRIPTION")[0]
    status, body = post(encode_server, {"inputs": [json_text("")], "outputs": [{"name": "DESCRIPTION"}]})
    assert status == 200 and body["outputs"][0]["data"] == [told.decode()]
    found = json.loads(told)
    assert found["kind"] == "embedding" and found["checkpoint"] == "all-MiniLM-L6-v2"
    assert (found["model"], found["version"], found["embedding_size"]) == ("encode", "1", 384)
    status, body = post(encode_server, {"inputs": []})
    assert status == 400 and "request has 0 inputs" in body["error"]


def test_every_text_as_ids_over_http(
    encode_server: TritonServer,
    reference: SentenceTransformer,
    texts: list[str],
    vectors: np.ndarray,
    min_cosine: float,
) -> None:
    with http_client.InferenceServerClient(encode_server.http_url) as client:
        got = [
            client.infer("encode", ids_input(http_client, [ids_of(reference, text)])).as_numpy("EMBEDDING")
            for text in texts
        ]
    assert_near(np.concatenate(got), vectors, min_cosine)


def test_all_texts_in_one_batch_over_json(
    encode_server: TritonServer, texts: list[str], vectors: np.ndarray, min_cosine: float
) -> None:
    status, body = post(encode_server, {"inputs": [json_text(*texts)]})
    assert status == 200, body
    (output,) = body["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("EMBEDDING", "FP32", [len(texts), 384])
    assert_near(np.array(output["data"], np.float32).reshape(len(texts), 384), vectors, min_cosine)


def test_padded_ids_in_one_batch(
    over_grpc: Any, reference: SentenceTransformer, texts: list[str], vectors: np.ndarray, min_cosine: float
) -> None:
    short = [index for index, text in enumerate(texts) if len(ids_of(reference, text)) <= 128]
    rows = [ids_of(reference, texts[index]) for index in short]
    got = over_grpc.infer("encode", ids_input(grpc_client, rows)).as_numpy("EMBEDDING")
    assert_near(got, vectors[short], min_cosine)


def test_a_row_of_one_token(over_grpc: Any, reference: SentenceTransformer, min_cosine: float) -> None:
    import torch

    rows = [[101], [102], [7592]]
    alone = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)} for row in rows]
    with torch.inference_mode():
        wanted = np.concatenate([reference(features)["sentence_embedding"].numpy() for features in alone])
    got = over_grpc.infer("encode", ids_input(grpc_client, rows)).as_numpy("EMBEDDING")
    assert_near(got, wanted, min_cosine)


def test_texts_that_share_an_engine_call_do_not_affect_each_other(
    over_grpc: Any,
    flushed: Callable[..., Callable[..., float]],
    texts: list[str],
    vectors: np.ndarray,
    min_cosine: float,
) -> None:
    """All texts at once, as requests of one to three texts in random order, so that they share calls."""
    order = random.Random(3).sample(range(len(texts)), len(texts))
    parts: list[list[int]] = []
    while order:
        size = 1 + len(parts) % 3
        parts.append(order[:size])
        order = order[size:]
    before = flushed()
    answers: dict[int, Any] = {}
    done = threading.Semaphore(0)
    for number, part in enumerate(parts):

        def note(result: Any, error: Any, number: int = number) -> None:
            answers[number] = error or result.as_numpy("EMBEDDING")
            done.release()

        over_grpc.async_infer("encode", text_input(grpc_client, [texts[index] for index in part]), note)
    for _ in parts:
        assert done.acquire(timeout=120)
    got = np.empty_like(vectors)
    for number, part in enumerate(parts):
        assert isinstance(answers[number], np.ndarray), answers[number]
        got[part] = answers[number]
    assert_near(got, vectors, min_cosine)
    after = flushed()
    rows = after("shapeshift_engine_rows_total") - before("shapeshift_engine_rows_total")
    calls = after("shapeshift_engine_calls_total") - before("shapeshift_engine_calls_total")
    assert rows == len(texts)
    assert calls < rows


def test_truncate_keeps_what_the_reference_keeps(
    over_grpc: Any, reference: SentenceTransformer, min_cosine: float
) -> None:
    long = "the long way home is never the same twice " * 200
    answer = over_grpc.infer("encode", text_input(grpc_client, [long]), parameters={"truncate": True})
    assert_near(answer.as_numpy("EMBEDDING"), reference.encode([long]), min_cosine)


# Wrong questions.

TEXT = json_text("a fine text")
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "wrong type": ({"inputs": [TEXT | {"datatype": "FP32", "data": [1.0]}]}, ["TEXT", "FP32", "expects 'BYTES'"]),
    "wrong type of ids": (
        {"inputs": [json_ids([101, 102], [1, 1])[0] | {"datatype": "INT32"}, json_ids([101, 102], [1, 1])[1]]},
        ["INPUT_IDS", "INT32", "expects 'INT64'"],
    ),
    "wrong shape": ({"inputs": [TEXT | {"shape": [1, 2], "data": ["a", "b"]}]}, ["TEXT", r"\[1,2\]", r"\[-1,1\]"]),
    "no batch axis": ({"inputs": [TEXT | {"shape": [1]}]}, ["TEXT", r"got \[1\]", r"\[-1,1\]"]),
    "too many rows": ({"inputs": [json_text(*["a"] * 65)]}, ["batch-size must be <= 64"]),
    "empty text": ({"inputs": [json_text("a", "b", "")]}, ["row 2", "TEXT", "''", "at least one character"]),
    "no text": ({"inputs": json_ids([101], [1])[1:]}, ["inputs", "'none'", "TEXT, or INPUT_IDS with ATTENTION_MASK"]),
    "ids without mask": ({"inputs": json_ids([101], [1])[:1]}, ["ATTENTION_MASK", "None", "beside INPUT_IDS"]),
    "both kinds": ({"inputs": [TEXT, *json_ids([101, 102], [1, 1])]}, ["inputs", "TEXT and INPUT_IDS", "not both"]),
    "id too large": (
        {"inputs": json_ids([101, 102, 101, 30522], [1] * 4, rows=2)},
        ["row 1", "INPUT_IDS", "30522", "0 to 30521"],
    ),
    "id below 0": ({"inputs": json_ids([101, -1], [1, 1])}, ["row 0", "INPUT_IDS", "-1", "0 to 30521"]),
    "too many ids": ({"inputs": json_ids([101] * 513, [1] * 513)}, ["row 0", "INPUT_IDS", "513", "at most 512"]),
    "too long": ({"inputs": [json_text("a", "word " * 511)]}, ["row 1", "TEXT", "513 tokens", "at most 512"]),
    "far too long": ({"inputs": [json_text("x" * 70_000)]}, ["row 0", "TEXT", "70000 bytes", "at most 65536"]),
    "mask with holes": (
        {"inputs": json_ids([101, 7592, 102], [1, 0, 1])},
        ["row 0", "ATTENTION_MASK", r"\[1, 0, 1\]", "ones, then zeros"],
    ),
    "mask of zeros": ({"inputs": json_ids([101, 102], [0, 0])}, ["row 0", "ATTENTION_MASK", "at least one token"]),
    "mask of another shape": (
        {"inputs": [json_ids([101, 102], [1])[0], json_ids([101, 102], [1])[1]]},
        ["ATTENTION_MASK", r"\[1, 1\]", r"\[1, 2\]"],
    ),
    "unknown parameter": (
        {"inputs": [TEXT], "parameters": {"latency": 3}},
        ["parameter latency", "got 3", "checkpoint, latency_ms"],
    ),
    "bad parameter": ({"inputs": [TEXT], "parameters": {"latency_ms": -3}}, ["latency_ms", "got -3", "above 0"]),
    "unknown output": ({"inputs": [TEXT], "outputs": [{"name": "LOGITS"}]}, ["LOGITS", "encode"]),
}


@pytest.fixture
def good_traffic(encode_server: TritonServer) -> Iterator[Callable[[], tuple[int, list[Any]]]]:
    """Good requests all the while; a function that gives how many were served, and everything that went wrong."""
    served = 0
    wrong: list[Any] = []
    stop = threading.Event()

    def work() -> None:
        nonlocal served
        with grpc_client.InferenceServerClient(encode_server.grpc_url) as client:
            while not stop.wait(0.002):
                try:
                    answer = client.infer("encode", text_input(grpc_client, ["all is well", "and stays so"]))
                    assert answer.as_numpy("EMBEDDING").shape == (2, 384)
                    served += 1
                except Exception as error:  # noqa: BLE001  the test must see it
                    wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda: (served, wrong)
    stop.set()
    thread.join()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_names_what_is_wrong_and_others_are_served(
    encode_server: TritonServer, good_traffic: Callable[[], tuple[int, list[Any]]], kind: str
) -> None:
    body, said = BAD[kind]
    pid = encode_server.pid
    before, _ = good_traffic()
    status, answer = post(encode_server, body)
    assert status == 400, answer
    for part in said:
        assert re.search(part, answer["error"]), answer["error"]
    deadline = time.monotonic() + 120
    while good_traffic()[0] < before + 2:
        assert time.monotonic() < deadline, "good requests are no longer served"
        time.sleep(0.002)
    assert good_traffic()[1] == []
    assert encode_server.is_running and encode_server.pid == pid


def test_errors_have_their_code_over_grpc(over_grpc: Any) -> None:
    with pytest.raises(InferenceServerException, match="row 1: TEXT: got ''") as caught:
        over_grpc.infer("encode", text_input(grpc_client, ["a", ""]))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


# What is counted.


def test_metrics_count_what_was_served(over_grpc: Any, flushed: Callable[..., Callable[..., float]]) -> None:
    before = flushed()
    over_grpc.infer("encode", ids_input(grpc_client, [[101] * 12, [101] * 16, [101] * 17]))
    with pytest.raises(InferenceServerException):
        over_grpc.infer("encode", ids_input(grpc_client, [[-1]]))
    after = flushed()

    def grown(name: str, **labels: str) -> float:
        return after(f"shapeshift_{name}", **labels) - before(f"shapeshift_{name}", **labels)

    buckets = {le: grown("request_tokens_bucket", le=le) for le in ("8", "16", "24", "512", "+Inf")}
    assert buckets == {"8": 0, "16": 2, "24": 3, "512": 3, "+Inf": 3}
    assert grown("request_tokens_sum") == 45
    assert grown("request_tokens_count") == 3
    assert grown("requests_total", code="OK") == 1
    assert grown("requests_total", code="INVALID_ARG") == 1
    assert grown("requests_total") == 2
    assert grown("request_latency_ms_count") == grown("request_latency_ms_bucket", le="+Inf") == 1
    assert grown("request_latency_ms_sum") > 0
    assert grown("engine_rows_total") == 3
    assert 1 <= grown("engine_calls_total") <= 3
    assert grown("heartbeat_total") >= 2
    assert after("shapeshift_requests_waiting") == after("shapeshift_requests_running") == 0


# Overload, with engines that only wait.


@pytest.fixture
def slow(
    encode_server: TritonServer,
    control: ModelControl,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
    tmp_path: Path,
) -> Iterator[str]:
    """A model that computes one text at a time, each for 100 ms, and lets two wait."""
    generated = encode_server.settings.repositories[1]
    if not (generated / SLOW).is_dir():
        own = {"packing": False, "engine_threads": 1, "queue_rows": 2, "max_queue_ms": 0, "max_bins": 1}
        add_front(tmp_path / "model_repository", SLOW, latency_ms=(100, 100), **own)
        assert build_fronts(tmp_path / "model_repository", generated.parent) == generated
    control.load(SLOW)
    yield SLOW
    control.unload(SLOW)
    control.wait_unloaded(SLOW)


class Call:
    """One gRPC request of so many texts, sent when it is made."""

    def __init__(self, client: Any, model: str, rows: int) -> None:
        self._answer: Any = None
        self._done = threading.Event()
        self.call = client.async_infer(model, text_input(grpc_client, ["a"] * rows), self._note)

    def result(self) -> Any:
        """The outputs, or the error."""
        assert self._done.wait(120)
        return self._answer

    def _note(self, result: Any, error: Any) -> None:
        self._answer = error or result.as_numpy("EMBEDDING")
        self._done.set()


def wait_until_waiting(flushed: Callable[..., Callable[..., float]], model: str) -> None:
    """Wait until the gauges show it: one text runs, others wait."""
    deadline = time.monotonic() + 120
    while True:
        total = flushed(model, beats=0)
        if total("shapeshift_requests_waiting") > 0 and total("shapeshift_requests_running") == 1:
            return
        assert time.monotonic() < deadline, "no request waits"
        time.sleep(0.05)


def test_a_full_queue_refuses_at_once_and_the_rest_is_served(
    encode_server: TritonServer, over_grpc: Any, flushed: Callable[..., Callable[..., float]], slow: str
) -> None:
    # An empty queue takes any request; what waits of this one then fills it.
    long = Call(over_grpc, slow, 40)
    wait_until_waiting(flushed, slow)
    status, body = post(encode_server, {"inputs": [json_text("one more")]}, slow)
    assert status == 503
    assert re.search(r"queue_rows: \d+ rows wait, 1 more would exceed 2; retry later", body["error"])
    with pytest.raises(InferenceServerException, match="queue_rows: ") as caught:
        over_grpc.infer(slow, text_input(grpc_client, ["one more"]))
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert post(encode_server, {"inputs": [TEXT]})[0] == 200
    assert long.result().shape == (40, 8)
    after = flushed(slow)
    assert after("shapeshift_requests_total", code="UNAVAILABLE") == 2
    assert after("shapeshift_requests_total", code="OK") == 1
    assert after("shapeshift_requests_waiting") == after("shapeshift_requests_running") == 0


def test_a_cancelled_request_leaves_the_queue(
    over_grpc: Any, flushed: Callable[..., Callable[..., float]], slow: str
) -> None:
    long = Call(over_grpc, slow, 64)
    wait_until_waiting(flushed, slow)
    long.call.cancel()
    deadline = time.monotonic() + 120
    while (after := flushed(slow, beats=0))("shapeshift_requests_total", code="CANCELLED") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert flushed(slow)("shapeshift_requests_waiting") == 0
    assert after("shapeshift_engine_rows_total") < 64
    assert isinstance(long.result(), InferenceServerException)


def test_unloading_serves_accepted_requests(
    over_grpc: Any, control: ModelControl, flushed: Callable[..., Callable[..., float]], slow: str
) -> None:
    long = Call(over_grpc, slow, 40)
    wait_until_waiting(flushed, slow)
    control.unload(slow)
    assert long.result().shape == (40, 8)


# Engines that are not what the config says.


def other_manifest(engines: Path) -> None:
    _replace(engines / "manifest.json", lambda content: content + b"\n")


def cut_engine(engines: Path) -> None:
    largest = max(engines.iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("rb") as stream:
        start = stream.read(1_000_000)
    largest.unlink()
    largest.write_bytes(start)


def _replace(link: Path, change: Callable[[bytes], bytes]) -> None:
    content = link.read_bytes()
    link.unlink()
    link.write_bytes(change(content))


@pytest.mark.parametrize(
    ("damage", "parameters", "said"),
    [
        (cut_engine, {}, r"engine file .*: 1000000 bytes, \d+ in the manifest; run `shapeshift engines`"),
        (other_manifest, {}, "is not the one that the model's config names; run `shapeshift engines`"),
        (None, {"checkpoint_sha256": "0" * 64}, "come from another checkpoint; run `shapeshift engines`"),
        (None, {"queue_row": "5"}, "queue_row: .*unknown parameter; did you mean queue_rows. known: "),
    ],
)
def test_a_model_with_changed_files_is_not_loaded(
    encode_server: TritonServer,
    control: ModelControl,
    damage: Callable[[Path], None] | None,
    parameters: dict[str, str],
    said: str,
) -> None:
    good, repository = encode_server.settings.repositories
    name = f"damaged_{len(list(repository.iterdir()))}"
    config = model_config.read(good / "encode" / "config.pbtxt")
    source = (good / "encode" / model_config.parameters(config)["engines"]).resolve()
    engines = repository.parent / "engines" / name
    engines.mkdir(parents=True)
    for file in source.iterdir():
        (engines / file.name).symlink_to(file)
    if damage is not None:
        damage(engines)
    config.name = name
    for key, value in {"engines": f"../../engines/{name}", **parameters}.items():
        model_config.set_parameter(config, key, value)
    (repository / name / "1").mkdir(parents=True)
    model_config.write(config, repository / name / "config.pbtxt")
    with pytest.raises(EngineError, match=said):
        control.load(name)
    assert not control.is_ready(name)
    manifest.load(source).check_files(source)
    assert control.is_ready("encode") and post(encode_server, {"inputs": [TEXT]})[0] == 200
