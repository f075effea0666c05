"""The chosen experts of a mixture against all of them, and a whole decode step of a mid-size Grok-1.

The layer: 8 experts of width 5,464 over a model width of 1,024, two chosen for each token, as Grok-1's proportions
give; both forms take turns with the same weights on the same mesh. On a CPU of few cores eight virtual devices share
what one has: only the comparison between the forms says something there, not the time.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import machine
from benchmarks.figures import Figures, emit, progress, share
from engine.config import EngineConfig, ExpertSharding, ModelConfig, MoEConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder, Params
from engine.models.experts import Experts, Matrices, all_experts
from engine.models.layers import ParamDTypes
from engine.models.moe import MixtureOfExperts, experts_apart, route
from engine.request import Request, SamplingParams
from engine.sharding import DATA, MODEL, make_mesh, param_sharding

_PATH = "layer_0/moe"


def grok1(size: int, num_layers: int, vocab_size: int = 131072) -> ModelConfig:
    """Grok-1 with another width and depth: its widening factor, norms, caps and shared embedding."""
    width = size * 16 // 3
    width += -width % 8
    return ModelConfig(
        family="grok1",
        vocab_size=vocab_size,
        hidden_size=size,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=8,
        head_size=size // 8,
        intermediate_size=width,
        max_position_embeddings=8192,
        activation="gelu_tanh",
        post_norms=True,
        tie_embeddings=True,
        attention_softcap=30.0,
        moe=MoEConfig(8, 2, width, renormalize=False),
    )


@dataclass(frozen=True)
class Layer:
    """A mixture's layer on a mesh: both forms of it, as functions of (parameters, tokens [D, T])."""

    chosen: Callable[[Params, jax.Array], jax.Array]
    every: Callable[[Params, jax.Array], jax.Array]
    params: Params
    """As they are loaded."""


class _Named(hk.Module):
    """Gives the experts the path that the sharding rules know."""

    def __init__(self, make: Callable[[], MixtureOfExperts]) -> None:
        super().__init__("layer_0")
        self._make = make

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._make()(x, jnp.ones(x.shape[1], bool))


def make_layer(config: ModelConfig, mesh: Mesh, expert_sharding: ExpertSharding) -> Layer:
    """Random float32 weights on the mesh."""
    moe = config.moe
    assert moe is not None
    dtypes = ParamDTypes.of("float32", "float32")

    def forward(x: jax.Array) -> jax.Array:
        return _Named(lambda: MixtureOfExperts(config, dtypes, mesh, expert_sharding, "moe"))(x)

    module: hk.Transformed = hk.without_apply_rng(hk.transform(forward))
    one = jnp.zeros((config.hidden_size, 1))
    shardings = {
        module: {name: param_sharding(f"{module}/{name}", a.shape, mesh, expert_sharding) for name, a in arrays.items()}
        for module, arrays in jax.eval_shape(module.init, jax.random.key(0), one).items()
    }
    params = jax.jit(module.init, out_shardings=shardings)(jax.random.key(0), one)
    specs = [shardings[f"{_PATH}/{name}"]["w"].spec for name in ("gate", "up", "down")]

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, DATA), P(), *specs),
        out_specs=P(None, DATA),
        check_vma=False,
    )
    def local(x, router, gate, up, down):  # type: ignore[no-untyped-def]
        routing = route(router, x, moe)
        if expert_sharding == "expert":
            routing = routing._replace(experts=routing.experts - jax.lax.axis_index(MODEL) * gate.shape[0])
        experts = Experts(Matrices(gate, None), Matrices(up, None), Matrices(down, None))
        real = jnp.ones(x.shape[1], bool)
        return jax.lax.psum(all_experts(x, real, routing, experts, config.activation), MODEL)

    def every(params: Params, x: jax.Array) -> jax.Array:
        return local(x, *(params[f"{_PATH}/{name}"]["w"] for name in ("router", "gate", "up", "down")))

    return Layer(module.apply, every, params)


