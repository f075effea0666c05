"""Files as torch.save writes them, made without PyTorch.

The pickle is written instruction by instruction, so that a test can write one that PyTorch never would.
"""

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

STORAGE_NAMES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}

ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
STOP = b"."


@dataclass(frozen=True)
class View:
    """A tensor: its storage's name, and where in it its elements lie."""

    key: str
    storage: str
    num_elements: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def but(self, **changes: object) -> "View":
        return replace(self, **changes)


def contiguous(key: str, array: np.ndarray, shape: tuple[int, ...] | None = None, offset: int = 0) -> View:
    """A view of a storage that holds `array`."""
    shape = array.shape if shape is None else shape
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape)))
    return View(key, STORAGE_NAMES[array.dtype], array.size, offset, shape, strides)


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def sequence(*items: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def tensor(view: View, metadata: bytes = b"") -> bytes:
    """A call of _rebuild_tensor_v2."""
    storage = sequence(
        text("storage"),
        f"ctorch\n{view.storage}\n".encode(),
        text(view.key),
        text("cpu"),
        number(view.num_elements),
    )
    arguments = sequence(
        storage + b"Q",
        number(view.offset),
        sequence(*map(number, view.shape)),
        sequence(*map(number, view.strides)),
        b"\x89",
        ORDERED_DICT,
        metadata,
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def parameter(view: View) -> bytes:
    """A call of _rebuild_parameter."""
    return b"ctorch._utils\n_rebuild_parameter\n" + sequence(tensor(view), b"\x88", ORDERED_DICT) + b"R"


def items(values: Mapping[str, bytes]) -> bytes:
    """Puts them into the dict before it."""
    return b"(" + b"".join(text(name) + value for name, value in values.items()) + b"u"


def state_dict(values: Mapping[str, bytes], start: bytes = b"}") -> bytes:
    """The pickle of a dict."""
    return b"\x80\x02" + start + items(values) + STOP


def write_archive(
    path: Path,
    pickle: bytes,
    storages: Mapping[str, np.ndarray],
    root: str = "pytorch_model",
    byte_order: bytes | None = b"little",
    compression: int = zipfile.ZIP_STORED,
    others: Sequence[tuple[str, bytes]] = (),
) -> Path:
    """The zip file of one state dict."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{root}/data.pkl", pickle)
        if byte_order is not None:
            archive.writestr(f"{root}/byteorder", byte_order)
        for key, values in storages.items():
            archive.writestr(f"{root}/data/{key}", values.tobytes())
        archive.writestr(f"{root}/version", b"3\n")
        for name, data in others:
            archive.writestr(name, data)
    return path


def write_state_dict(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """An ordinary file: a storage for each tensor."""
    storages = {str(index): values for index, values in enumerate(tensors.values())}
    calls = {name: tensor(contiguous(str(i), values)) for i, (name, values) in enumerate(tensors.items())}
    return write_archive(path, state_dict(calls, ORDERED_DICT), storages)


def write_torch_index(directory: Path, weight_map: object) -> None:
    """The index of a checkpoint of several files."""
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
