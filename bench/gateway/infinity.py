"""infinity's HTTP API beside the gateway's: the same checkpoint, texts and client, in turns.

infinity computes in f32, its default on a CPU; ours in the precision of `encode`, and in f32 as `encode_f32`,
which plans its calls by the latencies of `encode`. The processor time of a text stands beside the rate: on cores that
other programs use, the rate depends on how many of the cores each side gets.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.common.front_variants import ENGINES, publish_variant
from bench.common.output import BUILD, FOLDER, Output, Row, empty
from bench.common.server import loaded_server
from bench.common.systems import HttpServer
from bench.common.text_bench import CHECKPOINT, TextBench, TextScale
from bench.gateway.ways import wait_listed
from bench.peers.infinity import Engine, infinity_servers
from shapeshift.cli.gateway import child
from shapeshift.engines import manifest
from shapeshift.triton.embedded.free_ports import free_ports

PEERS: tuple[Engine, ...] = ("torch", "optimum")
CONCURRENCIES = (8, 32)


def measure(output: Output, requests: int, rounds: int) -> None:
    """Texts a second of each API, and ours over the faster of infinity's engines. Raises ShapeshiftError."""
    built = manifest.load(ENGINES)
    bench = TextBench(TextScale(rounds, requests, 0.0, CONCURRENCIES, ("short",), PEERS), seed=0)
    repository = FOLDER / "repository"
    empty(repository)
    publish_variant("encode_f32", built.engines, repository, built.packs_rows, precision="f32")
    with ExitStack() as stack:
        engines = {name: len(built.engines) for name in ("encode", "encode_f32")}
        server = stack.enter_context(loaded_server(engines, (BUILD / "repository", repository)))
        port = next(iter(free_ports()))
        stack.enter_context(child(server.settings, port)).start()
        ours = [
            HttpServer(f"gateway {precision}", f"http://127.0.0.1:{port}/v1", name)
            for name, precision in (("encode", built.precision), ("encode_f32", "f32"))
        ]
        others = stack.enter_context(infinity_servers(PEERS, CHECKPOINT, BUILD))
        wait_listed(f"http://127.0.0.1:{port}", engines)
        for system in (*ours, *others):
            system.closed(bench.texts["short"], 8, requests // 4)
        bench.closed([*ours, *others])
    rows = ratios(bench, [one.name for one in ours], [one.name for one in others])
    output.say(bench.tables("short"))
    output.table("over the better one of infinity's engines", rows)
    output.data |= {"infinity": bench.records(), "infinity ratios": rows}


def ratios(bench: TextBench, ours: list[str], others: list[str]) -> list[Row]:
    """How far each of ours is ahead, by rate and by processor time."""
    rows: list[Row] = []
    for load in [f"closed {clients}" for clients in CONCURRENCIES]:
        best = max(bench.per_second("short", load, name) for name in others)
        least = min(bench.processor_ms("short", load, name) for name in others)
        for name in ours:
            rate = bench.per_second("short", load, name) / best
            spent = least / bench.processor_ms("short", load, name)
            rows.append({"system": name, "load": load, "texts/s": rate, "processor time": spent})
    return rows
