import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Sampled, SamplingRows, filter_logits, gumbel_noise, sample

V = 7
PROBABILITIES = np.array([0.05, 0.3, 0.02, 0.3, 0.13, 0.19, 0.01])


def make_rows(count=1, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=None, position=3, wants_logprobs=False):
    """Equal parameters for every row; `seed` may be an array of 64-bit seeds."""
    seeds = np.arange(count, dtype=np.uint64) if seed is None else np.broadcast_to(np.uint64(seed), count)
    halves = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    return SamplingRows(
        *(jnp.full(count, value, jnp.float32) for value in (temperature, top_p, min_p)),
        jnp.full(count, top_k, jnp.int32),
        jnp.asarray(halves),
        jnp.full(count, position, jnp.int32),
        jnp.full(count, wants_logprobs),
    )


jitted_sample = jax.jit(sample)
jitted_filter = jax.jit(filter_logits)


def columns(probabilities, count=1):
    """Logits [V, count] of a distribution, not normalised."""
    return jnp.asarray(np.repeat(np.log(probabilities)[:, None] + 2.5, count, axis=1), jnp.float32)


def kept(probabilities, **params):
    """Ids that the filters leave."""
    filtered = np.asarray(jitted_filter(columns(probabilities), make_rows(**params)))[:, 0]
    return set(np.flatnonzero(np.isfinite(filtered)).tolist())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3, 4, 5, 6}),
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 1}, {1, 3}),  # both tie with the last one kept
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5, 6}),
        ({"top_p": 0.59}, {1, 3}),
        ({"top_p": 0.78}, {1, 3, 5}),
        ({"top_p": 0.8}, {1, 3, 5, 4}),
        ({"top_p": 0.1}, {1, 3}),  # tie again
        ({"top_p": 1e-6}, {1, 3}),
        ({"min_p": 0.5}, {1, 3, 5}),
        ({"min_p": 0.16}, {0, 1, 3, 4, 5}),
        ({"min_p": 1.0}, {1, 3}),
        # Top-p works on what top-k left: 0.3 / 0.79 twice is 0.76.
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),
        ({"top_k": 3, "top_p": 0.77}, {1, 3, 5}),
        ({"top_k": 5, "min_p": 0.5}, {1, 3, 5}),
    ],
)
def test_filters_on_a_literal_distribution(params, expected):
    assert kept(PROBABILITIES, **params) == expected


def test_filters_leave_the_logits_of_kept_tokens_alone():
    logits = columns(PROBABILITIES)
    filtered = np.asarray(jitted_filter(logits, make_rows(top_k=3)))
    np.testing.assert_array_equal(filtered[[1, 3, 5]], np.asarray(logits)[[1, 3, 5]])


def oracle(logits, top_k, top_p, min_p):
    """The filters by sorting, in float64; ids kept, and how far each decision was from its threshold."""
    p = np.exp(logits - logits.max())
    order = np.sort(p)[::-1]
    level = order[top_k - 1] if 0 < top_k < len(p) else 0.0
    p = np.where(p >= level, p, 0.0)
    margin = 1.0
    if top_p < 1:
        order = np.sort(p)[::-1]
        cumulative = np.cumsum(order) / order.sum()
        margin = np.abs(cumulative - top_p).min()
        p = np.where(p >= order[np.argmax(cumulative >= top_p)], p, 0.0)
    if min_p > 0:
        margin = min(margin, np.abs(p - min_p).min())
    return set(np.flatnonzero((p >= min_p) & (p > 0)).tolist()), margin


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=V, max_size=V),
    top_k=st.integers(0, V + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.99)),
)
def test_filters_agree_with_sorting(logits, top_k, top_p, min_p):
    # Eighths: exact in float32, ties included.
    values = np.array(logits) / 8
    expected, margin = oracle(values, top_k, top_p, min_p)
    rows = make_rows(top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = np.asarray(jitted_filter(jnp.asarray(values[:, None], jnp.float32), rows))[:, 0]
    got = set(np.flatnonzero(np.isfinite(filtered)).tolist())
    # At a threshold itself, float32 sums may fall on either side.
    assert got == expected or margin < 1e-5
    assert int(np.argmax(values)) in got


def test_temperature_zero_takes_the_lowest_of_equal_tokens():
    assert jitted_sample(columns(PROBABILITIES), make_rows(temperature=0.0)).tokens.tolist() == [1]


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 1e-40}]
)
def test_only_the_most_likely_token_left_equals_greedy(params):
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(V, 64)), jnp.float32)
    tokens = jitted_sample(logits, make_rows(64, **params)).tokens
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=0))


def test_a_high_temperature_approaches_the_uniform_distribution():
    tokens = jitted_sample(columns(PROBABILITIES, 4096), make_rows(4096, temperature=100.0)).tokens
    assert np.bincount(tokens, minlength=V).min() > 4096 / V * 0.85


CRITICAL_VALUES = {2: 13.82, 3: 16.27, 6: 22.46}
"""Chi-square that a correct sampler exceeds once in a thousand seeds, by degrees of freedom."""


@pytest.mark.parametrize(
    ("params", "exponent"),
    [({}, 1.0), ({"temperature": 0.5}, 2.0), ({"temperature": 2.0}, 0.5), ({"top_k": 3}, 1.0), ({"top_p": 0.9}, 1.0)],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_follow_the_filtered_softmax(params, exponent, vary):
    count = 8192
    rows = make_rows(count, **params)
    if vary == "position":
        rows = make_rows(count, **params, seed=99)._replace(position=jnp.arange(count, dtype=jnp.int32))
    scaled = PROBABILITIES**exponent
    left = sorted(kept(scaled, **{k: v for k, v in params.items() if k != "temperature"}))
    expected = scaled[left] / scaled[left].sum() * count
    tokens = np.asarray(jitted_sample(columns(PROBABILITIES, count), rows).tokens)
    observed = np.bincount(tokens, minlength=V)
    assert observed.sum() == observed[left].sum()
    assert ((observed[left] - expected) ** 2 / expected).sum() < CRITICAL_VALUES[len(left) - 1]


def test_rows_do_not_depend_on_each_other():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(V, 32)), jnp.float32)
    rows = make_rows(32, temperature=0.9, top_p=0.8)
    together = np.asarray(jitted_sample(logits, rows).tokens)
    order = np.random.default_rng(2).permutation(32)
    shuffled = SamplingRows(*(a[order] for a in rows))
    np.testing.assert_array_equal(jitted_sample(logits[:, order], shuffled).tokens, together[order])


def test_the_same_seed_and_position_draw_the_same_token_and_others_do_not():
    logits = columns(np.full(V, 1 / V), 64)
    first = np.asarray(jitted_sample(logits, make_rows(64, seed=7)).tokens)
    assert len(set(first.tolist())) == 1
    assert len(set(np.asarray(jitted_sample(logits, make_rows(64)).tokens).tolist())) == V


@pytest.mark.parametrize("other", [8, 7 + 2**32, 7 + 2**63])
def test_every_bit_of_the_seed_counts(other):
    def noise(seed):
        halves = jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
        return np.asarray(gumbel_noise(halves, jnp.int32(3), 5))

    np.testing.assert_array_equal(noise(7), noise(7))
    assert (noise(7) != noise(other)).all()


def test_greedy_and_sampled_rows_share_a_batch():
    rows = make_rows(64)._replace(temperature=jnp.asarray([0.0, 1.0] * 32, jnp.float32))
    tokens = np.asarray(jitted_sample(columns(PROBABILITIES, 64), rows).tokens)
    assert set(tokens[::2].tolist()) == {1}
    assert len(set(tokens[1::2].tolist())) > 3


def test_log_probabilities_are_those_before_temperature_and_filters():
    rows = make_rows(temperature=3.0, top_k=1, wants_logprobs=True)
    sampled = Sampled(*map(np.asarray, jitted_sample(columns(PROBABILITIES), rows)))
    np.testing.assert_allclose(sampled.logprobs, np.log(PROBABILITIES[sampled.tokens]), atol=1e-5)
    assert sampled.top_tokens[0].tolist() == [1, 3, 5, 4, 0, 2, 6]
    np.testing.assert_allclose(sampled.top_logprobs[0], np.log(np.sort(PROBABILITIES)[::-1]), atol=1e-5)