def compare(layer: Layer, mesh: Mesh, num_rows: int, seconds: float) -> Figures:
    """The fastest of interleaved runs of both forms within about `seconds`. Raises `RuntimeError` where they differ."""
    tokens = np.random.default_rng(num_rows).normal(size=(layer.params[f"{_PATH}/router"]["w"].shape[1], num_rows))
    x = jax.device_put(tokens.astype(np.float32), NamedSharding(mesh, P()))
    forms = {"chosen": (layer.chosen, experts_apart(layer.params, mesh)), "all": (layer.every, layer.params)}
    calls: dict[str, Callable[[], jax.Array]] = {}
    results = {}
    for name, (form, params) in forms.items():
        compiled = jax.jit(form).lower(params, x).compile()
        calls[name] = partial(compiled, params, x)
        results[name] = np.asarray(calls[name]())
    difference = float(np.abs(results["chosen"] - results["all"]).max() / np.abs(results["all"]).max())
    if not difference < 1e-4:
        raise RuntimeError(f"{num_rows} rows: the chosen experts differ from all by {difference} of the largest value")
    best = _interleaved(calls, seconds)
    return {
        "num_rows": num_rows,
        "chosen_s": best["chosen"],
        "all_s": best["all"],
        "times_faster": best["all"] / best["chosen"],
        "relative_difference": difference,
    }


def _interleaved(calls: dict[str, Callable[[], jax.Array]], seconds: float) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def step_bytes(config: ModelConfig, params: Params) -> int:
    """Bytes that a decode step of one row must read: every matrix once, of the experts only those of one token."""
    assert config.moe is not None
    total = 0
    for path, arrays in params.items():
        size = sum(array.nbytes for array in arrays.values())
        if path.rpartition("/")[0].endswith("/moe") and not path.endswith("/router"):
            size = size * config.moe.num_experts_per_token // config.moe.num_experts
        total += size
    return total


def decode_engine(config: ModelConfig, mesh: Mesh) -> Engine:
    """An engine of one slot with random float32 weights."""
    decoder = Decoder(config, mesh, "float32", "float32")
    shardings = {
        module: {name: param_sharding(f"{module}/{name}", a.shape, mesh) for name, a in arrays.items()}
        for module, arrays in decoder.abstract_params().items()
    }
    params = jax.jit(decoder.init_params, out_shardings=shardings)(jax.random.key(0))
    return build_engine(decoder, params, EngineConfig(num_slots=1, max_model_len=256, prefill_buckets=(16,)))


def decode_step(engine: Engine, num_tokens: int, bandwidth_bytes_per_s: float) -> Figures:
    """The fastest decode step of one greedy stream, against reading what it must at the machine's bandwidth."""
    prompt = tuple(range(1, 9))
    engine.add_request(Request("0", prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)))
    steps, last = [], time.perf_counter()
    while engine.has_work():
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    must_read = step_bytes(engine.runner.decoder.config, engine.runner.params)
    # The first steps prefill and fill the pipeline; the last has nothing to wait for.
    fastest = min(steps[3:-2])
    return {
        "decode_step_s": fastest,
        "must_read_bytes": must_read,
        "share_of_limit": share(must_read / bandwidth_bytes_per_s, fastest),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="tokens at once")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="model axes to measure")
    parser.add_argument("--sharding", nargs="+", default=["width", "expert"], choices=["width", "expert"])
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each comparison")
    parser.add_argument("--size", type=int, default=1024, help="model width")
    parser.add_argument("--layers", type=int, default=8, help="layers of the decode step; 0: leave it out")
    options = parser.parse_args()
    progress("moe: measuring the machine's limits ...")
    limits = machine.measure_apart("auto", "float32")
    emit("machine", asdict(limits))
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    for num_devices in options.devices:
        mesh = make_mesh(1, num_devices)
        shardings: list[ExpertSharding] = options.sharding if num_devices > 1 else ["width"]
        for sharding in shardings:
            layer = make_layer(grok1(options.size, 1), mesh, sharding)
            for num_rows in options.rows:
                progress(f"moe: {num_devices} devices by {sharding}, {num_rows} rows ...")
                figures = compare(layer, mesh, num_rows, options.seconds)
                where = {"num_devices": num_devices, "expert_sharding": sharding}
                emit("moe_layer", {**where, **figures, "load_average": os.getloadavg()[0]})
            del layer
    if options.layers:
        progress("moe: compiling the decode step ...")
        engine = decode_engine(grok1(options.size, options.layers), make_mesh(1, 1))
        engine.warm_up()
        figures = decode_step(engine, 48, limits.bandwidth_bytes_per_s)
        emit("moe_decode", {"size": options.size, "num_layers": options.layers, **figures})


if __name__ == "__main__":
    main()
