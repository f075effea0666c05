"""Which pages of a cache are free, held or cached. Plain bookkeeping; the arrays are on the device.

A held page belongs to one request or to several that share it (references are counted). A full page may be registered
under a key, which says what its positions hold; when its last holder lets go it stays cached, and a request that needs
the same content takes it from there. Where nothing is free, the cached page that was let go of first is used again.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.request import AdaptiveWindow

PageKey = bytes
"""What a page holds: a digest of its tokens and of everything before them."""


def root_key(cache_salt: str | None, window: int | None, adaptive: AdaptiveWindow | None = None) -> PageKey:
    """The key before the first page. Keys and values of deeper layers depend on the window, so it is part of it."""
    return hashlib.blake2b(repr((cache_salt, window, adaptive)).encode(), digest_size=16).digest()


def next_key(parent: PageKey, token_ids: Sequence[int]) -> PageKey:
    """The key of a full page with these tokens, after the page with key `parent`."""
    return hashlib.blake2b(parent + array("Q", token_ids).tobytes(), digest_size=16).digest()


class PagePool:
    """A pool of `num_pages` pages with ids from 0. One pool serves the slots of one data shard."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page freed last is the one most likely to be in a processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, PageKey] = {}
        self._pages: dict[PageKey, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, with content that may be wanted again."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return len(self._num_references)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free or cached."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, free ones first, then the cached ones let go of first.

        Raises `MemoryError` and takes none where fewer are available.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} of {self.num_pages} are available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._num_references.update(dict.fromkeys(pages, 1))
        return pages

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """The pages registered under these keys, up to the first key that has none. Nothing is taken."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_holders(self, page: int) -> int:
        """How many hold the page."""
        return self._num_references.get(page, 0)

    def is_writable(self, page: int) -> bool:
        """Whether the page has one holder, and no key that promises what it holds."""
        return self._num_references.get(page) == 1 and page not in self._keys

    def share(self, pages: Sequence[int]) -> None:
        """Becomes a further holder of pages that are held or cached. Raises `ValueError` for any other, before any is
        taken."""
        strange = [p for p in pages if p not in self._num_references and p not in self._cached]
        if strange or len(set(pages)) != len(pages):
            raise ValueError(f"pages {strange or list(pages)} are not all held or cached, each once")
        for page in pages:
            self._cached.pop(page, None)
            self._num_references[page] = self._num_references.get(page, 0) + 1

    def register(self, page: int, key: PageKey) -> None:
        """Says what a held page holds from now on. Where another page is known to hold the same, that one stays known.

        Raises `ValueError` for a page that is not held, or is registered already.
        """
        if page not in self._num_references or page in self._keys:
            raise ValueError(f"page {page} is not held, or registered already")
        if key not in self._pages:
            self._keys[page] = key
            self._pages[key] = page

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages. Of those that stay cached the last named is used again first.

        Raises `ValueError` for a page that is not held, before any is let go of.
        """
        if len(set(pages)) != len(pages) or not self._num_references.keys() >= set(pages):
            raise ValueError(f"pages {list(pages)} are not all held, each once")
        for page in reversed(pages):
            self._num_references[page] -= 1
            if self._num_references[page]:
                continue
            del self._num_references[page]
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget_cached(self) -> None:
        """Frees every cached page and forgets what the held ones hold."""
        for page in list(self._cached):
            del self._cached[page]
            self._free.append(page)
        self._keys.clear()
        self._pages.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every page is free, cached or held, and only that."""
        free, cached, held = set(self._free), set(self._cached), set(self._num_references)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(cached) + len(held) == len(free | cached | held), "a page is in two states"
        assert free | cached | held == set(range(self.num_pages)), "pages are lost"
        assert all(count > 0 for count in self._num_references.values()), "a page is held by nobody"
        assert {key: page for page, key in self._keys.items()} == self._pages, "keys and pages disagree"
        assert cached <= self._keys.keys(), "a cached page has no key"
        assert not free & self._keys.keys(), "a free page has a key"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page
