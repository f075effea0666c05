"""Replicas of several processes on this machine, each standing for a host with its own devices."""

import contextlib
import os
import re
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest

from cluster.channel import Channel
from cluster.group import EXIT_STATUS, Timeouts
from cluster.member import Member
from cluster.messages import Hello, encode
from cluster.multihost import Gathering, Invitation, join
from engine.errors import ConfigError, ReplicaGroupError

from .cases import CASES, GROK, make_runner, outcomes
from .replicas import Replica

QUICK = Timeouts(start_s=0.5)
SILENCE_S = 5.0
DETECTION_S = 4 * SILENCE_S
"""What must have ended by then is noticed after `SILENCE_S`; the rest is for a busy machine."""


def knock(invitation, **changes):
    """A follower that says hello and then waits."""
    fields = {"rank": invitation.rank, "num_hosts": invitation.num_hosts, "name": "a name", "identity": {}}
    channel = Channel.connect(invitation.host, invitation.port, invitation.token, 30.0)
    channel.send(encode(Hello(**{**fields, **changes})))
    return channel


def full_identity(**more):
    return {"jax": jax.__version__, "jaxlib": jax.lib.__version__, **more}


# ---- gathering, in one process ----


def test_hosts_that_do_not_come_are_named_in_time():
    gathering = Gathering(4, timeouts=QUICK)
    channel = knock(gathering.invitation(2), identity=full_identity())
    with pytest.raises(
        ReplicaGroupError,
        match=r"host 1 and host 3 of 4 did not come to 127\.0\.0\.1:\d+ within 0\.5 s; host 2 of 4 \(a name, .*\) came",
    ):
        gathering.start()
    channel.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((gathering.host, gathering.port))


def test_a_host_that_goes_before_all_have_come_is_named():
    failures = []
    gathering = Gathering(3, timeouts=Timeouts(start_s=60.0), on_failure=failures.append)
    knock(gathering.invitation(1), identity=full_identity()).close()
    with pytest.raises(ReplicaGroupError, match=r"host 1 of 3 \(a name, .*\) has gone"):
        gathering.start()
    # The leader's thread has heard of it: nothing else needs to end it.
    assert failures == []


def test_a_host_that_is_known_to_have_failed_is_not_waited_for():
    gathering = Gathering(3, timeouts=Timeouts(start_s=60.0))
    gathering.lose(2, "CheckpointError: no such folder")
    with pytest.raises(ReplicaGroupError, match="host 2 of 3 has failed: CheckpointError: no such folder"):
        gathering.start()


def test_a_host_that_differs_is_refused_and_named_with_both_values():
    gathering = Gathering(2, {"checkpoint": "a"}, timeouts=Timeouts(start_s=60.0))
    channel = knock(gathering.invitation(1), identity=full_identity(jaxlib="0.0.1", extra="x"))
    with pytest.raises(
        ConfigError, match=r"host 1 of 2 .* differs from the leader: checkpoint is None there and 'a' on the leader"
    ) as error:
        gathering.start()
    assert "extra is 'x' there and None on the leader" in str(error.value)
    assert "jaxlib is '0.0.1' there" in str(error.value)
    channel.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 5}, "host 5 of 3 .* is none of the 2 followers"),
        ({"rank": 0}, "host 0 of 3 .* is none of the 2 followers"),
        ({"num_hosts": 2}, "host 2 of 2 .* is none of the 2 followers"),
        ({"rank": 1}, "host 1 of 3 .* has come already"),
    ],
)
def test_a_host_that_is_not_expected_is_refused_and_the_others_waited_for(changes, reason, caplog):
    gathering = Gathering(3, timeouts=Timeouts(start_s=1.0))
    first = knock(gathering.invitation(1), identity=full_identity())
    wrong = knock(gathering.invitation(2), **{"identity": full_identity(), **changes})
    with pytest.raises(ReplicaGroupError, match=r"^(host 2|host 1) of 3 did not come"):
        gathering.start()
    assert [record for record in caplog.records if re.search(reason, record.getMessage())]
    first.close()
    wrong.close()


