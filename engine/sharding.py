"""How parameters, cache and activations lie on a (data, model) mesh.

Rows of a batch go over `data`; heads, feed-forward width and vocabulary go over `model`. Weights are replicated over
`data`. Every parameter path matches exactly one rule of `PARAM_RULES`; none or several is an error.
"""

import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.config import ExpertSharding, ModelConfig
from engine.errors import ConfigError

DATA = "data"
MODEL = "model"

PARAM_RULES: tuple[tuple[str, P], ...] = (
    (r"embed/w", P(MODEL, None)),
    (r"lm_head/w", P(MODEL, None)),
    (r"final_norm/(scale|bias)", P(None)),
    (r"layer_\d+/(attention|ffn)(_post)?_norm/(scale|bias)", P(None)),
    (r"layer_\d+/attention/(q|k)_norm/scale", P(None)),
    (r"layer_\d+/attention/(q|k|v)/w", P(MODEL, None)),
    (r"layer_\d+/attention/(q|k|v)/b", P(MODEL)),
    (r"layer_\d+/attention/(q|k|v)/scale", P(MODEL, None)),
    (r"layer_\d+/attention/o/(w|scale)", P(None, MODEL)),
    (r"layer_\d+/attention/o/b", P(None)),
    (r"layer_\d+/ffn/(gate|up)/(w|scale)", P(MODEL, None)),
    (r"layer_\d+/ffn/(gate|up)/b", P(MODEL)),
    (r"layer_\d+/ffn/down/(w|scale)", P(None, MODEL)),
    (r"layer_\d+/ffn/down/b", P(None)),
    (r"layer_\d+/moe/router/w", P(None, None)),
)
"""(regular expression for the whole path, partition of the array)."""

EXPERT_RULES: dict[ExpertSharding, tuple[tuple[str, P], ...]] = {
    "width": (
        (r"layer_\d+/moe/(gate|up)/(w|scale)", P(None, MODEL, None)),
        (r"layer_\d+/moe/down/(w|scale)", P(None, None, MODEL)),
    ),
    "expert": ((r"layer_\d+/moe/(gate|up|down)/(w|scale)", P(MODEL, None, None)),),
}
"""The rules that `PARAM_RULES` goes on with, by how the experts are divided."""


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, model) mesh over the first `data * model` devices.

    Raises `ConfigError` where there are too few devices.
    """
    available = list(jax.devices() if devices is None else devices)
    needed = data * model
    if data < 1 or model < 1 or needed > len(available):
        raise ConfigError(
            f"mesh {data}x{model} (data x model) needs {needed} devices; {len(available)} "
            f"{available[0].platform} device(s) are visible"
        )
    # The partitioner, not the program's types, places the intermediates.
    return Mesh(np.array(available[:needed]).reshape(data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def rules(expert_sharding: ExpertSharding = "width") -> tuple[tuple[str, P], ...]:
    """All rules of one way to divide experts."""
    return PARAM_RULES + EXPERT_RULES[expert_sharding]


def param_rule(path: str, expert_sharding: ExpertSharding = "width") -> tuple[str, P]:
    """The one rule, (regular expression, partition), of the parameter at `path` ("layer_0/attention/q/w").

    Raises `ConfigError` unless exactly one rule matches.
    """
    matches = [rule for rule in rules(expert_sharding) if re.fullmatch(rule[0], path)]
    if len(matches) != 1:
        found = ", ".join(pattern for pattern, _ in matches) or "none"
        raise ConfigError(f"parameter {path!r} must match exactly one sharding rule; it matches {found}")
    return matches[0]


def param_spec(path: str, expert_sharding: ExpertSharding = "width") -> P:
    """The partition of the parameter at `path`; see `param_rule`."""
    return param_rule(path, expert_sharding)[1]


def param_sharding(
    path: str, shape: Sequence[int], mesh: Mesh, expert_sharding: ExpertSharding = "width"
) -> NamedSharding:
    """The sharding of the parameter at `path` on `mesh`.

    A vocabulary that the model axis does not divide is kept whole on each device, and so are groups of scales. Raises
    `ConfigError` where another axis does not divide: `check_model_fits_mesh` says so with the shapes that would work.
    """
    spec = param_spec(path, expert_sharding)
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            if path in ("embed/w", "lm_head/w"):
                return NamedSharding(mesh, P(None, None))
            if path.endswith(("/o/scale", "/down/scale")) and spec[-1] == axis:
                return NamedSharding(mesh, P(*spec[:-1], None))
            raise ConfigError(f"{path}: an axis of {size} cannot be divided over {mesh.shape[axis]} devices ({axis})")
    return NamedSharding(mesh, spec)


def num_cache_heads(config: ModelConfig, mesh: Mesh) -> int:
    """KV heads that the cache stores: K, or, where the model axis does not divide K, heads repeated so that it does.

    The number is lcm(K, model axis): it divides the query heads, since both K and the model axis do.
    """
    return math.lcm(config.num_kv_heads, mesh.shape[MODEL])


def check_model_fits_mesh(config: ModelConfig, mesh: Mesh, expert_sharding: ExpertSharding = "width") -> None:
    """Raises `ConfigError` where the mesh cannot split the model: both numbers, and the model axes that would work."""
    model = mesh.shape[MODEL]
    needs = {"query heads": config.num_heads}
    if config.moe is None:
        needs["feed-forward width"] = config.intermediate_size
    elif expert_sharding == "width":
        needs["width of an expert"] = config.moe.intermediate_size
    else:
        needs["experts"] = config.moe.num_experts
    bad = {name: size for name, size in needs.items() if size % model}
    if bad:
        fits = [m for m in range(1, 65) if all(size % m == 0 for size in needs.values())]
        what = " and ".join(f"{size} {name}" for name, size in bad.items())
        raise ConfigError(f"a model axis of {model} does not divide {what}; it can be {', '.join(map(str, fits))}")
