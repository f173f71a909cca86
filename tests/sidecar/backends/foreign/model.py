"""A model of somebody else: it does what the text says, and knows nothing of this project.

answer; die; stop (SIGSTOP); loop: for ever; sleep SECONDS. `threaded`: it answers later, from a thread of its own.
broken: a file beside the model, with which it dies when it is loaded.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        if (Path(args["model_repository"]) / "broken").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        config = json.loads(args["model_config"])
        self.sends = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self.threaded = "threaded" in config.get("parameters", {})

    def execute(self, requests: list[Any]) -> list[Any] | None:
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().item().decode() for request in requests]
        if not self.sends and not self.threaded:
            return [self.answer(text) for text in texts]
        for request, text in zip(requests, texts, strict=True):
            arguments = text, request.get_response_sender()
            if self.threaded:
                threading.Thread(target=self.send, args=arguments, daemon=True).start()
            else:
                self.send(*arguments)
        return None

    def send(self, text: str, sender: Any) -> None:
        sender.send(self.answer(text), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, text: str) -> Any:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while text == "loop":
            pass
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", np.array([b"fine"], dtype=object))])
