"""The kernel against the reference without a GPU (Pallas' interpreter), and that it can be compiled for one."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.attention import can_address
from engine.config import CacheDType, EngineConfig
from engine.engine import build_engine
from engine.kernels import paged_attention as module
from engine.kernels.blockwise_attention import blockwise_attention
from engine.kernels.choice import random_case
from engine.kernels.paged_attention import paged_attention
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.sharding import make_mesh
from engine.teacher_forcing import forced_logits

from ..test_forward import assert_close, expected_logits, sequences
from ..tiny_models import MODELS, place, random_params

MAX_BLOCKS = 5
CACHE_DTYPES = get_args(CacheDType)


def both(case, softcap=None, interpret=True, max_blocks=MAX_BLOCKS):
    """(kernel, reference), float32 [B, K, G, N]; the row without tokens left out."""
    q, cache, layout = case

    def kernel(q, cache, layout):
        length = max_blocks * 128
        return paged_attention(q, cache, jnp.int32(1), layout.windows[:, 0], layout, length, softcap, interpret)

    def reference(q, cache, layout):
        return blockwise_attention(q, cache, jnp.int32(1), layout.windows, layout, (0, max_blocks), softcap)

    with jax.default_matmul_precision("float32"):
        results = [jax.jit(f)(q, cache, layout) for f in (kernel, reference)]
    assert results[0].dtype == results[1].dtype
    assert results[0].shape == results[1].shape
    used = np.asarray(layout.num_tokens) > 0
    return [np.asarray(r.astype(jnp.float32))[used, :, :, 0] for r in results]


def assert_equal(case, tolerance, **options):
    got, expected = both(case, **options)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("activation_dtype", ["float32", "bfloat16"])
def test_kernel_equals_reference_for_every_type_of_cache(cache_dtype, activation_dtype):
    exact = activation_dtype == "float32" or cache_dtype == "float32"
    case = random_case(64, 3, 16, cache_dtype, activation_dtype, num_heads=3)
    assert_equal(case, 5e-6 if exact or cache_dtype == "float16" else 0.02)


@pytest.mark.parametrize(
    ("head_size", "group", "page_size", "num_heads", "softcap"),
    [(64, 1, 16, 3, None), (128, 7, 32, 2, None), (80, 2, 128, 1, 3.0), (10, 17, 8, 2, 0.7), (256, 5, 64, 1, None)],
)
def test_kernel_equals_reference_for_every_shape(head_size, group, page_size, num_heads, softcap):
    case = random_case(head_size, group, page_size, "float32", "float32", num_heads)
    assert_equal(case, 5e-6, softcap=softcap)


def test_a_row_without_tokens_is_zero():
    q, cache, layout = random_case(64, 3, 16, "float32", "float32")
    assert layout.num_tokens[-1] == 0
    run = jax.jit(paged_attention, static_argnums=(5, 6, 7))
    out = np.asarray(run(q, cache, jnp.int32(1), layout.windows[:, 0], layout, MAX_BLOCKS * 128, None, True))
    assert not out[-1].any()
    assert out[0].all()


def test_pages_that_are_not_seen_are_not_read():
    """What lies before a window or behind a row's end may be anything, even no number."""
    q, cache, layout = random_case(64, 3, 16, "float32", "float32")
    seen = np.zeros((cache.keys.shape[1], 16), bool)
    table, positions, windows = (
        np.asarray(a) for a in (layout.page_table, layout.positions[:, 0], layout.windows[:, 0])
    )
    for row, position, window in zip(table, positions, windows, strict=True):
        for j in range(max(0, position - window + 1), position + 1):
            seen[row[j // 16], j % 16] = True
    poisoned = KVCache(
        jnp.where(seen[None, :, None, None, :], cache.keys, jnp.nan),
        jnp.where(seen[None, :, None, :, None], cache.values, jnp.nan),
    )
    np.testing.assert_array_equal(both((q, poisoned, layout))[0], both((q, cache, layout))[0])


def test_stretches_change_nothing(monkeypatch):
    case = random_case(64, 3, 16, "float32", "float32")
    several = both(case)[0]
    monkeypatch.setattr(module, "_MAX_STRETCHES", 1)
    np.testing.assert_allclose(both(case)[0], several, rtol=0, atol=3e-6)
    monkeypatch.setattr(module, "_MAX_STRETCHES", 7)
    monkeypatch.setattr(module, "_STRETCH_LEN", 64)
    np.testing.assert_allclose(both(case)[0], several, rtol=0, atol=3e-6)


def test_the_longest_row_bounds_what_is_looked_at():
    q, cache, layout = random_case(64, 3, 16, "float32", "float32")
    short = layout._replace(positions=jnp.minimum(layout.positions, 255))
    assert_equal((q, cache, short), 5e-6, max_blocks=2)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize(("head_size", "group", "activation_dtype"), [(64, 3, "float32"), (80, 1, "bfloat16")])
def test_kernel_lowers_for_cuda(cache_dtype, head_size, group, activation_dtype):
    q, cache, layout = random_case(head_size, group, 16, cache_dtype, activation_dtype)

    def kernel(q, cache, layout):
        return paged_attention(q, cache, jnp.int32(1), layout.windows[:, 0], layout, 640, 2.0)

    try:
        lowered = jax.jit(kernel).trace(q, cache, layout).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:
        if "compilation handler" not in str(error):
            raise
        pytest.skip("this jax compiles Triton kernels only beside its CUDA plugin")
    assert "triton" in lowered.as_text()


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_a_whole_model_decodes_with_the_kernel(mesh, monkeypatch):
    config = replace(MODELS["grok-like"], layer_windows=(29, None))
    params = random_params(config)
    settings = EngineConfig(num_slots=4, prefill_buckets=(32,), max_model_len=160)
    expected = expected_logits(config, params)
    decoder = Decoder(config, make_mesh(*mesh), "float32", "float32", attention_kernel="interpreted")
    engine = build_engine(decoder, place(params, decoder.mesh), settings)
    calls = []
    monkeypatch.setattr(module, "paged_attention", lambda *args: calls.append(1) or paged_attention(*args))
    got = forced_logits(engine.runner, sequences())
    assert calls
    assert_close(got, expected)


def test_arrays_of_bytes_beyond_31_bits_are_left_to_the_reference():
    def cache(dtype, gib):
        lead = (gib, 2**10, 2**10)
        return KVCache(*(jax.ShapeDtypeStruct((*lead, *end), dtype) for end in [(8, 128 // dtype.itemsize)] * 2))

    byte, half = np.dtype(np.uint8), np.dtype(np.uint16)
    assert [can_address(cache(byte, gib)) for gib in (2, 3, 4, 5)] == [True, False, False, True]
    assert all(can_address(cache(half, gib)) for gib in (2, 3, 4, 5))
