"""How a model's weights and cache fill the memory of each device of a mesh: arithmetic alone, nothing is allocated.

Everything is in bytes of one device, unless it says otherwise.

Letters: L layers, D model, F width of the feed-forward or of an expert, H query heads, K stored KV heads, N head size,
V vocabulary, m model axis.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.config import CacheDType
from engine.forward import AbstractParams
from engine.kv_cache import BLOCK_LEN, CacheShape
from engine.models.decoder import Decoder
from engine.sharding import DATA, MODEL, num_cache_heads, param_sharding

_EXPERTS = re.compile(r"layer_\d+/moe/(gate|up|down)/")


@dataclass(frozen=True)
class Param:
    """One parameter, and the part of it that one device holds."""

    path: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the experts of a mixture, of which a token uses only some."""
        return _EXPERTS.match(self.path) is not None

    @property
    def is_quantization_scale(self) -> bool:
        """Whether it belongs to an int8 matrix, and is no parameter of the model itself."""
        return self.path.endswith("/scale") and "norm/" not in self.path

    @property
    def size(self) -> int:
        """Values on all devices together, counted once."""
        return math.prod(self.shape)

    @property
    def shard_bytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.shard_shape) * self.dtype.itemsize


def abstract_params(decoder: Decoder) -> AbstractParams:
    """Every parameter as shape, dtype and sharding, as `engine.forward.compile_step` takes it."""

    def placed(path: str, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = param_sharding(path, array.shape, decoder.mesh, decoder.expert_sharding)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return {
        module: {name: placed(f"{module}/{name}", array) for name, array in arrays.items()}
        for module, arrays in decoder.abstract_params().items()
    }


def list_params(tree: AbstractParams) -> list[Param]:
    """Every parameter of a tree that says how each is sharded."""
    return list(_params(tree))


def _params(tree: AbstractParams) -> Iterator[Param]:
    for module, arrays in tree.items():
        for name, array in arrays.items():
            assert array.sharding is not None
            shard_shape = array.sharding.shard_shape(array.shape)
            yield Param(f"{module}/{name}", array.shape, shard_shape, np.dtype(array.dtype))


def weight_bytes(params: list[Param]) -> dict[str, int]:
    """Bytes of the weights by dtype, the largest first."""
    by_dtype: dict[str, int] = {}
    for param in params:
        by_dtype[param.dtype.name] = by_dtype.get(param.dtype.name, 0) + param.shard_bytes
    return dict(sorted(by_dtype.items(), key=lambda item: -item[1]))


def cache_bytes_per_position(decoder: Decoder, dtype: CacheDType) -> int:
    """Keys and values of one position of a slot, on each of the `m` devices that hold its data shard."""
    shape = CacheShape.of(decoder.config, decoder.mesh, num_pages=1, page_size=1, dtype=dtype)
    return shape.num_bytes // decoder.mesh.shape[MODEL]


def whole_blocks(num_positions: int) -> int:
    """Positions rounded up to the attention blocks that a slot's cache is made of."""
    return -(-num_positions // BLOCK_LEN) * BLOCK_LEN


def workspace_bytes(
    decoder: Decoder, params: list[Param], activation_dtype: str, rows_per_shard: int, chunk_len: int
) -> int:
    """An estimate of what a step needs beside weights and cache.

    Of a prefill chunk: six arrays of D and the projections of one layer. Of sampling: four float32 arrays of V for each
    row, on every device. Of int8 weights: the largest matrix in the activations' type (of experts, one).
    """
    c, m = decoder.config, decoder.mesh.shape[MODEL]
    itemsize = jnp.dtype(activation_dtype).itemsize
    per_token = 6 * c.hidden_size + (c.num_heads + 2 * num_cache_heads(c, decoder.mesh)) * c.head_size // m
    if c.moe is None:
        per_token += 3 * c.intermediate_size // m
    else:
        per_token += c.moe.num_experts_per_token * (c.hidden_size + 3 * c.moe.intermediate_size // m)
    widened = max((math.prod(p.shard_shape[-2:]) for p in params if p.dtype == np.int8), default=0)
    num_tokens, num_rows = max(chunk_len, rows_per_shard), rows_per_shard * decoder.mesh.shape[DATA]
    return itemsize * (num_tokens * per_token + widened) + 4 * 4 * c.vocab_size * num_rows


@dataclass(frozen=True)
class Memory:
    """What one device's memory is spent on, and what fits into the rest."""

    usable: int
    """The share of the device's memory that may be taken."""
    weights: dict[str, int]
    """By dtype."""
    workspace: int
    """An estimate, see `workspace_bytes`."""
    cache_per_position: int
    num_shards: int
    """Data shards: each holds the cache of its own slots."""
    max_positions: int
    """Positions that the model was trained for."""

    @property
    def free(self) -> int:
        """For the cache; negative where the weights alone do not fit."""
        return self.usable - sum(self.weights.values()) - self.workspace

    def cache_per_slot(self, context_len: int) -> int:
        """Cache of one slot of `context_len` positions."""
        return whole_blocks(context_len) * self.cache_per_position

    def num_slots(self, context_len: int) -> int:
        """Slots of `context_len` positions that fit into the mesh."""
        return max(0, self.free // self.cache_per_slot(context_len)) * self.num_shards

    def num_pages(self, page_size: int) -> int:
        """Pages of `page_size` positions that fit into the mesh."""
        return max(0, self.free // (page_size * self.cache_per_position)) * self.num_shards

    def context_that_memory_holds(self, num_slots: int) -> int:
        """The longest context that `num_slots` slots can have at once, whatever the model was trained for."""
        block = BLOCK_LEN * self.cache_per_position * -(-num_slots // self.num_shards)
        return max(0, self.free // block) * BLOCK_LEN

    def largest_context(self, num_slots: int) -> int:
        """The same, at most what the model was trained for."""
        return min(self.max_positions, self.context_that_memory_holds(num_slots))

    def fits(self, num_slots: int, context_len: int) -> bool:
        """Whether that many slots of that length fit."""
        return self.largest_context(num_slots) >= context_len
