"""The pages and slots of one data shard, as the requests on it hold them. Host only."""

from engine.page_pool import PageKey, PagePool, next_key, root_key
from engine.plan import PageCopy
from engine.request import Request
from engine.sequence import SchedulerLimits, Sequence


class ShardCache:
    """Gives the sequences of one data shard their slots and pages, shared with others where the content is the same."""

    def __init__(self, shard: int, limits: SchedulerLimits) -> None:
        self.shard = shard
        self.limits = limits
        self.pool = PagePool(limits.pages_per_shard)
        self.num_cached_tokens = 0
        """Tokens found in the cache so far, instead of being computed."""
        first = shard * limits.slots_per_shard
        self.free_slots = list(range(first + limits.slots_per_shard - 1, first - 1, -1))

    def num_pages_needed(self, s: Sequence, num_tokens: int) -> int:
        """Pages that the first `num_tokens` tokens need at once, at most: without those that the window leaves."""
        limits, window = self.limits, self.window(s)
        pages = limits.num_pages_of(num_tokens)
        if window is None:
            return pages
        # A window that begins inside a page, and the longest chunk behind it.
        chunk = max(limits.prefill_buckets[-1], limits.num_rows, limits.decode_chunk)
        return min(pages, limits.num_pages_of(window + s.request.chunk_overlap + chunk) + 1)

    def num_pages_to_start(self, s: Sequence) -> int:
        """Pages that a waiting sequence takes from those available: for its tokens and one more, without pages that
        others hold already."""
        cached = self.cached_pages(s)
        # The page of the last token, which is computed in any case, would be copied.
        first, end = self._num_left(s, len(cached) * self.limits.page_size), (s.num_tokens - 1) // self.limits.page_size
        num_held = sum(self.pool.num_holders(page) > 0 for page in cached[first:end])
        return self.num_pages_needed(s, s.num_tokens + 1) - num_held

    def num_pages_wanting(self, s: Sequence, num_more: int = 1) -> int:
        """Pages that a running sequence will take from those available for its tokens and so many more."""
        num_tokens, size = s.num_tokens + num_more, self.limits.page_size
        num_held = sum(page is not None for page in s.pages)
        missing = min(
            self.limits.num_pages_of(num_tokens) - len(s.pages), self.num_pages_needed(s, num_tokens) - num_held
        )
        if not s.started:
            # Where all its tokens are cached it holds the last page and the copy at once.
            return missing + (len(self.cached_pages(s)) * size >= s.num_tokens)
        index = s.num_computed_tokens // size
        page = s.pages[index] if index < len(s.pages) else None
        return max(0, missing) + (page is not None and not self.pool.is_writable(page))

    def window(self, s: Sequence) -> int | None:
        """Positions back from which nothing is read any more; None: everything is."""
        windows = [w for w in (s.request.window, self.limits.window) if w is not None]
        return min(windows, default=None)

    def cached_pages(self, s: Sequence) -> list[int]:
        """The pages with the sequence's leading tokens that are held or cached."""
        if not self.limits.prefix_caching:
            return []
        num_full = len(s.token_ids) // self.limits.page_size
        self._make_keys(s, num_full)
        pages = self.pool.find(s.page_keys[:num_full])
        return pages[: len(pages) - self._num_unusable(s, len(pages))]

    def start(self, s: Sequence) -> None:
        """Takes what the cache has of the sequence's tokens; the rest is to be computed."""
        assert s.num_computed_tokens == s.num_pending == len(s.pages) == 0
        pages = self.cached_pages(s)
        known = len(s.token_ids)
        # The last token is computed in any case: what comes after it is not in the cache.
        s.num_computed_tokens = min(len(pages) * self.limits.page_size, known - 1)
        s.num_left = self._num_left(s, s.num_computed_tokens)
        self.pool.share(pages[s.num_left :])
        s.pages = [None] * s.num_left + pages[s.num_left :]
        s.num_registered = len(pages)
        self._renew_ids(s)
        if self.limits.exact:
            s.num_prefill_tokens = s.num_prompt_tokens
        else:
            # A single token that is left is cheaper as a decode row.
            s.num_prefill_tokens = known - 1 if pages and s.num_computed_tokens == known - 1 else known
        if s.num_cached_tokens is None:
            s.num_cached_tokens = s.num_computed_tokens
        self.num_cached_tokens += s.num_computed_tokens
        s.started = True

    def provide(self, s: Sequence, start: int, end: int) -> list[PageCopy]:
        """Makes positions [start, end) writable: pages that are missing are allocated, shared ones copied.

        Raises `MemoryError` and changes nothing where pages are wanting.
        """
        size = self.limits.page_size
        touched = range(start // size, min(self.limits.num_pages_of(end), len(s.pages)))
        shared = [(i, page) for i in touched if (page := s.pages[i]) is not None and not self.pool.is_writable(page)]
        num_missing = max(0, self.limits.num_pages_of(end) - len(s.pages))
        if not shared and not num_missing:
            return []
        new = self.pool.allocate(len(shared) + num_missing)
        copies = []
        for (index, page), copy in zip(shared, new, strict=False):
            s.pages[index] = copy
            copies.append(PageCopy(self.shard, page, copy))
        self.pool.release([page for _, page in shared])
        s.pages += new[len(shared) :]
        s.num_registered = min([s.num_registered, *(index for index, _ in shared)])
        self._renew_ids(s)
        return copies

    def register(self, s: Sequence) -> None:
        """Offers the full pages of known tokens that steps so far have computed to others."""
        if not self.limits.prefix_caching:
            return
        # What a chunk may compute again must stay its own.
        num_known = min(s.num_computed_tokens, len(s.token_ids)) - s.request.chunk_overlap
        if self.limits.exact:
            num_known = min(num_known, s.num_prefill_tokens)
        num_full = num_known // self.limits.page_size
        if num_full <= s.num_registered:
            return
        self._make_keys(s, num_full)
        for index in range(s.num_registered, num_full):
            page = s.pages[index]
            if page is not None and self.pool.is_writable(page):
                self.pool.register(page, s.page_keys[index])
        s.num_registered = num_full

    def leave_window(self, s: Sequence) -> None:
        """Lets go of pages that no later token of the sequence sees."""
        num_left = self._num_left(s, s.num_computed_tokens)
        if num_left <= s.num_left:
            return
        left = range(s.num_left, num_left)
        self.pool.release([page for i in left if (page := s.pages[i]) is not None])
        for index in left:
            s.pages[index] = None
        s.num_left = num_left
        self._renew_ids(s)

    def vacate(self, s: Sequence) -> None:
        """Takes back slot and pages. Steps under way may still write to the pages: they run before any step that gives
        those pages to another."""
        assert s.slot is not None
        self.pool.release([page for page in s.pages if page is not None])
        self.free_slots.append(s.slot)
        s.slot, s.pages, s.page_ids, s.num_left, s.num_registered = None, [], (), 0, 0
        s.num_computed_tokens = s.num_prefill_tokens = 0
        s.started = False

    def give_back_unused(self, s: Sequence) -> int:
        """Lets go of pages that were provided for guesses and have not been needed; returns their number."""
        if s.num_drafted:
            return 0
        unused = s.pages[self.limits.num_pages_of(s.num_tokens) :]
        if unused:
            self.pool.release([page for page in unused if page is not None])
            del s.pages[-len(unused) :]
            self._renew_ids(s)
        return len(unused)

    def num_unused_positions(self, s: Sequence) -> int:
        """Positions of the sequence's pages that hold no token."""
        return max(0, len(s.pages) * self.limits.page_size - s.num_computed_tokens)

    def _num_left(self, s: Sequence, num_computed_tokens: int) -> int:
        """Leading pages that no token after those computed sees."""
        window = self.window(s)
        if window is not None and s.request.adaptive_window is not None:
            # Windows grow more slowly than the context: what this one has left, no later one sees.
            window = s.request.adaptive_window.size(num_computed_tokens, window)
        if window is None:
            return 0
        # The next token to be computed sees positions above its own minus the window.
        # So does one that is computed again.
        return max(0, num_computed_tokens - s.request.chunk_overlap - window + 1) // self.limits.page_size

    def _num_unusable(self, s: Sequence, num_pages: int) -> int:
        """How many of the leading pages found must be left, so that every token is computed as it would be alone."""
        if not self.limits.exact:
            return 0
        per_bucket = self.limits.prefill_buckets[-1] // self.limits.page_size
        # The last token of the prompt belongs to a chunk.
        most = (s.num_prompt_tokens - 1) // self.limits.page_size
        return num_pages - min(num_pages, most) // per_bucket * per_bucket

    def _make_keys(self, s: Sequence, count: int) -> None:
        size = self.limits.page_size
        while len(s.page_keys) < count:
            index = len(s.page_keys)
            parent = s.page_keys[-1] if s.page_keys else _root(s.request)
            s.page_keys.append(next_key(parent, s.token_ids[index * size : (index + 1) * size]))

    def _renew_ids(self, s: Sequence) -> None:
        # What stands for a page that the window has left is never seen.
        s.page_ids = tuple(0 if page is None else page for page in s.pages)


def _root(request: Request) -> PageKey:
    return root_key(request.cache_salt, request.window, request.adaptive_window)
