"""Malformed requests for the `encode` front, made from a seed, and a run that sends them.

Every case is malformed by construction: whatever the server does with it, serving it would be wrong. Against
a server that is already running:

    python -m tests.fuzz.encode --http 127.0.0.1:8000 --grpc 127.0.0.1:8001 --count 10000

Left out is what Triton 24.10 itself gets wrong before a backend sees the request. It reads names up to a NUL
character and ignores surplus `raw_input_contents`; and over HTTP two kinds of JSON end it: a tensor of a
fixed-size type whose shape claims terabytes, and a body nested about 100,000 deep.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import select
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

MODEL = "encode"
VOCABULARY = 30522
MAX_TOKENS = 512
MAX_ROWS = 64
TIMEOUT_S = 20.0
_HTTP_SHARE = 0.6
_LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpCase:
    """A request as it goes over the wire."""

    kind: str
    body: bytes
    path: str = f"/v2/models/{MODEL}/infer"
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class GrpcCase:
    """A serialised ModelInferRequest, or bytes that are none."""

    kind: str
    message: bytes


Case = HttpCase | GrpcCase


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` malformed requests; the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        makers: Sequence[Callable[[random.Random], Case]] = _HTTP if rng.random() < _HTTP_SHARE else _GRPC
        yield rng.choice(makers)(rng)


@dataclass
class Outcome:
    """What a run saw, by kind of case."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    served: list[Case] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0

    def note(self, case: Case, status: str) -> None:
        """Count one answer."""
        self.statuses.setdefault(case.kind, Counter())[status] += 1
        self.sent += 1
        if status in ("200", "OK"):
            self.served.append(case)

    def table(self) -> str:
        """One line a kind."""
        lines = [
            f"{kind:28} {', '.join(f'{status} x {n}' for status, n in seen.most_common())}"
            for kind, seen in sorted(self.statuses.items())
        ]
        ends = (
            f"{self.sent} sent in {self.seconds:.1f} s: {len(self.served)} served, "
            f"{len(self.unanswered)} unanswered, {len(self.surplus)} with more than one answer"
        )
        return "\n".join([*lines, ends])


def run(
    http_url: str, grpc_url: str, count: int, seed: int = 0, connections: int = 4, limit_s: float = 600.0
) -> Outcome:
    """Send `count` malformed requests over `connections` connections of each kind, at most `limit_s` seconds.

    Every answer is read before the next request goes out on the same connection.
    """
    waiting = cases(seed, count)
    outcome = Outcome()
    lock = threading.Lock()
    start = time.monotonic()

    def work() -> None:
        over_http = _Http(http_url)
        with grpc.insecure_channel(grpc_url, [("grpc.enable_http_proxy", 0)]) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            while time.monotonic() - start < limit_s:
                with lock:
                    case = next(waiting, None)
                if case is None:
                    break
                status, surplus = over_http.ask(case) if isinstance(case, HttpCase) else _ask_grpc(infer, case)
                with lock:
                    outcome.note(case, status)
                    if status == "none":
                        outcome.unanswered.append(case.kind)
                    if surplus:
                        outcome.surplus.append(case.kind)
        over_http.close()

    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.monotonic() - start
    return outcome


