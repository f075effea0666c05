"""Limits by hand, of the model in test_budget: D 24, H 4, K 2, N 6, F 32, V 40, E 8 of which 2, L 3."""

import pytest

from cluster.budget import abstract_params, list_params
from cluster.roofline import Accelerator, StepCosts, expected_distinct_experts

from .test_budget import DENSE, MODEL, decoder

EXPERT = 3 * 24 * 32
LAYER = 24 * 24 + 2 * 12 * 24 + 24 * 24
NORMS = 3 * 2 * 24 + 24


def costs(model=MODEL, **options):
    d = decoder(model=model, **({"weight_dtype": "float32"} | options))
    return StepCosts.of(d, list_params(abstract_params(d)), "float32")


def test_how_many_experts_a_step_reads():
    assert expected_distinct_experts(8, 2, 1) == 2
    assert expected_distinct_experts(8, 2, 2) == pytest.approx(3.5)
    assert expected_distinct_experts(8, 8, 5) == 8
    assert expected_distinct_experts(8, 2, 1000) == pytest.approx(8)


def test_what_is_read_and_multiplied_in_a_mixture():
    c = costs()
    assert c.dense_bytes == 4 * (40 * 24 // 4 + 3 * (LAYER // 4 + 8 * 24) + NORMS)
    assert c.expert_bytes == 4 * 3 * 8 * EXPERT // 4
    assert c.layer_params == 3 * (LAYER + 8 * 24 + 2 * EXPERT)
    assert c.head_params == 40 * 24
    assert c.attention_flop_per_pair == 4 * 3 * 4 * 6


def test_an_embedding_apart_from_the_output_layer_is_not_read():
    c = costs(DENSE)
    assert c.dense_bytes == 4 * (40 * 24 // 4 + 3 * (LAYER + EXPERT) // 4 + NORMS)
    assert c.expert_bytes_read(7) == 0
    assert c.head_params == 40 * 24


def test_int8_scales_are_read_and_not_multiplied():
    c, f32 = costs(weight_dtype="int8"), costs()
    assert c.layer_params == f32.layer_params
    scales = 8 * (2 * 32 // 4 + 24 * 8 // 4)
    assert c.expert_bytes == 3 * (8 * EXPERT // 4 + 2 * scales)


def test_experts_by_width_are_read_in_part_and_whole_ones_whole():
    one = 4 * 3 * EXPERT  # of every layer, in bytes
    assert costs().expert_bytes_read(1) == pytest.approx(2 * one / 4)
    assert costs().expert_bytes_read(2) == pytest.approx(3.5 * one / 4)
    dealt = costs(expert_sharding="expert")
    assert dealt.expert_bytes_read(1) == pytest.approx(one)
    assert dealt.expert_bytes_read(1000) == pytest.approx(2 * one)


def test_decode_is_limited_by_the_slower_of_reading_and_computing():
    c = costs()
    read = c.dense_bytes + 3.5 * 4 * 3 * EXPERT / 4 + 2 * 50 * c.cache_bytes_per_position
    flop = 2 * (2 * (c.layer_params + c.head_params) + 50 * c.attention_flop_per_pair) / 4
    # Three rows on two data shards: one has two of them.
    assert c.decode_bytes(3, 50) == pytest.approx(read)
    assert c.decode_flop(3, 50) == pytest.approx(flop)
    assert c.decode_step_s(3, 50, Accelerator(0, read, 2 * flop)) == pytest.approx(1)
    assert c.decode_step_s(3, 50, Accelerator(0, read, flop / 2)) == pytest.approx(2)


def test_prefill_computes_the_layers_and_half_the_pairs_and_reads_the_weights_once_a_chunk():
    c = costs()
    flop = (2 * c.layer_params + 51 * c.attention_flop_per_pair) / 4
    assert c.prefill_flop_per_token(101) == pytest.approx(flop)
    assert c.prefill_token_s(101, 64, Accelerator(0, 1e30, flop)) == pytest.approx(1)
    read = (c.dense_bytes + c.expert_bytes_read(64)) / 64
    assert c.prefill_token_s(101, 64, Accelerator(0, read, 1e30)) == pytest.approx(1)
    short = c.dense_bytes + c.expert_bytes_read(1)
    assert c.prefill_token_s(1, 64, Accelerator(0, short, 1e30)) == pytest.approx(1)
