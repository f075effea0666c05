"""A mixture of experts that computes only the chosen ones, whatever the balance between them.

Tokens are sorted by expert and taken a block at a time, each block through one expert: no capacity, no dropped token.
`jax.lax.ragged_dot` would say the same, but as of jax 0.10 it computes every expert on the CPU and on NVIDIA.

Letters: T tokens, D model, F width of an expert (of this device's part of it), E experts (of this device), k experts
of a token, A = T * k assignments of a token to an expert, S tokens of a block, G scale groups.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from engine.config import Activation, ExpertSharding, ModelConfig, MoEConfig
from engine.errors import ConfigError
from engine.models.layers import ParamDTypes, activate, dot, matrix_params, widen
from engine.sharding import DATA, MODEL, param_sharding

_MAX_BLOCK_LEN = 128
_TILE_BYTES = 2 << 20
"""The CPU backend copies a slice before it multiplies it: of this size the copy stays in the caches."""


class Matrices(NamedTuple):
    """One linear map of every expert."""

    w: Num[Array, "E O I"]
    scale: Float[Array, "E O G"] | None
    """Of int8 weights."""


class Experts(NamedTuple):
    """expert(x) = down(act(gate(x)) * up(x))."""

    gate: Matrices
    up: Matrices
    down: Matrices


class Routing(NamedTuple):
    """The experts of each token, best first."""

    experts: Int[Array, "T k"]
    gates: Float[Array, "T k"]


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
        moe, quantization = self._config.moe, self._config.quantization
        assert moe is not None
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
                first = device * experts.gate.w.shape[0]
                routing = routing._replace(experts=routing.experts - first)
            elif experts.down.scale is not None:
                scale = _local_groups(experts.down.scale, device, num_splits, quantization.output_groups)
                experts = experts._replace(down=experts.down._replace(scale=scale))
            part = chosen_experts(x, is_real, routing, experts, self._config.activation, tile_bytes)
            return jax.lax.psum(part, MODEL).astype(x.dtype)

        return local(x, is_real, router, experts)

    def _spec(self, path: tuple, array: Array) -> P:
        name = "/".join(key.name for key in path)
        return param_sharding(f"{self.module_name}/{name}", array.shape, self._mesh, self._expert_sharding).spec


class _Router(hk.Module):
    def __init__(self, num_experts: int, dtypes: ParamDTypes, name: str) -> None:
        super().__init__(name)
        self._num_experts, self._dtypes = num_experts, ParamDTypes(dtypes.others, dtypes.others)

    def __call__(self, size: int) -> Float[Array, "E D"]:
        return matrix_params((self._num_experts, size), self._dtypes, 1)[0]


class _Matrices(hk.Module):
    def __init__(self, shape: tuple[int, int, int], dtypes: ParamDTypes, num_groups: int, name: str) -> None:
        super().__init__(name)
        self._shape, self._dtypes, self._num_groups = shape, dtypes, num_groups

    def __call__(self) -> Matrices:
        return Matrices(*matrix_params(self._shape, self._dtypes, self._num_groups))


def route(router: Float[Array, "E D"], x: Float[Array, "D T"], moe: MoEConfig) -> Routing:
    """Softmax over all experts in float32, then the best k; the lower index where two are equal."""
    logits = dot(router.astype(jnp.float32), x.astype(jnp.float32))
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=0).T, moe.num_experts_per_token)
    if moe.renormalize:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(experts, gates)


def all_experts(
    x: Float[Array, "D T"], is_real: Bool[Array, " T"], routing: Routing, experts: Experts, activation: Activation
) -> Float[Array, "D T"]:
    """What `chosen_experts` computes, with every expert on every token: the reference for tests and benchmarks."""
    gate, up, down = (widen(w, scale, x.dtype) for w, scale in experts)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    hidden = activate(product("efd,dt->eft", gate, x), activation) * product("efd,dt->eft", up, x)
    y = product("edf,eft->edt", down, hidden.astype(x.dtype))
    is_chosen = routing.experts[..., None] == jnp.arange(gate.shape[0])  # [T, k, E]
    weights = jnp.sum(jnp.where(is_chosen & is_real[:, None, None], routing.gates[..., None], 0.0), axis=1)
    return product("edt,te->dt", y, weights)


def chosen_experts(
    x: Float[Array, "D T"],
    is_real: Bool[Array, " T"],
    routing: Routing,
    experts: Experts,
    activation: Activation,
    tile_bytes: int | None,
) -> Float[Array, "D T"]:
    """The sum of each real token's experts by their gates, in float32; experts not among these E add nothing.

    Blocks have one length, and a token's experts are added in the order of their rank: its result does not depend on
    the other tokens. `tile_bytes`: an expert's matrices are taken in pieces of that size, for a CPU; None: whole.
    """
    num_experts, (_, num_tokens), k = experts.gate.w.shape[0], x.shape, routing.experts.shape[1]
    is_here = (routing.experts >= 0) & (routing.experts < num_experts) & is_real[:, None]
    groups = _group(jnp.where(is_here, routing.experts, num_experts), num_experts)
    block_len = _block_len(num_tokens, k, num_experts)
    num_rows = num_tokens * k + block_len
    tokens = jnp.pad(groups.order // k, (0, block_len))
    num_blocks = (groups.counts + block_len - 1) // block_len
    ends = jnp.cumsum(num_blocks)
    starts = jnp.cumsum(groups.counts) - groups.counts

    def block(index: Array, out: Array) -> Array:
        expert = jnp.minimum(jnp.sum(ends <= index), num_experts - 1)
        row = starts[expert] + (index - ends[expert] + num_blocks[expert]) * block_len
        row = jnp.where(index < ends[-1], row, num_rows - block_len)
        rows = x
        if num_tokens > 1:
            rows = x[:, jax.lax.dynamic_slice_in_dim(tokens, row, block_len)]
        y = _expert(experts, expert, rows, activation, tile_bytes)
        # Rows behind the end of a group belong to the next one, which comes later, or to nobody.
        return jax.lax.dynamic_update_slice(out, y, (0, row))

    # On an accelerator a loop with a run-time bound costs a round trip to the host for each turn.
    bound = min(num_experts, num_tokens * k) + num_tokens * k // block_len
    out = jnp.zeros((x.shape[0], num_rows), jnp.float32)
    out = jax.lax.fori_loop(0, bound if tile_bytes is None else ends[-1], block, out)
    total = jnp.zeros(x.shape, jnp.float32)
    for rank in range(k):
        y = jnp.where(is_here[:, rank], out[:, groups.positions[:, rank]], 0.0)
        total = total + y * routing.gates[:, rank]
    return total


class _Groups(NamedTuple):
    """Assignments sorted by expert; those to no expert come last."""

    order: Int[Array, " A"]
    """Which assignment stands at each place."""
    positions: Int[Array, "T k"]
    """At which place each assignment stands."""
    counts: Int[Array, " E"]


def _group(experts: Int[Array, "T k"], num_experts: int) -> _Groups:
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    positions = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype))
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return _Groups(order, positions.reshape(experts.shape), counts)


def _block_len(num_tokens: int, k: int, num_experts: int) -> int:
    """Twice the mean group: few blocks, of which few rows are empty. No group has more than all tokens."""
    mean = -(-num_tokens * k // num_experts)
    return min(num_tokens, _MAX_BLOCK_LEN, max(8, 1 << (2 * mean - 1).bit_length()))


def _expert(
    experts: Experts, expert: Int[Array, ""], x: Float[Array, "D S"], activation: Activation, tile_bytes: int | None
) -> Float[Array, "D S"]:
    """One expert of some tokens, in float32."""

    def hidden(gate: Array, up: Array) -> Array:
        return (activate(dot(gate, x), activation) * dot(up, x)).astype(x.dtype)

    h = _by_tiles(hidden, (experts.gate, experts.up), expert, x.dtype, tile_bytes)
    return _by_tiles(lambda down: dot(down, h), (experts.down,), expert, x.dtype, tile_bytes)


def _by_tiles(
    compute: Callable[..., Array],
    matrices: Sequence[Matrices],
    expert: Int[Array, ""],
    dtype: jnp.dtype,
    tile_bytes: int | None,
) -> Float[Array, "O S"]:
    """`compute` of one expert's matrices, widened, a tile of their outputs at a time."""
    _, num_outputs, num_inputs = matrices[0].w.shape
    tile = num_outputs
    if tile_bytes is not None:
        tile = min(tile, max(1, tile_bytes // (num_inputs * max(dtype.itemsize, matrices[0].w.dtype.itemsize))))

    def part(start: Array | int) -> Array:
        return compute(*(_widened_rows(m, expert, start, tile, dtype) for m in matrices))

    if tile == num_outputs:
        return part(0)

    def store(index: Array, out: Array) -> Array:
        # The last tile overlaps the one before it where they do not divide the outputs.
        start = jnp.minimum(index * tile, num_outputs - tile)
        return jax.lax.dynamic_update_slice(out, part(start), (start, 0))

    result = jax.eval_shape(part, 0)
    out = jnp.zeros((num_outputs, result.shape[1]), result.dtype)
    return jax.lax.fori_loop(0, -(-num_outputs // tile), store, out)


def _widened_rows(m: Matrices, expert: Array, start: Array | int, size: int, dtype: jnp.dtype) -> Array:
    def rows(a: Array) -> Array:
        return jax.lax.dynamic_slice(a, (expert, start, 0), (1, size, a.shape[2]))[0]

    return widen(rows(m.w), None if m.scale is None else rows(m.scale), dtype)


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
