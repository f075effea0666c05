"""The folder that a conversion writes: which states it can be in, and one file at a time.

    empty or absent -> checksums.json, some files (unfinished) -> index, tokenizer, at last config.json (finished)

Each file is written beside its name and renamed once it is complete on the disk.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.weights.hf import INDEX_FILE
from engine.weights.native import (
    CHECKSUM_FILE,
    CONFIG_FILE,
    Checksums,
    FileChecksum,
    file_checksum,
    native_config,
    read_checksums,
)
from engine.weights.records import encode_record
from engine.weights.tensors import TensorSource

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Taken along from a source folder, so that the converted one can be served by itself."""

PARTIAL_SUFFIX = ".partial"


class Destination:
    """One folder and the conversion that it is meant for."""

    def __init__(self, path: Path, source: TensorSource, config: ModelConfig, options: Sequence[str]) -> None:
        self._path, self._config = path, config
        self._origin = _origin(source, config, options)
        self._files: dict[str, FileChecksum] = {}
        self._index: dict[str, str] = {}

    def is_finished(self) -> bool:
        """Whether the folder holds the finished result of this very conversion. Raises `CheckpointError` where it
        holds anything else than that, or a part of it."""
        if not self._path.exists():
            return False
        if not self._path.is_dir():
            raise CheckpointError(f"{self._path}: not a folder")
        entries = {entry.name for entry in self._path.iterdir()}
        if not entries:
            return False
        if CHECKSUM_FILE not in entries:
            raise CheckpointError(
                f"{self._path}: holds {sorted(entries)[0]!r} and is no conversion; give a folder that is empty or not "
                "there yet"
            )
        if read_checksums(self._path).origin != self._origin:
            raise CheckpointError(
                f"{self._path}: holds a conversion of another source, of a source that has changed, or with other "
                "options; give another folder, or remove this one"
            )
        return CONFIG_FILE in entries

    def refuse_finished(self) -> CheckpointError:
        """The error for a conversion that is finished (to be raised by the caller)."""
        return CheckpointError(
            f"{self._path}: this conversion is finished, and is not written again; --verify checks it"
        )

    def prepare(self, num_bytes: int) -> None:
        """Makes the folder, or reads what is there of it. Raises `CheckpointError` where the disk is too small."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            if (self._path / CHECKSUM_FILE).exists():
                self._files = dict(read_checksums(self._path).files)
            free_bytes = shutil.disk_usage(self._path).free
            needed = num_bytes - sum(checksum.num_bytes for checksum in self._files.values())
            if needed > free_bytes:
                raise CheckpointError(f"{self._path}: needs {needed} bytes more; {free_bytes} are free on its disk")
            self._write_checksums()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written ({error.strerror})") from error

    def has(self, name: str, tensors: Sequence[str]) -> bool:
        """Whether the file of these tensors was written before and is still what it was."""
        self._index |= dict.fromkeys(tensors, name)
        expected = self._files.get(name)
        path = self._path / name
        return expected is not None and path.exists() and file_checksum(path) == expected

    def add(self, name: str, tensors: dict[str, np.ndarray]) -> None:
        """Writes one file of tensors, reads it back, and notes its checksum. Raises `CheckpointError`."""
        partial = self._path / f"{name}{PARTIAL_SUFFIX}"
        try:
            save_file(tensors, partial)
            # safetensors makes files that only their owner can read.
            partial.chmod((self._path / CHECKSUM_FILE).stat().st_mode)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            _check_written(partial, tensors)
            partial.rename(self._path / name)
            self._files[name] = file_checksum(self._path / name)
            self._write_checksums()
        except OSError as error:
            raise CheckpointError(f"{partial}: cannot be written ({error.strerror})") from error

    def finish(self, source: Path) -> None:
        """Writes everything that makes the folder a model, config.json last; the tokenizer from the folder `source`."""
        try:
            _write_json(self._path / INDEX_FILE, {"metadata": {}, "weight_map": self._index})
            for name in TOKENIZER_FILES:
                if (source / name).exists():
                    shutil.copyfile(source / name, self._path / name)
            _write_json(self._path / CONFIG_FILE, native_config(self._config))
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written ({error.strerror})") from error

    def _write_checksums(self) -> None:
        _write_json(self._path / CHECKSUM_FILE, encode_checksums(Checksums(self._origin, self._files)))


def encode_checksums(checksums: Checksums) -> dict[str, object]:
    """The contents of checksums.json."""
    return {
        "origin": checksums.origin,
        "files": {name: encode_record(checksum) for name, checksum in checksums.files.items()},
    }


def _origin(source: TensorSource, config: ModelConfig, options: Sequence[str]) -> str:
    """A digest that changes with the source's files, the model or the options; the files are not read for it."""
    files = {info.file for info in source.tensors.values()}
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    described = json.dumps([stats, native_config(config), list(options)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def _check_written(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with safe_open(path, framework="numpy") as file:
        for name, expected in tensors.items():
            # By their bytes: values would call a NaN different from itself.
            if file.get_tensor(name).tobytes() != expected.tobytes():
                raise CheckpointError(f"{path}: {name!r} reads back other than it was written; check the disk")


def _write_json(path: Path, value: object) -> None:
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)
