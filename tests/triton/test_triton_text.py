"""Reading and writing text: metrics, configurations, logs, help."""

from __future__ import annotations

import http.server
import math
import threading
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.triton import metrics, model_config
from shapeshift.triton.embedded import command_line, logs

METRICS = r"""
# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="echo",version="1"} 17
plain 2.5
stamped{a="b"} 1e3 1700000000000
escaped{path="C:\\new",text="say \"hi\"\n",} 1
bound_bucket{le="+Inf"} +Inf
gone NaN
"""


def test_metrics_are_read() -> None:
    samples = metrics.parse(METRICS)
    assert samples["nv_inference_count", frozenset({("version", "1"), ("model", "echo")})] == 17
    assert samples["plain", frozenset()] == 2.5
    assert samples["stamped", frozenset({("a", "b")})] == 1000
    assert samples["escaped", frozenset({("path", "C:\\new"), ("text", 'say "hi"\n')})] == 1
    assert samples["bound_bucket", frozenset({("le", "+Inf")})] == math.inf
    assert math.isnan(samples["gone", frozenset()])
    assert len(samples) == 6


@pytest.mark.parametrize("line", ["<html>", "name", 'a{b="c} 1', "a{b=c} 1", "a{} x", "a{b='c'} 1"])
def test_invalid_metrics_are_refused_by_line(line: str) -> None:
    with pytest.raises(InvalidInputError, match="line 2"):
        metrics.parse(f"fine 1\n{line}\n")


def test_a_process_lives_while_its_heartbeat_has_moved_within_three_scrapes() -> None:
    heartbeats = metrics.Heartbeats[str]()
    beats = [(1, 5), (2, 5), (3, 5), (4, 5), (4, 5), (5, 6)]
    living = [sorted(heartbeats.living({"a": float(a), "b": float(b)})) for a, b in beats]
    # One that goes on, such as after SIGSTOP, lives again.
    assert living == [["a", "b"], ["a", "b"], ["a", "b"], ["a"], ["a"], ["a", "b"]]
    assert heartbeats.living({}) == frozenset()


def test_scrape_reads_a_page_and_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(b"up 1\n")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert metrics.scrape(f"{url}/metrics") == {("up", frozenset()): 1.0}
        with pytest.raises(ShapeshiftError, match="status 404"):
            metrics.scrape(f"{url}/other")
        server.shutdown()
    with pytest.raises(ShapeshiftError, match="is the server running"):
        metrics.scrape(f"{url}/metrics")
    with pytest.raises(InvalidInputError):
        metrics.scrape("https://127.0.0.1/metrics")


def test_configuration_survives_reading_and_writing(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text('name: "a"\nparameters { key: "bin" value { string_value: "64" } }\n')
    message = model_config.read(path)
    assert message.name == "a"
    assert model_config.parameters(message) == {"bin": "64"}
    model_config.set_parameter(message, "profile", '{"unit": "ms", "name": "größer"}')
    model_config.write(message, path)
    assert model_config.read(path) == message
    assert model_config.parameters(model_config.read(path))["profile"] == '{"unit": "ms", "name": "größer"}'
    assert [file.name for file in tmp_path.iterdir()] == ["config.pbtxt"]


@pytest.mark.parametrize("text", ['name: "a"\nnonsense: 1\n', 'name: "a"\ninput [\n', 'name: "a"\nname: x'])
def test_bad_configuration_names_file_and_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    with pytest.raises(ShapeshiftError, match=r"config\.pbtxt:[23]: \S") as caught:
        model_config.read(path)
    assert "\n" not in str(caught.value)


def test_missing_or_binary_configuration(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        model_config.read(tmp_path / "config.pbtxt")
    (tmp_path / "config.pbtxt").write_bytes(b"\xff\xfe")
    with pytest.raises(ShapeshiftError, match="config.pbtxt: got 'byte 0'; UTF-8 text"):
        model_config.read(tmp_path / "config.pbtxt")


def test_last_errors_skip_harmless_errors(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        'E1121 10:00:00.1 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        'I1121 10:00:00.2 1 a.cc:1] "loading"\n'
        "E1121 10:00:00.3 1 b.cc:1] \"failed to load 'x': no such file\n"
        "\n"
        "At:\n"
        '  model.py(3): initialize"\n'
        'I1121 10:00:00.4 1 a.cc:1] "bye"\n'
        "| table | row |\n"
        "error: creating server: Internal - failed to load all models\n"
    )
    lines = logs.last_errors(log)
    assert [line.split()[0] for line in lines] == ["E1121", "At:", "model.py(3):", "error:"]
    assert logs.last_errors(log, limit=1) == ["error: creating server: Internal - failed to load all models"]


def test_without_errors_the_end_of_the_log_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('I1121 10:00:00.2 1 a.cc:1] "one"\n\nsomething else\n')
    assert logs.last_errors(tmp_path / "log")[-1] == "something else"
    assert logs.last_errors(tmp_path / "absent") == []


def test_each_loaded_model_of_a_growing_log_is_told_once(tmp_path: Path) -> None:
    def line(name: str) -> str:
        return f"I1121 10:00:00.2 1 model_lifecycle.cc:1] \"successfully loaded '{name}'\"\n"

    log = tmp_path / "server.log"
    loaded = logs.LoadedModels(log)
    assert loaded.new() == []
    log.write_text("é\n" + line("one") + line("two") + line("three")[:30])
    assert loaded.new() == ["one", "two"]
    assert loaded.new() == []
    log.write_text(log.read_text() + line("three")[30:] + line("one"))
    assert loaded.new() == ["three", "one"]


def test_help_lists_options() -> None:
    text = "Usage: tritonserver [options]\n  --help\n\tPrint usage, see --other\n\nHTTP:\n  --http-port <integer>\n"
    assert command_line.parse_help(text) == {"help", "http-port"}
