import pytest

from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.shard_cache import ShardCache

from .fake_device import PAGE_SIZE, make_limits

PROMPT = tuple(range(12))


def make_cache(**changes: object) -> ShardCache:
    return ShardCache(0, make_limits(**{"num_slots": 4, "num_pages": 20, **changes}))


def a_sequence(cache: ShardCache, prompt: tuple[int, ...] = PROMPT, **more: object) -> Sequence:
    """A sequence that has just got its slot."""
    s = Sequence(0, Request("r", prompt, SamplingParams(max_tokens=8), **more), list(prompt))
    s.slot = cache.free_slots.pop()
    return s


def compute(cache: ShardCache, s: Sequence, end: int) -> list:
    """Computes positions up to `end`, as a chunk would."""
    copies = cache.provide(s, s.num_computed_tokens, end)
    s.num_computed_tokens = end
    cache.register(s)
    cache.leave_window(s)
    return copies


def leave_behind(cache: ShardCache, prompt: tuple[int, ...] = PROMPT, **more: object) -> None:
    """Has a sequence computed and ended."""
    s = a_sequence(cache, prompt, **more)
    cache.start(s)
    compute(cache, s, len(prompt))
    cache.vacate(s)


def test_slots_belong_to_their_shard_and_come_back():
    cache = ShardCache(1, make_limits(num_slots=6, num_shards=2))
    assert sorted(cache.free_slots) == [3, 4, 5]
    s = a_sequence(cache)
    assert s.slot == 3
    cache.start(s)
    cache.vacate(s)
    assert (s.slot, sorted(cache.free_slots)) == (None, [3, 4, 5])


def test_a_prefix_that_was_computed_is_taken_from_the_cache():
    cache = make_cache()
    leave_behind(cache)
    s = a_sequence(cache, (*PROMPT, 1, 2))
    cache.start(s)
    assert (s.num_computed_tokens, s.num_prefill_tokens, s.num_cached_tokens, len(s.pages)) == (12, 14, 12, 3)
    assert cache.provide(s, 12, 14) == []
    assert cache.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"cache_salt": "a"}),
        ({"window": 30}, {}),
        ({"window": 30}, {"window": 31}),
    ],
)
def test_other_salts_and_windows_share_nothing(first, second):
    cache = make_cache()
    leave_behind(cache, **first)
    assert cache.cached_pages(a_sequence(cache, **second)) == []
    assert len(cache.cached_pages(a_sequence(cache, **first))) == 3


def test_without_prefix_caching_nothing_is_kept():
    cache = make_cache(prefix_caching=False)
    leave_behind(cache)
    assert (cache.pool.num_cached, cache.cached_pages(a_sequence(cache))) == (0, [])


def test_a_prompt_wholly_cached_copies_its_last_page_and_computes_one_token():
    cache = make_cache()
    leave_behind(cache)
    s = a_sequence(cache)
    cache.start(s)
    assert (s.num_computed_tokens, s.wants_prefill, s.wants_decode) == (11, False, True)
    shared = list(s.pages)
    assert cache.num_pages_wanting(s) == 2  # the copy, and the page of the first new token
    (copy,) = cache.provide(s, 11, 12)
    assert (copy.source, copy.target) == (shared[2], s.pages[2])
    assert s.page_ids == (*shared[:2], copy.target)
    assert cache.pool.is_writable(copy.target)
    assert cache.pool.num_holders(copy.source) == 0


def test_a_single_token_prompt_is_a_chunk():
    cache = make_cache()
    s = a_sequence(cache, (1,))
    cache.start(s)
    assert s.wants_prefill


def test_providing_changes_nothing_where_pages_are_wanting():
    cache = make_cache(num_pages=3)
    s = a_sequence(cache)
    cache.start(s)
    cache.provide(s, 0, 8)
    before = list(s.pages)
    with pytest.raises(MemoryError):
        cache.provide(s, 8, 17)
    assert (s.pages, cache.pool.num_available) == (before, 1)


def test_pages_are_freed_as_the_window_leaves_them():
    cache = make_cache()
    s = a_sequence(cache, tuple(range(13)) * 2, window=6)
    cache.start(s)
    compute(cache, s, 8)
    assert [page is None for page in s.pages] == [False, False]
    # Position 9 sees 4 to 9, position 8 still sees 3.
    compute(cache, s, 9)
    assert [page is None for page in s.pages] == [True, False, False]
    assert s.page_ids[0] == 0
    assert cache.pool.num_held == 2
    compute(cache, s, 16)
    assert [page is None for page in s.pages] == [True, True, False, False]


