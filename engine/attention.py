"""Attention of a batch over the paged cache, sharded over a mesh.

Letters: H query heads, K stored KV heads, G query heads of a KV head, N head size, B sequences, T tokens of each, M
tokens in all.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int

from engine.config import AttentionKernel
from engine.kernels.blockwise_attention import blockwise_attention
from engine.kv_cache import BLOCK_LEN, CACHE_SPEC, NO_WINDOW, BatchLayout, KVCache, write
from engine.sharding import DATA, MODEL


class Group(NamedTuple):
    """Sequences of a batch with the same number of tokens each."""

    layout: BatchLayout
    num_blocks: Int[Array, ""] | int
    """Blocks of `BLOCK_LEN` positions, enough for the longest of the sequences."""


def write_and_attend(
    q: Float[Array, "H N M"],
    k: Float[Array, "K N M"],
    v: Float[Array, "K N M"],
    cache: KVCache,
    layer: int | Int[Array, ""],
    window: int | Int[Array, ""] | None,
    groups: Sequence[Group],
    *,
    mesh: Mesh,
    scale: float,
    softcap: float | None,
    kernel: AttentionKernel = "reference",
) -> tuple[Float[Array, "H N M"], KVCache]:
    """Stores keys and values of the batch's tokens, then lets each token attend to all it may see.

    A token at position i sees positions j <= i, and with a window (the layer's or its sequence's, whichever is smaller)
    only those with i - window < j. Where a group's blocks are counted at run time, those before every window are
    skipped. `scale` multiplies q·k, `softcap` c turns x into c·tanh(x / c). A chunk of whole pages must start at the
    first position of one. `kernel` computes the attention where T is 1 and it reaches the whole cache (`can_address`),
    else the reference does.

    The M tokens are those of all groups: one data shard after the other, in it one group after the other, in it one
    sequence after the other.
    """
    heads, rows = Spec(MODEL, None, DATA), Spec(DATA)
    # A loop whose bounds are known costs an accelerator no round trip to the host for each turn.
    static_blocks = [group.num_blocks if isinstance(group.num_blocks, int) else None for group in groups]

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(heads, heads, heads, CACHE_SPEC, Spec(), Spec(), rows, Spec()),
        out_specs=(heads, CACHE_SPEC),
        check_vma=False,
    )
    def local(q, k, v, cache, layer, window, layouts, num_blocks):  # type: ignore[no-untyped-def]
        num_q_heads, size, _ = q.shape
        num_kv_heads = k.shape[0]
        ends = list(itertools.accumulate(layout.positions.size for layout in layouts))
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        for layout, span in zip(layouts, spans, strict=True):
            cache = write(k[..., span], v[..., span], cache, layer, layout)
        outs = []
        for layout, span, count, static in zip(layouts, spans, num_blocks, static_blocks, strict=True):
            batch, num_tokens = layout.positions.shape
            heads_of = q[..., span].reshape(num_kv_heads, num_q_heads // num_kv_heads, size, batch, num_tokens)
            heads_of = heads_of.transpose(3, 0, 1, 4, 2) * jnp.asarray(scale, q.dtype)
            windows = jnp.minimum(layout.windows, window)
            if kernel != "reference" and num_tokens == 1 and can_address(cache):
                out = _kernel_attention(heads_of, cache, layer, windows[:, 0], layout, static, softcap, kernel)
            else:
                blocks = (0, static) if static is not None else (_first_block(layout, windows), count)
                out = blockwise_attention(heads_of, cache, layer, windows, layout, blocks, softcap)
            outs.append(out.transpose(1, 2, 4, 0, 3).reshape(num_q_heads, size, batch * num_tokens))
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=-1), cache

    window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
    num_blocks = tuple(jnp.asarray(group.num_blocks, jnp.int32) for group in groups)
    layouts = tuple(group.layout for group in groups)
    return local(q, k, v, cache, jnp.asarray(layer, jnp.int32), window, layouts, num_blocks)


def can_address(cache: KVCache) -> bool:
    """Whether the kernel reaches all of a device's cache: Pallas counts the elements of an array of up to 4 GiB with 32
    bits, the first of which is a sign. Arrays of bytes between 2 and 4 GiB are left to the reference."""
    return all(a.size <= 2**31 or a.size * a.dtype.itemsize > 2**32 for a in cache if a is not None)


def _kernel_attention(
    q: Float[Array, "B K G 1 N"],
    cache: KVCache,
    layer: Int[Array, ""],
    windows: Int[Array, " B"],
    layout: BatchLayout,
    num_blocks: int | None,
    softcap: float | None,
    kernel: AttentionKernel,
) -> Float[Array, "B K G 1 N"]:
    # Not before it is needed: much of Pallas is loaded with it.
    from engine.kernels.paged_attention import paged_attention

    blocks = layout.page_table.shape[1] * cache.keys.shape[-1] // BLOCK_LEN if num_blocks is None else num_blocks
    interpret = kernel == "interpreted"
    return paged_attention(q, cache, layer, windows, layout, blocks * BLOCK_LEN, softcap, interpret)


def _first_block(layout: BatchLayout, windows: Int[Array, "B T"]) -> Int[Array, ""]:
    """The first block that any real token sees."""
    is_real = jnp.arange(layout.positions.shape[1])[None] < layout.num_tokens[:, None]
    first = jnp.where(is_real, layout.positions - windows + 1, NO_WINDOW)
    return jnp.maximum(first.min(), 0) // BLOCK_LEN
