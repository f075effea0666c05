"""Which waiting request comes next: by priority with ageing, then by fair shares of the tenants, then by arrival.

Shares are kept by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the
tenant that has been served the fewest tokens goes first, and one that comes back from idleness starts level with the
others, not with what it saved up.
"""

import math
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """The sequences without a slot."""

    def __init__(self, ageing_s: float) -> None:
        """`ageing_s`: seconds of waiting that count as much as one step of priority."""
        self._ageing_s = ageing_s
        self._sequences: dict[int, Sequence] = {}
        self._served: dict[str | None, float] = {}
        """Tokens served to each tenant that has anything waiting or running."""
        self._num_active: dict[str | None, int] = {}
        self.num_queued_tokens = 0
        """Prompt tokens of all that waits."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def enter(self, tenant: str | None) -> None:
        """A request of the tenant has come."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_active[tenant] = self._num_active.get(tenant, 0) + 1

    def leave(self, tenant: str | None) -> None:
        """A request of the tenant has ended."""
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant], self._served[tenant]

    def charge(self, tenant: str | None, num_tokens: int) -> None:
        """Counts tokens served to a tenant."""
        self._served[tenant] += num_tokens

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait."""
        self._sequences[sequence.sequence_id] = sequence
        self.num_queued_tokens += sequence.num_prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        del self._sequences[sequence.sequence_id]
        self.num_queued_tokens -= sequence.num_prompt_tokens

    def next(self, now_s: float) -> Sequence | None:
        """The sequence to be admitted next; it stays in the queue."""
        return min(self._sequences.values(), key=lambda s: self._order(s, now_s), default=None)

    def _order(self, s: Sequence, now_s: float) -> tuple[int, float, tuple[float, int]]:
        aged = math.floor(s.request.priority - (now_s - s.arrival_s) / self._ageing_s)
        # A request of its own class that was preempted goes on before new ones of its tenant: it came before them.
        return aged, self._served[s.request.tenant], s.rank
