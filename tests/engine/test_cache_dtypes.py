"""How far each type of cache is from float32, through prefill and decode of small models with large weights."""

from functools import cache
from typing import get_args

import numpy as np
import pytest

from engine.config import CacheDType

from .test_forward import computed_logits
from .tiny_models import MODELS, random_params

BOUNDS = {"float16": (0.003, 3e-4), "bfloat16": (0.03, 2.5e-3), "int8": (0.06, 6e-3), "float8_e4m3": (0.7, 4e-2)}
"""(largest, mean) error of a logit as a share of its sequence's largest."""

SHARPER = {"float16": None, "bfloat16": "float16", "int8": "bfloat16", "float8_e4m3": "int8"}


@cache
def errors(model, dtype):
    params = random_params(MODELS[model])
    exact = logits(model, "float32")
    got = computed_logits(MODELS[model], params, cache_dtype=dtype)
    parts = [np.abs(a - b) / np.abs(b).max() for a, b in zip(got, exact, strict=True)]
    return max(part.max() for part in parts), np.mean([part.mean() for part in parts])


@cache
def logits(model, dtype):
    return computed_logits(MODELS[model], random_params(MODELS[model]), cache_dtype=dtype)


@pytest.mark.parametrize("model", ["llama", "grok-like"])
@pytest.mark.parametrize("dtype", sorted(set(get_args(CacheDType)) - {"float32"}))
def test_error_of_logits_is_within_the_types(model, dtype):
    largest, mean = errors(model, dtype)
    assert largest < BOUNDS[dtype][0]
    assert mean < BOUNDS[dtype][1]
    sharper = SHARPER[dtype]
    # Otherwise the numbers would be kept in another type than was asked for.
    assert mean > (1e-6 if sharper is None else 1.3 * errors(model, sharper)[1])


def test_a_sharded_int8_cache_has_the_same_error():
    params = random_params(MODELS["llama"])
    whole = computed_logits(MODELS["llama"], params, cache_dtype="int8")
    halves = computed_logits(MODELS["llama"], params, mesh=(2, 2), cache_dtype="int8")
    for a, b in zip(halves, whole, strict=True):
        # A number may be rounded to the next one where the products before it differ in their last bit.
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max())
        assert np.abs(a - b).mean() < 1e-3 * np.abs(b).max()
