"""Attention over the paged cache in plain XLA: the reference of every other kernel, and what runs on a CPU.

Letters: L layers, P pages of one data shard, S positions of a page, K stored KV heads, G query heads of a KV head,
N head size, B sequences, T tokens of each, C pages of a page table row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from engine.kv_cache import BLOCK_LEN, BatchLayout, KVCache, number_dtype, numbers

MASKED = -1e30
"""The score of a position that is not seen: finite, so that a sequence that sees nothing has no NaN."""


def compute_dtype(q: np.dtype, cache: np.dtype) -> np.dtype:
    """The type of both products' factors. Whatever is stored in a byte is exact in every type of activations."""
    return np.dtype(q if cache.itemsize == 1 else jnp.promote_types(q, cache))


def blockwise_attention(
    q: Float[Array, "B K G T N"],
    cache: KVCache,
    layer: Int[Array, ""],
    windows: Int[Array, "B T"],
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
    dtype = compute_dtype(q.dtype, number_dtype(cache.keys.dtype))
    q = q.astype(dtype)

    def scales_of(pages: Array, scales: Array) -> Float[Array, "B K 1 1 S"]:
        return scales[layer, pages].transpose(0, 2, 1, 3).reshape(batch, heads, 1, 1, BLOCK_LEN)

    def block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(layout.page_table, index * pages_per_block, pages_per_block, axis=1)
        keys = numbers(cache.keys[layer, pages]).astype(dtype)  # [B, C, K, N, S]
        values = numbers(cache.values[layer, pages]).astype(dtype)  # [B, C, K, S, N]
        keys = keys.transpose(0, 2, 3, 1, 4).reshape(flat, size, BLOCK_LEN)
        values = values.transpose(0, 2, 1, 3, 4).reshape(flat, BLOCK_LEN, size)
        scores = jnp.einsum("bmn,bns->bms", q, keys, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, heads, group, num_tokens, BLOCK_LEN)
        if cache.key_scales is not None:
            scores = scores * scales_of(pages, cache.key_scales)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        position = index * BLOCK_LEN + jnp.arange(BLOCK_LEN)
        behind = layout.positions[..., None] - position  # [B, T, BLOCK_LEN]
        seen = (behind >= 0) & (behind < windows[:, :, None])
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        rescale = jnp.exp(maximum - new_maximum)
        weights = jnp.where(seen, jnp.exp(scores - new_maximum[..., None]), 0.0)
        scaled = weights if cache.value_scales is None else weights * scales_of(pages, cache.value_scales)
        scaled = scaled.reshape(flat, group * num_tokens, BLOCK_LEN).astype(dtype)
        added = jnp.einsum("bms,bsn->bmn", scaled, values, preferred_element_type=jnp.float32)
        added = added.reshape(batch, heads, group, num_tokens, size)
        return new_maximum, total * rescale + weights.sum(-1), out * rescale[..., None] + added

    shape = (batch, heads, group, num_tokens)
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, size)))
    _, total, out = jax.lax.fori_loop(*blocks, block, start)
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
