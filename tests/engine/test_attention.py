"""Windows of layers and sequences against a plain softmax. L 2, S 16, K 2, G 3, N 10; three attention blocks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.attention import Group, write_and_attend
from engine.kv_cache import NO_WINDOW, BatchLayout, KVCache
from engine.sharding import make_mesh

L, S, K, G, N = 2, 16, 2, 3, 10
LAYER, SCALE, SOFTCAP, COLUMNS = 1, 0.4, 3.0, 24
LENGTHS = (300, 37, 150)
"""Positions of each sequence, those of the step included."""


@dataclass
class Case:
    """Sequences whose last T positions are computed in this step; the cache holds those before."""

    q: np.ndarray  # [B, K * G, T, N]
    k: np.ndarray  # [B, K, length, N] of the longest, as v
    v: np.ndarray
    table: np.ndarray
    starts: np.ndarray

    @property
    def num_tokens(self):
        return self.q.shape[2]


def make_case(num_tokens, lengths=LENGTHS):
    rng = np.random.default_rng(len(lengths))
    batch = len(lengths)
    k, v = rng.normal(size=(2, batch, K, COLUMNS * S, N)).astype(np.float32)
    q = rng.normal(size=(batch, K * G, num_tokens, N)).astype(np.float32)
    # Page 0 belongs to nobody.
    table = 1 + rng.permutation(batch * COLUMNS).reshape(batch, COLUMNS)
    return Case(q, k, v, table, np.array(lengths) - num_tokens)


def cache_of(case):
    pages, batch = 1 + case.table.size, len(case.starts)
    keys, values = np.zeros((L, pages, K, N, S), np.float32), np.zeros((L, pages, K, S, N), np.float32)
    known = np.arange(COLUMNS * S) < case.starts[:, None]
    k, v = (np.where(known[:, None, :, None], a, 0).reshape(batch, K, COLUMNS, S, N) for a in (case.k, case.v))
    keys[LAYER, case.table], values[LAYER, case.table] = k.transpose(0, 2, 1, 4, 3), v.transpose(0, 2, 1, 3, 4)
    return KVCache(jnp.asarray(keys), jnp.asarray(values))


def layout_of(case, windows, table=None, real=None):
    batch = len(case.starts)
    positions = case.starts[:, None] + np.arange(case.num_tokens)
    num_tokens = np.full(batch, case.num_tokens) if real is None else np.where(real, case.num_tokens, 0)
    per_token = np.broadcast_to(np.array(windows)[:, None], positions.shape)
    ints = (case.table if table is None else table, positions, num_tokens, per_token)
    return BatchLayout(*(jnp.asarray(a, jnp.int32) for a in ints))


def _attend_one_group(q, k, v, cache, layer, window, layout, num_blocks):
    groups = [Group(layout, num_blocks)]
    return write_and_attend(q, k, v, cache, layer, window, groups, mesh=make_mesh(1, 1), scale=SCALE, softcap=SOFTCAP)


_compiled = jax.jit(_attend_one_group, static_argnames=("num_blocks",))
_compiled_counting = jax.jit(_attend_one_group)


def attend(case, windows, layer_window=None, cache=None, counted=True, **changes):
    """[B, K * G, T, N]; `counted`: the number of blocks is known at run time only."""
    steps = [slice(start, start + case.num_tokens) for start in case.starts]
    k, v = (
        jnp.asarray(np.concatenate([a[b, :, s] for b, s in enumerate(steps)], axis=1).transpose(0, 2, 1))
        for a in (case.k, case.v)
    )
    q = jnp.asarray(case.q.transpose(1, 3, 0, 2).reshape(K * G, N, -1))
    run = _compiled_counting if counted else _compiled
    window = None if layer_window is None else jnp.int32(layer_window)
    cache = cache_of(case) if cache is None else cache
    blocks = {"num_blocks": jnp.int32(3) if counted else 3}
    out, _ = run(q, k, v, cache, jnp.int32(LAYER), window, layout_of(case, windows, **changes), **blocks)
    return np.asarray(out).reshape(K * G, N, len(case.starts), -1).transpose(2, 0, 3, 1)


def expected(case, windows, layer_window=None):
    out = np.zeros(case.q.shape)
    for b, start in enumerate(case.starts):
        window = min(windows[b], NO_WINDOW if layer_window is None else layer_window)
        for t in range(case.num_tokens):
            first, end = max(0, start + t - window + 1), start + t + 1
            for head in range(K * G):
                k, v = (a[b, head // G, first:end].astype(np.float64) for a in (case.k, case.v))
                scores = SOFTCAP * np.tanh(k @ case.q[b, head, t] * SCALE / SOFTCAP)
                weights = np.exp(scores - scores.max())
                out[b, head, t] = weights @ v / weights.sum()
    return out


WINDOWS = [(NO_WINDOW,) * 3, (1, 1, 1), (5, NO_WINDOW, 129), (128, 300, 17)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("layer_window", [None, 23])
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_a_token_sees_what_both_windows_leave(windows, layer_window, num_tokens):
    # A chunk starts at a page's first position.
    case = make_case(num_tokens, LENGTHS if num_tokens == 1 else (304, 32, 160))
    got = attend(case, windows, layer_window)
    np.testing.assert_allclose(got, expected(case, windows, layer_window), rtol=0, atol=2e-6)
    if windows != WINDOWS[0] or layer_window is not None:
        assert np.abs(got - expected(case, WINDOWS[0])).max() > 0.1


@pytest.mark.parametrize("num_tokens", [1, 32])
def test_skipped_blocks_add_exact_zeros(num_tokens):
    case = make_case(num_tokens, (300, 290, 310) if num_tokens == 1 else (304, 288, 320))
    windows = (20, 3, 9)
    np.testing.assert_array_equal(attend(case, windows), attend(case, windows, counted=False))


def test_blocks_before_every_window_are_not_read():
    case = make_case(1, (300, 290, 310))
    cache = cache_of(case)
    first_two_blocks = jnp.asarray(case.table[:, :16].reshape(-1))
    poisoned = cache._replace(values=cache.values.at[:, first_two_blocks].set(jnp.nan))
    windows = (20, 3, 9)
    np.testing.assert_array_equal(attend(case, windows, cache=poisoned), attend(case, windows))
    assert np.isnan(attend(case, (300, 3, 9), cache=poisoned)).any()


def test_rows_without_tokens_do_not_hold_the_window_back():
    case = make_case(1, (300, 1, 310))
    cache = cache_of(case)
    early = jnp.asarray(case.table[[0, 2], :16].reshape(-1))
    poisoned = cache._replace(values=cache.values.at[:, early].set(jnp.nan))
    got = attend(case, (20, 20, 9), cache=poisoned, real=np.array([True, False, True]))
    np.testing.assert_array_equal(got[[0, 2]], attend(case, (20, 20, 9))[[0, 2]])
    assert np.isfinite(got).all()


@pytest.mark.parametrize("num_tokens", [1, 32])
@pytest.mark.parametrize("counted", [True, False])
def test_pages_before_the_window_may_be_any(num_tokens, counted):
    case = make_case(num_tokens, LENGTHS if num_tokens == 1 else (304, 32, 160))
    windows = (20, NO_WINDOW, 140)
    stale = case.table.copy()
    for b, window in enumerate(windows):
        stale[b, : max(0, case.starts[b] - window + 1) // S] = 0
    assert (stale == 0).sum() > 10
    plain = attend(case, windows, counted=counted)
    np.testing.assert_array_equal(attend(case, windows, counted=counted, table=stale), plain)


def test_a_sequence_that_overflows_reaches_no_other():
    """The page it leaves behind is finite, so that what is masked of it counts for nothing."""
    case = make_case(1, (300, 37, 150))
    for cache_dtype in (jnp.float32, jnp.float16):
        cache = jax.tree.map(lambda a, d=cache_dtype: a.astype(d), cache_of(case))
        broken = make_case(1, (300, 37, 150))
        broken.v[0, :, 299] = np.inf
        broken.k[0, :, 299] = np.nan
        got, plain = attend(broken, WINDOWS[0], cache=cache), attend(case, WINDOWS[0], cache=cache)
        np.testing.assert_array_equal(got[1:], plain[1:])
        assert np.isfinite(got).all()
