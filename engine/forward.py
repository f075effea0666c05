"""The compiled pair: a prefill program for each prompt bucket, a decode program for each row count.

Both take the plan packed into two arrays, sample on the device, and keep the last token of each slot there, so that the
next step can be dispatched before the host has seen this one's result. Cache and last tokens are donated and updated in
place; logits stay on the device.

Letters: B rows (sequences), T tokens of each, C pages of a page table row, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from engine.attention import Group
from engine.devices import compiler_options
from engine.kv_cache import BLOCK_LEN, BatchLayout, KVCache, copy_pages
from engine.models.decoder import Decoder, Params
from engine.packing import BatchShape, PackedCopies, PackedRows, pack_rows, unpack
from engine.sampling import Sampled, sample
from engine.sharding import DATA, MODEL

AbstractParams = dict[str, dict[str, jax.ShapeDtypeStruct]]
"""Shape, dtype and sharding of every parameter, to compile without any."""


T = TypeVar("T")


class DeviceState(NamedTuple):
    """What lives on the device from step to step."""

    cache: KVCache
    last_tokens: Int[Array, " slots"]
    """The token sampled last in each slot."""


class StepOutput(NamedTuple):
    """What a program chose: C tokens of each row at most."""

    sampled: Sampled
    """Every array with a leading axis C."""
    num_sampled: Int[Array, " B"]


def prefill_step(
    decoder: Decoder, params: Params, state: DeviceState, packed: PackedRows, max_blocks: int | None, all_logits: bool
) -> tuple[DeviceState, StepOutput, Float[Array, "V BT"] | None]:
    """Computes a chunk of each row and samples the token after it.

    `max_blocks` bounds the context to that many blocks of `BLOCK_LEN` positions at compile time; None: as many as the
    longest row needs, decided at run time. `all_logits` returns the logits of every token, too.
    """
    rows, tokens = _apart(decoder, unpack(packed))
    column, (batch, num_tokens) = rows.column, tokens.shape
    positions = column["position"][:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    layout = BatchLayout(rows.page_table, positions, column["num_tokens"], rows.windows(positions))
    end = column["position"] + column["num_tokens"]
    num_blocks = _num_blocks(end) if max_blocks is None else max_blocks
    hidden, cache = decoder.hidden(params, state.cache, tokens, layout, num_blocks)
    last = jnp.maximum(column["num_tokens"] - 1, 0)
    by_row = hidden.reshape(-1, batch, num_tokens)
    last_hidden = jnp.take_along_axis(by_row, last[None, :, None], axis=2)[:, :, 0]
    sampled = sample(_logits(decoder, params, last_hidden), rows.sampling(end, column["wants_logprobs"] > 0))
    logits = decoder.logits(params, hidden) if all_logits else None
    output = StepOutput(jax.tree.map(lambda a: a[None], sampled), jnp.ones(batch, jnp.int32))
    return DeviceState(cache, _keep_last(state, column, sampled.tokens)), output, logits


def decode_steps(
    decoder: Decoder,
    params: Params,
    state: DeviceState,
    packed: PackedRows,
    max_blocks: int | None,
    max_steps: int,
    all_logits: bool,
) -> tuple[DeviceState, StepOutput, Float[Array, "V B"] | None]:
    """Samples up to `max_new_tokens` tokens of each row, `max_steps` at most, one after the other.

    A row ends early at a token that ends its request, and from then on writes nothing. The loop ends with the last row:
    one program serves any number of steps, and its compilation does not depend on it. `all_logits` (with one step)
    returns the logits, too. `max_blocks`: as in `prefill_step`.
    """
    rows, tokens = _apart(decoder, unpack(packed))
    column, batch = rows.column, tokens.shape[0]
    on_device = state.last_tokens.at[column["slot"]].get(mode="clip")
    first = jnp.where(column["token_on_device"] > 0, on_device, tokens[:, 0])

    def step(carry: _Decode) -> tuple[_Decode, Sampled, Array]:
        active = carry.num_left > 0
        positions = carry.position[:, None]
        layout = BatchLayout(rows.page_table, positions, active.astype(jnp.int32), rows.windows(positions))
        end = carry.position + 1
        num_blocks = _num_blocks(jnp.where(active, end, 0)) if max_blocks is None else max_blocks
        hidden, cache = decoder.hidden(params, carry.cache, carry.tokens[:, None], layout, num_blocks)
        logits = _logits(decoder, params, hidden)
        sampled = sample(logits, rows.sampling(end, active & (column["wants_logprobs"] > 0)))
        goes_on = active & ~rows.ends(sampled.tokens, decoder.config.eos_token_ids)
        after = _Decode(
            cache,
            jnp.where(active, sampled.tokens, carry.tokens),
            carry.position + active,
            jnp.where(goes_on, carry.num_left - 1, 0),
            carry.num_sampled + active,
        )
        return after, sampled, logits

    start = _Decode(state.cache, first, column["position"], column["max_new_tokens"], jnp.zeros(batch, jnp.int32))
    logits = None
    if max_steps == 1:
        end, one, logits = step(start)
        sampled = jax.tree.map(lambda a: a[None], one)
    else:
        shapes = jax.eval_shape(step, start)[1]
        buffers = jax.tree.map(lambda a: jnp.zeros((max_steps, *a.shape), a.dtype), shapes)

        def body(loop: tuple[Array, _Decode, Sampled]) -> tuple[Array, _Decode, Sampled]:
            index, carry, buffers = loop
            after, sampled, _ = step(carry)
            return index + 1, after, jax.tree.map(lambda buffer, a: buffer.at[index].set(a), buffers, sampled)

        _, end, sampled = jax.lax.while_loop(
            lambda loop: jnp.any(loop[1].num_left > 0), body, (jnp.int32(0), start, buffers)
        )
    output = StepOutput(sampled, end.num_sampled)
    return DeviceState(end.cache, _keep_last(state, column, end.tokens)), output, logits if all_logits else None


class _Decode(NamedTuple):
    """What changes from one decode step to the next."""

    cache: KVCache
    tokens: Int[Array, " B"]
    position: Int[Array, " B"]
    num_left: Int[Array, " B"]
    """Tokens that each row may still sample; 0: it has ended."""
    num_sampled: Int[Array, " B"]


def _apart(decoder: Decoder, tree: T) -> T:
    """The arrays on every device, where processes of CPUs find each other's collectives by their order alone: sampling
    then needs none, whose order could differ from process to process."""
    if not compiler_options(decoder.mesh):
        return tree
    everywhere = NamedSharding(decoder.mesh, P())
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, everywhere), tree)


def _logits(decoder: Decoder, params: Params, hidden: Float[Array, "D B"]) -> Float[Array, "V B"]:
    """Logits to sample from, set apart."""
    logits = decoder.logits(params, hidden)
    if compiler_options(decoder.mesh) and logits.shape[0] % decoder.mesh.shape[MODEL] == 0:
        # Without this the weights are gathered instead of the logits.
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(decoder.mesh, P(MODEL, DATA)))
    return _apart(decoder, logits)


def _num_blocks(end: Int[Array, " B"]) -> Int[Array, ""]:
    return (jnp.max(end) + BLOCK_LEN - 1) // BLOCK_LEN


def _keep_last(state: DeviceState, column: dict[str, Array], tokens: Int[Array, " B"]) -> Int[Array, " slots"]:
    """The last token of each slot, with those just sampled."""
    slot = jnp.where(column["samples"] > 0, column["slot"], state.last_tokens.shape[0])
    return state.last_tokens.at[slot].set(tokens, mode="drop")


class MixedOutput(NamedTuple):
    """What a step of both kinds chose."""

    prefill: StepOutput
    decode: StepOutput


def mixed_step(
    decoder: Decoder, params: Params, state: DeviceState, packed: tuple[PackedRows, PackedRows], max_blocks: int | None
) -> tuple[DeviceState, MixedOutput, None]:
    """A chunk of each row of the first batch and one token of each row of the second, in one pass over the weights.

    `max_blocks`: as in `prefill_step`.
    """
    (chunk, chunk_tokens), (rows, given) = (_apart(decoder, unpack(each)) for each in packed)
    on_device = state.last_tokens.at[rows.column["slot"]].get(mode="clip")
    tokens = jnp.where(rows.column["token_on_device"] > 0, on_device, given[:, 0])[:, None]
    steps = jnp.arange(chunk_tokens.shape[1], dtype=jnp.int32)[None]
    positions = chunk.column["position"][:, None] + steps, rows.column["position"][:, None]
    ends = chunk.column["position"] + chunk.column["num_tokens"], rows.column["position"] + 1
    groups = [
        Group(
            BatchLayout(r.page_table, p, r.column["num_tokens"], r.windows(p)),
            _num_blocks(jnp.where(r.column["num_tokens"] > 0, end, 0)) if max_blocks is None else max_blocks,
        )
        for r, p, end in zip((chunk, rows), positions, ends, strict=True)
    ]
    hidden, cache = decoder.hidden_of_groups(params, state.cache, [chunk_tokens, tokens], groups)
    by_chunk, by_row = decoder.unflatten(hidden, [chunk_tokens.shape, tokens.shape])
    last = jnp.maximum(chunk.column["num_tokens"] - 1, 0)
    by_chunk = jnp.take_along_axis(by_chunk, last[None, :, None], axis=2)
    num_chunks = by_chunk.shape[1]
    # Every data shard's rows of both kinds together, so that nothing moves between shards.
    both = _by_shard(decoder, by_chunk[:, :, 0].T, by_row[:, :, 0].T).T
    sampling = jax.tree.map(
        lambda *a: _by_shard(decoder, *a),
        *(r.sampling(end, r.column["wants_logprobs"] > 0) for r, end in zip((chunk, rows), ends, strict=True)),
    )
    sampled = sample(_logits(decoder, params, both), sampling)
    parts = [_of_shards(decoder, sampled, which, num_chunks, tokens.shape[0]) for which in (0, 1)]
    outputs = [
        StepOutput(jax.tree.map(lambda a: a[None], part), jnp.ones(part.tokens.shape[0], jnp.int32)) for part in parts
    ]
    kept = _keep_last(state, chunk.column, parts[0].tokens)
    kept = _keep_last(state._replace(last_tokens=kept), rows.column, parts[1].tokens)
    return DeviceState(cache, kept), MixedOutput(*outputs), None


def _by_shard(decoder: Decoder, a: Array, b: Array) -> Array:
    """Rows of two batches as one: each data shard's of the first, then its of the second."""
    shards = decoder.mesh.shape[DATA]
    parts = [x.reshape(shards, -1, *x.shape[1:]) for x in (a, b)]
    return jnp.concatenate(parts, axis=1).reshape(-1, *a.shape[1:])


