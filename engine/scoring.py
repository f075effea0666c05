"""How likely a model finds given tokens: for reranking candidates, and to measure what an option costs in quality.

Letters: R data shards, T tokens of a chunk, C pages of a page table row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from engine import kv_cache
from engine.config import CacheDType
from engine.devices import put
from engine.errors import InvalidRequestError
from engine.kv_cache import BLOCK_LEN, NO_WINDOW, BatchLayout, CacheShape, KVCache
from engine.models.decoder import Decoder, Params
from engine.models.moe import experts_apart
from engine.sharding import DATA

_PAGE_SIZE = 16

_MAX_EXPONENT = 709.0
"""Above it exp is no float64."""


class _Chunk(NamedTuple):
    tokens: Int[np.ndarray, "R T"]
    targets: Int[np.ndarray, "R T"]
    """The token after each."""
    positions: Int[np.ndarray, "R T"]
    num_tokens: Int[np.ndarray, " R"]
    page_table: Int[np.ndarray, "R C"]


class Scorer:
    """Log-probabilities of sequences under one model, with a cache of its own for one sequence.

    All calls come from one thread. Nothing is compiled after `warm_up`.
    """

    def __init__(
        self, decoder: Decoder, params: Params, max_len: int, dtype: CacheDType = "float32", bucket: int = 128
    ) -> None:
        """`max_len`: tokens of the longest sequence; `dtype`: of the cache; `bucket`: tokens computed at a time."""
        self.max_len = max_len
        self._decoder, self._params, self._bucket = decoder, experts_apart(params, decoder.mesh), bucket
        self._num_shards = decoder.mesh.shape[DATA]
        # The last chunk may reach beyond the longest sequence.
        self._num_columns = -(-(max_len + bucket) // BLOCK_LEN) * (BLOCK_LEN // _PAGE_SIZE)
        shape = CacheShape.of(
            decoder.config,
            decoder.mesh,
            self._num_columns * self._num_shards,
            _PAGE_SIZE,
            dtype,
        )
        self._cache = kv_cache.allocate(shape, decoder.mesh)
        self._run: jax.stages.Compiled | None = None

    def warm_up(self) -> None:
        """Compiles the program."""
        self.logprobs((0, 0))

    def logprobs(self, token_ids: Sequence[int]) -> Float[np.ndarray, " n"]:
        """Natural logarithm of the probability of each token but the first, given those before it.

        Raises `InvalidRequestError` where there are too many tokens, or fewer than two.
        """
        if not 2 <= len(token_ids) <= self.max_len:
            raise InvalidRequestError(f"{len(token_ids)} tokens to score; expected 2 to {self.max_len}")
        inputs, targets = np.array(token_ids[:-1], np.int32), np.array(token_ids[1:], np.int32)
        pieces = []
        for start in range(0, len(inputs), self._bucket):
            end = min(start + self._bucket, len(inputs))
            pieces.append(self._score(self._chunk(inputs[start:end], targets[start:end], start))[: end - start])
        return np.concatenate(pieces)

    def perplexity(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """exp of the mean negative log-probability of the answer's tokens after the prompt; infinite where that is
        too large a number.

        Raises `InvalidRequestError` as `logprobs` does, and where the prompt or the answer is empty.
        """
        if not prompt or not answer:
            raise InvalidRequestError("a prompt and an answer of at least one token each are needed for a perplexity")
        surprise = -float(self.logprobs((*prompt, *answer))[len(prompt) - 1 :].mean(dtype=np.float64))
        return math.exp(surprise) if surprise < _MAX_EXPONENT else math.inf

    def _chunk(self, inputs: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"], start: int) -> _Chunk:
        # Every data shard computes the same on pages of its own.
        rows = (self._num_shards, 1)
        pad = (0, self._bucket - len(inputs))
        return _Chunk(
            np.tile(np.pad(inputs, pad), rows),
            np.tile(np.pad(targets, pad), rows),
            np.tile(np.arange(start, start + self._bucket, dtype=np.int32), rows),
            np.full(self._num_shards, len(inputs), np.int32),
            np.tile(np.arange(self._num_columns, dtype=np.int32), rows),
        )

    def _score(self, chunk: _Chunk) -> Float[np.ndarray, " T"]:
        mesh = self._decoder.mesh
        placed = put(chunk, NamedSharding(mesh, P(DATA)))
        if self._run is None:
            everywhere = NamedSharding(mesh, P())
            shardings = (jax.tree.map(lambda a: a.sharding, self._cache), everywhere)
            jitted = jax.jit(self._forward, donate_argnums=1, out_shardings=shardings)
            self._run = jitted.lower(self._params, self._cache, placed).compile()
        self._cache, scores = self._run(self._params, self._cache, placed)
        return np.asarray(scores)[0]

    def _forward(self, params: Params, cache: KVCache, chunk: _Chunk) -> tuple[KVCache, jax.Array]:
        positions, targets = jnp.asarray(chunk.positions), jnp.asarray(chunk.targets)
        windows = jnp.full(positions.shape, NO_WINDOW, jnp.int32)
        layout = BatchLayout(jnp.asarray(chunk.page_table), positions, jnp.asarray(chunk.num_tokens), windows)
        num_blocks: int | jax.Array = self._num_columns * _PAGE_SIZE // BLOCK_LEN
        if self._decoder.mesh.devices.flat[0].platform == "cpu":
            num_blocks = (positions.max() + BLOCK_LEN) // BLOCK_LEN
        # As on the serving path (`engine.forward.compile_step`).
        with jax.default_matmul_precision("float32"):
            hidden, cache = self._decoder.hidden(params, cache, jnp.asarray(chunk.tokens), layout, num_blocks)
            logits = self._decoder.logits(params, hidden)
        chosen = jnp.take_along_axis(logits, targets.reshape(1, -1), axis=0)[0]
        return cache, (chosen - jax.nn.logsumexp(logits, axis=0)).reshape(targets.shape)
