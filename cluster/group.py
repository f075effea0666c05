"""The processes of one replica, each with a watch over the others: nobody waits for a host that is gone.

Every process sends a heartbeat to its counterpart several times within `Timeouts.silence_s`, from a thread of its own:
the main thread may be inside a collective that never ends. What ends a process is `on_failure`.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.channel import Channel
from cluster.messages import (
    Answer,
    Begin,
    Command,
    Failure,
    Heartbeat,
    Stop,
    decode,
    encode,
)
from engine.errors import ConfigError, ReplicaGroupError

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a process that ends because another of its replica did (EX_SOFTWARE)."""

FAREWELL_S = 1.0
"""How long the processes of a replica wait for each other's last words."""
HEARTBEATS_IN_SILENCE = 4
"""How many a process sends within `Timeouts.silence_s`."""


@dataclass(frozen=True)
class Timeouts:
    """How long a host waits for another, in seconds. Raises `ConfigError` where one is not positive."""

    start_s: float = 300.0
    """Until all hosts have come and `jax.distributed` runs."""
    silence_s: float = 10.0
    """Without a sign of life."""
    step_s: float = 300.0
    """From the broadcast of a step to its end on every host."""
    warm_up_s: float = 3600.0
    """The same of the warm-up (which followers begin once they have loaded), and of steps that compile."""

    def __post_init__(self) -> None:
        for name in ["start_s", "silence_s", "step_s", "warm_up_s"]:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive number of seconds")


OnFailure = Callable[[ReplicaGroupError], None]
"""Called once, on a thread of the group, with what went wrong."""


def exit_process(error: ReplicaGroupError) -> None:
    """Says what went wrong and ends this process at once: its main thread may never come back from a collective."""
    logger.critical("%s", error)
    sys.stderr.write(f"this process ends: {error}\n")
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


@dataclass
class _Follower:
    """A follower as the leader sees it."""

    name: str
    channel: Channel
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    num_compilations: int = 0


@dataclass
class _Pending:
    """A command that has not ended everywhere."""

    what: str
    deadline: float
    limit_s: float
    digest: bytes | None = None
    """The leader's own, once it has come so far."""
    answers: dict[int, bytes] = field(default_factory=dict)


