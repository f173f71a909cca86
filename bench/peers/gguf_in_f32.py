"""A GGUF file with the numbers of another one's tensors in F32, for programs that compute with them exactly."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType
from gguf.quants import dequantize

_IN_HEADER = ("general.architecture", "general.file_type", "general.quantization_version")


def write(source: Path, target: Path) -> Path:
    """Write `target` unless it is there; returns it. The metadata stay."""
    if target.exists():
        return target
    unfinished = target.with_suffix(".part")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    writer = GGUFWriter(unfinished, reader.fields[_IN_HEADER[0]].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _IN_HEADER:
            of_list = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of_list)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(map(int, tensor.shape[::-1])))
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)
