"""A test backend for fronts and workers: it exports a heartbeat and the values of a file, and answers OUT = IN.

Model parameters, besides those of the sidecar: `fail` makes the load fail with that text, `fail_bin` only for that bin,
`load_s` delays the load, `beat_s` is the period of the heartbeat, `figures` names a JSON file
{metric: [[labels, value], ..]} whose values are exported with each heartbeat; counters as totals.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        declared = json.loads(args["model_config"])["parameters"]
        values = {name: value["string_value"] for name, value in declared.items()}
        time.sleep(float(values.get("load_s", "0")))
        if "fail" in values or values.get("fail_bin", "none") == values.get("bin"):
            raise RuntimeError(values.get("fail", "this bin cannot be loaded"))
        self.labels = {"model": args["model_name"], "pid": str(os.getpid())}
        self.figures = values.get("figures", "")
        self.families: dict[str, Any] = {}
        self.series: dict[tuple[str, str], list[Any]] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.beat, args=(float(values.get("beat_s", "1")),), daemon=True)
        self.thread.start()

    def beat(self, period_s: float) -> None:
        beats = 0
        while not self.stop.wait(period_s):
            beats += 1
            self.export("shapeshift_heartbeat_total", {}, beats)
            if self.figures and Path(self.figures).is_file():
                for name, rows in json.loads(Path(self.figures).read_text()).items():
                    for labels, value in rows:
                        self.export(name, labels, value)

    def export(self, name: str, labels: dict[str, str], value: float) -> None:
        kinds = pb_utils.MetricFamily
        counts = name.endswith(("_total", "_bucket", "_sum", "_count"))
        if name not in self.families:
            kind = kinds.COUNTER if counts else kinds.GAUGE
            self.families[name] = kinds(name=name, description=name, kind=kind)
        key = (name, str(labels))
        if key not in self.series:
            self.series[key] = [self.families[name].Metric(labels={**self.labels, **labels}), 0.0]
        metric, before = self.series[key]
        if not counts:
            metric.set(float(value))
        elif value > before:
            metric.increment(value - before)
            self.series[key][1] = value

    def execute(self, requests: list[Any]) -> list[Any]:
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]) for values in inputs]

    def finalize(self) -> None:
        self.stop.set()
        self.thread.join(3)
        self.series.clear()
        self.families.clear()
