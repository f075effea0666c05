"""Checkpoints in safetensors files: `model.safetensors`, or shards listed in `model.safetensors.index.json`."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.weights.layout import SAFETENSORS
from engine.weights.tensors import TensorInfo

INDEX_FILE = SAFETENSORS.index

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The safetensors format's names of its element types."""


class HFSource:
    """A directory in the Hugging Face layout, or one safetensors file (a `TensorSource`).

    Raises `CheckpointError` where it holds no safetensors, or the files are truncated, foreign or contradict the index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for file, listed in SAFETENSORS.shards(path).items():
            self._open_shard(file, listed)

    @property
    def path(self) -> Path:
        """The directory or file."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of all shards."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """One tensor, mapped; shape and dtype as in `tensors`."""
        info = self._tensors[name]
        if not info.num_bytes:
            return np.zeros(info.shape, info.dtype)
        try:
            return np.memmap(info.file, info.dtype, mode="r", offset=self._offsets[name], shape=info.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {name!r} cannot be read ({error})") from error

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _open_shard(self, file: Path, listed: frozenset[str] | None) -> None:
        try:
            # Checks that the tensors fill the file, without overlap.
            with safe_open(file, framework="numpy") as shard:
                infos = {name: _tensor_info(shard, name, file) for name in shard.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise CheckpointError(f"{file}: missing, though {INDEX_FILE} lists it") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: not a complete safetensors file ({error}); it may be truncated, or not be a safetensors file"
            ) from error
        SAFETENSORS.check_names(file, infos, listed)
        self._tensors |= infos
        self._offsets |= _offsets(file)


def _tensor_info(shard: safe_open, name: str, file: Path) -> TensorInfo:
    view = shard.get_slice(name)
    dtype = DTYPES.get(view.get_dtype())
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {view.get_dtype()}; expected one of {sorted(DTYPES)}")
    shape = tuple(view.get_shape())
    return TensorInfo(shape, dtype, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, file)


def _offsets(file: Path) -> dict[str, int]:
    """Where each tensor's data begins, in bytes from the start of the file (the header was checked before).

    Format: the length of the header in 8 bytes, the header in JSON, the data.
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    return {
        name: 8 + header_bytes + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }
