import jax
import numpy as np
import pytest

from benchmarks.moe import compare, decode_engine, decode_step, grok1, make_layer, step_bytes
from engine.models.decoder import Decoder
from engine.sharding import make_mesh

SMALL = grok1(48, 2, vocab_size=96)


def test_width_and_experts_follow_the_release():
    released = grok1(6144, 64)
    assert released.intermediate_size == released.moe.intermediate_size == 32768
    assert grok1(1024, 8).moe.intermediate_size == 5464


@pytest.mark.parametrize("expert_sharding", ["width", "expert"])
def test_both_forms_are_run_and_agree(expert_sharding):
    mesh = make_mesh(1, 2)
    figures = compare(make_layer(SMALL, mesh, expert_sharding), mesh, 5, seconds=0.0)
    assert figures["num_rows"] == 5
    assert figures["times_faster"] == figures["all_s"] / figures["chosen_s"]
    assert figures["relative_difference"] < 1e-5


def test_forms_that_differ_are_reported():
    mesh = make_mesh(1, 1)
    layer = make_layer(SMALL, mesh, "width")
    wrong = type(layer)(layer.chosen, lambda params, x: 2 * layer.every(params, x), layer.params)
    with pytest.raises(RuntimeError, match="5 rows: the chosen experts differ"):
        compare(wrong, mesh, 5, seconds=0.0)


def test_a_step_reads_two_of_eight_experts_and_all_the_rest():
    params = Decoder(SMALL, make_mesh(1, 1), "float32", "float32").abstract_params()
    arrays = {m: {n: np.empty(a.shape, a.dtype) for n, a in leaves.items()} for m, leaves in params.items()}
    everything = sum(a.nbytes for a in jax.tree.leaves(arrays))
    one_expert = 3 * 48 * 256 * 4
    assert step_bytes(SMALL, arrays) == everything - 2 * 6 * one_expert


def test_the_decode_step_is_timed_on_an_engine():
    figures = decode_step(decode_engine(SMALL, make_mesh(1, 1)), 12, bandwidth_bytes_per_s=1e9)
    assert figures["share_of_limit"] == pytest.approx(figures["must_read_bytes"] / 1e9 / figures["decode_step_s"])
