"""Attention of decode rows on an NVIDIA GPU that reads pages where they lie: a Pallas kernel, compiled by Triton.

One program of the grid takes one row, one KV head with all of its query heads, and one stretch of the context (so that
a few long rows keep the whole device busy, as Flash-Decoding does; Dao et al., 2023). Each stretch gives a softmax of
its own, and what they give is joined at the end. Only tiles that the row sees are read.

Importing this module needs no GPU. Letters: L layers, P pages of one data shard, S positions of a page, K stored KV
heads, G query heads of a KV head, N head size, B rows, C pages of a page table row, X stretches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from engine.kernels.blockwise_attention import MASKED, compute_dtype
from engine.kv_cache import BatchLayout, KVCache, number_dtype, numbers

_TILE_LEN = 64
"""Positions that a program takes at a time."""
_STRETCH_LEN = 512
"""Positions of a stretch at least; with more than that in all of `_MAX_STRETCHES`, it is longer."""
_MAX_STRETCHES = 16
_MIN_ROWS = 16
"""Rows and columns of a factor that matrix units take at least."""


@dataclass(frozen=True)
class _Sizes:
    """What the kernel is compiled for."""

    page_size: int
    head_size: int
    stretch_len: int
    softcap: float | None
    dtype: Any
    """Of the factors of both products."""


def paged_attention(
    q: Float[Array, "B K G 1 N"],
    cache: KVCache,
    layer: Int[Array, ""],
    windows: Int[Array, " B"],
    layout: BatchLayout,
    max_len: int,
    softcap: float | None,
    interpret: bool = False,
) -> Float[Array, "B K G 1 N"]:
    """What `blockwise_attention` computes, for one token of each row, on one device; `q` is scaled already.

    `max_len` positions are enough for the longest row. `interpret` runs the kernel without a GPU, slowly.
    """
    batch, heads, group, _, size = q.shape
    page_size = cache.keys.shape[-1]
    dtype = compute_dtype(q.dtype, number_dtype(cache.keys.dtype))
    rows, columns = _padded(group), _padded(size)
    q = jnp.pad(q[:, :, :, 0].astype(dtype), ((0, 0), (0, 0), (0, rows - group), (0, columns - size)))
    max_len = min(max_len, layout.page_table.shape[1] * page_size)
    num_stretches = min(_MAX_STRETCHES, -(-max_len // _STRETCH_LEN))
    stretch_len = -(-max_len // (num_stretches * _TILE_LEN)) * _TILE_LEN
    sizes = _Sizes(page_size, size, stretch_len, softcap, dtype)
    position = layout.positions[:, 0]
    end = jnp.where(layout.num_tokens > 0, position + 1, 0)
    first = jnp.maximum(position - windows + 1, 0)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, k, x: (b,) + (0,) * len(shape))

    def of_program(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *shape), lambda b, k, x: (b, k, x) + (0,) * len(shape))

    arrays = [a for a in cache if a is not None]
    lead = (batch, heads, num_stretches)
    out, maximum, total = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=lead,
        in_specs=[
            pl.BlockSpec((1,), lambda b, k, x: (0,)),
            of_row(2),
            of_row(layout.page_table.shape[1]),
            pl.BlockSpec((None, None, rows, columns), lambda b, k, x: (b, k, 0, 0)),
            # Whole: the kernel itself finds its pages.
            *(pl.BlockSpec(a.shape, lambda b, k, x, n=a.ndim: (0,) * n) for a in arrays),
        ],
        out_specs=[of_program(rows, columns), of_program(rows), of_program(rows)],
        out_shape=[
            jax.ShapeDtypeStruct((*lead, rows, columns), jnp.float32),
            jax.ShapeDtypeStruct((*lead, rows), jnp.float32),
            jax.ShapeDtypeStruct((*lead, rows), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(layer.reshape(1), jnp.stack([first, end], axis=1), layout.page_table, q, *arrays)
    return _joined(out, maximum, total)[:, :, :group, None, :size].astype(dtype)


def _padded(size: int) -> int:
    """Triton's arrays have powers of two as sizes."""
    return max(_MIN_ROWS, 1 << (size - 1).bit_length())


def _joined(
    out: Float[Array, "B K X G N"], maximum: Float[Array, "B K X G"], total: Float[Array, "B K X G"]
) -> Float[Array, "B K G N"]:
    """The softmax over all stretches. One that saw nothing has a total of zero, and weighs nothing."""
    weight = jnp.exp(maximum - maximum.max(2, keepdims=True))
    summed = (total * weight).sum(2)
    return (out * weight[..., None]).sum(2) / jnp.maximum(summed, 1e-30)[..., None]


def _kernel(layer_ref, seen_ref, table_ref, q_ref, keys_ref, values_ref, *refs, sizes: _Sizes) -> None:  # type: ignore[no-untyped-def]
    """The softmax of one stretch: its weighted values, the largest score, and the sum of weights."""
    *scale_refs, out_ref, maximum_ref, total_ref = refs
    layer, head, stretch = layer_ref[0], pl.program_id(1), pl.program_id(2)
    first, end = seen_ref[0], seen_ref[1]
    q = q_ref[...]
    num_rows, num_columns = q.shape
    feature = jnp.arange(num_columns)
    product = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def tile(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        position = index * _TILE_LEN + jnp.arange(_TILE_LEN)
        seen = (position >= first) & (position < end)
        page = triton.load(table_ref.at[position // sizes.page_size], mask=seen, other=0)
        offset = position % sizes.page_size

        def scale(ref: Any) -> Float[Array, "1 S"]:
            return triton.load(ref.at[layer, page, head, offset], mask=seen, other=0.0)[None, :]

        keys = triton.load(
            keys_ref.at[layer, page[None, :], head, feature[:, None], offset[None, :]],
            mask=seen[None, :] & (feature < sizes.head_size)[:, None],
            other=0,
        )
        scores = product(q, numbers(keys).astype(sizes.dtype))
        if scale_refs:
            scores = scores * scale(scale_refs[0])
        if sizes.softcap is not None:
            scores = sizes.softcap * jnp.tanh(scores / sizes.softcap)
        scores = jnp.where(seen[None, :], scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        rescale = jnp.exp(maximum - new_maximum)
        weights = jnp.where(seen[None, :], jnp.exp(scores - new_maximum[:, None]), 0.0)
        scaled = weights * scale(scale_refs[1]) if scale_refs else weights
        values = triton.load(
            values_ref.at[layer, page[:, None], head, offset[:, None], feature[None, :]],
            mask=seen[:, None] & (feature < sizes.head_size)[None, :],
            other=0,
        )
        added = product(scaled.astype(sizes.dtype), numbers(values).astype(sizes.dtype))
        return new_maximum, total * rescale + weights.sum(1), out * rescale[:, None] + added

    lowest = jnp.maximum(first, stretch * sizes.stretch_len)
    highest = jnp.minimum(end, (stretch + 1) * sizes.stretch_len)
    start = (
        jnp.full((num_rows,), MASKED, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows, num_columns), jnp.float32),
    )
    maximum, total, out = jax.lax.fori_loop(lowest // _TILE_LEN, pl.cdiv(highest, _TILE_LEN), tile, start)
    out_ref[...], maximum_ref[...], total_ref[...] = out, maximum, total
