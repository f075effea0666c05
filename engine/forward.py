"""The compiled pair: a prefill program for each prompt bucket, a decode program for each row count.

Both take the plan packed into two arrays, sample on the device, and keep the last token of each slot there, so that the
next step can be dispatched before the host has seen this one's result. Cache and last tokens are donated and updated in
place; logits stay on the device.

Letters: B rows (sequences), T tokens of each, C pages of a page table row, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from engine.kv_cache import BLOCK_LEN, NO_WINDOW, BatchLayout, KVCache, copy_pages
from engine.models.decoder import Decoder, Params
from engine.plan import PlanRow
from engine.sampling import Sampled, SamplingRows, sample
from engine.sharding import DATA

AbstractParams = dict[str, dict[str, jax.ShapeDtypeStruct]]
"""Shape, dtype and sharding of every parameter, to compile without any."""


class DeviceState(NamedTuple):
    """What lives on the device from step to step."""

    cache: KVCache
    last_tokens: Int[Array, " slots"]
    """The token sampled last in each slot."""


class PackedRows(NamedTuple):
    """Rows of a plan as arrays; made by `pack_rows`, read by the programs."""

    ints: Int[np.ndarray, "B I+C"]
    """Columns `INT_COLUMNS`, then the page table."""
    floats: Float[np.ndarray, "B 3"]
    """Columns `FLOAT_COLUMNS`."""
    tokens: Int[np.ndarray, "B T"]


class PackedCopies(NamedTuple):
    """Pages to copy, as `engine.kv_cache.copy_pages` takes them."""

    sources: Int[np.ndarray, " M"]
    targets: Int[np.ndarray, " M"]


INT_COLUMNS = [
    "slot",
    "position",
    "num_tokens",
    "token_on_device",
    "top_k",
    "seed_high",
    "seed_low",
    "wants_logprobs",
    "samples",
    "window",
]
FLOAT_COLUMNS = ["temperature", "top_p", "min_p"]


@dataclass(frozen=True)
class BatchShape:
    """Sizes of one program's batch."""

    num_shards: int
    """Data shards."""
    rows_per_shard: int
    num_tokens: int
    """Tokens of each row: a prefill bucket, or 1."""
    num_columns: int
    """Page table columns: pages of the longest context."""
    num_slots: int

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return self.num_shards * self.rows_per_shard


def row_indices(rows: Sequence[PlanRow], shape: BatchShape) -> list[int]:
    """The batch row of each plan row: rows of a shard stand together, padded to the same number."""
    slots_per_shard = shape.num_slots // shape.num_shards
    used = [0] * shape.num_shards
    indices = []
    for row in rows:
        shard = row.slot // slots_per_shard
        indices.append(shard * shape.rows_per_shard + used[shard])
        used[shard] += 1
    return indices


