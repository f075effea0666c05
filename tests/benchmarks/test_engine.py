"""The benchmark on a tiny engine: it must run, and report what can be known beforehand."""

import jax
import pytest

from benchmarks.costs import ModelCosts
from benchmarks.engine import measure, memory
from benchmarks.machine import Limits
from benchmarks.workload import Load
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder
from engine.sharding import make_mesh

_LIMITS = Limits("cpu", "a machine", "float32", 1e9, 1e12, 0.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = ModelConfig(
        family="llama",
        vocab_size=31,
        hidden_size=14,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=6,
        intermediate_size=10,
        max_position_embeddings=64,
        tie_embeddings=True,
    )
    decoder = Decoder(model, make_mesh(1, 1, jax.devices()[:1]), "float32", "float32")
    engine = build_engine(
        decoder, decoder.init_params(jax.random.key(0)), EngineConfig(num_slots=2, prefill_buckets=(16,))
    )
    engine.warm_up()
    return engine


def test_figures_of_a_load(engine: Engine) -> None:
    decoder = engine.runner.decoder
    costs = ModelCosts.of(decoder.config, decoder.abstract_params(), cache_itemsize=4)
    figures = measure(engine, costs, _LIMITS, Load(num_streams=2, prompt_len=5, max_tokens=7), repeats=2)
    assert figures["num_tokens"] == 14
    assert figures["padding_waste"] == 11 / 16
    # The smaller limit by hand: this model's step reads more seconds than it computes.
    read = costs.weight_bytes + 2 * 8.5 * costs.cache_bytes_per_token
    decode = figures["decode_tokens_per_s"]
    assert decode is not None
    assert figures["decode_share_of_limit"] == pytest.approx(decode / (2 * 1e9 / read))


def test_memory_counts_weights_and_cache(engine: Engine) -> None:
    sizes = memory(engine)
    params = engine.runner.params
    assert sizes["weights_bytes"] == sum(array.nbytes for array in jax.tree.leaves(params))
    assert sizes["cache_bytes"] == engine.runner.cache_shape.num_bytes
    assert (sizes["peak_resident_bytes"] or 0) > (sizes["weights_bytes"] or 0)