def test_the_smaller_of_both_windows_counts():
    cache = make_cache(window=20)
    assert cache.window(a_sequence(cache)) == 20
    assert cache.window(a_sequence(cache, window=7)) == 7
    assert cache.window(a_sequence(cache, window=99)) == 20


def test_a_windowed_prompt_takes_only_the_cached_pages_that_it_will_see():
    cache = make_cache()
    prompt = tuple(range(13)) * 2
    leave_behind(cache, prompt, window=6)
    s = a_sequence(cache, prompt, window=6)
    cache.start(s)
    # 24 positions are cached, and position 24 sees 19 to 24.
    assert s.num_computed_tokens == 24
    assert [page is None for page in s.pages] == [True] * 4 + [False] * 2
    assert cache.pool.num_held == 2


@pytest.mark.parametrize("window", range(1, 12))
def test_a_window_never_needs_more_pages_than_were_said(window):
    cache = make_cache(num_slots=1, num_pages=99)
    for chunk in (1, 3, 4, 8):
        s = a_sequence(cache, tuple(range(13)) * 3, window=window)
        cache.start(s)
        most = cache.num_pages_needed(s, 39)
        while s.num_computed_tokens < 39:
            end = min(39, s.num_computed_tokens + chunk)
            cache.provide(s, s.num_computed_tokens, end)
            assert cache.pool.num_held <= most
            s.num_computed_tokens = end
            cache.leave_window(s)
        cache.vacate(s)
        assert cache.pool.num_held == 0


def test_only_full_pages_of_known_tokens_are_offered():
    cache = make_cache()
    s = a_sequence(cache, tuple(range(7)))
    cache.start(s)
    compute(cache, s, 7)
    # The eighth position is computed, its token has not been seen.
    s.num_pending = 1
    cache.provide(s, 7, 8)
    s.num_computed_tokens = 8
    cache.register(s)
    assert len(cache.pool.find(s.page_keys)) == 1
    s.token_ids.append(3)
    s.num_pending = 0
    cache.register(s)
    assert len(cache.pool.find(s.page_keys)) == 2


def test_exact_offers_no_generated_tokens_and_takes_whole_buckets_only():
    cache = make_cache(exact=True, prefill_buckets=(8,))
    s = a_sequence(cache, (*PROMPT, 5, 6))
    cache.start(s)
    compute(cache, s, 14)
    s.token_ids += [1, 2, 3]
    compute(cache, s, 17)
    cache.vacate(s)
    assert cache.pool.num_cached == 3
    for num_tokens, num_pages in [(13, 2), (12, 2), (9, 2), (8, 0), (7, 0)]:
        other = a_sequence(cache, (*PROMPT, 5, 6)[:num_tokens])
        assert len(cache.cached_pages(other)) == num_pages, num_tokens
        cache.free_slots.append(other.slot)


def test_cached_tokens_are_reported_once_for_a_request_preempted_before_it_generates():
    cache = make_cache()
    s = a_sequence(cache)
    cache.start(s)
    compute(cache, s, 8)
    cache.vacate(s)
    s.slot = cache.free_slots.pop()
    cache.start(s)
    assert (s.num_computed_tokens, s.num_cached_tokens) == (8, 0)


def test_pages_held_by_others_are_not_counted_as_needed():
    cache = make_cache()
    first = a_sequence(cache)
    cache.start(first)
    compute(cache, first, 12)
    second = a_sequence(cache, (*PROMPT, 1, 2))
    assert cache.num_pages_to_start(second) == 1
    # Its last page would be copied, and its first new token needs another.
    assert cache.num_pages_to_start(a_sequence(cache)) == 2
    cache.vacate(first)
    assert cache.num_pages_to_start(second) == 4


def test_pages_for_guesses_are_given_back_unless_they_are_being_verified():
    cache = make_cache()
    s = a_sequence(cache)
    cache.start(s)
    compute(cache, s, 12)
    s.token_ids.append(1)
    cache.provide(s, 12, 21)
    assert len(s.pages) == 6
    s.num_drafted = 3
    assert cache.give_back_unused(s) == 0
    s.num_drafted = 0
    assert cache.give_back_unused(s) == 2
    assert (len(s.pages), s.page_ids, cache.pool.num_held) == (4, tuple(s.pages), 4)
    assert cache.num_unused_positions(s) == 4 * PAGE_SIZE - 12
