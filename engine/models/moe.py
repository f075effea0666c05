"""A mixture of experts in place of a feed-forward: router, parameters, and how they lie on the mesh.

Letters: T tokens, D model, F width of an expert, E experts, k experts of a token, I in, O out, G scale groups.
"""

import re
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from engine.config import ExpertSharding, ModelConfig, MoEConfig
from engine.errors import ConfigError
from engine.models.experts import Experts, Matrices, Routing, chosen_experts, num_experts_of
from engine.models.layers import ParamDTypes, dot, stacked_params
from engine.sharding import DATA, MODEL, param_sharding

_MAX_BLOCK_LEN = 128
_MAX_EXPERTS_APART = 8
_TILE_BYTES = 2 << 20
"""The CPU backend copies a slice before it multiplies it: of this size the copy stays in the caches."""

Params = dict[str, dict[str, jax.Array]]


class MixtureOfExperts(hk.Module):
    """The experts of one layer: `router/w` [E, D], `gate/w` and `up/w` [E, F, D], `down/w` [E, D, F].

    Where those are int8, each but the router has `scale` [E, F or D, G]. Experts are divided over the model axis by
    width or dealt out whole; each device adds up its part of every token, and a sum over the axis finishes it.
    """

    def __init__(
        self, config: ModelConfig, dtypes: ParamDTypes, mesh: Mesh, expert_sharding: ExpertSharding, name: str
    ) -> None:
        super().__init__(name)
        self._config, self._dtypes, self._mesh, self._expert_sharding = config, dtypes, mesh, expert_sharding

    def __call__(self, x: Float[Array, "D T"], is_real: Bool[Array, " T"]) -> Float[Array, "D T"]:
        """Tokens that are not real go through no expert and come out as zeros."""
        assert self._config.moe is not None
        moe, quantization = self._config.moe, self._config.quantization
        width, size = moe.intermediate_size, self._config.hidden_size
        router = _Router(moe.num_experts, self._dtypes, "router")(size)

        def matrices(name: str, num_outputs: int, num_inputs: int, num_groups: int) -> Matrices:
            return _Matrices((moe.num_experts, num_outputs, num_inputs), self._dtypes, num_groups, name)()

        experts = Experts(
            matrices("gate", width, size, quantization.input_groups),
            matrices("up", width, size, quantization.input_groups),
            matrices("down", size, width, quantization.output_groups),
        )
        specs = jax.tree.map_with_path(self._spec, experts)
        num_splits = self._mesh.shape[MODEL]
        tile_bytes = _TILE_BYTES if self._mesh.devices.flat[0].platform == "cpu" else None

        @partial(
            jax.shard_map,
            mesh=self._mesh,
            in_specs=(P(None, DATA), P(DATA), P(), specs),
            out_specs=P(None, DATA),
            check_vma=False,
        )
        def local(x, is_real, router, experts):  # type: ignore[no-untyped-def]
            routing = route(router, x, moe)
            device = jax.lax.axis_index(MODEL)
            if self._expert_sharding == "expert":
                routing = routing._replace(experts=routing.experts - device * num_experts_of(experts))
            elif experts.down.scale is not None:
                scale = _local_groups(experts.down.scale, device, num_splits, quantization.output_groups)
                experts = experts._replace(down=experts.down._replace(scale=scale))
            length = block_len(x.shape[1], moe)
            part = chosen_experts(x, is_real, routing, experts, self._config.activation, length, tile_bytes)
            return jax.lax.psum(part, MODEL).astype(x.dtype)

        return local(x, is_real, router, experts)

    def _spec(self, path: tuple, array: Array) -> P:
        name = "/".join(key.name for key in path[:2])
        return param_sharding(f"{self.module_name}/{name}", array.shape, self._mesh, self._expert_sharding).spec


class _Router(hk.Module):
    def __init__(self, num_experts: int, dtypes: ParamDTypes, name: str) -> None:
        super().__init__(name)
        self._num_experts, self._dtypes = num_experts, ParamDTypes(dtypes.exact, dtypes.exact)

    def __call__(self, size: int) -> Float[Array, "E D"]:
        return stacked_params((self._num_experts, size), self._dtypes, 1)[0]


class _Matrices(hk.Module):
    def __init__(self, shape: tuple[int, int, int], dtypes: ParamDTypes, num_groups: int, name: str) -> None:
        super().__init__(name)
        self._shape, self._dtypes, self._num_groups = shape, dtypes, num_groups

    def __call__(self) -> Matrices:
        parts = [name for name in self.params_dict() if "/w_" in name]
        if not parts:
            return Matrices(*stacked_params(self._shape, self._dtypes, self._num_groups))
        shape = self._shape[0] // len(parts), *self._shape[1:]
        ws = (hk.get_parameter(f"w_{e}", shape, self._dtypes.matrices) for e in range(len(parts)))
        return Matrices(tuple(ws), None)


def experts_apart(params: Params, mesh: Mesh) -> Params:
    """`params` with an array `w_{e}` for each expert e of a device in place of `w`, in the same memory.

    For the CPU, which copies a slice before it multiplies it. int8 experts, which are widened on the way, and so many
    experts that a program would have too many branches stay as they are.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return params
    result = dict(params)
    for path, arrays in params.items():
        if not re.fullmatch(r"layer_\d+/moe/(gate|up|down)", path) or set(arrays) != {"w"}:
            continue
        num_local = arrays["w"].sharding.shard_shape(arrays["w"].shape)[0]
        if num_local <= _MAX_EXPERTS_APART:
            result[path] = {f"w_{e}": _view(arrays["w"], e) for e in range(num_local)}
    return result


def _view(w: Array, expert: int) -> Array:
    """One expert of each device. An array made from aligned host memory takes that over as it is."""
    shards = w.addressable_shards
    views = [jax.device_put(np.asarray(s.data)[expert : expert + 1], s.device) for s in shards]
    shape = w.shape[0] // shards[0].data.shape[0], *w.shape[1:]
    return jax.make_array_from_single_device_arrays(shape, w.sharding, views)


def route(router: Float[Array, "E D"], x: Float[Array, "D T"], moe: MoEConfig) -> Routing:
    """Softmax over all experts in float32, then the best k; the lower index where two are equal."""
    logits = dot(router.astype(jnp.float32), x.astype(jnp.float32))
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=0).T, moe.num_experts_per_token)
    if moe.renormalize:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(experts, gates)


def block_len(num_tokens: int, moe: MoEConfig) -> int:
    """Twice the mean group: few blocks, of which few rows are empty. No group has more than all tokens."""
    mean = -(-num_tokens * moe.num_experts_per_token // moe.num_experts)
    return min(num_tokens, _MAX_BLOCK_LEN, max(8, 1 << (2 * mean - 1).bit_length()))


def _local_groups(scale: Float[Array, "E D G"], device: Array, num_splits: int, num_groups: int) -> Array:
    """The scales of this device's part of the inputs: where groups do not divide over the devices, all are here."""
    if scale.shape[-1] < num_groups or num_groups == 1 or num_splits == 1:
        return scale
    if num_splits % num_groups:
        raise ConfigError(
            f"a model axis of {num_splits} splits int8 experts within their {num_groups} scale groups; it must divide "
            "that number or be a multiple of it, or deal out whole experts"
        )
    return jax.lax.dynamic_slice_in_dim(scale, device // (num_splits // num_groups), 1, axis=-1)
