"""What the loader needs of a checkpoint file: named tensors, read one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file declares it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """Of the array that `read` returns: for a quantised tensor that of its dequantised values."""
    num_bytes: int
    """Size in the file."""
    file: Path
    """The file that holds it, for messages."""


class TensorSource(Protocol):
    """A checkpoint opened for reading. Nothing but names and shapes is in memory until `read`."""

    @property
    def path(self) -> Path:
        """What was opened: a directory or a file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint, by the name it has there."""

    def read(self, name: str) -> np.ndarray:
        """One tensor in an array of its own (it does not alias the file). Raises `CheckpointError`."""

    def close(self) -> None:
        """Closes the files."""
