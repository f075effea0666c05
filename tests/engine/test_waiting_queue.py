from engine.request import Request
from engine.sequence import Sequence
from engine.waiting_queue import WaitingQueue

AGEING_S = 10.0


class Queue:
    """A waiting queue with requests of one prompt token, added as the scheduler adds them."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.num_added = 0

    def add(self, tenant: str | None = None, priority: int = 0, now_s: float = 0.0) -> Sequence:
        s = Sequence(self.num_added, Request(f"r{self.num_added}", (1,), priority=priority, tenant=tenant), [1])
        s.rank = (priority + now_s / AGEING_S, self.num_added)
        self.num_added += 1
        self.queue.enter(tenant)
        self.queue.add(s)
        return s

    def admit(self, cost: int = 1) -> Sequence:
        """Takes out the next one and charges it."""
        s = self.queue.next()
        assert s is not None
        self.queue.remove(s)
        self.queue.charge(s.request.tenant, cost)
        return s


def test_an_empty_queue_has_no_next():
    assert WaitingQueue().next() is None


def test_first_come_first_served_within_tenant_and_priority():
    q = Queue()
    added = [q.add() for _ in range(5)]
    assert [q.admit() for _ in range(5)] == added


def test_lower_priorities_go_first():
    q = Queue()
    added = [q.add(priority=p) for p in (2, -1, 0)]
    assert [q.admit() for _ in range(3)] == [added[1], added[2], added[0]]


def test_waiting_lowers_a_priority():
    q = Queue()
    old = q.add(priority=2, now_s=0.0)
    young = q.add(priority=0, now_s=19.0)
    younger = q.add(priority=0, now_s=21.0)
    assert [q.admit() for _ in range(3)] == [young, old, younger]


def test_an_old_backlog_does_not_go_before_a_newcomer():
    q = Queue()
    for _ in range(50):
        q.add("a", now_s=0.0)
    q.admit()
    single = q.add("b", now_s=1000.0)
    # Level with "a", older requests first; then it is the turn of "b".
    assert [q.admit(), q.admit()][1] is single


def test_tenants_share_by_tokens_not_by_requests():
    q = Queue()
    for _ in range(30):
        q.add("large")
        q.add("small")
    served = {"large": 0, "small": 0}
    for _ in range(22):
        tenant = q.queue.next().request.tenant
        served[tenant] += (cost := 10 if tenant == "large" else 1)
        q.admit(cost)
    assert abs(served["large"] - served["small"]) <= 10


def test_an_idle_tenant_saves_nothing_up():
    q = Queue()
    for _ in range(20):
        q.add("busy")
    for _ in range(10):
        q.admit(5)
    late = [q.add("late") for _ in range(5)]
    order = [q.admit(5).request.tenant for _ in range(8)]
    assert order.count("late") == 4
    assert late[0].request.tenant == "late"


def test_a_tenant_that_pauses_keeps_its_debts():
    q = Queue()
    for _ in range(10):
        q.add("busy")
    first = q.add("greedy")
    while q.admit(1) is not first:
        pass
    q.queue.charge("greedy", 5)
    q.queue.leave("greedy")
    again = q.add("greedy")
    ahead = 0
    while q.admit(1) is not again:
        ahead += 1
    assert ahead == 6


def test_nothing_is_kept_of_tenants_that_owe_nothing():
    q = Queue()
    for name in "abc":
        q.add(name)
        q.admit()
    for name in "abc":
        q.queue.leave(name)
    assert (len(q.queue), q.queue._served, q.queue._num_active) == (0, {}, {})


def test_a_preempted_sequence_goes_on_before_newer_ones_of_its_tenant():
    q = Queue()
    first, second = q.add(), q.add()
    assert q.admit() is first
    q.queue.add(first)
    assert [q.admit(), q.admit()] == [first, second]


def test_waiting_prompt_tokens_are_counted():
    q = Queue()
    for _ in range(3):
        q.add()
    assert (len(q.queue), q.queue.num_queued_tokens) == (3, 3)
    q.admit()
    assert (len(q.queue), q.queue.num_queued_tokens, len(list(q.queue))) == (2, 2, 2)


def test_priorities_go_before_fair_shares():
    q = Queue()
    urgent = [q.add("busy", priority=0) for _ in range(3)]
    lazy = q.add("idle", priority=1)
    assert [q.admit(100) for _ in range(4)] == [*urgent, lazy]


def test_a_tenant_that_always_runs_something_saves_nothing_up():
    q = Queue()
    q.add("light")
    q.admit()
    for _ in range(50):
        q.add("busy")
        q.admit(10)
    for name in ["busy", "light"]:
        for _ in range(10):
            q.add(name)
    order = [q.admit(1).request.tenant for _ in range(10)]
    assert order.count("busy") == 5


def test_a_newcomer_of_an_old_backlog_s_priority_does_not_overtake_a_higher_one():
    q = Queue()
    old = q.add("x", priority=10, now_s=0.0)
    urgent = q.add("z", priority=0, now_s=150.0)
    late = [q.add("y", priority=10, now_s=150.0) for _ in range(3)]
    q.queue.charge("x", 100)
    # The oldest has waited for long enough to go first; those that came after the urgent one have not.
    assert [q.admit() for _ in range(5)] == [old, urgent, *late]
