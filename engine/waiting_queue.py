"""Which waiting request comes next: by priority with ageing, then by fair shares of the tenants, then by arrival.

The priority served next is that of the request with the lowest rank (see `Sequence.rank`), and of its requests those
that come before all of other priorities: ageing decides between priorities, not between tenants, or whoever has much
waiting for long would be served before all others.

Shares are kept by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the
tenant that has been served the fewest tokens goes first. One that had nothing waiting starts at least level with those
that have, or else with the last one that had, not with what it saved up, and keeps what it owes.
"""

from collections import Counter
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """The sequences without a slot."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._served: dict[str | None, float] = {}
        """Tokens served to each tenant that has anything waiting or running, or has been served more than those."""
        self._num_active: dict[str | None, int] = {}
        self._num_waiting: Counter[str | None] = Counter()
        self._last_to_leave: str | None = None
        """The tenant whose request has last left the queue."""
        self._level = 0.0
        """What has been served to that one."""
        self.num_queued_tokens = 0
        """Prompt tokens of all that waits."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def enter(self, tenant: str | None) -> None:
        """A request of the tenant has come; it is added next."""
        if not self._num_waiting[tenant]:
            waiting = (served for t, served in self._served.items() if self._num_waiting[t])
            level = min(waiting, default=max(self._level, self._least_served()))
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)
        self._num_active[tenant] = self._num_active.get(tenant, 0) + 1

    def leave(self, tenant: str | None) -> None:
        """A request of the tenant has ended."""
        self._num_active[tenant] -= 1
        if self._num_active[tenant]:
            return
        del self._num_active[tenant]
        # Who owes nothing to those that are there would start level with them; without anybody there, nobody owes.
        least = self._least_served()
        self._served = {
            t: served
            for t, served in self._served.items()
            if t in self._num_active or (self._num_active and served > least)
        }
        if not self._num_active:
            self._level = 0.0

    def charge(self, tenant: str | None, num_tokens: int) -> None:
        """Counts tokens served to a tenant."""
        self._served[tenant] += num_tokens
        if tenant == self._last_to_leave:
            self._level = self._served[tenant]

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait."""
        self._sequences[sequence.sequence_id] = sequence
        self._num_waiting[sequence.request.tenant] += 1
        self.num_queued_tokens += sequence.num_prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        del self._sequences[sequence.sequence_id]
        self._last_to_leave = tenant = sequence.request.tenant
        self._level = self._served[tenant]
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
        self.num_queued_tokens -= sequence.num_prompt_tokens

    def next(self) -> Sequence | None:
        """The sequence to be admitted next; it stays in the queue."""
        if not self._sequences:
            return None
        priority = min(self, key=lambda s: s.rank).request.priority
        limit = min((s.rank for s in self if s.request.priority != priority), default=None)
        equals = (s for s in self if s.request.priority == priority and (limit is None or s.rank < limit))
        # A request that was preempted goes on before new ones of its tenant: it came before them.
        return min(equals, key=lambda s: (self._served[s.request.tenant], s.rank))

    def _least_served(self) -> float:
        return min((self._served[tenant] for tenant in self._num_active), default=0.0)
