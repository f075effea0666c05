"""Checks of a tensor's values on the host."""

from pathlib import Path

import ml_dtypes
import numpy as np

from engine.errors import CheckpointError

FINITE_CHECK_CHUNK = 1 << 18
"""Elements looked at together: few enough to stay in a core's cache."""


def check_values(file: Path, name: str, values: np.ndarray, target: np.dtype, factor: float = 1.0) -> None:
    """Raises `CheckpointError` where a value is not finite, or `factor` times it is beyond the target dtype's range."""
    largest = _largest_magnitude(values) * factor
    if not np.isfinite(largest):
        raise CheckpointError(f"{file}: tensor {name!r} holds NaN or infinite values; the file is damaged")
    limit = float(ml_dtypes.finfo(target).max)
    if largest > limit:
        raise CheckpointError(
            f"{file}: tensor {name!r} holds a value of magnitude {largest:g}, above {limit:g}, the largest of "
            f"{np.dtype(target)}; load it with weight_dtype bfloat16 or float32"
        )


def _largest_magnitude(values: np.ndarray) -> float:
    """max |x|, infinite or NaN where a value is.

    The bit patterns of floats without their sign order as the magnitudes do, with infinities and NaNs above all finite
    ones: one pass over the bits, without a second array, tells both the range and whether all values are finite.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).reshape(-1).view(unsigned)
    without_sign = unsigned.type(np.iinfo(unsigned).max >> 1)
    starts = range(0, bits.size, FINITE_CHECK_CHUNK)
    chunks = (bits[start : start + FINITE_CHECK_CHUNK] for start in starts)
    largest = max((np.bitwise_and(chunk, without_sign).max() for chunk in chunks), default=unsigned.type(0))
    return float(np.asarray([largest], unsigned).view(values.dtype)[0])