def _of_shards(decoder: Decoder, sampled: Sampled, which: int, num_first: int, num_second: int) -> Sampled:
    """The rows of one of the batches of `_by_shard`."""
    shards = decoder.mesh.shape[DATA]
    border = num_first // shards

    def part(a: Array) -> Array:
        by_shard = a.reshape(shards, -1, *a.shape[1:])
        rows = by_shard[:, border:] if which else by_shard[:, :border]
        return rows.reshape(num_second if which else num_first, *a.shape[1:])

    return jax.tree.map(part, sampled)


def compile_step(
    decoder: Decoder,
    params: Params | AbstractParams,
    state: DeviceState,
    shape: BatchShape,
    max_blocks: int | None,
    max_steps: int = 1,
    all_logits: bool = False,
) -> jax.stages.Compiled:
    """Compiles one program: `prefill_step` for several tokens of each row, else `decode_steps`.

    Its arguments are (params, state, packed); `state` is donated.

    `params` and `state` may be arrays or `jax.ShapeDtypeStruct` with shardings. Products of float32 arrays are computed
    in float32 on every backend (a GPU's default rounds the factors to 10 bits).
    """

    def step(params: Params, state: DeviceState, packed: PackedRows) -> tuple:
        if shape.num_tokens > 1:
            return prefill_step(decoder, params, state, packed, max_blocks, all_logits)
        return decode_steps(decoder, params, state, packed, max_blocks, max_steps, all_logits)

    return _compile(decoder.mesh, step, params, state, pack_rows((), shape), all_logits)


