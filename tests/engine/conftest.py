"""Engines that several test files share: compiling them takes longer than all that is done with them."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine

from .tiny_models import LLAMA, WIDE, make_engine, random_params

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The reference data; skips where it is absent."""
    if not DATA.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    return DATA


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Several buckets of each kind; tokens may differ where two candidates are within rounding.

    No number of rows is that of an axis of a weight: a moved weight is told from activations by its shape.
    """
    config = EngineConfig(num_slots=4, prefill_buckets=(8, 32), max_model_len=96, max_queue_len=64)
    engine = make_engine(LLAMA, random_params(LLAMA), config)
    engine.warm_up()
    return engine


@pytest.fixture(scope="session")
def invariant_engine() -> Engine:
    """One shape of each kind, over two attention blocks."""
    config = EngineConfig(num_slots=3, prefill_buckets=(32,), max_model_len=160, max_queue_len=64, batch_invariant=True)
    engine = make_engine(LLAMA, random_params(LLAMA), config)
    engine.warm_up()
    return engine


@pytest.fixture(scope="session", params=[(1, 8), (2, 4)], ids=["1x8", "2x4"])
def sharded_engine(request: pytest.FixtureRequest) -> Engine:
    """`WIDE` over eight devices, two slots a data shard."""
    config = EngineConfig(
        num_slots=2 * request.param[0], prefill_buckets=(32,), max_model_len=160, max_queue_len=64, batch_invariant=True
    )
    engine = make_engine(WIDE, random_params(WIDE), config, request.param)
    engine.warm_up()
    return engine
