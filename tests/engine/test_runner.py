"""What the runner counts, and how its start fails."""

import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from engine.config import EngineConfig
from engine.runner import CompilationCounter

from .tiny_models import LLAMA, make_engine, random_params

CACHE = "jax_compilation_cache_dir"


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[None]:
    """A compilation cache of its own."""
    before = getattr(jax.config, CACHE)
    jax.config.update(CACHE, str(tmp_path))
    compilation_cache.reset_cache()
    yield
    jax.config.update(CACHE, before)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("empty_cache")
def test_a_program_from_the_compilation_cache_is_no_miss() -> None:
    def make(factor: float) -> None:
        jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()

    counter = CompilationCounter()
    make(3.0)
    assert (counter.count, counter.num_cache_misses) == (1, 1)
    make(3.0)
    assert (counter.count, counter.num_cache_misses) == (2, 1)
    make(5.0)
    assert (counter.count, counter.num_cache_misses) == (3, 2)


def test_a_program_that_does_not_compile_ends_the_warm_up_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(num_slots=2, prefill_buckets=(16,), max_model_len=64)
    runner = make_engine(LLAMA, random_params(LLAMA), config).runner

    def fail(*_: object) -> None:
        raise MemoryError("no room for the program")

    monkeypatch.setattr("engine.runner.compile_step", fail)
    monkeypatch.setattr("engine.runner.compile_mixed", fail)
    with pytest.raises(MemoryError, match="no room for the program"):
        runner.warm_up()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile_")]
