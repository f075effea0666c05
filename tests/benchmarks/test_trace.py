"""Production arrivals on a tiny engine: nothing lost, nothing compiled, little padded."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks.trace import Arrival, figures_of, read_trace, replay
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder
from engine.sharding import make_mesh

TRACES = Path(__file__).parents[2] / ".." / "shared" / "data" / "traces"
CONTEXT = 1024
CONFIG = EngineConfig(
    num_slots=6, prefill_buckets=(16, 64, 256), max_model_len=CONTEXT, num_pages=240, max_queue_len=80
)
STEP_S = 0.1


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = ModelConfig(
        family="llama",
        vocab_size=31,
        hidden_size=14,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_size=6,
        intermediate_size=10,
        max_position_embeddings=CONTEXT,
    )
    decoder = Decoder(model, make_mesh(1, 1, jax.devices()[:1]), "float32", "float32")
    engine = build_engine(decoder, decoder.init_params(jax.random.key(0)), CONFIG)
    engine.warm_up()
    return engine


class StepClock:
    """A second for every ten steps, and what is slept."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._slept_s = engine, 0.0

    def __call__(self) -> float:
        return self._engine.stats().num_steps * STEP_S + self._slept_s

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self._slept_s += seconds


@pytest.mark.parametrize("name", ["azure_llm_2023_code.csv", "azure_llm_2023_conv.csv"])
def test_a_replay_loses_nothing_and_wastes_little(engine: Engine, name: str) -> None:
    if not TRACES.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    arrivals = read_trace(TRACES / name, 70, 0.5, CONTEXT)
    fresh = Engine(engine.runner, replace(CONFIG, prefix_caching=False))
    compiled = fresh.stats().num_compilations_since_warm_up
    clock = StepClock(fresh)
    result = replay(fresh, arrivals, clock, clock.sleep)
    figures = figures_of(fresh, result, arrivals)
    assert figures["num_lost"] == 0
    assert result.num_tokens == sum(arrival.num_generated for arrival in arrivals)
    assert figures["num_compilations_since_warm_up"] == compiled
    assert (figures["padding_share"] or 1) < 0.10
    assert (figures["page_utilization"] or 0) > 0.96
    assert fresh.stats().cache_usage == 0


def test_lengths_are_scaled_and_cut_to_the_context(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,1,9000\n"
        "2023-11-16 18:17:05.9799600,40,4\n"
    )
    assert read_trace(path, 2, 0.5, 64) == [Arrival(0.0, 59, 5), Arrival(0.5, 1, 32)]
