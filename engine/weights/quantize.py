"""Symmetric int8 weights: each value counts times the scale of its row and group of inputs.

Letters: O out, I in, G groups; a group is I / G inputs that follow each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 127

INVERSE = np.float32(1 / LARGEST)
"""Multiplied with: XLA turns a division by a constant into this, numpy does not, and both must agree to the bit."""

ROWS_TOGETHER = 256
"""Rows whose scales the host computes together."""


@dataclass(frozen=True)
class QuantizationError:
    """How far a parameter that was quantised while loading is from what its file holds."""

    path: str
    relative_rms: float
    """Root of the mean squared error, as a share of the root of the mean square of the values."""
    max_abs: float
    """Largest error of one value."""


QuantizationReport = Callable[[QuantizationError], None]
"""Called once for each parameter that is quantised while loading."""


def group_scales(w: jax.Array, num_groups: int, dtype: np.dtype) -> jax.Array:
    """Scales [..., O, G] of float32 `w` [..., O, I]: max |w| / 127 over each group."""
    groups = w.reshape(*w.shape[:-1], num_groups, w.shape[-1] // num_groups)
    return (jnp.max(jnp.abs(groups), axis=-1) * INVERSE).astype(dtype)


def host_scales(w: np.ndarray, num_groups: int, dtype: np.dtype) -> np.ndarray:
    """`group_scales` of a host array of any float dtype, a few rows at a time."""
    scales = np.empty((*w.shape[:-1], num_groups), dtype)
    for start in range(0, w.shape[-2], ROWS_TOGETHER):
        rows = w[..., start : start + ROWS_TOGETHER, :].astype(np.float32)
        groups = rows.reshape(*rows.shape[:-1], num_groups, -1)
        scales[..., start : start + ROWS_TOGETHER, :] = np.abs(groups).max(axis=-1) * INVERSE
    return scales


def quantize(w: jax.Array, scales: jax.Array) -> jax.Array:
    """int8 values [..., O, I] of float32 `w` [..., O, I]: those nearest to it under the scales [..., O, G]."""
    groups = w.reshape(*scales.shape, w.shape[-1] // scales.shape[-1])
    divisors = scales.astype(jnp.float32)
    divisors = jnp.where(divisors == 0, jnp.float32(1), divisors)[..., None]
    values = jnp.clip(jnp.round(groups / divisors), -LARGEST, LARGEST)
    return values.astype(jnp.int8).reshape(w.shape)


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Float32 [..., O, I] of int8 values [..., O, I] and scales [..., O, G]."""
    num_groups = scales.shape[-1]
    groups = values.reshape(*values.shape[:-1], num_groups, values.shape[-1] // num_groups).astype(jnp.float32)
    return (groups * scales.astype(jnp.float32)[..., None]).reshape(values.shape)


def measured_error(path: str, figures: Sequence[jax.Array]) -> QuantizationError:
    """The error of a parameter from what `placement.place_quantized` measured of its pieces, over the parts that this
    process holds. A part held by several devices counts several times in both sums alike."""
    rows = np.concatenate([np.asarray(shard.data) for piece in figures for shard in piece.addressable_shards])
    squared_error, squares = rows[:, 0].sum(dtype=np.float64), rows[:, 1].sum(dtype=np.float64)
    return QuantizationError(path, math.sqrt(squared_error / squares) if squares else 0.0, float(rows[:, 2].max()))


def describe_errors(errors: Sequence[QuantizationError]) -> str:
    """One line for a start-up log: how many parameters, their mean error and the worst of them."""
    if not errors:
        return "no parameter was quantised while loading"
    mean = sum(error.relative_rms for error in errors) / len(errors)
    worst = max(errors, key=lambda error: error.relative_rms)
    return (
        f"{len(errors)} parameters quantised to int8: relative RMS error {mean:.3%} on average, at most "
        f"{worst.relative_rms:.3%} ({worst.path}, largest error {worst.max_abs:.3g})"
    )
