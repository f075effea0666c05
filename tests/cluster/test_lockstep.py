"""Lockstep between threads of one process, with a runner that is computable by hand. Real processes: test_multihost."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cluster.group import Leader, Timeouts
from cluster.lockstep import LockstepRunner, RunningDigest, describe_result, follow
from cluster.member import Member
from cluster.messages import Answer, Failure, Heartbeat, Stop, decode, encode
from engine.errors import ConfigError, ReplicaGroupError
from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.request import SamplingParams

from .connections import connected

PATIENT = Timeouts(silence_s=60.0)
"""Nothing in these tests takes that long: what ends them is something else."""


def plan(number):
    return StepPlan((), 0, (PlanRow(number, 0, number, 1, (number,), (0,), SamplingParams(), True),), 1)


class Runner:
    """Samples the position of a plan's one row, and keeps the order of what it was asked for."""

    def __init__(self, change=None, size=3):
        self.calls = []
        self.change = change or (lambda position: position)
        self.sizes, self.params, self.compiled_programs = (size,), {}, {"decode": None}
        mesh = SimpleNamespace(shape={"data": 1}, devices=SimpleNamespace(flat=[]))
        self.decoder = SimpleNamespace(config="a model", attention_kernel="reference", mesh=mesh)
        self.num_compilations_since_warm_up = 0
        self.compilations = SimpleNamespace(count=4)

    def warm_up(self, progress=None):
        self.calls.append("warm up")
        return {"decode": 0.5}

    def dispatch(self, plan):
        self.calls.append(plan.decode[0].position)
        return SimpleNamespace(plan=plan)

    def fetch(self, handle):
        token = self.change(handle.plan.decode[0].position)
        return StepResult((), ((SampledToken(token, None),),))

    def all_logits(self, rows, rows_per_shard, num_tokens):
        self.calls.append(("logits", rows[0].position, rows_per_shard, num_tokens))
        return "logits"

    def memory_bytes(self):
        return {"weights": 5}


class Replica:
    """A leader and its followers, each in a thread."""

    def __init__(self, *followers, timeouts=PATIENT, leader=None):
        self.runner = leader or Runner()
        self.failures = queue.SimpleQueue()
        self.follower_failures = queue.SimpleQueue()
        self.leader = Leader(1 + len(followers), timeouts, self.failures.put)
        self.leader.arm()
        self.lockstep = LockstepRunner(self.runner, self.leader)
        self._pool = ThreadPoolExecutor(len(followers))
        self.members, self.threads = [], []
        for rank, follower in enumerate(followers, 1):
            theirs, mine = connected()
            self.leader.admit(rank, f"name {rank}", theirs)
            member = Member(mine, rank, 1 + len(followers), timeouts, self.follower_failures.put)
            self.members.append(member)
            self.threads.append(self._pool.submit(follow, follower, member))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lockstep.stop()
        for member in self.members:
            member.close()
        self._pool.shutdown()


def test_followers_do_what_the_leader_does_in_the_same_order():
    followers = [Runner(), Runner()]
    with Replica(*followers) as replica:
        assert replica.lockstep.warm_up() == {"decode": 0.5}
        results = [replica.lockstep.execute(plan(number)) for number in range(3)]
        ahead = [replica.lockstep.dispatch(plan(number)) for number in range(3, 5)]
        results += [replica.lockstep.fetch(handle) for handle in ahead]
        assert replica.lockstep.all_logits(plan(9).decode, 1, 16) == "logits"
        replica.lockstep.stop()
        for thread in replica.threads:
            assert thread.result() is None
        assert [result.decode[0][0].token_id for result in results] == [0, 1, 2, 3, 4]
        assert ahead[1].plan == plan(4)
    expected = ["warm up", 0, 1, 2, 3, 4, ("logits", 9, 1, 16)]
    assert [runner.calls for runner in [replica.runner, *followers]] == [expected] * 3
    assert replica.failures.empty()
    assert replica.follower_failures.empty()


def test_everything_else_is_the_runners_own():
    with Replica(Runner()) as replica:
        runner = replica.lockstep
        assert (runner.sizes, runner.params, runner.compiled_programs) == ((3,), {}, {"decode": None})
        assert (runner.decoder.config, runner.compilations.count, runner.memory_bytes()) == (
            "a model",
            4,
            {"weights": 5},
        )