def pack_rows(rows: Sequence[PlanRow], shape: BatchShape) -> PackedRows:
    """Packs plan rows; rows that are not used compute nothing that is kept."""
    ints = np.zeros((shape.num_rows, len(INT_COLUMNS) + shape.num_columns), np.int32)
    floats = np.zeros((shape.num_rows, len(FLOAT_COLUMNS)), np.float32)
    floats[:, 1] = 1.0
    tokens = np.zeros((shape.num_rows, shape.num_tokens), np.int32)
    ints[:, 0] = shape.num_slots
    first_page = len(INT_COLUMNS)
    for index, row in zip(row_indices(rows, shape), rows, strict=True):
        p = row.params
        seed_high, seed_low = np.array([p.seed >> 32, p.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        ints[index, :first_page] = (
            row.slot,
            row.position,
            row.num_tokens,
            not row.token_ids,
            p.top_k,
            seed_high,
            seed_low,
            p.logprobs is not None,
            row.samples,
            NO_WINDOW if row.window is None else row.window,
        )
        ints[index, first_page : first_page + len(row.page_ids)] = row.page_ids
        floats[index] = (p.temperature, p.top_p, p.min_p)
        tokens[index, : len(row.token_ids)] = row.token_ids
    return PackedRows(ints, floats, tokens)


def forward_step(
    decoder: Decoder, params: Params, state: DeviceState, packed: PackedRows, max_blocks: int | None, all_logits: bool
) -> tuple[DeviceState, Sampled, Float[Array, "V BT"] | None]:
    """One step of either kind: computes each row's tokens and samples one token a row.

    `max_blocks` bounds the context to that many blocks of `BLOCK_LEN` positions at compile time; None: as many as the
    longest row needs, decided at run time. `all_logits` returns the logits of every token, too.
    """
    ints, tokens = jnp.asarray(packed.ints), jnp.asarray(packed.tokens)
    batch, num_tokens = tokens.shape
    column = dict(zip(INT_COLUMNS, ints[:, : len(INT_COLUMNS)].T, strict=True))
    temperature, top_p, min_p = jnp.asarray(packed.floats).T
    if num_tokens == 1:
        on_device = state.last_tokens.at[column["slot"]].get(mode="clip")
        tokens = jnp.where(column["token_on_device"] > 0, on_device, tokens[:, 0])[:, None]
    layout = BatchLayout(
        ints[:, len(INT_COLUMNS) :],
        column["position"][:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None],
        column["num_tokens"],
        column["window"],
    )
    end = column["position"] + column["num_tokens"]
    num_blocks = (jnp.max(end) + BLOCK_LEN - 1) // BLOCK_LEN if max_blocks is None else max_blocks
    hidden, cache = decoder.hidden(params, state.cache, tokens, layout, num_blocks)
    last = jnp.maximum(column["num_tokens"] - 1, 0)
    by_row = hidden.reshape(-1, batch, num_tokens)
    last_hidden = jnp.take_along_axis(by_row, last[None, :, None], axis=2)[:, :, 0]
    seed = jnp.stack([column["seed_high"], column["seed_low"]], axis=1).astype(jnp.uint32)
    sampled = sample(
        decoder.logits(params, last_hidden),
        SamplingRows(temperature, top_p, min_p, column["top_k"], seed, end, column["wants_logprobs"] > 0),
    )
    slot = jnp.where(column["samples"] > 0, column["slot"], state.last_tokens.shape[0])
    last_tokens = state.last_tokens.at[slot].set(sampled.tokens, mode="drop")
    logits = decoder.logits(params, hidden) if all_logits else None
    return DeviceState(cache, last_tokens), sampled, logits


def compile_step(
    decoder: Decoder,
    params: Params | AbstractParams,
    state: DeviceState,
    shape: BatchShape,
    max_blocks: int | None,
    all_logits: bool = False,
) -> jax.stages.Compiled:
    """Compiles one program. Its arguments are (params, state, packed); `state` is donated.

    `params` and `state` may be arrays or `jax.ShapeDtypeStruct` with shardings. Products of float32 arrays are computed
    in float32 on every backend (a GPU's default rounds the factors to 10 bits).
    """
    mesh = decoder.mesh
    by_row = NamedSharding(mesh, P(DATA, None))
    everywhere = NamedSharding(mesh, P())
    empty = pack_rows((), shape)
    packed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_row), empty)
    state_sharding = jax.tree.map(lambda a: a.sharding, state)

    def step(params: Params, state: DeviceState, packed: PackedRows) -> tuple:
        with jax.default_matmul_precision("float32"):
            return forward_step(decoder, params, state, packed, max_blocks, all_logits)

    jitted = jax.jit(
        step,
        donate_argnums=1,
        out_shardings=(state_sharding, everywhere, everywhere if all_logits else None),
    )
    return jitted.lower(params, state, packed).compile()


def compile_copies(mesh: Mesh, state: DeviceState, copies: PackedCopies) -> jax.stages.Compiled:
    """Compiles copying pages. Its arguments are (state, copies); `state` is donated."""

    def copy(state: DeviceState, copies: PackedCopies) -> DeviceState:
        sources, targets = jnp.asarray(copies.sources), jnp.asarray(copies.targets)
        return state._replace(cache=copy_pages(state.cache, sources, targets, mesh=mesh))

    jitted = jax.jit(copy, donate_argnums=0, out_shardings=jax.tree.map(lambda a: a.sharding, state))
    return jitted.lower(state, copies).compile()
