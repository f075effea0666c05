"""Bytes of a device, by hand. D 24, H 4, K 2, N 6, F 32, V 40, E 8 of which 2, L 3: one int8 model on 2 x 4 devices."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from cluster.budget import (
    Memory,
    abstract_params,
    cache_bytes_per_position,
    list_params,
    weight_bytes,
    whole_blocks,
    workspace_bytes,
)
from engine.config import ModelConfig, MoEConfig
from engine.models.decoder import Decoder
from engine.sharding import make_mesh

MODEL = ModelConfig(
    family="grok-1",
    vocab_size=40,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    intermediate_size=32,
    max_position_embeddings=1000,
    tie_embeddings=True,
    moe=MoEConfig(8, 2, 32, renormalize=False),
)
DENSE = replace(MODEL, family="llama", moe=None, tie_embeddings=False)


def decoder(model=MODEL, mesh=(2, 4), weight_dtype="int8", expert_sharding="width"):
    return Decoder(model, make_mesh(*mesh), weight_dtype, "bfloat16", expert_sharding)


def params(**options):
    return list_params(abstract_params(decoder(**options)))


def test_weights_of_one_device_by_dtype():
    matrices = 3 * ((24 * 24 + 2 * 12 * 24 + 24 * 24) + 8 * 3 * 24 * 32) // 4
    # A scale for each output; of o and down for each of 8 groups of inputs, two of them on a device.
    scales = (24 + 2 * 12) // 4 + 24 * 8 // 4 + 8 * (2 * 32 // 4 + 24 * 8 // 4)
    # Two norms and the router of each layer, and the last norm.
    exact = 3 * (2 * 24 + 8 * 24) + 24
    expected = {"int8": matrices, "bfloat16": 2 * (40 * 24 // 4 + 3 * scales), "float32": 4 * exact}
    assert weight_bytes(params()) == expected


def test_a_vocabulary_that_does_not_divide_is_whole_on_each_device():
    split = weight_bytes(params(model=DENSE, weight_dtype="float32"))["float32"]
    whole = weight_bytes(params(model=replace(DENSE, vocab_size=41), weight_dtype="float32"))["float32"]
    assert whole - split == 4 * 2 * 24 * (41 - 10)


def test_dealing_out_experts_changes_no_sum_but_that_of_scales():
    by_width, by_expert = params(), params(expert_sharding="expert")
    for a, b in zip(by_width, by_expert, strict=True):
        assert a.shape == b.shape
        assert a.shard_bytes == b.shard_bytes, a.path
        assert (a.shard_shape == b.shard_shape) == (not a.is_expert), a.path


def test_scales_of_int8_matrices_are_no_parameters_of_the_model():
    assert sum(p.size for p in params() if not p.is_quantization_scale) == sum(
        p.size for p in params(weight_dtype="bfloat16")
    )


@pytest.mark.parametrize(
    ("mesh", "dtype", "expected"),
    [
        ((1, 1), "float32", 3 * 2 * 2 * 6 * 4),
        ((1, 2), "float32", 3 * 2 * 1 * 6 * 4),
        ((1, 2), "float8_e4m3", 3 * 2 * 1 * 6),
        ((1, 2), "int8", 3 * 2 * 1 * (6 + 4)),  # with a scale
        ((2, 4), "bfloat16", 3 * 2 * 1 * 6 * 2),  # two KV heads over four devices: each is stored twice
    ],
)
def test_cache_of_a_position(mesh, dtype, expected):
    assert cache_bytes_per_position(decoder(mesh=mesh, weight_dtype="float32"), dtype) == expected


def test_workspace_holds_a_chunk_the_logits_and_a_widened_matrix():
    d = decoder()
    listed = list_params(abstract_params(d))
    # 4 heads of q, and k and v of 4 stored heads each, over 4 devices; two experts of a token.
    per_token = 6 * 24 + 12 * 6 // 4 + 2 * (24 + 3 * 32 // 4)
    widest = max(24 * 24 // 4, 24 * 32 // 4)
    expected = 2 * (64 * per_token + widest) + 16 * 40 * (3 * 2)
    assert workspace_bytes(d, listed, "bfloat16", rows_per_shard=3, chunk_len=64) == expected
    dense = decoder(model=DENSE, weight_dtype="float32")
    per_token = 6 * 24 + 12 * 6 // 4 + 3 * 32 // 4
    expected = 4 * 5 * per_token + 16 * 40 * (5 * 2)
    assert workspace_bytes(dense, list_params(abstract_params(dense)), "float32", 5, 4) == expected


MEMORY = Memory(
    usable=100_000,
    weights={"int8": 30_000, "bfloat16": 5_000},
    workspace=1_000,
    cache_per_position=10,
    num_shards=2,
    max_positions=1000,
)


def test_what_fits_into_the_rest():
    assert MEMORY.free == 64_000
    assert MEMORY.cache_per_slot(128) == 1280
    assert MEMORY.cache_per_slot(129) == 2560
    assert MEMORY.num_slots(128) == 2 * 50
    assert MEMORY.num_slots(129) == 2 * 25
    assert MEMORY.num_pages(16) == 2 * 400


@pytest.mark.parametrize(
    ("num_slots", "held", "largest"),
    [(1, 6400, 1000), (2, 6400, 1000), (10, 1280, 1000), (12, 1024, 1000), (13, 896, 896), (200, 0, 0)],
)
def test_the_largest_context_is_of_whole_blocks_and_not_above_the_models(num_slots, held, largest):
    assert MEMORY.context_that_memory_holds(num_slots) == held
    assert MEMORY.largest_context(num_slots) == largest
    assert MEMORY.fits(num_slots, largest)
    assert not MEMORY.fits(num_slots, largest + 1)


def test_weights_that_do_not_fit_leave_nothing():
    short = replace(MEMORY, usable=30_000)
    assert short.free == -6_000
    assert (short.num_slots(128), short.num_pages(16), short.largest_context(1)) == (0, 0, 0)
    assert not short.fits(1, 1)


def test_whole_blocks():
    assert [whole_blocks(n) for n in (1, 128, 129)] == [128, 128, 256]


def test_arithmetic_is_what_the_devices_hold():
    """Against real arrays: a device's share of randomly initialised parameters."""
    d = decoder(weight_dtype="float32")
    tree = abstract_params(d)
    held = 0
    for arrays in tree.values():
        for array in arrays.values():
            zeros = jnp.zeros(array.shape, array.dtype, device=array.sharding)
            held += zeros.addressable_shards[0].data.nbytes
    assert held == sum(weight_bytes(list_params(tree)).values())