def test_compilations_of_every_host_count():
    follower = Runner()
    with Replica(follower, leader=Runner()) as replica:
        replica.lockstep.warm_up()
        assert replica.lockstep.num_compilations_since_warm_up == 0
        follower.num_compilations_since_warm_up = 2
        replica.runner.num_compilations_since_warm_up = 1
        replica.lockstep.warm_up()
        assert replica.lockstep.num_compilations_since_warm_up == 3


def test_a_follower_with_another_result_is_named_at_the_next_steps():
    odd = Runner(change=lambda position: position + (position == 2))
    with Replica(Runner(), odd) as replica:
        for number in range(3):
            replica.lockstep.execute(plan(number))
        error = replica.failures.get(timeout=60)
        assert "host 2 of 3 (name 2, 127.0.0.1:" in str(error)
        assert "has diverged: a step (command 3)" in str(error)
        with pytest.raises(ReplicaGroupError, match="host 2 of 3"):
            replica.lockstep.execute(plan(3))
        # The others hear why.
        assert "host 2 of 3" in str(replica.follower_failures.get(timeout=60))
    assert 3 not in replica.runner.calls


def test_another_program_is_found_in_the_warm_up():
    expected = r"host 1 of 2 .* has diverged: the warm-up"
    with Replica(Runner(size=4)) as replica, pytest.raises(ReplicaGroupError, match=expected):
        replica.lockstep.warm_up()


def test_a_past_difference_is_not_forgotten():
    """A digest covers all that came before."""
    first, second = RunningDigest(), RunningDigest()
    assert first.add(b"a", "1") == second.add(b"a", "1")
    first.add(b"b", "1")
    second.add(b"b", "2")
    assert first.add(b"c", "1") != second.add(b"c", "1")
    assert RunningDigest().add(b"ab", "c") != RunningDigest().add(b"a", "bc")


def test_what_a_result_says():
    def result(*tokens):
        return StepResult(((),), tuple(tuple(SampledToken(t, None) for t in row) for row in tokens))

    described = {describe_result(result(*tokens)) for tokens in [((1,), (2,)), ((1, 2), ()), ((2,), (1,)), ()]}
    assert len(described) == 4
    assert describe_result(result((1,))) == describe_result(result((1,)))


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
def test_a_follower_that_raises_is_named_with_its_error(where):
    def fail(argument):
        raise ValueError("out of luck")

    runner = Runner()
    setattr(runner, where, fail)
    with Replica(runner) as replica:
        replica.lockstep.dispatch(plan(0))
        error = replica.failures.get(timeout=60)
        assert "host 1 of 2 (name 1, " in str(error)
        assert "has failed: ValueError: out of luck" in str(error)
        with pytest.raises((ValueError, ReplicaGroupError)):
            replica.threads[0].result()


def test_a_leader_that_raises_ends_its_followers():
    leader = Runner()
    leader.fetch = lambda handle: 1 / 0
    with Replica(Runner(), leader=leader) as replica:
        with pytest.raises(ReplicaGroupError, match=r"host 0 of 2 \(the leader\) has failed: ZeroDivisionError"):
            replica.lockstep.execute(plan(0))
        assert "has ended the replica: host 0 of 2" in str(replica.follower_failures.get(timeout=60))
        with pytest.raises(ReplicaGroupError, match="ZeroDivisionError"):
            replica.lockstep.check_health()
        with pytest.raises(ReplicaGroupError, match="has ended the replica"):
            replica.threads[0].result()


def test_a_step_that_breaks_with_its_follower_is_that_followers_fault():
    """As a collective does: it raises as soon as the other host is gone."""
    leader = Runner()
    with Replica(Runner(), leader=leader) as replica:

        def fetch(handle):
            replica.members[0].close()
            raise RuntimeError("connection closed by peer")

        leader.fetch = fetch
        with pytest.raises(ReplicaGroupError, match=r"host 1 of 2 .* has gone"):
            replica.lockstep.execute(plan(0))