class Leader:
    """The leader's end of a replica. Threads of its own listen to the followers; everything else is one thread's."""

    def __init__(self, num_hosts: int, timeouts: Timeouts, on_failure: OnFailure = exit_process) -> None:
        self.num_hosts = num_hosts
        self.timeouts = timeouts
        self._on_failure = on_failure
        self._followers: dict[int, _Follower] = {}
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._error: ReplicaGroupError | None = None
        self._armed, self._ending = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._readers: list[threading.Thread] = []
        threading.Thread(target=self._pulse, name="replica-pulse", daemon=True).start()

    def admit(self, rank: int, name: str, channel: Channel) -> None:
        """A follower has come; from here on it is watched."""
        channel.set_timeout(self.timeouts.silence_s)
        full_name = f"host {rank} of {self.num_hosts} ({name}, {channel.address})"
        with self._changed:
            self._followers[rank] = _Follower(full_name, channel)
        reader = threading.Thread(target=self._listen, args=(rank,), name=f"replica-host-{rank}", daemon=True)
        self._readers.append(reader)
        reader.start()

    @property
    def names(self) -> dict[int, str]:
        """Those that have come, by rank."""
        with self._changed:
            return {rank: follower.name for rank, follower in self._followers.items()}

    @property
    def num_compilations(self) -> int:
        """Programs that the followers have compiled since their warm-up."""
        return sum(follower.num_compilations for follower in self._followers.values())

    def lose(self, rank: int, reason: str) -> None:
        """Whoever runs the process of a follower says that it has failed, perhaps before it came."""
        self._fail(f"{self.names.get(rank, f'host {rank} of {self.num_hosts}')} has failed: {reason}")

    def arm(self) -> None:
        """From now on a failure is told to `on_failure`, and no longer to who asks only."""
        self._armed.set()

    def begin(self, coordinator_address: str) -> None:
        """Tells all to start `jax.distributed`."""
        self._send_to_all(encode(Begin(coordinator_address)))

    def broadcast(self, make: Callable[[int], Command], what: str, limit_s: float) -> tuple[int, bytes]:
        """Sends the command that `make` makes of its number; returns the number, and the command as it was sent.

        `what`: for messages. All hosts must have ended it within `limit_s`. Raises `ReplicaGroupError`.
        """
        self.check()
        self._number += 1
        payload = encode(make(self._number))
        with self._changed:
            self._pending[self._number] = _Pending(what, time.monotonic() + limit_s, limit_s)
        self._send_to_all(payload)
        return self._number, payload

    def expect(self, number: int, digest: bytes) -> None:
        """The leader's own outcome of a command; a follower with another one has diverged."""
        with self._changed:
            pending = self._pending.get(number)
            if pending is not None:
                pending.digest = digest
        self._settle(number)
        self.check()

    def wait_for(self, number: int) -> None:
        """Returns when every follower has answered a command, its outcome is known here, and both agree."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._pending or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raises `ReplicaGroupError` where the replica cannot go on."""
        if self._error is not None:
            raise ReplicaGroupError(str(self._error))

    def explain(self, error: Exception) -> ReplicaGroupError:
        """Why a step has failed here: the follower that is gone, where that is why, or else `error` itself.

        Ends the followers, which wait for the step.
        """
        with self._changed:
            # A collective breaks as soon as the connection does, by which the reader is told, too.
            self._changed.wait_for(lambda: self._error is not None, FAREWELL_S)
        self.abort(f"host 0 of {self.num_hosts} (the leader) has failed: {type(error).__name__}: {error}")
        assert self._error is not None
        return ReplicaGroupError(str(self._error))

    def abort(self, reason: str) -> None:
        """Ends all followers at once, whatever they do."""
        with self._changed:
            self._error = self._error or ReplicaGroupError(reason)
            self._changed.notify_all()
        self._say_farewell(reason)

    def stop(self) -> None:
        """Ends all followers after the commands that they have; returns when they are gone, or `silence_s` is over."""
        self._say_farewell(None)

    def _say_farewell(self, reason: str | None) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        for follower in self._followers.values():
            try:
                follower.channel.set_timeout(FAREWELL_S if reason else self.timeouts.silence_s)
                follower.channel.send(encode(Stop(reason)))
            except OSError as error:
                logger.warning("%s was not told of the end: %s", follower.name, error)
        give_up_at = time.monotonic() + (FAREWELL_S if reason else self.timeouts.silence_s)
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(max(0.0, give_up_at - time.monotonic()))
        for follower in self._followers.values():
            follower.channel.close()

    def _fail(self, message: str) -> None:
        with self._changed:
            if self._error is not None or self._ending.is_set():
                return
            self._error = error = ReplicaGroupError(message)
            self._changed.notify_all()
        self._say_farewell(message)
        if self._armed.is_set():
            self._on_failure(error)

    def _send_to_all(self, payload: bytes) -> None:
        for follower in self._followers.values():
            try:
                follower.channel.send(payload)
            except OSError as error:
                self._fail(f"{follower.name} cannot be reached: {error}")
                self.check()

    def _listen(self, rank: int) -> None:
        follower = self._followers[rank]
        while True:
            try:
                message = decode(follower.channel.receive())
            except TimeoutError:
                return self._fail(f"{follower.name} has been silent for {self.timeouts.silence_s:g} s")
            except OSError as error:
                return self._fail(f"{follower.name} has gone: {error}")
            if isinstance(message, Heartbeat):
                follower.heartbeat = message
            elif isinstance(message, Answer):
                follower.num_compilations = message.num_compilations
                with self._changed:
                    pending = self._pending.get(message.number)
                    if pending is not None:
                        pending.answers[rank] = message.digest
                self._settle(message.number)
            elif isinstance(message, Failure):
                return self._fail(f"{follower.name} has failed: {message.reason}")
            else:
                return self._fail(f"{follower.name} sent a {type(message).__name__}; expected an answer")

    def _settle(self, number: int) -> None:
        """Compares what is known of a command's outcomes, and forgets it once all are."""
        with self._changed:
            pending = self._pending.get(number)
            if pending is None or pending.digest is None:
                return
            differ = [rank for rank, digest in pending.answers.items() if digest != pending.digest]
            if not differ and len(pending.answers) == len(self._followers):
                del self._pending[number]
                self._changed.notify_all()
        if differ:
            self._fail(
                f"{self._followers[differ[0]].name} has diverged: {pending.what} (command {number}) came out "
                "differently there than on the leader"
            )

    def _pulse(self) -> None:
        heartbeat = encode(Heartbeat())
        while not self._ending.wait(self.timeouts.silence_s / HEARTBEATS_IN_SILENCE):
            with self._changed:
                followers = list(self._followers.values())
                late = [(n, p) for n, p in self._pending.items() if time.monotonic() > p.deadline]
            if late:
                return self._fail(self._describe(*late[0]))
            for follower in followers:
                try:
                    follower.channel.send(heartbeat)
                except OSError as error:
                    return self._fail(f"{follower.name} cannot be reached: {error}")

    def _describe(self, number: int, pending: _Pending) -> str:
        missing = [follower for rank, follower in self._followers.items() if rank not in pending.answers]
        idle = [follower.name for follower in missing if follower.heartbeat.num_started < number]
        if not missing:
            return f"{pending.what} has not ended on the leader within {pending.limit_s:g} s"
        if idle:
            return f"{pending.what} has not begun within {pending.limit_s:g} s on {' and '.join(idle)}"
        names = " and ".join(follower.name for follower in missing)
        return f"{pending.what} has begun everywhere, and not ended within {pending.limit_s:g} s on {names}"
