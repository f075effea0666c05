from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.page_pool import PagePool, next_key, root_key

KEYS = [bytes([n]) for n in range(9)]


def cached_pool(num_pages: int, num_keys: int) -> tuple[PagePool, list[int]]:
    """A pool with pages cached under the first keys, let go of at once."""
    pool = PagePool(num_pages)
    pages = pool.allocate(num_keys)
    for page, key in zip(pages, KEYS, strict=False):
        pool.register(page, key)
    pool.release(pages)
    return pool, pages


def test_allocated_pages_are_distinct_and_held():
    pool = PagePool(7)
    first, second = pool.allocate(3), pool.allocate(4)
    assert sorted(first + second) == list(range(7))
    assert (pool.num_free, pool.num_held) == (0, 7)


def test_too_many_pages_name_the_numbers_and_take_none():
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(MemoryError, match="4 pages wanted, 3 of 5 are available"):
        pool.allocate(4)
    assert (pool.num_free, pool.num_held) == (3, 2)


@pytest.mark.parametrize("given_back", [[9], [0, 0], [0, 3]])
def test_pages_not_held_are_refused_before_any_is_let_go(given_back):
    pool = PagePool(5)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(ValueError, match="not all held"):
        pool.release(given_back)
    assert (pool.num_free, pool.num_held) == (3, 2)
    pool.check_integrity()


def test_a_page_released_twice_is_refused():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="not all held"):
        pool.release(pages)


@pytest.mark.parametrize("shared", [[4], [0, 0], [0, 4]])
def test_only_held_or_cached_pages_are_shared_each_once(shared):
    pool = PagePool(5)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(ValueError, match="not all held or cached"):
        pool.share(shared)
    assert [pool.num_holders(page) for page in (0, 1, 4)] == [1, 1, 0]


def test_a_shared_page_is_held_until_its_last_holder_lets_go():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    assert (pool.num_holders(page), pool.is_writable(page)) == (2, False)
    pool.release([page])
    assert (pool.num_holders(page), pool.is_writable(page), pool.num_free) == (1, True, 1)
    pool.release([page])
    assert (pool.num_holders(page), pool.is_writable(page), pool.num_free) == (0, False, 2)


def test_a_registered_page_is_not_writable_and_is_found_again():
    pool, pages = cached_pool(4, 3)
    assert (pool.num_cached, pool.num_free, pool.num_available) == (3, 1, 4)
    assert pool.find(KEYS[:3]) == pages
    pool.share(pages[:1])
    assert (pool.num_cached, pool.is_writable(pages[0])) == (2, False)


def test_finding_stops_at_the_first_unknown_key():
    pool, pages = cached_pool(4, 3)
    assert pool.find([KEYS[0], KEYS[5], KEYS[2]]) == pages[:1]
    assert pool.num_held == 0


