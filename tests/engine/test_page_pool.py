import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.page_pool import PagePool


def test_allocated_pages_are_distinct_and_held():
    pool = PagePool(7)
    first, second = pool.allocate(3), pool.allocate(4)
    assert sorted(first + second) == list(range(7))
    assert (pool.num_free, pool.num_held) == (0, 7)


def test_too_many_pages_name_both_numbers_and_take_none():
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(MemoryError, match="4 pages wanted, 3 of 5 are free"):
        pool.allocate(4)
    assert (pool.num_free, pool.num_held) == (3, 2)


@pytest.mark.parametrize("given_back", [[9], [0, 0], [0, 3]])
def test_pages_not_held_are_refused_before_any_is_freed(given_back):
    pool = PagePool(5)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(ValueError, match="not all held"):
        pool.free(given_back)
    assert (pool.num_free, pool.num_held) == (3, 2)
    pool.check_integrity()


def test_a_page_freed_twice_is_refused():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(ValueError, match="not all held"):
        pool.free(pages)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_no_page_is_lost_or_given_out_twice(operations):
    pool, held = PagePool(11), []
    for allocates, count in operations:
        if allocates and count <= pool.num_free:
            held.append(pool.allocate(count))
        elif not allocates and held:
            pool.free(held.pop(count % len(held)))
        pool.check_integrity()
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat) == pool.num_held == 11 - pool.num_free
