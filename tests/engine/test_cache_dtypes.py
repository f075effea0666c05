"""How far each type of cache is from float32, through prefill and decode of a small model with large weights."""

from functools import cache

import numpy as np
import pytest

from .test_forward import computed_logits
from .tiny_models import LLAMA, random_params

BOUNDS = {"float16": (0.003, 3e-4), "bfloat16": (0.03, 2.5e-3), "int8": (0.06, 6e-3), "float8_e4m3": (0.7, 4e-2)}
"""(largest, mean) error of a logit as a share of its sequence's largest."""

SHARPER = {"bfloat16": "float16", "int8": "bfloat16", "float8_e4m3": "int8"}
"""The type whose error is just below."""


@cache
def logits(dtype, mesh=(1, 1)):
    return computed_logits(LLAMA, random_params(LLAMA), mesh, cache_dtype=dtype)


@cache
def errors(dtype, mesh=(1, 1)):
    pairs = zip(logits(dtype, mesh), logits("float32"), strict=True)
    parts = [np.abs(got - exact) / np.abs(exact).max() for got, exact in pairs]
    return max(part.max() for part in parts), np.mean([part.mean() for part in parts])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_error_of_logits_is_within_the_types(dtype):
    largest, mean = errors(dtype)
    assert largest < BOUNDS[dtype][0]
    assert mean < BOUNDS[dtype][1]
    # Otherwise the numbers would be kept in another type than was asked for.
    assert mean > (1.3 * errors(SHARPER[dtype])[1] if dtype in SHARPER else 1e-6)


def test_a_sharded_int8_cache_has_the_same_error():
    """Not the same logits: a number may be rounded to the next one where what is before it differs in its last bit."""
    mean, sharded = errors("int8")[1], errors("int8", (2, 2))[1]
    assert 0.8 * mean < sharded < 1.25 * mean
