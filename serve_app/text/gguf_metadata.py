"""Reads the key-value header of a GGUF file.

The `gguf` package's reader makes several numpy views for every string of an array, and so takes 5 s for the 98,000
strings of a 49,000-token vocabulary. Every ingress and replica process loads a tokenizer; this takes 0.1 s.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

from engine.errors import TokenizerError

MetadataValue = bool | int | float | str | list["MetadataValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_ARRAY_DEPTH = 4


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, MetadataValue]:
    """The key-value pairs of `path` whose key is `wanted`. Tensors are not touched.

    Raises `TokenizerError` for a file that is missing, truncated, or no GGUF of a known version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).metadata(wanted)
    except (OSError, ValueError) as e:  # ValueError: mmap of an empty file; a string that is not UTF-8
        raise TokenizerError(f"{path} cannot be read as a GGUF file: {e}") from e
    except struct.error as e:
        raise TokenizerError(f"{path} ends in the middle of its GGUF header; it is truncated") from e


class _Reader:
    """A cursor over the bytes of one file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0

    def metadata(self, wanted: Callable[[str], bool]) -> dict[str, MetadataValue]:
        if self._data[:4] != _MAGIC:
            raise TokenizerError(f"{self._path} starts with {self._data[:4]!r}; a GGUF file starts with {_MAGIC!r}")
        self._offset = 4
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            raise TokenizerError(
                f"{self._path} is a GGUF file of version {version} or of big-endian byte order; "
                f"expected little-endian of version {' or '.join(map(str, _VERSIONS))}"
            )
        self._scalar(_U64)  # number of tensors
        values: dict[str, MetadataValue] = {}
        for _ in range(int(self._scalar(_U64))):
            key = self._string()
            value = self._value(int(self._scalar(_U32)), 0)
            if wanted(key):
                values[key] = value
        return values

    def _scalar(self, kind: struct.Struct) -> bool | int | float:
        (value,) = kind.unpack_from(self._data, self._offset)
        self._offset += kind.size
        return value

    def _string(self) -> str:
        (length,) = _U64.unpack_from(self._data, self._offset)
        start = self._offset + 8
        self._offset = start + length
        if self._offset > len(self._data):
            raise struct.error
        return self._data[start : self._offset].decode("utf-8")

    def _value(self, code: int, depth: int) -> MetadataValue:
        if code == _STRING:
            return self._string()
        if code in _SCALARS:
            return self._scalar(_SCALARS[code])
        if code == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise TokenizerError(f"{self._path} has a metadata value of unknown type {code} at byte {self._offset}")

    def _array(self, depth: int) -> list[MetadataValue]:
        code, length = int(self._scalar(_U32)), int(self._scalar(_U64))
        if code not in _SCALARS:
            return [self._value(code, depth + 1) for _ in range(length)]
        kind = _SCALARS[code]
        end = self._offset + length * kind.size
        if end > len(self._data):
            raise struct.error
        values = [v for (v,) in kind.iter_unpack(self._data[self._offset : end])]
        self._offset = end
        return values
