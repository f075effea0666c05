"""What this machine can do at most: the limits that the other benchmarks' figures are shares of.

Measured through XLA, so on the device that the engine uses; the best of several tries, since anything else that runs
only makes a machine look slower.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.figures import emit

_TRIES = 7


@dataclass(frozen=True)
class Limits:
    """Limits of the first device (on a CPU: of the machine)."""

    platform: str
    device: str
    dtype: str
    """Of the matrix product."""
    bandwidth_bytes_per_s: float
    """Reading a float32 matrix far larger than any cache, once, in a product with a vector."""
    peak_flop_per_s: float
    """A square matrix product; a multiplication and an addition count as two."""
    load_average: float
    """Processes that wanted to run in the last minute, before the measurement: above 1, figures are distorted."""


def measure(dtype: str = "float32") -> Limits:
    """Measures the default device in about five seconds; takes 0.5 GB of its memory (2 GB on an accelerator)."""
    load = os.getloadavg()[0]
    device = jax.devices()[0]
    large = device.platform != "cpu"
    rows = 1 << (18 if large else 16)
    return Limits(
        platform=device.platform,
        device=device.device_kind,
        dtype=dtype,
        bandwidth_bytes_per_s=_bandwidth(rows),
        peak_flop_per_s=_peak(8192 if large else 2048, dtype),
        load_average=load,
    )


def measure_apart(platform: str, dtype: str) -> Limits:
    """`measure` in a process of its own, which leaves neither memory nor compilations behind."""
    command = [sys.executable, "-m", "benchmarks.machine", "--platform", platform, "--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    del figures["benchmark"]
    return Limits(**figures)


def _bandwidth(rows: int) -> float:
    columns = 2048
    w = jax.jit(lambda: jnp.ones((rows, columns), jnp.float32))()
    x = jnp.ones((columns, 1), jnp.float32)
    candidates = [
        jax.jit(lambda w, x: jax.lax.dot_general(w, x, (((1,), (0,)), ((), ())))),
        jax.jit(lambda w, x: jnp.sum(w)),
    ]
    return w.nbytes / min(_best_s(partial(f, w, x)) for f in candidates)


def _peak(size: int, dtype: str) -> float:
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ()))))
    return 2 * size**3 / _best_s(partial(product, a, a))


def _best_s(run: Callable[[], jax.Array]) -> float:
    run().block_until_ready()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", help="type of the matrix product (default: float32)")
    parser.add_argument("--platform", default="auto", choices=["auto", "cpu", "gpu", "tpu"], help="where to measure")
    options = parser.parse_args()
    if options.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.platform, options.platform))
    emit("machine", asdict(measure(options.dtype)))


if __name__ == "__main__":
    main()