def test_a_leader_that_is_gone_is_named():
    with Replica(Runner()) as replica:
        replica.leader._followers[1].channel.close()
        assert "host 0 of 2 (the leader, 127.0.0.1:" in str(replica.follower_failures.get(timeout=60))
        with pytest.raises(ReplicaGroupError, match="has gone"):
            replica.threads[0].result()


class Puppet:
    """A follower's end that says only what it is told to."""

    def __init__(self, timeouts):
        self.failures = queue.SimpleQueue()
        self.leader = Leader(2, timeouts, self.failures.put)
        theirs, self.channel = connected()
        self.leader.admit(1, "a puppet", theirs)
        self.leader.arm()
        self.lockstep = LockstepRunner(Runner(), self.leader)

    def say(self, message):
        self.channel.send(encode(message))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        self.leader.stop()


def test_silence_is_noticed_though_the_connection_stands():
    with Puppet(Timeouts(silence_s=0.2)) as puppet:
        error = puppet.failures.get(timeout=60)
        assert str(error).startswith("host 1 of 2 (a puppet, ")
        assert str(error).endswith("has been silent for 0.2 s")
        with pytest.raises(ReplicaGroupError, match="silent"):
            puppet.lockstep.execute(plan(0))


def test_a_silent_leader_is_noticed_by_its_follower():
    theirs, mine = connected()
    failures = queue.SimpleQueue()
    member = Member(mine, 1, 2, Timeouts(silence_s=0.2), failures.put)
    assert "(the leader, " in str(failures.get(timeout=60))
    with pytest.raises(ReplicaGroupError, match=r"has been silent for 0\.2 s"):
        next(member.commands())
    member.close()
    theirs.close()


def lively(puppet, heartbeat, until):
    """Heartbeats until something has failed."""

    def run():
        while not until.wait(0.05):
            try:
                puppet.say(heartbeat)
            except OSError:
                return

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize(
    ("num_started", "expected"),
    [(0, "a step has not begun within 0.3 s on host 1 of 2"), (1, "has begun everywhere, and not ended within 0.3 s")],
)
def test_a_follower_that_lives_but_does_not_get_on_is_noticed(num_started, expected):
    done = threading.Event()
    with Puppet(Timeouts(silence_s=3.0, step_s=0.3)) as puppet:
        lively(puppet, Heartbeat(num_started), done)
        puppet.lockstep.execute(plan(0))
        error = puppet.failures.get(timeout=60)
        done.set()
    assert expected in str(error)
    assert "(a puppet, " in str(error)


def test_a_step_that_does_not_end_on_the_leader_is_said_to_be_its_own():
    done = threading.Event()
    with Puppet(Timeouts(silence_s=3.0, step_s=0.3)) as puppet:
        lively(puppet, Heartbeat(1, 1), done)
        puppet.lockstep.dispatch(plan(0))
        puppet.say(Answer(1, b"?", 0))
        error = puppet.failures.get(timeout=60)
        done.set()
    assert str(error) == "a step has not ended on the leader within 0.3 s"


def test_a_follower_that_says_something_else_is_refused():
    with Puppet(PATIENT) as puppet:
        puppet.say(Stop(None))
        assert "sent a Stop; expected an answer" in str(puppet.failures.get(timeout=60))


def test_why_a_follower_failed_is_passed_on():
    with Puppet(PATIENT) as puppet:
        puppet.say(Failure("its weights are damaged"))
        assert str(puppet.failures.get(timeout=60)).endswith("has failed: its weights are damaged")
        # Heartbeats may have come before.
        messages = iter(lambda: decode(puppet.channel.receive()), None)
        assert "damaged" in next(m.reason for m in messages if isinstance(m, Stop))


def test_who_runs_a_followers_process_may_say_that_it_failed():
    with Puppet(PATIENT) as puppet:
        puppet.leader.lose(1, "no such file")
        assert str(puppet.failures.get(timeout=60)).startswith("host 1 of 2 (a puppet, ")
        with pytest.raises(ReplicaGroupError, match="has failed: no such file"):
            puppet.lockstep.execute(plan(0))


@pytest.mark.parametrize("name", ["start_s", "silence_s", "step_s", "warm_up_s"])
def test_timeouts_are_positive(name):
    with pytest.raises(ConfigError, match=f"{name} is 0; expected a positive number of seconds"):
        Timeouts(**{name: 0})
