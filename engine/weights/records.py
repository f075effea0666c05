"""Frozen dataclasses as JSON objects, read back strictly: every field, of its type, and nothing else."""

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engine.errors import CheckpointError

Record = TypeVar("Record")


def encode_record(record: object) -> object:
    """A dataclass as an object of its fields; tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: encode_record(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, tuple):
        return [encode_record(item) for item in record]
    return record


def decode_record(kind: type[Record], value: object, file: Path, where: str = "") -> Record:
    """What `encode_record` encoded. Raises `CheckpointError` naming the file and the field that is wrong."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {where or kind.__name__} is {value!r}; expected an object")
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for name in sorted(names - value.keys()):
        raise CheckpointError(f"{file}: {prefix}{name} is missing")
    for name in sorted(value.keys() - names):
        raise CheckpointError(f"{file}: {prefix}{name} is unknown; expected {', '.join(sorted(names))}")
    hints = get_type_hints(kind)
    return kind(**{name: _decode(hints[name], value[name], file, f"{prefix}{name}") for name in names})


def _decode(hint: Any, value: object, file: Path, where: str) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, file, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, file, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return decode_record(hint, value, file, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise CheckpointError(f"{file}: {where} is {value!r}; expected {hint if origin else hint.__name__}")


def _decode_union(arguments: tuple[Any, ...], value: object, file: Path, where: str) -> object:
    if value is None and type(None) in arguments:
        return None
    kinds = [kind for kind in arguments if kind is not type(None)]
    if isinstance(value, dict):
        # Records are told apart by their fields.
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and {f.name for f in dataclasses.fields(kind)} == value.keys():
                return _decode(kind, value, file, where)
    return _decode(kinds[0], value, file, where)
