"""The header of a GGUF file: metadata and tensor descriptions.

gguf's own reader builds numpy views for every string, which takes seconds for a vocabulary, and takes a truncated file
for a complete one; this one takes milliseconds and checks every length against the file. The numbers of the format
(value types, quantisation blocks) are gguf's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

GGUFScalar = int | float | bool | str
GGUFValue = GGUFScalar | list[GGUFScalar]

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's description."""

    shape: tuple[int, ...]
    """Slowest axis first, as in numpy (the file has it the other way round)."""
    type: GGMLQuantizationType
    offset: int
    """Of its data, in bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """All of a GGUF file but the tensors' data."""

    path: Path
    metadata: dict[str, GGUFValue]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Reads and checks the header. Raises `CheckpointError` where the file is foreign, truncated or contradictory."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a GGUF file ({error})") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it starts with {data[:4]!r}; expected {MAGIC!r})")
    version = cursor.uint32()
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version}; expected one of {VERSIONS}, little-endian")
    num_tensors, num_values = cursor.uint64(), cursor.uint64()
    metadata: dict[str, GGUFValue] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.value_type())
    descriptions: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in descriptions:
            raise CheckpointError(f"{path}: tensor {name!r} occurs twice")
        descriptions[name] = _tensor(cursor, name)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; expected a power of two")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: GGUFTensor(tensor.shape, tensor.type, start + tensor.offset, tensor.num_bytes)
        for name, tensor in descriptions.items()
    }
    for name, tensor in tensors.items():
        if tensor.offset + tensor.num_bytes > len(data):
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {tensor.offset + tensor.num_bytes}, the file at "
                f"{len(data)}"
            )
    return GGUFHeader(path, metadata, tensors)


def _tensor(cursor: "_Cursor", name: str) -> GGUFTensor:
    num_dims = cursor.uint32()
    if num_dims > MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {num_dims} axes; expected at most {MAX_DIMS}")
    shape = tuple(cursor.uint64() for _ in range(num_dims))[::-1]
    number = cursor.uint32()
    try:
        type_ = GGMLQuantizationType(number)
    except ValueError as error:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has the unknown type number {number}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[type_]
    if (shape[-1] if shape else 1) % block_size:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} of type {type_.name} has shape {shape}; "
            f"expected rows of a multiple of {block_size}"
        )
    return GGUFTensor(shape, type_, cursor.uint64(), math.prod(shape) // block_size * block_bytes)


class _Cursor:
    """Reads forward through the file; every read is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.offset = 0
        self._data = data

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated: the header needs bytes up to {end}, the file ends at {len(self._data)}"
            )
        taken = self._data[self.offset : end]
        self.offset = end
        return taken

    def uint32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def uint64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        raw = self.take(self.uint64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: the header holds a string that is not UTF-8 before byte {self.offset}"
            ) from error

    def value_type(self) -> GGUFValueType:
        number = self.uint32()
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: metadata of the unknown type number {number}") from error

    def value(self, type_: GGUFValueType) -> GGUFValue:
        if type_ == GGUFValueType.STRING:
            return self.string()
        if type_ == GGUFValueType.ARRAY:
            return self._array()
        return self._scalars(type_, 1)[0]

    def _array(self) -> list[GGUFScalar]:
        type_, length = self.value_type(), self.uint64()
        if type_ == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: metadata holds an array of arrays, which no known model has")
        if type_ == GGUFValueType.STRING:
            return [self.string() for _ in range(length)]
        return self._scalars(type_, length)

    def _scalars(self, type_: GGUFValueType, length: int) -> list[GGUFScalar]:
        dtype = np.dtype(_SCALARS[type_])
        return np.frombuffer(self.take(dtype.itemsize * length), dtype).tolist()
