"""The paged KV cache and attention over it. Nothing else knows how the cache is laid out.

Keys are stored `[L, P, K, N, S]` and values `[L, P, K, S, N]`: with the positions of a page minor for keys and major
for values, both products of attention read them in the order that matrix units want.

Letters: L layers, P pages of one data shard, S positions of a page, K stored KV heads, G query heads of a KV head,
N head size, B sequences, T tokens of each, C pages of a page table row.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int

from engine.config import ModelConfig
from engine.sharding import DATA, MODEL, num_cache_heads

BLOCK_LEN = 128
"""Positions that attention takes at a time: reductions run over blocks of this one size, whatever the context."""

NO_WINDOW = 2**30
"""A window that nothing lies outside of."""

_CACHE_SPEC = Spec(None, DATA, MODEL, None, None)
_MASKED = -1e30


class KVCache(NamedTuple):
    """The arrays of the cache; pages lie over `data`, heads over `model`."""

    keys: Float[Array, "L P K N S"]
    values: Float[Array, "L P K S N"]


class BatchLayout(NamedTuple):
    """Where the tokens of a batch stand: B sequences of T tokens, each sequence on the data shard of its pages."""

    page_table: Int[Array, "B C"]
    """Pages of each sequence in order; ids count within the data shard."""
    positions: Int[Array, "B T"]
    """Position of each token in its sequence."""
    num_tokens: Int[Array, " B"]
    """How many of the T tokens are real. The others are computed and stored nowhere."""
    windows: Int[Array, " B"]
    """Sliding window of each sequence in positions, beside that of the layer; `NO_WINDOW` for none. Page table entries
    of pages wholly before it may be any page of the data shard."""


@dataclass(frozen=True)
class CacheShape:
    """Everything that decides the size of the cache."""

    num_layers: int
    num_pages: int
    """Of all data shards together."""
    num_heads: int
    head_size: int
    page_size: int
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh, num_pages: int, page_size: int, dtype: str) -> "CacheShape":
        """The cache of `config` on `mesh`."""
        return cls(config.num_layers, num_pages, num_cache_heads(config, mesh), config.head_size, page_size, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values over all devices."""
        per_page = self.num_layers * self.num_heads * self.head_size * self.page_size
        return 2 * per_page * self.num_pages * np.dtype(jnp.dtype(self.dtype)).itemsize


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of both arrays of the cache."""
    return NamedSharding(mesh, _CACHE_SPEC)


def allocate(shape: CacheShape, mesh: Mesh) -> KVCache:
    """A cache of zeros, made on its devices."""
    s = shape
    lead = (s.num_layers, s.num_pages, s.num_heads)
    keys, values = (*lead, s.head_size, s.page_size), (*lead, s.page_size, s.head_size)
    make = jax.jit(
        lambda: KVCache(jnp.zeros(keys, s.dtype), jnp.zeros(values, s.dtype)), out_shardings=cache_sharding(mesh)
    )
    return make()


def write_and_attend(
    q: Float[Array, "H N BT"],
    k: Float[Array, "K N BT"],
    v: Float[Array, "K N BT"],
    cache: KVCache,
    layer: int | Int[Array, ""],
    window: int | Int[Array, ""] | None,
    layout: BatchLayout,
    num_blocks: Int[Array, ""] | int,
    *,
    mesh: Mesh,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "H N BT"], KVCache]:
    """Stores keys and values of the batch's tokens, then lets each token attend to all it may see.

    A token at position i sees positions j <= i, and with a window (the layer's or its sequence's, whichever is smaller)
    only those with i - window < j. `num_blocks` blocks of `BLOCK_LEN` positions are enough for the longest sequence of
    the batch; where they are counted at run time, those before every window are skipped, too. `scale` multiplies q·k,
    `softcap` c turns x into c·tanh(x / c). Tokens are flattened sequence by sequence. A chunk (T > 1) must start at a
    page's first position.
    """
    heads, rows = Spec(MODEL, None, DATA), Spec(DATA)
    # A loop whose bounds are known costs an accelerator no round trip to the host for each turn.
    static_blocks = num_blocks if isinstance(num_blocks, int) else None

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(heads, heads, heads, _CACHE_SPEC, Spec(), Spec(), rows, Spec()),
        out_specs=(heads, _CACHE_SPEC),
        check_vma=False,
    )
    def local(q, k, v, cache, layer, window, layout, num_blocks):  # type: ignore[no-untyped-def]
        batch, num_tokens = layout.positions.shape
        if num_tokens == 1:
            cache = _write_tokens(k, v, cache, layer, layout)
        else:
            cache = _write_chunks(k, v, cache, layer, layout)
        num_q_heads, size, _ = q.shape
        num_kv_heads = k.shape[0]
        q = q.reshape(num_kv_heads, num_q_heads // num_kv_heads, size, batch, num_tokens)
        q = q.transpose(3, 0, 1, 4, 2) * jnp.asarray(scale, q.dtype)
        windows = jnp.minimum(layout.windows, window)
        blocks = (0, static_blocks) if static_blocks is not None else (_first_block(layout, windows), num_blocks)
        out = _attend(q, cache, layer, windows, layout, blocks, softcap)
        return out.transpose(1, 2, 4, 0, 3).reshape(num_q_heads, size, batch * num_tokens), cache

    window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
    return local(q, k, v, cache, jnp.asarray(layer, jnp.int32), window, layout, jnp.asarray(num_blocks, jnp.int32))


def _first_block(layout: BatchLayout, windows: Int[Array, " B"]) -> Int[Array, ""]:
    """The first block that any real token sees."""
    first = jnp.where(layout.num_tokens > 0, layout.positions[:, 0] - windows + 1, NO_WINDOW)
    return jnp.maximum(first.min(), 0) // BLOCK_LEN


def _write_tokens(k: Array, v: Array, cache: KVCache, layer: Int[Array, ""], layout: BatchLayout) -> KVCache:
    """Stores one token of each sequence."""
    page_size = cache.keys.shape[-1]
    position = layout.positions[:, 0]
    page = jnp.take_along_axis(layout.page_table, (position // page_size)[:, None], axis=1)[:, 0]
    page = _drop_unless(layout.num_tokens > 0, page, cache)
    page, offset, k, v = _not_alone(cache, page, position % page_size, k.transpose(2, 0, 1), v.transpose(2, 0, 1))
    return KVCache(
        cache.keys.at[layer, page, :, :, offset].set(k.astype(cache.keys.dtype), mode="drop"),
        cache.values.at[layer, page, :, offset, :].set(v.astype(cache.values.dtype), mode="drop"),
    )


def _write_chunks(k: Array, v: Array, cache: KVCache, layer: Int[Array, ""], layout: BatchLayout) -> KVCache:
    """Stores chunks page by page. What lies behind a chunk's last token in its last page is written over before it is
    seen."""
    batch, num_tokens = layout.positions.shape
    page_size = cache.keys.shape[-1]
    num_pages = num_tokens // page_size
    first = layout.positions[:, 0] // page_size
    columns = first[:, None] + jnp.arange(num_pages)[None]
    pages = jnp.take_along_axis(layout.page_table, jnp.minimum(columns, layout.page_table.shape[1] - 1), axis=1)
    used = jnp.arange(num_pages)[None] * page_size < layout.num_tokens[:, None]
    pages = _drop_unless(used, pages, cache).reshape(-1)
    heads, size = k.shape[:2]
    k = k.reshape(heads, size, batch * num_pages, page_size).transpose(2, 0, 1, 3)
    v = v.reshape(heads, size, batch * num_pages, page_size).transpose(2, 0, 3, 1)
    pages, k, v = _not_alone(cache, pages, k, v)
    return KVCache(
        cache.keys.at[layer, pages].set(k.astype(cache.keys.dtype), mode="drop"),
        cache.values.at[layer, pages].set(v.astype(cache.values.dtype), mode="drop"),
    )


def _drop_unless(keep: Array, page: Array, cache: KVCache) -> Array:
    """Page ids with those not to be written moved out of range."""
    return jnp.where(keep, page, cache.keys.shape[1])


def _not_alone(cache: KVCache, pages: Array, *others: Array) -> tuple[Array, ...]:
    """Page ids and what belongs to each; a single one gets a companion that is not written.

    XLA turns a scatter of one index into a slice update behind a select, for which it copies the whole cache.
    """
    if pages.shape[0] > 1:
        return (pages, *others)
    nowhere = jnp.full_like(pages, cache.keys.shape[1])
    return (jnp.concatenate([pages, nowhere]), *(jnp.concatenate([a, a]) for a in others))


def _attend(
    q: Float[Array, "B K G T N"],
    cache: KVCache,
    layer: Int[Array, ""],
    windows: Int[Array, " B"],
    layout: BatchLayout,
    blocks: tuple[Array | int, Array | int],
    softcap: float | None,
) -> Float[Array, "B K G T N"]:
    """Softmax attention block by block with a running maximum (Milakov and Gimelshein, 2018), in float32.

    A block that a token cannot see changes neither its maximum nor its sums: it adds exact zeros. So it is nothing to
    the result which `blocks` (the first, and the one after the last) are read, as long as all that are seen are.
    """
    page_size = cache.keys.shape[-1]
    pages_per_block = BLOCK_LEN // page_size
    batch, heads, group, num_tokens, size = q.shape
    # One flat batch axis: with several the CPU backend takes a path 2 times slower.
    flat = batch * heads
    q = q.reshape(flat, group * num_tokens, size)
    dtype = jnp.promote_types(q.dtype, cache.keys.dtype)
    q = q.astype(dtype)

    def block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(layout.page_table, index * pages_per_block, pages_per_block, axis=1)
        keys = cache.keys[layer, pages].astype(dtype)  # [B, C, K, N, S]
        values = cache.values[layer, pages].astype(dtype)  # [B, C, K, S, N]
        keys = keys.transpose(0, 2, 3, 1, 4).reshape(flat, size, BLOCK_LEN)
        values = values.transpose(0, 2, 1, 3, 4).reshape(flat, BLOCK_LEN, size)
        scores = jnp.einsum("bmn,bns->bms", q, keys, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        position = index * BLOCK_LEN + jnp.arange(BLOCK_LEN)
        behind = layout.positions[..., None] - position  # [B, T, BLOCK_LEN]
        seen = (behind >= 0) & (behind < windows[:, None, None])
        scores = scores.reshape(batch, heads, group, num_tokens, BLOCK_LEN)
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        rescale = jnp.exp(maximum - new_maximum)
        weights = jnp.where(seen, jnp.exp(scores - new_maximum[..., None]), 0.0)
        weights_flat = weights.reshape(flat, group * num_tokens, BLOCK_LEN).astype(dtype)
        added = jnp.einsum("bms,bsn->bmn", weights_flat, values, preferred_element_type=jnp.float32)
        added = added.reshape(batch, heads, group, num_tokens, size)
        return new_maximum, total * rescale + weights.sum(-1), out * rescale[..., None] + added

    shape = (batch, heads, group, num_tokens)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, size)))
    _, total, out = jax.lax.fori_loop(*blocks, block, start)
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
