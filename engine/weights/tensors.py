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
    """Of the array that `read` returns; where that dequantises, of the dequantised values."""
    num_bytes: int
    """Size in the file."""
    file: Path
    """The file that holds it, for messages."""
    scales: str | None = None
    """For int8 values: the name of the tensor with their scales, of the same shape but with G groups in place of the
    I inputs. Each value counts times the scale of its group."""


class TensorSource(Protocol):
    """A checkpoint opened for reading. Nothing but names and shapes is in memory until `read`."""

    @property
    def path(self) -> Path:
        """What was opened: a directory or a file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint, by the name it has there."""

    def read(self, name: str) -> np.ndarray:
        """One tensor: an array of its own, or an `np.memmap` of the file. Several threads may read at once.

        Raises `CheckpointError`.
        """

    def close(self) -> None:
        """Closes the files."""
