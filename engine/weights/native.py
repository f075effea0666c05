"""A converted model: this engine's own parameters in safetensors files, ready to load without any rearranging.

    config.json                     {"model_type": "jax-serve", "format_version": 1, "config": fields of `ModelConfig`}
    model.safetensors.index.json    tensor name (a parameter's path) to file
    model-00001-of-00007.safetensors, ...
    checksums.json                  size and SHA-256 of each file of tensors, and what it was converted from

An int8 "x/w" has its scales in "x/scale".
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.weights.families.family import WeightMap
from engine.weights.hf import HFSource
from engine.weights.jsonfile import read_json_object
from engine.weights.plan import rule_of
from engine.weights.records import decode_record, encode_record
from engine.weights.tensors import TensorInfo

MODEL_TYPE = "jax-serve"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
CHECKSUM_FILE = "checksums.json"

HASH_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class FileChecksum:
    """What a file of tensors must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Checksums:
    """The contents of checksums.json."""

    origin: str
    """Digest of what was converted, and how."""
    files: Mapping[str, FileChecksum]


def is_native(path: Path) -> bool:
    """Whether `path` is a folder with a converted model's config."""
    config = path / CONFIG_FILE
    return config.is_file() and read_json_object(config).get("model_type") == MODEL_TYPE


def read_native_config(directory: Path) -> ModelConfig:
    """The model of a converted folder. Raises `CheckpointError` naming the field that is missing or wrong."""
    file = directory / CONFIG_FILE
    values = read_json_object(file)
    if values.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {values.get('format_version')!r}; this version reads {FORMAT_VERSION}. Convert "
            "the model again"
        )
    return decode_record(ModelConfig, values.get("config"), file)


def native_config(config: ModelConfig) -> dict[str, object]:
    """The contents of config.json for a model."""
    return {
        "model_type": MODEL_TYPE,
        "format_version": FORMAT_VERSION,
        "config": encode_record(config),
        # Where a tokenizer without a generation_config.json looks.
        "eos_token_id": list(config.eos_token_ids),
    }


def read_checksums(directory: Path) -> Checksums:
    """Raises `CheckpointError` where checksums.json is missing or malformed."""
    file = directory / CHECKSUM_FILE
    values = read_json_object(file)
    origin, files = values.get("origin"), values.get("files")
    if not isinstance(origin, str) or not isinstance(files, dict) or values.keys() != {"origin", "files"}:
        raise CheckpointError(f"{file}: expected 'origin' and 'files'")
    for name in files:
        if Path(name).name != name or "\\" in name:
            raise CheckpointError(f"{file}: {name!r} is not the plain name of a file in the same directory")
    return Checksums(origin, {name: decode_record(FileChecksum, entry, file) for name, entry in files.items()})


def verify_checksums(directory: Path, progress: Callable[[str], None] | None = None) -> None:
    """Reads every file of tensors and compares its SHA-256. Raises `CheckpointError` naming the first that differs."""
    checksums = read_checksums(directory)
    for name, expected in checksums.files.items():
        if progress is not None:
            progress(name)
        if file_checksum(directory / name) != expected:
            raise CheckpointError(
                f"{directory / name}: differs from its checksum in {CHECKSUM_FILE}; the file is damaged. Convert the "
                "model again"
            )


def file_checksum(path: Path) -> FileChecksum:
    """Size and SHA-256 of a file. Raises `CheckpointError` where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
        return FileChecksum(path.stat().st_size, digest.hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


class NativeSource(HFSource):
    """A converted folder (a `TensorSource`).

    Raises `CheckpointError` where a file is missing, truncated, not of the size that checksums.json says, or foreign.
    """

    def __init__(self, directory: Path) -> None:
        checksums = read_checksums(directory).files
        for name, expected in checksums.items():
            file = directory / name
            num_bytes = file.stat().st_size if file.exists() else None
            if num_bytes != expected.num_bytes:
                found = "is missing" if num_bytes is None else f"has {num_bytes} bytes"
                raise CheckpointError(f"{file}: {found}; {CHECKSUM_FILE} says {expected.num_bytes} bytes")
        super().__init__(directory)
        files = {info.file.name for info in super().tensors.values()}
        if files != checksums.keys():
            raise CheckpointError(
                f"{directory}: {sorted(files ^ checksums.keys())[0]} is listed in only one of {CHECKSUM_FILE} and the "
                "index of the tensors"
            )
        self._paired = {name: self._with_scales(name, info) for name, info in super().tensors.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every parameter by its path."""
        return self._paired

    def _with_scales(self, name: str, info: TensorInfo) -> TensorInfo:
        scales = f"{name.removesuffix('/w')}/scale"
        if info.dtype != np.int8 or scales not in super().tensors:
            return info
        return TensorInfo(info.shape, info.dtype, info.num_bytes, info.file, scales)


def native_weights(source: NativeSource) -> WeightMap:
    """Every parameter under its own path."""
    rules = {rule_of(path) for path in source.tensors}
    return WeightMap(names={rule: rule for rule in rules})
