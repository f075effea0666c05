from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.weights.values import check_values


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 7, (1 << 18) + 5])
def test_one_bad_value_anywhere_is_found(dtype, bad, position):
    values = np.zeros((1 << 18) + 6, dtype)
    values[:4] = [1, -1, ml_dtypes.finfo(dtype).max if dtype != np.float64 else 3e38, -0.0]
    check_values(Path("f"), "t", values, np.dtype(np.float32))
    values[position] = bad
    with pytest.raises(CheckpointError, match="f: tensor 't' holds NaN or infinite values"):
        check_values(Path("f"), "t", values, np.dtype(np.float32))


def test_an_empty_tensor_is_finite():
    check_values(Path("f"), "t", np.zeros((0, 3), np.float32), np.dtype(np.float32))


def test_the_factor_counts_towards_the_range():
    values = np.full(3, 600, np.float32)
    check_values(Path("f"), "t", values, np.dtype(np.float16), factor=100)
    with pytest.raises(CheckpointError, match="magnitude 76800, above 65504"):
        check_values(Path("f"), "t", values, np.dtype(np.float16), factor=128)
