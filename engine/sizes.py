"""The sizes of a runner: what follows from an engine config, a model and a mesh."""

from dataclasses import dataclass

import jax

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import BLOCK_LEN
from engine.models.decoder import Decoder
from engine.sharding import DATA, check_model_fits_mesh

_ACCELERATOR_BUDGET = 512
"""Prompt tokens that a step of a memory-bound accelerator computes beside its weights without taking much longer."""


@dataclass(frozen=True)
class RunnerSizes:
    """Sizes that follow from an engine config, a model and a mesh."""

    num_shards: int
    num_slots: int
    max_model_len: int
    page_size: int
    num_columns: int
    """Pages of the longest context, rounded up to whole attention blocks."""
    num_pages: int
    prefill_buckets: tuple[int, ...]
    decode_row_buckets: tuple[int, ...]
    decode_chunk: int
    """Tokens that a decode row samples at most."""
    step_token_budget: int
    """Tokens of a step with decode rows."""
    mixed_chunk: int
    """Length of the prompt chunks for which there are programs that compute them together with decode rows; 0: none."""
    context_blocks: tuple[int | None, ...]
    """Context buckets in attention blocks, ascending; (None,) where the program itself stops at the longest context."""


def derive_sizes(config: EngineConfig, decoder: Decoder) -> RunnerSizes:
    """The sizes of a runner. Raises `ConfigError` where the config does not fit the model or the mesh."""
    model, mesh = decoder.config, decoder.mesh
    check_model_fits_mesh(model, mesh, decoder.expert_sharding)
    shards = mesh.shape[DATA]
    if config.num_slots % shards:
        raise ConfigError(f"{config.num_slots} slots cannot be divided over a data axis of {shards}")
    max_len = config.max_model_len or model.max_position_embeddings
    if max_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_len}; the model was trained for {model.max_position_embeddings} positions"
        )
    page = config.page_size
    if BLOCK_LEN % page:
        raise ConfigError(f"page_size is {page}; it must divide {BLOCK_LEN}")
    odd = [b for b in config.prefill_buckets if b % page and page % b] or [
        b for b in config.prefill_buckets[-1:] if b % page
    ]
    if odd:
        raise ConfigError(
            f"prefill_buckets {odd} are no multiples of the page size {page}; smaller ones may divide it, but not the "
            "largest"
        )
    columns = -(-max_len // BLOCK_LEN) * (BLOCK_LEN // page)
    per_shard = config.num_slots // shards
    num_rows = max(per_shard, 1 + config.num_draft_tokens)
    if config.batch_invariant:
        buckets, rows = config.prefill_buckets[-1:], (num_rows,)
    else:
        # A bucket above the context would only waste work, but one must cover a whole context-long chunk.
        useful = [b for b in config.prefill_buckets if b < max_len]
        buckets = tuple(config.prefill_buckets[: len(useful) + 1])
        rows = tuple(sorted({min(2**i, num_rows) for i in range(num_rows.bit_length() + 1)}))
    pages = config.num_pages or config.num_slots * columns
    if pages % shards:
        raise ConfigError(f"{pages} pages cannot be divided over a data axis of {shards}")
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    budget = config.step_token_budget or per_shard + (buckets[0] if on_cpu else _ACCELERATOR_BUDGET)
    return RunnerSizes(
        shards,
        config.num_slots,
        max_len,
        page,
        columns,
        pages,
        buckets,
        rows,
        config.decode_chunk,
        budget,
        _mixed_chunk(config, buckets, budget - per_shard),
        _context_blocks(config, mesh, max_len),
    )


def _mixed_chunk(config: EngineConfig, buckets: tuple[int, ...], room: int) -> int:
    """The longest chunk that fits beside all slots' rows. With `batch_invariant` a row must be computed by one program
    whatever else a step holds."""
    if config.batch_invariant:
        return 0
    return max((b for b in buckets if b <= room), default=buckets[0])


def _context_blocks(config: EngineConfig, mesh: jax.sharding.Mesh, max_len: int) -> tuple[int | None, ...]:
    # A loop with a run-time bound costs a GPU a round trip to the host for each turn; a CPU nothing.
    if mesh.devices.flat[0].platform == "cpu":
        return (None,)
    blocks, buckets = -(-max_len // BLOCK_LEN), []
    size = -(-min(config.context_bucket_min, max_len) // BLOCK_LEN)
    while size < blocks and not config.batch_invariant:
        buckets.append(size)
        size *= 2
    return (*buckets, blocks)
