"""What the runner counts."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from engine.runner import CompilationCounter

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
