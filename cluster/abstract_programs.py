"""Compiles a model's programs for a mesh of virtual devices without a weight, and reads off the memory they take.

The compiler is that of the CPU. What programs take and give (weights, cache) is the same everywhere; temporaries are
not: for want of products of such types the CPU's compiler holds bfloat16 and int8 arrays widened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.budget import abstract_params
from engine.config import CacheDType, EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.forward import AbstractParams, DeviceState, compile_step
from engine.kv_cache import CacheShape
from engine.models.decoder import Decoder
from engine.packing import FLOAT_COLUMNS, INT_COLUMNS, BatchShape
from engine.request import MAX_STOP_TOKEN_IDS
from engine.sizes import RunnerSizes, derive_sizes

Progress = Callable[[str], None]
"""Called with the name of the program that is compiled next."""


@dataclass(frozen=True)
class ProgramMemory:
    """What the compiler says of one program: bytes of one device."""

    arguments: int
    """Weights, cache, and the batch."""
    results: int
    """What is returned, the cache included."""
    aliased: int
    """Results that take the place of donated arguments."""
    temporaries: int

    @property
    def peak(self) -> int:
        """Everything that is held while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporaries

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "ProgramMemory":
        """As `compiled` reports it. Raises `ConfigError` where its compiler does not."""
        m = compiled.memory_analysis()
        if m is None:
            raise ConfigError("this jax's compiler reports no memory; plan without compiling")
        return cls(m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes)


def compile_programs(
    decoder: Decoder,
    config: EngineConfig,
    params: AbstractParams | None = None,
    progress: Progress = lambda name: None,
    kinds: Sequence[Literal["decode", "prefill"]] = ("decode", "prefill"),
) -> dict[str, ProgramMemory]:
    """The decode program of all slots and the prefill program of the largest chunk, over the longest context.

    `params`: those of `abstract_params`, where they are there already. `kinds`: which of the two.

    Raises `ConfigError` where the config does not fit the model or the mesh.
    """
    sizes = derive_sizes(config, decoder)
    params = abstract_params(decoder) if params is None else params
    state = abstract_state(decoder, sizes, config.cache_dtype or config.activation_dtype)
    memory = {}
    for name, shape in program_shapes(sizes).items():
        if not name.startswith(tuple(kinds)):
            continue
        progress(f"{name}, {decoder.config.num_layers} layers")
        compiled = compile_step(decoder, params, state, shape, sizes.context_blocks[-1])
        memory[name] = ProgramMemory.of(compiled)
    return memory


def program_shapes(sizes: RunnerSizes) -> dict[str, BatchShape]:
    """The largest batch of each kind, by the program's name."""
    rows, chunk = sizes.decode_row_buckets[-1], sizes.prefill_buckets[-1]
    decode = BatchShape(sizes.num_shards, rows, 1, sizes.num_columns, sizes.num_slots)
    return {
        f"decode {rows} rows": decode,
        f"prefill {chunk} tokens": replace(decode, rows_per_shard=1, num_tokens=chunk),
    }


def argument_bytes(shape: BatchShape, weights: int, cache_per_position: int, page_size: int) -> int:
    """By arithmetic, what `ProgramMemory.arguments` must be: weights, cache of all slots, last tokens and the batch."""
    cache = shape.num_slots // shape.num_shards * shape.num_columns * page_size * cache_per_position
    row = len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS + shape.num_columns + len(FLOAT_COLUMNS) + shape.num_tokens
    return weights + cache + 4 * (shape.num_slots + shape.rows_per_shard * row)


def abstract_state(decoder: Decoder, sizes: RunnerSizes, cache_dtype: CacheDType) -> DeviceState:
    """Cache and last tokens as shapes with shardings."""
    shape = CacheShape.of(decoder.config, decoder.mesh, sizes.num_pages, sizes.page_size, cache_dtype)
    everywhere = NamedSharding(decoder.mesh, P())
    tokens = jax.ShapeDtypeStruct((sizes.num_slots,), jnp.int32, sharding=everywhere)
    return DeviceState(shape.abstract(decoder.mesh), tokens)  # type: ignore[arg-type]


def cut(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The model with its first layers only."""
    windows = None if config.layer_windows is None else config.layer_windows[:num_layers]
    return replace(config, num_layers=num_layers, layer_windows=windows)


def extrapolate(shallow: ProgramMemory, deep: ProgramMemory, depths: tuple[int, int], num_layers: int) -> ProgramMemory:
    """The memory at `num_layers` on the line through two depths (ascending)."""
    factor = (num_layers - depths[1]) / (depths[1] - depths[0])

    def on_line(name: str) -> int:
        a, b = getattr(shallow, name), getattr(deep, name)
        return round(b + (b - a) * factor)

    return ProgramMemory(*(on_line(name) for name in ["arguments", "results", "aliased", "temporaries"]))
