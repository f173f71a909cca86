"""Reads, completes and writes config.pbtxt files as ModelConfig messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from tritonclient.grpc import model_config_pb2

from shapeshift import files
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.serving.model_args import Signature

# Generated protobuf classes have no type annotations.
ModelConfig: TypeAlias = Any


def _message_class() -> Any:
    """The class of tritonclient's ModelConfig, with proto2's rule that a field of value 0 counts as stated.

    In proto3, `max_batch_size: 0` reads as if the line were missing.
    """
    schema = descriptor_pb2.FileDescriptorProto()
    model_config_pb2.DESCRIPTOR.CopyToProto(schema)
    schema.syntax = "proto2"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(model_config_pb2.ModelConfig.DESCRIPTOR.full_name)
    )


_MESSAGE = _message_class()


def read(path: Path) -> ModelConfig:
    """The ModelConfig in the file `path`.

    Raises NotFoundError if the file is missing, InvalidInputError with file and line for invalid text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"no model configuration at {path}") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(str(path), f"byte {error.start}", "UTF-8 text") from None
    except OSError as error:
        raise ShapeshiftError(f"{path} cannot be read: {error}") from error
    message = _MESSAGE()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line = error.GetLine() or 1
        reason = str(error).removeprefix(f"{line}:{error.GetColumn()} : ")
        faulty = [*text.splitlines(), *["the end of the file"] * line][line - 1].strip()
        raise InvalidInputError(f"{path}:{line}", faulty, reason) from error
    return message


def from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration with these values, in the form of `as_json`."""
    return json_format.ParseDict(values, _MESSAGE())


def complete(message: ModelConfig, signature: Signature) -> ModelConfig:
    """The configuration with what it leaves out; see `Signature.complete`, which raises InvalidInputError."""
    return from_json(signature.complete(as_json(message)))


def parameters(message: ModelConfig) -> dict[str, str]:
    """The `parameters` of the configuration as plain strings."""
    return {name: str(value.string_value) for name, value in message.parameters.items()}


def set_parameter(message: ModelConfig, name: str, value: str) -> None:
    """Set one of the `parameters`, in place."""
    message.parameters[name].string_value = value


def write(message: ModelConfig, path: Path) -> None:
    """Replace the file `path` in one step, so that a server never reads a partial file."""
    files.replace_text(path, as_text(message))


def as_text(message: ModelConfig) -> str:
    """The text of a config.pbtxt with this configuration."""
    return str(text_format.MessageToString(message, as_utf8=True))


def as_json(message: ModelConfig) -> dict[str, Any]:
    """The configuration as JSON values, in the form that `control.ModelControl.load` accepts."""
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))
