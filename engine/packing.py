"""Rows of a step plan as arrays: packed on the host, read on the device.

Letters: B rows (sequences), T tokens of each, C pages of a page table row, S stop tokens, M page copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from engine.kv_cache import NO_WINDOW
from engine.plan import PlanRow
from engine.request import MAX_STOP_TOKEN_IDS
from engine.sampling import SamplingRows


class PackedRows(NamedTuple):
    """Rows of a plan as arrays; made by `pack_rows`, read by the programs."""

    ints: Int[np.ndarray, "B I+S+C"]
    """Columns `INT_COLUMNS`, `MAX_STOP_TOKEN_IDS` stop tokens (-1: none), then the page table."""
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
    "window_least",
    "window_divisor",
    "max_new_tokens",
    "ignore_eos",
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
    ints = np.zeros((shape.num_rows, len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS + shape.num_columns), np.int32)
    floats = np.zeros((shape.num_rows, len(FLOAT_COLUMNS)), np.float32)
    floats[:, 1] = 1.0
    tokens = np.zeros((shape.num_rows, shape.num_tokens), np.int32)
    ints[:, 0] = shape.num_slots
    first_stop, first_page = len(INT_COLUMNS), len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS
    ints[:, first_stop:first_page] = -1
    for index, row in zip(row_indices(rows, shape), rows, strict=True):
        p = row.params
        seed_high, seed_low = np.array([p.seed >> 32, p.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        ints[index, :first_stop] = (
            row.slot,
            row.position,
            row.num_tokens,
            not row.token_ids,
            p.top_k,
            seed_high,
            seed_low,
            p.logprobs is not None,
            row.samples,
            *_window(row),
            row.max_new_tokens,
            p.ignore_eos,
        )
        ints[index, first_stop : first_stop + len(p.stop_token_ids)] = p.stop_token_ids
        ints[index, first_page : first_page + len(row.page_ids)] = row.page_ids
        floats[index] = (p.temperature, p.top_p, p.min_p)
        tokens[index, : len(row.token_ids)] = row.token_ids
    return PackedRows(ints, floats, tokens)


def _window(row: PlanRow) -> tuple[int, int, int]:
    """The most, the least and the divisor of a row's window."""
    most = NO_WINDOW if row.window is None else row.window
    adaptive = row.adaptive_window
    return (most, most, 1) if adaptive is None else (most, adaptive.least, adaptive.divisor)


class Rows(NamedTuple):
    """Packed rows on the device."""

    column: dict[str, Array]
    stop_token_ids: Int[Array, "B S"]
    page_table: Int[Array, "B C"]
    floats: Float[Array, "B 3"]

    def sampling(self, position: Int[Array, " B"], wants_logprobs: Bool[Array, " B"]) -> SamplingRows:
        """How to choose the tokens at these positions."""
        column = self.column
        temperature, top_p, min_p = self.floats.T
        seed = jnp.stack([column["seed_high"], column["seed_low"]], axis=1).astype(jnp.uint32)
        return SamplingRows(temperature, top_p, min_p, column["top_k"], seed, position, wants_logprobs)

    def windows(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The sliding window of each position; see `engine.request.AdaptiveWindow`."""
        most, least, divisor = (self.column[n][:, None] for n in ("window", "window_least", "window_divisor"))
        return jnp.minimum(most, jnp.maximum(least, (positions + 1) // jnp.maximum(divisor, 1)))

    def ends(self, tokens: Int[Array, " B"], eos_token_ids: tuple[int, ...]) -> Bool[Array, " B"]:
        """Whether each token ends its request."""
        is_eos = jnp.isin(tokens, jnp.array(eos_token_ids, jnp.int32)) & (self.column["ignore_eos"] == 0)
        return is_eos | (tokens[:, None] == self.stop_token_ids).any(axis=1)


def unpack(packed: PackedRows) -> tuple[Rows, Int[Array, "B T"]]:
    """The rows and their tokens, on the device."""
    ints = jnp.asarray(packed.ints)
    names, stops, table = jnp.split(ints, [len(INT_COLUMNS), len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS], axis=1)
    column = dict(zip(INT_COLUMNS, names.T, strict=True))
    return Rows(column, stops, table, jnp.asarray(packed.floats)), jnp.asarray(packed.tokens)
