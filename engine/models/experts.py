"""The chosen experts of some tokens as products over blocks of tokens, and every expert as the reference for it.

Tokens are sorted by expert and taken a block at a time, each block through one expert: no capacity, no dropped token.
`jax.lax.ragged_dot` would say the same, but as of jax 0.10 it computes every expert on the CPU and on NVIDIA.

Letters: T tokens, D model, F width of an expert (of this device's part of it), E experts (of this device), k experts
of a token, A = T * k assignments of a token to an expert, S tokens of a block, I in, O out, G scale groups.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from engine.config import Activation
from engine.models.layers import activate, dot, widen


class Matrices(NamedTuple):
    """One linear map of every expert."""

    w: Num[Array, "E O I"] | tuple[Float[Array, "1 O I"], ...]
    """One array, or E of them."""
    scale: Float[Array, "E O G"] | None
    """Of int8 weights."""

    @property
    def stacked(self) -> Num[Array, "E O I"]:
        """`w` where it is one array."""
        assert not isinstance(self.w, tuple)
        return self.w


class Experts(NamedTuple):
    """expert(x) = down(act(gate(x)) * up(x))."""

    gate: Matrices
    up: Matrices
    down: Matrices


class Routing(NamedTuple):
    """The experts of each token, best first."""

    experts: Int[Array, "T k"]
    gates: Float[Array, "T k"]


def all_experts(
    x: Float[Array, "D T"], is_real: Bool[Array, " T"], routing: Routing, experts: Experts, activation: Activation
) -> Float[Array, "D T"]:
    """What `chosen_experts` computes, with every expert on every token: the reference for tests and benchmarks."""
    gate, up, down = (widen(m.stacked, m.scale, x.dtype) for m in experts)
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
    block_len: int,
    tile_bytes: int | None,
) -> Float[Array, "D T"]:
    """The sum of each real token's experts by their gates, in float32; experts not among these E add nothing.

    Blocks have one length, at most T, and a token's experts are added in the order of their rank: its result does not
    depend on the other tokens. `tile_bytes`: pieces in which an expert's matrices are taken, for a CPU; None: whole.
    """
    num_experts, (_, num_tokens), k = num_experts_of(experts), x.shape, routing.experts.shape[1]
    is_here = (routing.experts >= 0) & (routing.experts < num_experts) & is_real[:, None]
    groups = _group(jnp.where(is_here, routing.experts, num_experts), num_experts)
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
        if isinstance(experts.gate.w, tuple):
            branches = [partial(_expert_apart, experts, e, activation) for e in range(num_experts)]
            y = jax.lax.switch(expert, branches, rows)
        else:
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


def num_experts_of(experts: Experts) -> int:
    """E."""
    return len(experts.gate.w)


def _expert_apart(experts: Experts, expert: int, activation: Activation, x: Float[Array, "D S"]) -> Float[Array, "D S"]:
    gate, up, down = (m.w[expert][0] for m in experts)
    return dot(down, (activate(dot(gate, x), activation) * dot(up, x)).astype(x.dtype))


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
    _, num_outputs, num_inputs = matrices[0].stacked.shape
    tile = num_outputs
    if tile_bytes is not None:
        tile = min(tile, max(1, tile_bytes // (num_inputs * max(dtype.itemsize, matrices[0].stacked.dtype.itemsize))))

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

    return widen(rows(m.stacked), None if m.scale is None else rows(m.scale), dtype)
