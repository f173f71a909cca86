"""The memory plan of GPUs: what models want, from their generated parameters, against what is free."""

from __future__ import annotations

import json

from shapeshift.engines import device_plan
from shapeshift.engines.device_plan import CONTEXT_MB, Share
from shapeshift.engines.gpu import CPU_INSTEAD, Gpu
from shapeshift.engines.manifest import FileEntry
from shapeshift.errors import UnsupportedError


def look_at(device: int) -> tuple[Gpu, float]:
    """GPUs of 24 GiB; number 1 has others' processes on it."""
    if device > 1:
        raise UnsupportedError(f"GPU {device}: the NVIDIA driver shows 2 devices, numbered from 0")
    return Gpu(device, "L4", (8, 9), 24576), (20000, 3000)[device]


def shares() -> list[Share]:
    generate = device_plan.as_parameter({"engines": 2000, "KV": 9000, "adapters": 256, "graphs": 700})
    encode = device_plan.of_engines("torch", 500, {"model": FileEntry(420 << 20, ""), "tokenizer": FileEntry(1, "")})
    return [
        *device_plan.shares_of("generate", generate, [0]),
        *device_plan.shares_of("encode", encode, [0, 1]),
        *device_plan.shares_of("classify_image", {}, [1]),
    ]


def test_each_device_has_one_plan_of_all_its_models() -> None:
    lines, refused = device_plan.fit(shares(), look_at)
    assert refused == {} and lines == [
        "GPU 0 (L4): 13480 MiB are wanted, 20000 of 24576 MiB are free",
        "  generate: 12468 MiB (engines 2000, KV 9000, adapters 256, graphs 700, context 512)",
        "  encode: 1012 MiB (engines 420, graphs 80, context 512)",
        "GPU 1 (L4): 1524 MiB are wanted, 3000 of 24576 MiB are free",
        "  encode: 1012 MiB (engines 420, graphs 80, context 512)",
        "  classify_image: 512 MiB (context 512)",
    ]
    assert device_plan.fit([], look_at) == ([], {})


def test_a_model_beyond_the_memory_is_named_with_the_figures_and_the_way_to_the_cpu() -> None:
    own = shares()
    own.append(Share("chat", 0, {"engines": 6000, "KV": 1000, "context": CONTEXT_MB}))
    own.append(Share("small", 0, {"engines": 6000}))
    lines, refused = device_plan.fit(own, look_at)
    assert "  small: 6000 MiB (engines 6000)" in lines
    assert list(refused) == ["chat"] and refused["chat"] == (
        "GPU 0 (L4): chat wants 7512 MiB (engines 6000, KV 1000, context 512); 6520 MiB are left of the plan, 20000 of"
        " 24576 MiB are free; serve fewer models (--models), or name another GPU in instance_group gpus of chat; "
        + CPU_INSTEAD
    )
    # What fits exactly fits.
    assert not device_plan.fit([Share("one", 1, {"engines": 2488, "context": CONTEXT_MB})], look_at)[1]


def test_a_model_that_does_not_fit_on_one_of_its_devices_takes_none() -> None:
    own = [Share(f"encode_w0{device}", device, {"engines": 2900}, owner="encode") for device in (0, 1)]
    own.append(Share("encode_w02", 1, {"engines": 200}, owner="encode"))
    own.append(Share("chat", 0, {"engines": 20000}))
    lines, refused = device_plan.fit(own, look_at)
    assert list(refused) == ["encode"] and "encode_w02 wants 200 MiB" in refused["encode"]
    assert lines[1:] == ["  chat: 20000 MiB (engines 20000)"]


def test_a_device_that_is_not_there_is_named() -> None:
    refused = device_plan.fit([Share("encode", 7, {"context": 1})], look_at)[1]
    assert refused["encode"].startswith("GPU 7: the NVIDIA driver shows 2 devices")


def test_weights_count_once_where_engines_share_them() -> None:
    files = {f"gamma_{gamma}/model": FileEntry(300 << 20, "") for gamma in range(3)}
    for provider, wanted in (
        ("torch", {"engines": 300.0, "graphs": 700.0}),
        ("tensorrt", {"engines": 900.0, "graphs": 100.0}),
    ):
        assert json.loads(device_plan.of_engines(provider, 1000, files)["device_memory"]) == wanted
    assert device_plan.of_engines("openvino", 0.0, files) == {}
