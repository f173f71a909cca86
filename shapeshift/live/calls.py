"""Requests of the try-it boxes, and how to send the same by hand: with curl and with tritonclient."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from shapeshift.live.source import Addresses

_TIMEOUT_S = 30.0
_HEADER = "Inference-Header-Content-Length"
_IMAGE_FILE = "image.jpg"


@dataclass(frozen=True)
class Call:
    """A request to a front.

    path    behind the model: infer or generate_stream
    body    of it, JSON
    image   the file that goes with it as the input IMAGE
    python  the same with tritonclient; `{grpc}` stands for the address
    """

    model: str
    path: str
    body: Mapping[str, Any]
    python: str
    image: bytes = b""

    def curl(self, at: Addresses) -> str:
        """A command for a shell, run beside the image's file where there is one."""
        url = f"http://{at.http}/v2/models/{self.model}/{self.path}"
        if not self.image:
            quiet = "-sN" if self.path == "generate_stream" else "-s"
            return f"curl {quiet} {url} -d {shlex.quote(json.dumps(self.body))}"
        head = json.dumps(_with_image(self.body, len(self.image)))
        return (
            f'python3 -c \'import struct, sys; data = open("{_IMAGE_FILE}", "rb").read();'
            f' sys.stdout.buffer.write({json.dumps(head)}.encode() + struct.pack("<I", len(data)) + data)\' |'
            f" curl -s {url} -H '{_HEADER}: {len(head)}' --data-binary @-  # {_IMAGE_FILE} of {len(self.image)} bytes"
        )

    def tritonclient(self, at: Addresses) -> str:
        """A program in Python."""
        return self.python.replace("{grpc}", at.grpc)


def text(model: str, value: str, outputs: tuple[str, ...]) -> Call:
    """A text for `encode` or `classify_text`; outputs: what the program prints."""
    body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [value]}]}
    return Call(
        model,
        "infer",
        body,
        "import numpy as np, tritonclient.grpc as triton\n\n"
        'client = triton.InferenceServerClient("{grpc}")\n'
        'text = triton.InferInput("TEXT", [1, 1], "BYTES")\n'
        f"text.set_data_from_numpy(np.array([[{value!r}]], dtype=object))\n"
        f'result = client.infer("{model}", [text], client_timeout=10)\n'
        f"for name in {outputs}:\n"
        "    print(name, result.as_numpy(name)[0, :4])\n",
    )


def generation(model: str, prompt: str, most: int, adapter: str = "") -> Call:
    """The most likely text, generated as a stream."""
    named = {"lora_name": adapter} if adapter else {}
    parameters = f", parameters={named!r}" if named else ""
    return Call(
        model,
        "generate_stream",
        {"text_input": prompt, "max_tokens": most, "temperature": 0, "stream": True, **named},
        "import numpy as np, queue, tritonclient.grpc as triton\n\n"
        'shapes = {"text_input": "BYTES", "max_tokens": "INT32", "temperature": "FP32", "stream": "BOOL"}\n'
        f"values = {{'text_input': {prompt!r}, 'max_tokens': np.int32({most}), 'stream': True}}\n"
        "values['temperature'] = np.float32(0)\n"
        "inputs = [triton.InferInput(name, [1], kind) for name, kind in shapes.items()]\n"
        "for one in inputs:\n"
        "    kind = object if one.datatype() == 'BYTES' else None\n"
        "    one.set_data_from_numpy(np.array([values[one.name()]], dtype=kind))\n"
        "responses = queue.Queue()\n"
        'with triton.InferenceServerClient("{grpc}") as client:\n'
        "    client.start_stream(lambda result, error: responses.put(error or result))\n"
        f'    client.async_stream_infer("{model}", inputs, enable_empty_final_response=True{parameters})\n'
        "    while not isinstance(result := responses.get(timeout=30), Exception):\n"
        '        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)\n'
        '        if result.get_response().parameters["triton_final_response"].bool_param:\n'
        "            break\n",
    )


def image(model: str, data: bytes, latency_ms: float) -> Call:
    """An image file with a deadline."""
    parameters = {"latency_ms": latency_ms}
    return Call(
        model,
        "infer",
        {"parameters": parameters},
        "import numpy as np, tritonclient.grpc as triton\n\n"
        'client = triton.InferenceServerClient("{grpc}")\n'
        'image = triton.InferInput("IMAGE", [1, 1], "BYTES")\n'
        f'image.set_data_from_numpy(np.array([[open("{_IMAGE_FILE}", "rb").read()]], dtype=object))\n'
        f'result = client.infer("{model}", [image], parameters={parameters}, client_timeout=10)\n'
        'for name in ("LABEL", "GAMMA", "OUTCOME"):\n'
        "    print(name, result.as_numpy(name))\n",
        data,
    )


@dataclass
class Answer:
    """What came of a call. outputs: by name, of `infer`; error: in the server's words, empty where there is none."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    error: str = ""


async def infer(at: Addresses, call: Call) -> Answer:
    """Send a call to `infer`."""
    content, headers = json.dumps(call.body).encode(), {}
    if call.image:
        head = json.dumps(_with_image(call.body, len(call.image))).encode()
        content = head + len(call.image).to_bytes(4, "little") + call.image
        headers = {_HEADER: str(len(head))}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
        try:
            url = f"http://{at.http}/v2/models/{call.model}/{call.path}"
            reply = (await client.post(url, content=content, headers=headers)).json()
        except (httpx.HTTPError, ValueError) as error:
            return Answer(error=str(error) or type(error).__name__)
    if "error" in reply:
        return Answer(error=str(reply["error"]))
    return Answer({output["name"]: output["data"] for output in reply["outputs"]})


async def stream(at: Addresses, call: Call) -> AsyncIterator[str]:
    """The text of a call to `generate_stream`, piece by piece; an error is the last piece."""
    url = f"http://{at.http}/v2/models/{call.model}/{call.path}"
    try:
        async with (
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", url, json=dict(call.body)) as reply,
        ):
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data.startswith("{"):
                    said = json.loads(data)
                    yield str(said.get("text_output", said.get("error", "")))
    except (httpx.HTTPError, ValueError) as error:
        yield f"\n{error or type(error).__name__}"


def _with_image(body: Mapping[str, Any], size: int) -> dict[str, Any]:
    """`body` for a request with the bytes of an image behind it."""
    tensor = {"name": "IMAGE", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": size + 4}}
    return {**body, "inputs": [tensor]}
