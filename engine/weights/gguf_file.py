"""GGUF checkpoints. Quantised tensors are dequantised to float32 by the gguf package, one at a time."""

import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, quants

from engine.errors import CheckpointError
from engine.weights.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from engine.weights.tensors import TensorInfo

PLAIN_DTYPES = {
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
"""Types that are stored as they are; all others are quantised."""

ROWS_JOINED = 16


class GGUFSource:
    """A GGUF file (a `TensorSource`). Raises `CheckpointError` where it is foreign or truncated."""

    def __init__(self, path: Path) -> None:
        self.header: GGUFHeader = read_gguf_header(path)
        self._tensors = {
            name: TensorInfo(tensor.shape, PLAIN_DTYPES.get(tensor.type, np.dtype(np.float32)), tensor.num_bytes, path)
            for name, tensor in self.header.tensors.items()
        }
        # A plain view: slicing a memmap costs microseconds of Python each time, and dequantising slices a lot.
        self._data: np.ndarray | None = np.memmap(path, np.uint8, mode="r").view(np.ndarray)

    @property
    def path(self) -> Path:
        """The file."""
        return self.header.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file; shapes as in numpy, slowest axis first."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """One tensor: its plain values, or what its quantised blocks stand for in float32."""
        if self._data is None:
            raise CheckpointError(f"{self.path}: read after close")
        tensor = self.header.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        plain = PLAIN_DTYPES.get(tensor.type)
        if plain is not None:
            return np.frombuffer(raw.tobytes(), plain).reshape(tensor.shape)
        return self._dequantise(name, tensor, raw)

    def close(self) -> None:
        """Lets go of the mapped file."""
        self._data = None

    def _dequantise(self, name: str, tensor: GGUFTensor, raw: np.ndarray) -> np.ndarray:
        try:
            values = quants.dequantize(raw.reshape(_num_long_rows(tensor), -1), tensor.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.type.name}, which cannot be dequantised"
            ) from error
        return np.asarray(values, np.float32).reshape(tensor.shape)


def _num_long_rows(tensor: GGUFTensor) -> int:
    """How many rows to show gguf, which goes 16 rows at a time: several real ones in each make it twice as fast.

    Blocks are independent of each other, so rows may be joined.
    """
    num_rows = math.prod(tensor.shape[:-1])
    return num_rows // math.gcd(num_rows, ROWS_JOINED)
