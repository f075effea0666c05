"""Cached equals full, sharded equals unsharded, chunked equals whole."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.teacher_forcing import ForcedSequence, forced_logits

from .oracle import full_logits
from .tiny_models import LLAMA, MODELS, WIDE, make_engine, random_params

TOLERANCE = 2e-4

NUM_DECODED = 7
PROMPT_LENGTHS = [1, 16, 37, 150]
"""Less than a page, a page, chunks of two lengths, more than an attention block."""


@cache
def sequences(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        ForcedSequence(tuple(rng.integers(0, 53, n).tolist()), tuple(rng.integers(0, 53, NUM_DECODED).tolist()))
        for n in PROMPT_LENGTHS
    )


def computed_logits(config, params, mesh=(1, 1), **changes):
    """Logits of all sequences through chunked prefill and batched decode."""
    settings = {"num_slots": 4, "prefill_buckets": (32,), "max_model_len": 160} | changes
    return forced_logits(make_engine(config, params, EngineConfig(**settings), mesh).runner, sequences())


def expected_logits(config, params):
    return [full_logits(config, params, s.prompt + s.continuation) for s in sequences()]


def assert_close(got, expected, tolerance=TOLERANCE):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=f"sequence {i}")


def test_every_parameter_shows_in_the_logits():
    """Without this, agreement with the oracle would say nothing of a parameter that both ignore."""
    for name, config in MODELS.items():
        params = random_params(config)
        tokens = sequences()[2].prompt
        plain = full_logits(config, params, tokens)
        for path, value in params.items():
            changed = full_logits(config, params | {path: np.roll(value, 1, axis=-1)}, tokens)
            assert np.abs(changed - plain).max() > 1e-2, (name, path)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_chunked_prefill_and_decode_equal_one_full_forward_pass(name):
    config = MODELS[name]
    params = random_params(config)
    assert_close(computed_logits(config, params), expected_logits(config, params))


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)])
def test_a_sharded_model_equals_a_full_forward_pass(mesh):
    """With 4 KV heads on 8 devices each is stored twice; the vocabulary of 53 is divided by none."""
    config = dataclasses.replace(WIDE, qkv_bias=True, layer_windows=(7, None))
    params = random_params(config)
    assert_close(computed_logits(config, params, mesh), expected_logits(config, params))


def test_whole_prompts_and_smaller_pages_change_nothing():
    params = random_params(LLAMA)
    whole = computed_logits(LLAMA, params, page_size=4, prefill_buckets=(160,))
    assert_close(whole, expected_logits(LLAMA, params))


def test_a_bfloat16_cache_is_close_to_float32_and_not_equal():
    params = random_params(LLAMA)
    got, expected = computed_logits(LLAMA, params, cache_dtype="bfloat16"), expected_logits(LLAMA, params)
    assert_close(got, expected, tolerance=0.05)
    with pytest.raises(AssertionError):
        assert_close(got, expected)