class _Http:
    """One keep-alive connection, opened again when the server closes it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)

    def ask(self, case: HttpCase) -> tuple[str, bool]:
        """The status, and whether more came than one answer; `none` without an answer, `closed` without words."""
        connection = self._connection
        fresh = connection.sock is None
        try:
            connection.putrequest(case.method, case.path, skip_accept_encoding=True)
            for name, value in case.headers:
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(case.body)))
            connection.endheaders(case.body)
            answer = connection.getresponse()
            answer.read()
        except TimeoutError:
            connection.close()
            return "none", False
        except (OSError, http.client.HTTPException):
            connection.close()
            # A kept connection may have been closed before this request; only on a new one was it refused.
            return ("closed", False) if fresh else self.ask(case)
        surplus = connection.sock is not None and self._has_more(connection.sock)
        return str(answer.status), surplus

    def close(self) -> None:
        self._connection.close()

    def _has_more(self, sock: Any) -> bool:
        if not select.select([sock], [], [], 0)[0]:
            return False
        more = bool(sock.recv(1))
        self._connection.close()
        return more


def _ask_grpc(infer: Any, case: GrpcCase) -> tuple[str, bool]:
    try:
        infer(case.message, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        code = error.code()
        return ("none" if code is grpc.StatusCode.DEADLINE_EXCEEDED else code.name), False
    return "OK", False


# What goes wrong, in values.

_WRONG_TYPES = ["FP32", "INT32", "UINT64", "BOOL", "FP16", "BF16", "INT8", "FOO", "", "bytes", "x" * 5000]
_WRONG_SHAPES: list[Any] = [
    [],
    [1],
    [1, 2],
    [2, 1],
    [0, 1],
    [1, 0],
    [1, 1, 1],
    [-1, 1],
    [1, -1],
    [MAX_ROWS + 1, 1],
    [1] * 100,
]
_HUGE_SHAPES: list[Any] = [[2**31, 2**31], [2**62, 4], [1, 2**40], [2**63 - 1, 1], [-(2**63), 1]]
_JSON_SHAPES: list[Any] = [
    *_WRONG_SHAPES,
    [1.5, 1],
    ["1", 1],
    [None, 1],
    [[1], 1],
    None,
    "1,1",
    {},
    1,
    [2**64, 1],
    [1e300, 1],
]
_WRONG_TEXT_DATA: list[Any] = [
    [],
    [1],
    [None],
    [True],
    [1.5],
    [{}],
    [{"b64": "!!not base64!!"}],
    [["a", "b"]],
    ["a", "b"],
    "a",
    None,
    {},
    [[[]]],
    [""],
]
_WRONG_ID_DATA: list[Any] = [
    [-1, 102],
    [101, VOCABULARY],
    [101, 2**63 - 1],
    [101, -(2**63)],
    [101, 2**64],
    [101, 1e30],
    [101, 1.5],
    [101, "102"],
    [101, None],
    [101, True],
    [101],
    [101, 102, 103],
    [[101], [102]] * 2,
    None,
    {"b64": "AAAA"},
]
_WRONG_MASKS = [[0, 0], [0, 1], [2, 1], [-1, 1], [1, 2], [2**62, -(2**62)], [1, -1]]
_WRONG_PARAMETERS: list[dict[str, Any]] = [
    {"latency_ms": -1},
    {"latency_ms": 0},
    {"latency_ms": "soon"},
    {"latency_ms": "nan"},
    {"latency_ms": "inf"},
    {"latency_ms": True},
    {"latency_ms": ""},
    {"utility": "much"},
    {"utility": "-inf"},
    {"truncate": 1},
    {"truncate": "yes"},
    {"truncate": ""},
    {"slo_class": ""},
    {"slo_class": 3},
    {"request_tag": "t" * 257},
    {"request_tag": False},
    {"task": "a"},
    {"lora_name": "../../etc/passwd"},
    {"level": 1},
    {"no_such_parameter": 1},
    {"": 1},
    {"n" * 3000: "x"},
    {"\u0000": 1},
]
_JSON_PARAMETERS: list[Any] = [
    *_WRONG_PARAMETERS,
    {"latency_ms": None},
    {"latency_ms": []},
    {"truncate": {}},
    [1],
    "x",
    3,
]
_INVALID_UTF8 = [
    b"\xff",
    b"\xc3",
    b"\xc3\x28",
    b"\xa0\xa1",
    b"\xed\xa0\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xc0\xaf",
    b"ok \xf0\x9f\x98",
]


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(("river", "engine", "Köln", "東京", "🙂", "a", "42")) for _ in range(rng.randint(1, 6)))


def _text(rng: random.Random) -> dict[str, Any]:
    return {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [_words(rng)]}


def _ids(data: Any = (101, 102), mask: Any = (1, 1), shape: Any = (1, 2)) -> list[dict[str, Any]]:
    return [
        {"name": "INPUT_IDS", "shape": shape, "datatype": "INT64", "data": data},
        {"name": "ATTENTION_MASK", "shape": shape, "datatype": "INT64", "data": mask},
    ]


def _post(kind: str, *inputs: Any, **others: Any) -> HttpCase:
    return HttpCase(kind, json.dumps({"inputs": list(inputs), **others}).encode())


# Over HTTP.


def _random_bytes(rng: random.Random) -> Case:
    return HttpCase("bytes", b"\x00" + rng.randbytes(rng.randint(0, 400)))


def _random_json(rng: random.Random) -> Case:
    """Any JSON but an object with inputs."""

    def value(depth: int) -> Any:
        pick = rng.randrange(8 if depth else 5)
        if pick < 5:
            return (None, rng.random() < 0.5, rng.randint(-(2**70), 2**70), rng.random() * 1e300, _words(rng))[pick]
        if pick == 5:
            return {_words(rng): value(depth - 1) for _ in range(rng.randint(0, 4))}
        if pick == 6:
            return {rng.choice(("id", "parameters", "outputs")): value(depth - 1)}
        return [value(depth - 1) for _ in range(rng.randint(0, 4))]

    return HttpCase("json", json.dumps(value(4)).encode())


def _nested(rng: random.Random) -> Case:
    depth = rng.randint(2, 200)
    return HttpCase("json nested", b'{"inputs":' + b"[" * depth + b"]" * depth + b"}")


def _truncated(rng: random.Random) -> Case:
    body = json.dumps({"inputs": [_text(rng)]}).encode()
    return HttpCase("json cut short", body[: rng.randrange(len(body))])


def _not_a_number(rng: random.Random) -> Case:
    word = rng.choice(
        ("NaN", "Infinity", "-Infinity", "nan", "1e", "0x10", "01", "+1", "--1", "1.", "'a'", "undefined")
    )
    inputs = json.dumps({"inputs": _ids([7777, 102])})
    return HttpCase("json not a number", inputs.replace("7777", word).encode())


def _inputs_of_wrong_kind(rng: random.Random) -> Case:
    text = _text(rng)
    wrong: list[Any] = [[], {}, None, "TEXT", 1, [1], ["TEXT"], [None], [[text]], text, [text, 5]]
    return HttpCase("inputs", json.dumps({"inputs": rng.choice(wrong)}).encode())


def _missing_member(rng: random.Random) -> Case:
    text = _text(rng)
    del text[rng.choice(list(text))]
    return _post("member missing", text)


def _wrong_name(rng: random.Random) -> Case:
    name: object = rng.choice(("text", "", "TEXT ", "EMBEDDING", "x" * 3000, "../TEXT", 5, None, []))
    return _post("input name", _text(rng) | {"name": name})


def _wrong_type(rng: random.Random) -> Case:
    wrong: object = rng.choice((*_WRONG_TYPES, 5, None, []))
    if rng.random() < 0.5:
        return _post("datatype", _text(rng) | {"datatype": wrong})
    ids, mask = _ids()
    return _post("datatype", ids | {"datatype": wrong}, mask)


def _wrong_shape(rng: random.Random) -> Case:
    if rng.random() < 0.5:
        return _post("shape", _text(rng) | {"shape": rng.choice(_JSON_SHAPES + _HUGE_SHAPES)})
    shape = rng.choice(_JSON_SHAPES)
    ids, mask = _ids()
    return _post("shape", *((ids | {"shape": shape}, mask) if shape != [1, 2] else (ids, mask | {"shape": [1, 1]})))


def _wrong_data(rng: random.Random) -> Case:
    if rng.random() < 0.5:
        return _post("data", _text(rng) | {"data": rng.choice(_WRONG_TEXT_DATA)})
    return _post("data", *_ids(rng.choice(_WRONG_ID_DATA)))


def _wrong_mask(rng: random.Random) -> Case:
    return _post("mask", *_ids(mask=rng.choice(_WRONG_MASKS)))


def _wrong_set_of_inputs(rng: random.Random) -> Case:
    text, (ids, mask) = _text(rng), _ids()
    sets = ([text, ids, mask], [text, ids], [text, mask], [ids], [mask], [text, text], [ids, mask, mask])
    return _post("set of inputs", *rng.choice(sets))


def _too_long(rng: random.Random) -> Case:
    length = rng.choice((MAX_TOKENS + 1, 2 * MAX_TOKENS, 20_000))
    if rng.random() < 0.5:
        return _post("too long", _text(rng) | {"data": ["word " * length]})
    return _post("too long", *_ids([101] * length, [1] * length, [1, length]))


def _wrong_parameters(rng: random.Random) -> Case:
    return _post("parameters", _text(rng), parameters=rng.choice(_JSON_PARAMETERS))


def _wrong_outputs(rng: random.Random) -> Case:
    wrong: list[Any] = [
        [{"name": "NO_SUCH_OUTPUT"}],
        [{"name": ""}],
        [{}],
        [5],
        {},
        "EMBEDDING",
        [{"name": "EMBEDDING"}, {"name": "LOGITS"}],
        [{"name": "EMBEDDING", "parameters": {"shared_memory_region": "none", "shared_memory_byte_size": 1536}}],
    ]
    return _post("outputs", _text(rng), outputs=rng.choice(wrong))


def _shared_memory(rng: random.Random) -> Case:
    size = rng.choice((-1, 0, 8, 2**63 - 1, "8", None))
    parameters = {"shared_memory_region": rng.choice(("none", "", "../x")), "shared_memory_byte_size": size}
    text = _text(rng) | {"parameters": parameters}
    del text["data"]
    return _post("shared memory", text)


def _wrong_place(rng: random.Random) -> Case:
    path = rng.choice(
        (
            "/v2/models/no_such_model/infer",
            "/v2/models//infer",
            "/v2/models/encode/versions/9/infer",
            "/v2/models/encode/versions/one/infer",
            "/v2/models/encode/versions/-1/infer",
            "/v2/models/..%2f..%2fetc/infer",
            "/v2/models/encode/inferno",
            f"/v2/models/{'x' * 2000}/infer",
            "/v3/models/encode/infer",
        )
    )
    body = json.dumps({"inputs": [_text(rng)]}).encode()
    method = rng.choice(("POST", "POST", "GET", "PUT", "DELETE"))
    return HttpCase("path", body, path=path, method=method)


def _wrong_method(rng: random.Random) -> Case:
    body = json.dumps({"inputs": [_text(rng)]}).encode()
    return HttpCase("method", body, method=rng.choice(("GET", "PUT", "DELETE", "PATCH")))


def _wrong_encoding(rng: random.Random) -> Case:
    body = json.dumps({"inputs": [_text(rng)]}).encode()
    return HttpCase("content encoding", body, headers=(("Content-Encoding", rng.choice(("gzip", "deflate"))),))


def _binary(kind: str, header: dict[str, Any], payload: bytes, length: object = None) -> HttpCase:
    """A request of Triton's binary extension; `length` is what is claimed of the JSON part."""
    text = json.dumps(header).encode()
    claimed = str(len(text) if length is None else length)
    return HttpCase(kind, text + payload, headers=((_LENGTH_HEADER, claimed),))


