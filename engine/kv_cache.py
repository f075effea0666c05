"""The paged KV cache: what is stored, written and copied. Only this file and the kernels know how it is laid out.

Keys are stored `[L, P, K, N, S]` and values `[L, P, K, S, N]`: with the positions of a page minor for keys and major
for values, both products of attention read them in the order that matrix units want.

Letters: L layers, P pages of one data shard, S positions of a page, K stored KV heads, N head size, B sequences,
T tokens of each, C pages of a page table row, M page copies.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int, Num

from engine.config import CacheDType, ModelConfig
from engine.sharding import DATA, MODEL, num_cache_heads

BLOCK_LEN = 128
"""Positions that attention takes at a time: reductions run over blocks of this one size, whatever the context."""

NO_WINDOW = 2**30
"""A window that nothing lies outside of."""

CACHE_SPEC = Spec(None, DATA, MODEL)
"""The partition of every array of the cache: pages lie over `data`, heads over `model`."""

_INT8_MAX = 127.0


class KVCache(NamedTuple):
    """The arrays of the cache. Everything in it is finite, whatever was computed: positions that are masked are
    multiplied by zero, which would let one sequence's infinities into another."""

    keys: Num[Array, "L P K N S"]
    values: Num[Array, "L P K S N"]
    key_scales: Float[Array, "L P K S"] | None = None
    """float32: a key is its int8 numbers times its scale. None where the cache is of floating point."""
    value_scales: Float[Array, "L P K S"] | None = None


class BatchLayout(NamedTuple):
    page_table: Int[Array, "B C"]
    """Pages of each sequence in order; ids count within the data shard."""
    positions: Int[Array, "B T"]
    """Position of each token in its sequence."""
    num_tokens: Int[Array, " B"]
    """How many of the T tokens are real. The others are computed and stored nowhere."""
    windows: Int[Array, "B T"]
    """Sliding window of each token in positions, beside that of the layer; `NO_WINDOW` for none. Page table entries of
    pages wholly before it may be any page of the data shard."""


@dataclass(frozen=True)
class CacheShape:
    """Everything that decides the size of the cache."""

    num_layers: int
    num_pages: int
    """Of all data shards together."""
    num_heads: int
    head_size: int
    page_size: int
    dtype: CacheDType

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh, num_pages: int, page_size: int, dtype: CacheDType) -> "CacheShape":
        """The cache of `config` on `mesh`."""
        return cls(config.num_layers, num_pages, num_cache_heads(config, mesh), config.head_size, page_size, dtype)

    def abstract(self, mesh: Mesh) -> KVCache:
        """Every array as a `jax.ShapeDtypeStruct` with its sharding."""
        array = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, CACHE_SPEC))
        lead, size, page = (self.num_layers, self.num_pages, self.num_heads), self.head_size, self.page_size
        dtype = storage_dtype(self.dtype)
        scales = array((*lead, page), jnp.float32) if dtype == jnp.int8 else None
        arrays = (array((*lead, size, page), dtype), array((*lead, page, size), dtype), scales, scales)
        return KVCache(*arrays)  # type: ignore[arg-type]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and their scales over all devices."""
        dtype = storage_dtype(self.dtype)
        per_vector = self.head_size * dtype.itemsize + (4 if dtype == jnp.int8 else 0)
        return 2 * self.num_layers * self.num_pages * self.num_heads * self.page_size * per_vector


def storage_dtype(name: CacheDType) -> np.dtype:
    """The dtype of a cache's arrays of keys and values by its name in a config.

    Types that XLA's CPU compiler has no arithmetic for are kept as their bits: it would widen the whole cache for each
    write.
    """
    bits = {"bfloat16": np.uint16, "float8_e4m3": np.uint8}
    return np.dtype(bits.get(name, name))


def number_dtype(stored: np.dtype) -> np.dtype:
    """The type of the numbers in a cache's arrays of keys and values."""
    return np.dtype({"uint16": jnp.bfloat16, "uint8": jnp.float8_e4m3fn}.get(stored.name, stored))


def numbers(stored: Num[Array, "..."]) -> Num[Array, "..."]:
    """A part of a cache's keys or values as numbers. Of the whole this would be a copy."""
    dtype = number_dtype(stored.dtype)
    return stored if dtype == stored.dtype else jax.lax.bitcast_convert_type(stored, dtype)


def allocate(shape: CacheShape, mesh: Mesh) -> KVCache:
    """A cache of zeros, made on its devices."""
    abstract = shape.abstract(mesh)
    make = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract),
        out_shardings=jax.tree.map(lambda a: a.sharding, abstract),
    )
    return make()