def test_strangers_on_the_port_are_ignored(caplog):
    gathering = Gathering(2, timeouts=QUICK)
    with socket.create_connection((gathering.host, gathering.port)) as silent:
        with socket.create_connection((gathering.host, gathering.port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nhost: a-host-with-a-name-that-is-long\r\n\r\n")
            guess = knock(Invitation(1, 2, gathering.host, gathering.port, "guess"))
            with pytest.raises(ReplicaGroupError, match="host 1 of 2 did not come"):
                gathering.start()
        assert silent.fileno() >= 0
    guess.close()
    said = [record.getMessage() for record in caplog.records]
    assert any("does not speak the protocol" in line for line in said)
    assert any("not made with this replica's token" in line for line in said)


def test_a_follower_without_a_leader_says_where_it_looked():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        ReplicaGroupError, match=rf"host 1 of 2 cannot reach the leader \(host 0\) at 127\.0\.0\.1:{port} within 0\.5 s"
    ):
        join(Invitation(1, 2, "127.0.0.1", port, "secret", QUICK))


def test_a_follower_that_is_refused_says_why():
    gathering = Gathering(2, {"model": "this"}, timeouts=Timeouts(start_s=60.0))
    refused = []

    def come():
        with contextlib.suppress(ConfigError):
            join(gathering.invitation(1), {"model": "another"}, on_failure=refused.append)
        refused.append("came back")

    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(ConfigError, match="model is 'another' there and 'this' on the leader"):
        gathering.start()
    thread.join()
    assert refused == ["came back"]


def test_a_leader_that_gives_up_tells_who_waits():
    failures = []
    with Gathering(3, timeouts=Timeouts(start_s=60.0)) as gathering:
        channel = knock(gathering.invitation(1), identity=full_identity())
        member = Member(channel, 1, 3, gathering.timeouts, failures.append)
    with pytest.raises(ReplicaGroupError, match="the leader"):
        member.receive()
    member.close()


def test_one_host_has_nobody_to_wait_for():
    with pytest.raises(ConfigError, match=r"over 1 host\(s\).*expected at least 2"):
        Gathering(1)


def test_an_invitation_is_plain_data_and_keeps_its_secret():
    with Gathering(2, timeouts=QUICK) as gathering:
        invitation = gathering.invitation(1)
    assert Invitation.from_json(invitation.to_json()) == invitation
    assert invitation.token not in repr(invitation)


# ---- whole replicas, in processes of their own ----


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda n: f"{n} hosts of {8 // n} devices")
def replica_outcomes(request, tmp_path_factory):
    """All cases of a topology, computed by one replica: {case: arrays}."""
    if not GROK.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    out = tmp_path_factory.mktemp("outcomes")
    num_hosts, cases = request.param, CASES[request.param]
    # Where other tests take the processors, a host may be silent for long.
    patient = {"silence_s": 120.0}
    with Replica(num_hosts, "cases", [case.name for case in cases], out=str(out), timeouts=patient) as replica:
        started = replica.leader.next_line()
        assert sorted(started["started"]) == [str(rank) for rank in range(1, num_hosts)]
        assert started["num_devices"] == [8 // num_hosts, 8]
        for case in cases:
            assert replica.leader.next_line()["done"] == case.name
        # All leave by themselves.
        assert [host.wait() for host in replica.hosts] == [0] * num_hosts, replica.errors
    return {case: np.load(out / f"{case.name}.npz") for case in cases}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("index", range(4), ids=["dense, 1x8", "dense, 2x4", "grok, 1x8", "grok, 2x4"])
def test_a_replica_over_hosts_computes_what_one_process_does(replica_outcomes, index):
    """Prefill, chunked prefill and decode over scattered pages; requests batched by the engine, greedy and sampled."""
    case, found = list(replica_outcomes.items())[index]
    runner = make_runner(case.in_one_process)
    runner.warm_up()
    expected = outcomes(runner)
    assert sorted(found) == sorted(expected)
    # Grok-1's logits lie between -40 and 40, ten times as far apart as the other model's.
    limit = 1e-4 * max(1.0, float(expected["logits0"].std()))
    for name, values in expected.items():
        if name.startswith("tokens"):
            assert found[name].tolist() == values.tolist(), name
        else:
            np.testing.assert_allclose(found[name], values, atol=limit, rtol=0, err_msg=name)


def seconds_to_end(host):
    started_at = time.monotonic()
    status = host.wait()
    return status, time.monotonic() - started_at


@pytest.fixture
def stepping():
    """A replica of two hosts in the midst of steps."""
    with Replica(2, "steps", timeouts={"silence_s": SILENCE_S}) as replica:
        assert "started" in replica.leader.next_line()
        assert replica.leader.next_line() == {"stepping": True, "token": 20 * 8}
        yield replica


@pytest.mark.slow
@pytest.mark.alone
def test_a_follower_that_is_killed_ends_the_replica_with_its_name(stepping, record_property):
    follower = stepping.hosts[1]
    follower.process.send_signal(signal.SIGKILL)
    status, seconds = seconds_to_end(stepping.leader)
    record_property("seconds until the leader ended", seconds)
    assert status == EXIT_STATUS, stepping.errors
    assert f"host 1 of 2 ({socket.gethostname()}, process {follower.process.pid}, " in stepping.leader.errors
    assert "has gone" in stepping.leader.errors
    assert seconds < DETECTION_S


@pytest.mark.slow
@pytest.mark.alone
def test_a_follower_that_stops_running_ends_the_replica_with_its_name(stepping, record_property):
    follower = stepping.hosts[1]
    follower.process.send_signal(signal.SIGSTOP)
    try:
        status, seconds = seconds_to_end(stepping.leader)
        record_property("seconds until the leader ended", seconds)
    finally:
        follower.process.send_signal(signal.SIGCONT)
    assert status == EXIT_STATUS, stepping.errors
    assert f"process {follower.process.pid}, " in stepping.leader.errors
    assert f"has been silent for {SILENCE_S:g} s" in stepping.leader.errors
    assert seconds < DETECTION_S
    # When it wakes, its leader is gone.
    assert follower.wait() != 0


@pytest.mark.slow
@pytest.mark.alone
def test_a_leader_that_is_killed_ends_its_followers(stepping, record_property):
    stepping.leader.process.send_signal(signal.SIGKILL)
    status, seconds = seconds_to_end(stepping.hosts[1])
    record_property("seconds until the follower ended", seconds)
    assert status != 0
    assert "host 0 of 2 (the leader, 127.0.0.1:" in stepping.hosts[1].errors
    assert seconds < DETECTION_S


@pytest.mark.slow
@pytest.mark.alone
def test_a_follower_that_is_lost_while_nothing_runs_is_noticed_too():
    with Replica(2, "idle", timeouts={"silence_s": SILENCE_S}) as replica:
        assert "started" in replica.leader.next_line()
        os.kill(replica.hosts[1].process.pid, signal.SIGKILL)
        status, seconds = seconds_to_end(replica.leader)
        assert status == EXIT_STATUS
        assert seconds < DETECTION_S
        assert "host 1 of 2" in replica.leader.errors


@pytest.mark.slow
@pytest.mark.alone
def test_a_process_that_never_starts_is_named_and_the_others_end():
    with Replica(3, "idle", absent=[2], timeouts={"start_s": 8.0}) as replica:
        assert replica.leader.wait() != 0
        assert replica.hosts[1].wait() != 0
        assert "ReplicaGroupError: host 2 of 3 did not come" in replica.leader.errors
        assert "host 2 of 3 did not come" in replica.hosts[1].errors