def _binary_text(size: object) -> dict[str, Any]:
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    return {"inputs": [tensor]}


def _framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _binary_header(rng: random.Random) -> Case:
    payload = _framed(_words(rng).encode())
    header = _binary_text(len(payload))
    true = len(json.dumps(header))
    wrong = (0, -1, true - 1, true // 2, true + 1, true + len(payload), 10**9, 2**63, 2**64, "", "many", "1e3")
    return _binary("binary header length", header, payload, rng.choice(wrong))


def _binary_size(rng: random.Random) -> Case:
    payload = _framed(_words(rng).encode())
    size = len(payload)
    wrong = rng.choice((0, -1, 1, size - 1, size + 1, size * 2, 2**31, 2**63 - 1, 2**64, str(size), None, 1.5, [size]))
    return _binary("binary size", _binary_text(wrong), payload)


def _binary_payload(rng: random.Random) -> Case:
    text = _words(rng).encode()
    wrong = rng.choice(
        (
            struct.pack("<I", len(text) + 1) + text,
            struct.pack("<I", 2**32 - 1) + text,
            struct.pack(">I", len(text)) + text,
            _framed(text)[:3],
            _framed(text) + _framed(text),
            _framed(text) + b"\x01",
            _framed(b""),
            b"",
        )
    )
    return _binary("binary payload", _binary_text(len(wrong)), wrong)


def _binary_ids(rng: random.Random) -> Case:
    ids, mask = _ids()
    payload = b""
    for tensor in (ids, mask):
        del tensor["data"]
        part = struct.pack("<2q", 1, rng.choice((2, -1, VOCABULARY, 2**62)))[: rng.choice((16, 15, 8, 0))]
        tensor["parameters"] = {"binary_data_size": len(part)}
        payload += part
    return _binary("binary ids", {"inputs": [ids, mask]}, payload)


def _invalid_utf8(rng: random.Random) -> Case:
    text = rng.choice(_INVALID_UTF8) + _words(rng).encode() * rng.randint(0, 2)
    if rng.random() < 0.5:
        body = json.dumps({"inputs": [_text(rng) | {"data": ["%"]}]}).encode()
        return HttpCase("invalid UTF-8", body.replace(b"%", text))
    payload = _framed(text)
    return _binary("invalid UTF-8", _binary_text(len(payload)), payload)


_HTTP: list[Callable[[random.Random], Case]] = [
    _random_bytes,
    _random_json,
    _nested,
    _truncated,
    _not_a_number,
    _inputs_of_wrong_kind,
    _missing_member,
    _wrong_name,
    _wrong_type,
    _wrong_shape,
    _wrong_data,
    _wrong_mask,
    _wrong_set_of_inputs,
    _too_long,
    _wrong_parameters,
    _wrong_outputs,
    _shared_memory,
    _wrong_place,
    _wrong_method,
    _wrong_encoding,
    _binary_header,
    _binary_size,
    _binary_payload,
    _binary_ids,
    _invalid_utf8,
]


# Over gRPC.


def _message(*tensors: tuple[str, str, Sequence[int], bytes | None], model: str = MODEL) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model)
    for name, datatype, shape, content in tensors:
        made.inputs.add(name=name, datatype=datatype, shape=shape)
        if content is not None:
            made.raw_input_contents.append(content)
    return made


