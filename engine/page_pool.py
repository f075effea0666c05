"""Which pages of a cache are free and which are held. Plain bookkeeping; the arrays are on the device."""


class PagePool:
    """A pool of `num_pages` pages with ids from 0. One pool serves the slots of one data shard."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page freed last is the one most likely to be in a processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages allocated and not freed."""
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages. Raises `MemoryError` and takes none where fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Gives pages back. Raises `ValueError` for a page that is not held, before any is freed."""
        if len(set(pages)) != len(pages) or not self._held.issuperset(pages):
            raise ValueError(f"pages {pages} are not all held, each once")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every page is either free or held, and once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._held, f"pages both free and held: {sorted(free & self._held)}"
        assert free | self._held == set(range(self.num_pages)), "pages are lost"
