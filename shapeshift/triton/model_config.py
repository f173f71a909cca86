"""Reads and writes config.pbtxt files as ModelConfig messages of tritonclient."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from shapeshift import files
from shapeshift.errors import NotFoundError, ShapeshiftError

# Generated protobuf classes have no type annotations.
ModelConfig: TypeAlias = Any


def read(path: Path) -> ModelConfig:
    """The ModelConfig in the file `path`.

    Raises NotFoundError if the file is missing, ShapeshiftError with file and line for invalid text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"no model configuration at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ShapeshiftError(f"{path} cannot be read: {error}") from error
    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line = error.GetLine() or 1
        reason = str(error).removeprefix(f"{line}:{error.GetColumn()} : ")
        raise ShapeshiftError(f"{path}:{line}: {reason}") from error
    return message


def parameters(message: ModelConfig) -> dict[str, str]:
    """The `parameters` of the configuration as plain strings."""
    return {name: str(value.string_value) for name, value in message.parameters.items()}


def set_parameter(message: ModelConfig, name: str, value: str) -> None:
    """Set one of the `parameters`, in place."""
    message.parameters[name].string_value = value


def type_name(tensor: Any) -> str:
    """The data type of an input or output, such as TYPE_FP32."""
    numbers = type(tensor).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return str(numbers[tensor.data_type].name)


def write(message: ModelConfig, path: Path) -> None:
    """Replace the file `path` in one step, so that a server never reads a partial file."""
    files.replace_text(path, as_text(message))


def as_text(message: ModelConfig) -> str:
    """The text of a config.pbtxt with this configuration."""
    return str(text_format.MessageToString(message, as_utf8=True))


def as_json(message: ModelConfig) -> dict[str, Any]:
    """The configuration as JSON values, in the form that `control.ModelControl.load` accepts."""
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))
