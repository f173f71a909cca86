"""Triton's entry point of the polymorph backend."""

from typing import Any

import triton_python_backend_utils as pb_utils

from shapeshift.errors import ShapeshiftError
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args


class TritonPythonModel:
    """Encodes texts of any length; requests are answered later, through their response senders."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._front = TextFront(pb_utils, model_args.read(args))
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def finalize(self) -> None:
        self._front.close()
