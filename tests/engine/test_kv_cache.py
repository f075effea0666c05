"""What is stored and copied. L 2, P 7 of each of 2 data shards, S 16, K 4 over 2 devices, N 10."""

from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import CacheDType
from engine.kv_cache import NO_WINDOW, BatchLayout, CacheShape, allocate, copy_pages, number_dtype, numbers, write
from engine.sharding import make_mesh

DTYPES = get_args(CacheDType)
L, P, S, K, N = 2, 7, 16, 4, 10


def shape(dtype, num_pages=2 * P):
    return CacheShape(L, num_pages, K, N, S, dtype)


def filled(dtype, mesh):
    """A cache in which no two pages are the same."""
    rng = np.random.default_rng(0)
    arrays = allocate(shape(dtype), mesh)
    return jax.tree.map(lambda a: jax.device_put(rng.integers(1, 100, a.shape).astype(a.dtype), a.sharding), arrays)


@cache
def copier(mesh):
    return jax.jit(partial(copy_pages, mesh=mesh), donate_argnums=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_num_bytes_is_what_the_devices_hold(dtype):
    held = allocate(shape(dtype), make_mesh(2, 2))
    assert shape(dtype).num_bytes == sum(a.nbytes for a in held if a is not None)
    per_vector = {"float32": 40, "bfloat16": 20, "float16": 20, "float8_e4m3": 10, "int8": 14}[dtype]
    assert shape(dtype).num_bytes == 2 * L * 2 * P * K * S * per_vector


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_copied_within_their_shard_and_others_stay(dtype):
    mesh = make_mesh(2, 2)
    before = jax.tree.map(np.asarray, filled(dtype, mesh))
    # 1 and 5 of the first shard change places; a target of -1 or 7 is no page.
    sources, targets = [1, 5, 2, 0, 6, 3], [5, 1, -1, 3, 7, 2]
    after = copier(mesh)(filled(dtype, mesh), jnp.array(sources), jnp.array(targets))
    origin = np.arange(2 * P)
    origin[[1, 5]] = [5, 1]
    origin[[P + 3, P + 2]] = [P + 0, P + 3]
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(b, a[:, origin])


def test_one_page_can_be_copied_alone():
    mesh = make_mesh(1, 1)
    before = np.asarray(filled("float32", mesh).keys)
    after = np.asarray(copier(mesh)(filled("float32", mesh), jnp.array([2]), jnp.array([9])).keys)
    np.testing.assert_array_equal(after[:, 9], before[:, 2])
    np.testing.assert_array_equal(np.delete(after, 9, 1), np.delete(before, 9, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_copies", [1, 3])
def test_copying_pages_copies_no_cache(dtype, num_copies):
    mesh = make_mesh(1, 1)
    large = shape(dtype, num_pages=400)
    ids = jnp.zeros(num_copies, jnp.int32)
    assert_in_place(copier(mesh).lower(large.abstract(mesh), ids, ids), large)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "num_tokens"), [(1, 1), (3, 1), (1, 32)])
def test_writing_copies_no_cache(dtype, rows, num_tokens):
    large = shape(dtype, num_pages=400)
    new = jnp.zeros((K, N, rows * num_tokens))
    step = jax.jit(write, donate_argnums=2)
    lowered = step.lower(new, new, large.abstract(make_mesh(1, 1)), jnp.int32(1), layout(rows, num_tokens))
    assert_in_place(lowered, large)


def assert_in_place(lowered, large):
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == large.num_bytes
    assert memory.temp_size_in_bytes < large.num_bytes / 10


def layout(rows, num_tokens):
    """Each sequence from its first position on, in pages of its own."""
    pages = max(1, num_tokens // S)
    positions = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (rows, num_tokens))
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    windows = jnp.full((rows, num_tokens), NO_WINDOW, jnp.int32)
    return BatchLayout(table, positions, jnp.full(rows, num_tokens, jnp.int32), windows)


def stored(k, dtype, num_tokens):
    """Keys and values as read back, each [K, N, tokens], after `k` was written as both."""
    cache = allocate(shape(dtype), make_mesh(1, 1))
    cache = write(k, k, cache, jnp.int32(1), layout(k.shape[2] // num_tokens, num_tokens))
    assert not any(np.asarray(a[0]).any() for a in jax.tree.leaves(cache)), "another layer was written"
    keys, values = (np.asarray(numbers(a)[1].astype(jnp.float32)) for a in (cache.keys, cache.values))
    values = values.swapaxes(2, 3)
    if cache.key_scales is not None:
        keys = keys * np.asarray(cache.key_scales[1])[:, :, None]
        values = values * np.asarray(cache.value_scales[1])[:, :, None]
    if num_tokens == 1:
        return [a[: k.shape[2], :, :, 0].transpose(1, 2, 0) for a in (keys, values)]
    return [a.transpose(1, 2, 0, 3).reshape(K, N, -1)[:, :, : k.shape[2]] for a in (keys, values)]


ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3": 2**-4}
"""Largest relative error of a number in the type's normal range."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_numbers_are_stored_to_the_nearest_of_the_type(dtype, num_tokens):
    k = np.random.default_rng(1).normal(size=(K, N, 3 * num_tokens)).astype(np.float32)
    # int8 numbers are as exact as the largest of their own head and token allows.
    unit = np.abs(k).max(1, keepdims=True) / 127
    tolerance = unit * 0.5001 if dtype == "int8" else np.maximum(np.abs(k) * ROUNDING[dtype], 2**-10)
    for got in stored(jnp.asarray(k), dtype, num_tokens):
        assert np.all(np.abs(got - k) <= tolerance)
        assert dtype == "float32" or np.any(got != k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_what_is_out_of_range_is_stored_as_the_largest_number_and_nan_as_zero(dtype, num_tokens):
    k = np.zeros((K, N, num_tokens), np.float32)
    k[0, :4, 0] = [np.inf, -np.inf, np.nan, 3e38]
    number = number_dtype(allocate(shape(dtype), make_mesh(1, 1)).keys.dtype)
    largest = 3.4028235e38 if dtype == "int8" else float(jnp.finfo(number).max)
    for got in stored(jnp.asarray(k), dtype, num_tokens):
        np.testing.assert_allclose(got[0, :4, 0], [largest, -largest, 0, min(3e38, largest)], rtol=1e-2)
        assert not got[1:].any()


def test_the_type_of_eight_bits_is_the_one_without_infinities():
    assert number_dtype(allocate(shape("float8_e4m3"), make_mesh(1, 1)).keys.dtype) == jnp.float8_e4m3fn
