"""No weight and no cache is copied in a step: read from the programs themselves."""

import re
from dataclasses import replace

import jax
import numpy as np

from engine.config import EngineConfig

from .tiny_models import WIDE, make_engine, random_params

MOVED = re.compile(r" = f32\[([\d,]+)\]\S* (copy|copy-start|transpose)\(")


def local_shapes(tree, shardings):
    """Shape of every array on one device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return [sharding.shard_shape(arg.shape) for arg, sharding in pairs]


def unordered(shape):
    """A shape whatever the order of its axes."""
    return tuple(sorted(size for size in shape if size > 1))


def assert_in_place(engine):
    programs = engine.runner.compiled_programs
    assert any(name.startswith("prefill") for name in programs)
    assert any(name.startswith("decode") for name in programs)
    for name, compiled in programs.items():
        (params, state, _), (param_shardings, state_shardings, _) = compiled.args_info[0], compiled.input_shardings[0]
        assert all(arg.donated for arg in jax.tree.leaves(state)), name
        assert not any(arg.donated for arg in jax.tree.leaves(params)), name
        held = local_shapes(state, state_shardings)
        text = compiled.as_text()
        header = text.partition("\n")[0]
        assert header.count("may-alias") + header.count("must-alias") == len(held), header[:300]
        assert compiled.memory_analysis().alias_size_in_bytes == sum(4 * int(np.prod(shape)) for shape in held), name
        large = {unordered(s) for s in held + local_shapes(params, param_shardings) if len(s) > 1}
        copied = [m[0] for m in MOVED.finditer(text) if unordered(map(int, m[1].split(","))) in large]
        assert copied == [], name


def test_cache_is_updated_in_place_and_nothing_large_is_copied(engine):
    assert_in_place(engine)


def test_the_same_holds_on_eight_devices(sharded_engine):
    assert_in_place(sharded_engine)


def test_a_copied_weight_would_be_seen():
    def step(w, x):
        # Both orders are wanted as results, so that one of them is a copy.
        return w.T, w @ x

    text = jax.jit(step).lower(np.ones((26, 22), np.float32), np.ones(22, np.float32)).compile().as_text()
    moved = [unordered(map(int, m[1].split(","))) for m in MOVED.finditer(text)]
    assert (22, 26) in moved


def test_each_device_holds_its_share_of_the_cache(sharded_engine):
    runner = sharded_engine.runner
    compiled = next(iter(runner.compiled_programs.values()))
    state, shardings = compiled.args_info[0][1], compiled.input_shardings[0][1]
    local = sum(4 * int(np.prod(s)) for s in local_shapes(state.cache, shardings.cache))
    assert local * 8 == runner.memory_bytes()["cache"]


def test_between_processes_of_cpus_logits_are_gathered_and_no_weight(monkeypatch):
    monkeypatch.setattr(
        "engine.forward.compiler_options", lambda mesh: {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    )
    model = replace(WIDE, vocab_size=56)
    config = EngineConfig(num_slots=2, prefill_buckets=(16,), max_model_len=32, batch_invariant=True)
    engine = make_engine(model, random_params(model), config, (1, 8))
    engine.warm_up()
    weights = {unordered(a.shape) for a in jax.tree.leaves(engine.runner.params) if a.ndim > 1}
    for name, compiled in engine.runner.compiled_programs.items():
        shapes = re.findall(r" = f32\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
        gathered = {unordered(map(int, shape.split(","))) for shape in shapes}
        assert not gathered & weights, name
        assert unordered((56, 1 if name.startswith("prefill") else config.num_slots)) in gathered, name