def _grpc_text(rng: random.Random, shape: Sequence[int] = (1, 1), datatype: str = "BYTES") -> Any:
    return _message(("TEXT", datatype, shape, _framed(_words(rng).encode())))


def _grpc_ids(ids: Sequence[int] = (101, 102), mask: Sequence[int] = (1, 1)) -> Any:
    tensors = (("INPUT_IDS", ids), ("ATTENTION_MASK", mask))
    return _message(*((name, "INT64", [1, len(row)], struct.pack(f"<{len(row)}q", *row)) for name, row in tensors))


def _grpc(kind: str, message: Any) -> GrpcCase:
    return GrpcCase(f"grpc {kind}", message.SerializeToString())


def _grpc_bytes(rng: random.Random) -> Case:
    # Field 0 is no field: no parser takes this for a message.
    return GrpcCase("grpc bytes", b"\x00" + rng.randbytes(rng.randint(0, 200)))


def _grpc_cut(rng: random.Random) -> Case:
    # Cut before the last tensor's content is whole; a cut between fields leaves a request without content.
    whole = _grpc_text(rng).SerializeToString()
    return GrpcCase("grpc cut short", whole[: rng.randrange(len(whole))])


def _grpc_shape(rng: random.Random) -> Case:
    return _grpc("shape", _grpc_text(rng, shape=rng.choice(_WRONG_SHAPES + _HUGE_SHAPES)))


