"""A follower's end of a replica; `cluster.group` has the leader's."""

import logging
import queue
import threading
from collections.abc import Iterator

from cluster.channel import Channel
from cluster.group import FAREWELL_S, HEARTBEATS_IN_SILENCE, OnFailure, Timeouts, exit_process
from cluster.messages import (
    Answer,
    Command,
    Failure,
    FromFollower,
    FromLeader,
    Heartbeat,
    Refused,
    Stop,
    decode,
    encode,
)
from engine.errors import ReplicaGroupError

logger = logging.getLogger(__name__)


class Member:
    """A follower's end of a replica. A thread of its own listens to the leader."""

    def __init__(
        self, channel: Channel, rank: int, num_hosts: int, timeouts: Timeouts, on_failure: OnFailure = exit_process
    ) -> None:
        self.rank, self.num_hosts, self.timeouts = rank, num_hosts, timeouts
        self._channel = channel
        self._leader = f"host 0 of {num_hosts} (the leader, {channel.address})"
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[tuple[FromLeader, bytes] | ReplicaGroupError] = queue.SimpleQueue()
        self._heartbeat = Heartbeat()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._failed = threading.Event()
        channel.set_timeout(timeouts.silence_s)
        for target, name in [(self._listen, "replica-leader"), (self._pulse, "replica-pulse")]:
            threading.Thread(target=target, name=name, daemon=True).start()

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Leaves; the leader is told what the block raised."""
        if isinstance(error, Exception) and not self._ending.is_set():
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    def receive(self) -> tuple[FromLeader, bytes]:
        """The leader's next message but heartbeats, and as it was sent. Raises `ReplicaGroupError`."""
        item = self._inbox.get()
        if isinstance(item, ReplicaGroupError):
            raise item
        return item

    def commands(self) -> Iterator[tuple[Command, bytes]]:
        """The leader's commands, and each as it was sent, until it says stop. Raises `ReplicaGroupError`."""
        while True:
            message, payload = self.receive()
            if isinstance(message, Stop):
                return
            if not isinstance(message, Command):
                raise ReplicaGroupError(f"{self._leader} sent a {type(message).__name__}; expected a command")
            self._heartbeat = Heartbeat(message.number, self._heartbeat.num_finished)
            yield message, payload

    def answer(self, number: int, digest: bytes, num_compilations: int) -> None:
        """A command has ended here. Raises `ReplicaGroupError` where the leader is gone."""
        self._heartbeat = Heartbeat(self._heartbeat.num_started, number)
        self._send(Answer(number, digest, num_compilations))

    def fail(self, reason: str) -> None:
        """Tells the leader that this host cannot go on, and leaves. Nothing where it is the leader that is gone."""
        # A collective breaks as soon as the connection does, by which the reader is told, too.
        if self._failed.wait(FAREWELL_S):
            return
        try:
            self._send(Failure(reason))
        except ReplicaGroupError as error:
            logger.warning("the leader was not told: %s", error)
        self.close()

    def close(self) -> None:
        """Leaves the replica; whoever waits for a command hears of it."""
        self._ending.set()
        self._inbox.put(ReplicaGroupError(f"host {self.rank} of {self.num_hosts} has left its replica"))
        self._channel.close()

    def _send(self, message: FromFollower) -> None:
        try:
            self._channel.send(encode(message))
        except OSError as error:
            raise ReplicaGroupError(f"{self._leader} cannot be reached: {error}") from None

    def _listen(self) -> None:
        while True:
            try:
                payload = self._channel.receive()
                message = decode(payload)
            except TimeoutError:
                return self._fail(f"{self._leader} has been silent for {self.timeouts.silence_s:g} s")
            except OSError as error:
                return self._fail(f"{self._leader} has gone: {error}")
            if isinstance(message, Heartbeat):
                continue
            if isinstance(message, Stop) and message.reason is not None:
                return self._fail(f"{self._leader} has ended the replica: {message.reason}")
            if isinstance(message, Stop | Refused):
                self._ending.set()
            self._inbox.put((message, payload))  # type: ignore[arg-type]
            if self._ending.is_set():
                return

    def _pulse(self) -> None:
        while not self._ending.wait(self.timeouts.silence_s / HEARTBEATS_IN_SILENCE):
            try:
                self._channel.send(encode(self._heartbeat))
            except OSError as error:
                return self._fail(f"{self._leader} cannot be reached: {error}")

    def _fail(self, message: str) -> None:
        with self._lock:
            if self._ending.is_set() or self._failed.is_set():
                return
            self._failed.set()
        error = ReplicaGroupError(message)
        self._inbox.put(error)
        self._on_failure(error)