def compile_mixed(
    decoder: Decoder,
    params: Params | AbstractParams,
    state: DeviceState,
    shapes: tuple[BatchShape, BatchShape],
    max_blocks: int | None,
) -> jax.stages.Compiled:
    """Compiles `mixed_step` for a batch of chunks and one of decode rows; otherwise as `compile_step`."""

    def step(params: Params, state: DeviceState, packed: tuple[PackedRows, PackedRows]) -> tuple:
        return mixed_step(decoder, params, state, packed, max_blocks)

    return _compile(decoder.mesh, step, params, state, tuple(pack_rows((), shape) for shape in shapes), False)


def _compile(
    mesh: Mesh,
    step: Callable[..., tuple],
    params: Params | AbstractParams,
    state: DeviceState,
    empty: Any,
    all_logits: bool,
) -> jax.stages.Compiled:
    """Compiles `step` for batches packed as `empty`; its outputs are on every device."""
    by_row, everywhere = (NamedSharding(mesh, spec) for spec in (P(DATA, None), P()))
    packed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_row), empty)
    shardings = jax.tree.map(lambda a: a.sharding, state), everywhere, everywhere if all_logits else None

    @partial(jax.jit, donate_argnums=1, out_shardings=shardings)
    def step_program(params: Params, state: DeviceState, packed: Any) -> tuple:
        with jax.default_matmul_precision("float32"):
            return step(params, state, packed)

    return step_program.lower(params, state, packed).compile(compiler_options(mesh))


def compile_copies(mesh: Mesh, state: DeviceState, copies: PackedCopies) -> jax.stages.Compiled:
    """Compiles copying pages. Its arguments are (state, copies); `state` is donated."""

    def copy(state: DeviceState, copies: PackedCopies) -> DeviceState:
        sources, targets = jnp.asarray(copies.sources), jnp.asarray(copies.targets)
        return state._replace(cache=copy_pages(state.cache, sources, targets, mesh=mesh))

    jitted = jax.jit(copy, donate_argnums=0, out_shardings=jax.tree.map(lambda a: a.sharding, state))
    return jitted.lower(state, copies).compile()