def _grpc_type(rng: random.Random) -> Case:
    return _grpc("datatype", _grpc_text(rng, datatype=rng.choice(_WRONG_TYPES)))


def _grpc_name(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    message.inputs[0].name = rng.choice(("", "text", "EMBEDDING", "x" * 3000))
    return _grpc("input name", message)


def _grpc_model(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    if rng.random() < 0.5:
        message.model_name = rng.choice(("", "no_such_model", "../encode", "x" * 3000))
    else:
        message.model_version = rng.choice(("9", "one", "-1", "99999999999999999999", "../1"))
    return _grpc("model", message)


def _grpc_content(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    good = message.raw_input_contents[0]
    wrong = rng.choice(
        (
            [],
            [b""],
            [good[:-1]],
            [good + b"\x00"],
            [good[:3]],
            [struct.pack("<I", 2**32 - 1) + good[4:]],
            [_framed(b"")],
            [_framed(rng.choice(_INVALID_UTF8))],
            [_framed(b"word " * 600)],
        )
    )
    del message.raw_input_contents[:]
    message.raw_input_contents.extend(wrong)
    return _grpc("content", message)


def _grpc_typed_content(rng: random.Random) -> Case:
    message = _message(("TEXT", "BYTES", [1, 1], None))
    contents = message.inputs[0].contents
    kind = rng.randrange(5)
    if kind == 0:
        contents.int64_contents.append(rng.randint(-(2**63), 2**63 - 1))
    elif kind == 1:
        contents.fp32_contents.append(float("nan"))
    elif kind == 2:
        contents.bytes_contents.extend([b"a", b"b"])
    elif kind == 3:
        contents.bytes_contents.append(rng.choice(_INVALID_UTF8))
    else:
        contents.bytes_contents.append(b"a")
        message.raw_input_contents.append(_framed(b"a"))
    return _grpc("typed content", message)


def _grpc_wrong_ids(rng: random.Random) -> Case:
    wrong = [row for row in _WRONG_ID_DATA[:4] if isinstance(row, list)]
    return _grpc("ids", _grpc_ids(ids=rng.choice(wrong)))


def _grpc_mask(rng: random.Random) -> Case:
    return _grpc("mask", _grpc_ids(mask=rng.choice([*_WRONG_MASKS, [1], [1, 1, 1]])))


def _grpc_set_of_inputs(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    other = _grpc_ids()
    chosen = rng.choice(([0], [1], [0, 1]))
    for index in chosen:
        message.inputs.append(other.inputs[index])
        message.raw_input_contents.append(other.raw_input_contents[index])
    return _grpc("set of inputs", message)


def _grpc_parameters(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    for name, value in rng.choice(_WRONG_PARAMETERS).items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return _grpc("parameters", message)


def _grpc_nan_parameter(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    message.parameters["latency_ms"].double_param = rng.choice((float("nan"), float("inf"), -0.0, -1e308))
    return _grpc("parameters nan", message)


def _grpc_outputs(rng: random.Random) -> Case:
    message = _grpc_text(rng)
    output = message.outputs.add(name=rng.choice(("NO_SUCH_OUTPUT", "", "TEXT", "x" * 3000)))
    if rng.random() < 0.3:
        output.name = "EMBEDDING"
        output.parameters["shared_memory_region"].string_param = "none"
        output.parameters["shared_memory_byte_size"].int64_param = 1536
    return _grpc("outputs", message)


def _grpc_shared_memory(rng: random.Random) -> Case:
    message = _message(("TEXT", "BYTES", [1, 1], None))
    message.inputs[0].parameters["shared_memory_region"].string_param = rng.choice(("none", "", "/etc/passwd"))
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = rng.choice((-1, 0, 8, 2**63 - 1))
    return _grpc("shared memory", message)


_GRPC: list[Callable[[random.Random], Case]] = [
    _grpc_bytes,
    _grpc_cut,
    _grpc_shape,
    _grpc_type,
    _grpc_name,
    _grpc_model,
    _grpc_content,
    _grpc_typed_content,
    _grpc_wrong_ids,
    _grpc_mask,
    _grpc_set_of_inputs,
    _grpc_parameters,
    _grpc_nan_parameter,
    _grpc_outputs,
    _grpc_shared_memory,
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run against a server that serves `encode`; 1 if a malformed request was served or not answered."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.encode", description=__doc__)
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    outcome = run(options.http, options.grpc, options.count, options.seed)
    print(outcome.table())
    for case in outcome.served[:20]:
        print("served:", case)
    return 1 if outcome.served or outcome.unanswered or outcome.surplus else 0


if __name__ == "__main__":
    sys.exit(main())
