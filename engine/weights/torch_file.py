"""PyTorch checkpoints: state dicts that `torch.save` wrote, read without PyTorch and without unpickling.

Format: a zip archive whose entries are stored as they are, `<name>/data.pkl` (a pickle with every tensor's shape) and
`<name>/data/<key>` (the elements of each storage, little-endian). Nothing is ever extracted.
"""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.errors import CheckpointError
from engine.weights.layout import TORCH
from engine.weights.tensors import TensorInfo
from engine.weights.torch_pickle import TensorView, read_state_dict

SUFFIXES = (".bin", ".pt", ".pth")
"""Of files that are taken for state dicts."""

MAX_PICKLE_BYTES = 256 << 20
"""The pickle is held in memory; that of a model of a hundred thousand tensors has about 30 MB."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The pickled number that files of PyTorch before 1.6 begin with."""


@dataclass(frozen=True)
class _Entry:
    """A tensor with the place of its storage."""

    view: TensorView
    offset: int
    """Bytes from the start of the file to the storage."""


class TorchSource:
    """A folder with `pytorch_model.bin` or its shards, or one file with a state dict (a `TensorSource`).

    Raises `CheckpointError` where a file is truncated, foreign, of the old format, contradicts the index, or holds
    anything but a flat dict of tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str, TensorInfo] = {}
        self._entries: dict[str, _Entry] = {}
        for file, listed in TORCH.shards(path).items():
            entries = _read_archive(file)
            TORCH.check_names(file, entries, listed)
            for name, entry in entries.items():
                view = entry.view
                num_bytes = view.num_elements * view.storage.dtype.itemsize
                self._tensors[name] = TensorInfo(view.shape, view.storage.dtype, num_bytes, file)
                self._entries[name] = entry

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of all files."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """One tensor, mapped, or a copy where it is not contiguous; shape and dtype as in `tensors`."""
        info, entry = self._tensors[name], self._entries[name]
        view, itemsize = entry.view, info.dtype.itemsize
        if not info.num_bytes:
            return np.zeros(info.shape, info.dtype)
        first = entry.offset + view.offset * itemsize
        try:
            if view.is_contiguous:
                return np.memmap(info.file, info.dtype, mode="r", offset=first, shape=info.shape)
            span = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
            flat = np.memmap(info.file, info.dtype, mode="r", offset=first, shape=(span,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {name!r} cannot be read ({error})") from error
        strides = [stride * itemsize for stride in view.strides]
        return np.array(
            np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False), order="C", subok=False
        )

    def close(self) -> None:
        """Nothing stays open between reads."""


def _read_archive(file: Path) -> dict[str, _Entry]:
    try:
        with file.open("rb") as opened:
            return _Archive(file, opened).entries()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: missing, though {TORCH.index} lists it") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error


class _Archive:
    """The zip file of one checkpoint, open."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._num_bytes = path.stat().st_size
        self._infos = self._read_directory()

    def entries(self) -> dict[str, _Entry]:
        """Every tensor of the state dict."""
        pickles = [name for name in self._infos if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._refuse(f"it holds {len(pickles)} entries data.pkl; expected one")
        root = pickles[0].removesuffix("data.pkl")
        byte_order = self._infos.get(f"{root}byteorder")
        if byte_order is not None and (order := self._read(byte_order, 16)) != b"little":
            raise self._refuse(f"its byte order is {order!r}; expected little")
        views = read_state_dict(self._path, self._read(self._infos[pickles[0]], MAX_PICKLE_BYTES))
        offsets: dict[str, int] = {}
        for name, view in views.items():
            key = view.storage.key
            info = self._infos.get(f"{root}data/{key}")
            if info is None:
                raise self._refuse(f"tensor {name!r} lies in storage {key!r}, which the archive does not hold")
            if info.file_size != view.storage.num_bytes:
                raise self._refuse(
                    f"storage {key!r} of tensor {name!r} has {info.file_size} bytes; expected {view.storage.num_bytes}"
                )
            if key not in offsets:
                offsets[key] = self._offset(info)
        return {name: _Entry(view, offsets[view.storage.key]) for name, view in views.items()}

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        if self._file.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
            raise self._refuse(
                "it is of the format before PyTorch 1.6. Write it again: "
                "torch.save(torch.load(path, weights_only=True), path)"
            )
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        # What the package raises of directories that are damaged, or made to be.
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OverflowError, struct.error) as error:
            raise self._refuse(f"no complete zip archive ({error}); it may be truncated") from error
        by_name = {info.filename: info for info in infos}
        if len(by_name) != len(infos):
            raise self._refuse("its archive holds two entries of one name")
        return by_name

    def _read(self, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
        if info.file_size > max_bytes:
            raise self._refuse(f"{info.filename!r} has {info.file_size} bytes; expected at most {max_bytes}")
        self._file.seek(self._offset(info))
        return self._file.read(info.file_size)

    def _offset(self, info: zipfile.ZipInfo) -> int:
        """Where an entry's bytes begin."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise self._refuse(f"{info.filename!r} is compressed or encrypted; torch.save writes neither")
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise self._refuse(f"there is no entry where {info.filename!r} should be")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        name = self._file.read(name_bytes)
        if name != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
            raise self._refuse(f"another entry lies where {info.filename!r} should be")
        offset = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if offset + info.file_size > self._num_bytes:
            raise self._refuse(f"{info.filename!r} reaches beyond the end of the file")
        return offset

    def _refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a state dict that can be read: {why}")