def test_of_two_pages_with_the_same_content_the_first_stays_known():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.register(first, KEYS[0])
    pool.register(second, KEYS[0])
    assert pool.find(KEYS[:1]) == [first]
    pool.release([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 2)


@pytest.mark.parametrize("when", ["free", "registered"])
def test_a_page_is_registered_once_and_only_while_held(when):
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    if when == "registered":
        pool.register(page, KEYS[0])
    else:
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is not held, or registered already"):
        pool.register(page, KEYS[1])


def test_free_pages_go_before_cached_ones_and_tails_before_heads():
    pool, pages = cached_pool(4, 3)
    assert pool.allocate(1)[0] not in pages
    assert pool.allocate(2) == [pages[2], pages[1]]
    assert pool.find(KEYS[:3]) == pages[:1]


def test_the_least_recently_used_page_is_evicted_first():
    pool, pages = cached_pool(3, 3)
    # In the order of letting go the last comes first; using it again makes it the latest.
    pool.share(pages[2:])
    pool.release(pages[2:])
    assert pool.allocate(3) == [pages[1], pages[0], pages[2]]


def test_forgetting_frees_the_cached_and_lets_the_held_be_written():
    pool, pages = cached_pool(4, 3)
    pool.share(pages[:1])
    pool.forget_cached()
    assert (pool.num_cached, pool.num_free, pool.num_held) == (0, 3, 1)
    assert pool.find(KEYS[:3]) == []
    assert pool.is_writable(pages[0])
    pool.check_integrity()


def test_keys_tell_salts_windows_tokens_and_what_came_before_apart():
    roots = [root_key(salt, window) for salt in (None, "", "None", "a") for window in (None, 1, 16)]
    keys = [next_key(root, tokens) for root in roots for tokens in [(1, 2), (2, 1), (2**40, 0)]]
    further = [next_key(key, (1, 2)) for key in keys]
    assert len({*roots, *keys, *further}) == len(roots) + len(keys) + len(further)
    assert next_key(root_key("a", 1), (1, 2)) == next_key(root_key("a", 1), [1, 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.pop(), "lost"),
        (lambda pool: pool._free.append(next(iter(pool._cached))), "two states"),
        (lambda pool: pool._num_references.update({0: 0}), "two states|held by nobody"),
        (lambda pool: pool._pages.clear(), "disagree"),
        (lambda pool: (pool._keys.clear(), pool._pages.clear()), "no key"),
    ],
)
def test_integrity_is_checked(spoil, message):
    pool, _ = cached_pool(5, 2)
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: who holds what, which key is known for which page, and in which order pages were let
    go of."""

    @initialize(num_pages=st.integers(1, 9))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.holders: list[list[int]] = []
        self.known: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        num_free = self.pool.num_pages - len(self.held()) - len(self.cached)
        if count > num_free + len(self.cached):
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            return
        before = self.held() | self.cached.keys()
        pages = self.pool.allocate(count)
        evicted = [self.cached.popitem(last=False)[0] for _ in range(count - num_free)]
        assert pages[min(count, num_free) :] == evicted
        assert not before & set(pages[:num_free])
        self.known = {key: page for key, page in self.known.items() if page not in evicted}
        self.holders.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        candidates = sorted(self.held() | self.cached.keys())
        if candidates:
            pages = data.draw(st.lists(st.sampled_from(candidates), unique=True, max_size=4))
            self.pool.share(pages)
            for page in pages:
                self.cached.pop(page, None)
            self.holders.append(pages)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def register(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.held())))
        if page in self.known.values():
            with pytest.raises(ValueError, match="registered already"):
                self.pool.register(page, key)
            return
        self.pool.register(page, key)
        self.known.setdefault(key, page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):
            if page not in self.held() and page in self.known.values():
                self.cached[page] = None

    @rule(page=st.integers(0, 9))
    def misuse(self, page: int) -> None:
        if page not in self.held():
            with pytest.raises(ValueError, match="not all held"):
                self.pool.release([page])
            if page not in self.cached:
                with pytest.raises(ValueError, match="not all held or cached"):
                    self.pool.share([page])

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        self.known.clear()
        self.cached.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, held = self.pool, self.held()
        pool.check_integrity()
        assert (pool.num_held, pool.num_cached) == (len(held), len(self.cached))
        assert pool.num_available == pool.num_free + pool.num_cached == pool.num_pages - len(held)
        for page in range(pool.num_pages):
            num_holders = sum(page in pages for pages in self.holders)
            assert pool.num_holders(page) == num_holders
            assert pool.is_writable(page) == (num_holders == 1 and page not in self.known.values())
        for key in KEYS:
            assert pool.find([key]) == ([self.known[key]] if key in self.known else [])

    def teardown(self) -> None:
        for pages in getattr(self, "holders", []):
            self.pool.release(pages)
        if hasattr(self, "pool"):
            assert self.pool.num_free + self.pool.num_cached == self.pool.num_pages


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
