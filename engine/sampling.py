"""Choosing tokens on the device. Everything works on feature-major logits `[V, R]`.

Filters are thresholds on the probability, found by bisection over the bit patterns of float32, instead of a sort:
exact, the same work for any distribution, and with no gather across a sharded vocabulary. Tokens that tie with the last
one kept are kept.

Randomness is Gumbel noise that depends on the request's seed, the token's position and nothing else, so that a request
draws the same tokens in any batch.

Letters: V vocabulary, R rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from engine.request import MAX_LOGPROBS

_SMALLEST_TEMPERATURE = 1e-30
"""Below it the most likely token has been certain for long; a denormal divisor may count as 0."""


class SamplingRows(NamedTuple):
    """Sampling parameters, one entry a row; see `engine.request.SamplingParams`."""

    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    top_k: Int[Array, " R"]
    seed: UInt[Array, "R 2"]
    """High and low half of the 64-bit seed."""
    position: Int[Array, " R"]
    """Position of the token being chosen."""
    wants_logprobs: Bool[Array, " R"]


class Sampled(NamedTuple):
    """What was chosen."""

    tokens: Int[Array, " R"]
    logprobs: Float[Array, " R"]
    """Of the chosen token, before temperature and filters. Zeros where no row of the batch wants log-probabilities."""
    top_tokens: Int[Array, "R n"]
    """The `MAX_LOGPROBS` most likely tokens (fewer with a smaller vocabulary), best first."""
    top_logprobs: Float[Array, "R n"]


def sample(logits: Float[Array, "V R"], rows: SamplingRows) -> Sampled:
    """One token a row. Temperature 0 takes the most likely one (the lowest id of equals)."""
    greedy = jnp.argmax(logits, axis=0).astype(jnp.int32)
    is_greedy = rows.temperature <= 0.0
    tokens = jax.lax.cond(
        jnp.all(is_greedy),
        lambda: greedy,
        lambda: jnp.where(is_greedy, greedy, _draw(logits, rows)),
    )
    return _with_logprobs(logits, tokens, jnp.any(rows.wants_logprobs))


def gumbel_noise(seed: UInt[Array, " 2"], position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """The noise that decides the token at `position` of a request with this seed."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def _draw(logits: Float[Array, "V R"], rows: SamplingRows) -> Int[Array, " R"]:
    temperature = jnp.where(rows.temperature <= 0.0, 1.0, jnp.maximum(rows.temperature, _SMALLEST_TEMPERATURE))
    # From the most likely token down, so that no quotient overflows.
    scaled = (logits - logits.max(axis=0)) / temperature
    filtered = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    kept = jax.lax.cond(jnp.any(filtered), lambda: filter_logits(scaled, rows), lambda: scaled)
    noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None), out_axes=1)(rows.seed, rows.position, logits.shape[0])
    return jnp.argmax(kept + noise, axis=0).astype(jnp.int32)


def filter_logits(scaled: Float[Array, "V R"], rows: SamplingRows) -> Float[Array, "V R"]:
    """Logits after temperature with every token that top-k, top-p or min-p drops at minus infinity.

    Each filter works on the renormalised rest of the one before. Top-p keeps the smallest set of most likely tokens
    that reaches it (Holtzman et al., 2020), top-k and min-p never drop the most likely token.
    """
    vocab_size = scaled.shape[0]
    odds = jnp.exp(scaled - scaled.max(axis=0))  # of each token against the most likely one, in [0, 1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab_size), vocab_size)
    at_k = _largest(lambda level: (odds >= level).sum(axis=0, dtype=jnp.int32) >= k, scaled.shape[1])
    odds = jnp.where(odds >= at_k, odds, 0.0)
    wanted = jnp.minimum(rows.top_p, 1.0) * odds.sum(axis=0)
    at_p = _largest(lambda level: jnp.where(odds >= level, odds, 0.0).sum(axis=0) >= wanted, scaled.shape[1])
    at_p = jnp.where(rows.top_p >= 1.0, 0.0, at_p)
    level = jnp.maximum(jnp.maximum(at_k, at_p), rows.min_p)
    return jnp.where(odds >= level, scaled, -jnp.inf)


def _largest(holds: Callable[[Float[Array, " R"]], Bool[Array, " R"]], num_rows: int) -> Float[Array, " R"]:
    """The largest float32 level in [0, 1] at which `holds`, which must hold at 0 and be monotone.

    Non-negative floats are ordered as their bit patterns are, so 31 halvings find the level exactly.
    """

    def halve(index: Array, bits: Array) -> Array:
        raised = bits | (jnp.int32(1) << (30 - index))
        level = jax.lax.bitcast_convert_type(raised, jnp.float32)
        return jnp.where((level <= 1.0) & holds(level), raised, bits)

    bits = jax.lax.fori_loop(0, 31, halve, jnp.zeros(num_rows, jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _with_logprobs(logits: Float[Array, "V R"], tokens: Int[Array, " R"], wanted: Bool[Array, ""]) -> Sampled:
    vocab_size, num_rows = logits.shape
    count = min(MAX_LOGPROBS, vocab_size)

    def compute() -> tuple[Array, Array, Array]:
        rows = jax.nn.log_softmax(logits, axis=0).T
        top, ids = jax.lax.top_k(rows, count)
        return jnp.take_along_axis(rows, tokens[:, None], axis=1)[:, 0], ids, top

    def skip() -> tuple[Array, Array, Array]:
        shape = (num_rows, count)
        return jnp.zeros(num_rows), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    return Sampled(tokens, *jax.lax.cond(wanted, compute, skip))
