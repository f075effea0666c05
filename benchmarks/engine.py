"""The engine in this process, without HTTP, Ray or text: streams of equal prompts, all sent at once.

Every figure comes with its share of what the machine could do at most, measured in the same run: prefill against the
matrix peak, decode against the slower of memory bandwidth and matrix peak.
"""

import argparse
import contextlib
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict

import jax
import jax.numpy as jnp

from benchmarks import machine, startup
from benchmarks.costs import ModelCosts
from benchmarks.figures import Figures, Stream, emit, progress, share, summarize, wall_s
from benchmarks.machine import Limits
from benchmarks.workload import Load, add_options, app_config, build, greedy, run_streams
from engine.engine import Engine
from engine.request import EngineStats


def measure(engine: Engine, costs: ModelCosts, limits: Limits, load: Load, repeats: int) -> Figures:
    """Figures of one load: prefill alone (one token each), then the whole; of the fastest of `repeats` runs."""
    prompts = load.prompts(engine.vocab_size)
    prefill = _fastest(repeats, lambda: run_streams(engine, prompts, greedy(1)))
    before = engine.stats()
    whole = summarize(_fastest(repeats, lambda: run_streams(engine, prompts, greedy(load.max_tokens))))
    after = engine.stats()
    prefill_rate = load.num_streams * load.prompt_len / wall_s(prefill)
    # Between the first and the last decode step the context grows by the tokens generated.
    context_len = load.prompt_len + load.max_tokens / 2
    decode_limit = load.num_streams * costs.decode_limit_steps_per_s(load.num_streams, context_len, limits)
    num_devices = engine.runner.decoder.mesh.size
    return {
        "num_streams": load.num_streams,
        "prompt_len": load.prompt_len,
        "max_tokens": load.max_tokens,
        **whole,
        "prefill_tokens_per_s": prefill_rate,
        "prefill_share_of_limit": share(
            prefill_rate, num_devices * costs.prefill_limit_tokens_per_s(load.prompt_len, limits)
        ),
        "decode_share_of_limit": share(whole["decode_tokens_per_s"], num_devices * decode_limit),
        "padding_waste": _padding_waste(before, after),
        "num_compilations_since_warm_up": after.num_compilations_since_warm_up,
    }


def _fastest(repeats: int, run: Callable[[], list[Stream]]) -> list[Stream]:
    return min((run() for _ in range(repeats)), key=wall_s)


def _padding_waste(before: EngineStats, after: EngineStats) -> float | None:
    """Share of the prefill positions computed that no prompt token stood at."""
    padding = after.num_padding_tokens - before.num_padding_tokens
    return share(padding, padding + after.num_prompt_tokens - before.num_prompt_tokens)


def memory(engine: Engine) -> dict[str, int | None]:
    """Bytes: the process's largest resident set, the first device's peak (where it counts), weights and cache."""
    stats = jax.local_devices()[0].memory_stats() or {}
    kib = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
        **{f"{name}_bytes": size for name, size in engine.runner.memory_bytes().items()},
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--no-startup", action="store_true", help="leave out the two measured starts")
    parser.add_argument("--profile", metavar="DIR", help="write a trace of the last load, for xprof or Perfetto")
    options, load_arguments = parser.parse_args(), _without_own(sys.argv[1:])
    if not options.no_startup:
        # In processes of their own, and before this one holds any device memory.
        emit("startup", {"model": options.model, **startup.measure(load_arguments)})
    progress("engine: measuring the machine's limits ...")
    limits = machine.measure_apart(options.platform, options.dtype)
    emit("machine", asdict(limits))
    engine = build(app_config(options))
    assert isinstance(engine, Engine)
    progress("engine: compiling ...")
    engine.warm_up()
    decoder = engine.runner.decoder
    costs = ModelCosts.of(decoder.config, engine.runner.params, jnp.dtype(options.dtype).itemsize)
    run_streams(engine, Load(1, options.prompt_len, 1).prompts(engine.vocab_size), greedy(8))
    for num_streams in options.streams:
        progress(f"engine: {num_streams} streams ...")
        load = Load(num_streams, options.prompt_len, options.max_tokens)
        traced = options.profile is not None and num_streams == options.streams[-1]
        with jax.profiler.trace(options.profile) if traced else contextlib.nullcontext():
            figures = measure(engine, costs, limits, load, options.repeats)
        emit("engine", {"model": options.model, **figures, "load_average": os.getloadavg()[0]})
    emit("memory", {"model": options.model, "num_slots": max(options.streams), **memory(engine)})


def _without_own(arguments: list[str]) -> list[str]:
    """The options of the load: without those that only this command has."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--no-startup", action="store_true")
    parser.add_argument("--profile")
    return parser.parse_known_args(arguments)[1]


if __name__ == "__main__":
    main()