def copy_pages(cache: KVCache, sources: Int[Array, " M"], targets: Int[Array, " M"], *, mesh: Mesh) -> KVCache:
    """Copies whole pages, all layers of them: `sources[i]` to `targets[i]`, as if at once.

    Both hold as many ids for each data shard, one shard's after the other's; ids count within the shard. A target that
    is no page of the shard is left out. No two targets of a shard may be the same. In place where the cache is donated.
    """

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(CACHE_SPEC, Spec(DATA), Spec(DATA)),
        out_specs=CACHE_SPEC,
        check_vma=False,
    )
    def local(cache: KVCache, sources: Array, targets: Array) -> KVCache:
        num_layers, num_pages = cache.keys.shape[:2]
        targets = jnp.where(targets < 0, num_pages, targets)
        targets, sources = _not_alone(cache, targets, sources)
        # Indexed by layer as well: with whole rows of layers moved, XLA would transpose the cache first.
        layers = jnp.arange(num_layers)[:, None]

        def copy(pages: Array) -> Array:
            # Read before anything is written, and not within the kernel that writes.
            moved = jax.lax.optimization_barrier(pages.at[layers, sources[None]].get(mode="clip"))
            return pages.at[layers, targets[None]].set(moved, mode="drop")

        return jax.tree.map(copy, cache)

    return local(cache, sources, targets)


def write(
    k: Float[Array, "K N BT"],
    v: Float[Array, "K N BT"],
    cache: KVCache,
    layer: Int[Array, ""],
    layout: BatchLayout,
) -> KVCache:
    """Stores keys and values of a batch's tokens, on one device of a mesh. Tokens are flattened sequence by sequence;
    a chunk of whole pages must start at a page's first position, one of fewer tokens may stand anywhere.

    What lies outside the cache's type becomes its largest value, and what is no number zero.
    """
    whole_pages = layout.positions.shape[1] % cache.keys.shape[-1] == 0
    return (_write_chunks if whole_pages else _write_tokens)(k, v, cache, layer, layout)


def _write_tokens(k: Array, v: Array, cache: KVCache, layer: Array, layout: BatchLayout) -> KVCache:
    """Stores token by token."""
    page_size = cache.keys.shape[-1]
    column = jnp.minimum(layout.positions // page_size, layout.page_table.shape[1] - 1)
    pages = jnp.take_along_axis(layout.page_table, column, axis=1)
    is_real = jnp.arange(layout.positions.shape[1])[None] < layout.num_tokens[:, None]
    page, position = _drop_unless(is_real, pages, cache).reshape(-1), layout.positions.reshape(-1)
    page, offset, k, v = _not_alone(cache, page, position % page_size, k.transpose(2, 0, 1), v.transpose(2, 0, 1))
    keys, key_scales = _stored(k, cache, -1)
    values, value_scales = _stored(v, cache, -1)
    return KVCache(
        cache.keys.at[layer, page, :, :, offset].set(keys, mode="drop"),
        cache.values.at[layer, page, :, offset, :].set(values, mode="drop"),
        *(
            None if pages is None else pages.at[layer, page, :, offset].set(scales, mode="drop")
            for pages, scales in [(cache.key_scales, key_scales), (cache.value_scales, value_scales)]
        ),
    )


def _write_chunks(k: Array, v: Array, cache: KVCache, layer: Array, layout: BatchLayout) -> KVCache:
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
    stored = (*_stored(k, cache, 2), *_stored(v, cache, 3))
    keys, key_scales, values, value_scales = stored
    new = KVCache(keys, values, key_scales, value_scales)
    return jax.tree.map(lambda old, part: old.at[layer, pages].set(part, mode="drop"), cache, new)


def _stored(x: Array, cache: KVCache, axis: int) -> tuple[Array, Array | None]:
    """Keys or values as the cache holds them, and their scales; `axis` is that of the head."""
    dtype = number_dtype(cache.keys.dtype)
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), 0.0, x)
    if dtype != jnp.int8:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest).astype(dtype)
        return x if dtype == cache.keys.dtype else jax.lax.bitcast_convert_type(x, cache.keys.dtype), None
    largest = float(jnp.finfo(jnp.float32).max)
    x = jnp.clip(x, -largest, largest)
    # Of a vector of zeros any scale is right, but its reciprocal must be finite.
    scale = jnp.maximum(jnp.abs(x).max(axis), 1e-30) / _INT8_MAX
    return jnp.round(x / jnp.expand_dims(scale, axis)).astype(jnp.int8), scale


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
