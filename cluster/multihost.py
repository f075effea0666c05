"""Starts the processes of a replica that spans hosts: who comes, who does not, and `jax.distributed` in all of them.

    gathering = Gathering(2, identity, host="10.0.0.1")     # in the leader's process
    gathering.invitation(1)                                 # plain data, for whoever starts the other process
    leader = gathering.start()                              # returns once all have come

    member = join(invitation, identity)                     # in the follower's process

Both come before jax's first use, and after its platform is chosen. That all have come is known before `jax.distributed`
is entered, so that no process waits in it for one that never started.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import jax

from cluster.channel import Channel
from cluster.group import Leader, OnFailure, Timeouts, exit_process
from cluster.member import Member
from cluster.messages import Begin, Hello, Refused, decode, encode
from engine.errors import ConfigError, ReplicaGroupError

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_SHUTDOWN_S = 10
_JAX_HEARTBEAT_S = 100
_CONNECT_RETRY_S = 0.2


@dataclass(frozen=True)
class Invitation:
    """What a follower's process must be told; plain data."""

    rank: int
    """From 1; the leader is host 0."""
    num_hosts: int
    host: str
    port: int
    """Where the leader listens."""
    token: str = field(repr=False)
    """Shows that a process belongs to the replica: a secret, not for command lines or logs."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def to_json(self) -> dict[str, object]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> "Invitation":
        """The opposite of `to_json`."""
        return cls(**{**values, "timeouts": Timeouts(**values["timeouts"])})


class Gathering:
    """The leader waits for its followers.

    Close it where it is not started. As a context manager it does so, and ends the followers where its block raises.
    """

    def __init__(
        self,
        num_hosts: int,
        identity: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        timeouts: Timeouts | None = None,
        on_failure: OnFailure = exit_process,
    ) -> None:
        """`identity`: what must be the same on all hosts, by name; versions of jax are added. `host`: the address of
        this host that the others reach; only there it listens, on a free port. The time to come begins now."""
        if num_hosts < 2:
            raise ConfigError(f"a replica over {num_hosts} host(s) has nobody to wait for; expected at least 2")
        self.num_hosts, self.host = num_hosts, host
        self.timeouts = timeouts or Timeouts()
        self._identity = _full_identity(identity)
        self._give_up_at = time.monotonic() + self.timeouts.start_s
        self._token = secrets.token_hex(32)
        self._leader = Leader(num_hosts, self.timeouts, on_failure)
        self._arrival = threading.Condition()
        self._mismatch: ConfigError | None = None
        self._started = False
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="replica-accept", daemon=True).start()

    def __enter__(self) -> "Gathering":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None or not self._started:
            self.close(None if error is None else f"the leader has failed: {type(error).__name__}: {error}")

    def invitation(self, rank: int) -> Invitation:
        """For the process that is to be host `rank`, from 1 to `num_hosts` - 1."""
        assert 0 < rank < self.num_hosts, f"rank {rank} of {self.num_hosts} hosts"
        return Invitation(rank, self.num_hosts, self.host, self.port, self._token, self.timeouts)

    def start(self) -> Leader:
        """Waits for all hosts and starts `jax.distributed` with them.

        Raises `ReplicaGroupError` naming the hosts that have not come in time, or have gone, and `ConfigError` naming
        one whose identity differs.
        """
        try:
            self._gather()
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise
        self._stop_listening()
        self._leader.arm()
        with _reserved_port(self.host) as port:
            address = f"{self.host}:{port}"
            try:
                self._leader.begin(address)
                _start_jax(address, self.num_hosts, 0, self._seconds_left())
            except Exception as error:
                raise self._leader.explain(error) from error
        self._started = True
        return self._leader

    def lose(self, rank: int, reason: str) -> None:
        """Whoever runs the process of a follower says that it has failed, before it came or at any time later."""
        self._leader.lose(rank, reason)

    def close(self, reason: str | None = None) -> None:
        """Waits no longer; who has come is told `reason`."""
        self._stop_listening()
        self._leader.abort(reason or "the leader has given up")

    def _stop_listening(self) -> None:
        # Without it a thread in `accept` would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _seconds_left(self) -> float:
        return max(0.0, self._give_up_at - time.monotonic())

    def _gather(self) -> None:
        with self._arrival:
            while len(self._leader.names) < self.num_hosts - 1:
                if self._mismatch is not None:
                    raise self._mismatch
                self._leader.check()
                if not self._seconds_left():
                    raise ReplicaGroupError(self._who_is_missing())
                # Short turns, so that the loss of one who has come is seen, too.
                self._arrival.wait(min(0.2, self._seconds_left()))
        self._leader.check()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            # Whoever connects and says nothing keeps only its own thread waiting.
            threading.Thread(target=self._greet, args=(sock,), name="replica-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            channel = Channel.accept(sock, self._token, _HANDSHAKE_S)
        except OSError as error:
            return logger.warning("a connection to the replica's port was refused: %s", error)
        try:
            hello = decode(channel.receive())
            if not isinstance(hello, Hello):
                raise ConnectionError(f"a {type(hello).__name__} came first; expected a Hello")
        except OSError as error:
            logger.warning("a connection from %s to the replica's port was refused: %s", channel.address, error)
            return channel.close()
        with self._arrival:
            self._admit(channel, hello)
            self._arrival.notify_all()

    def _admit(self, channel: Channel, hello: Hello) -> None:
        who = f"host {hello.rank} of {hello.num_hosts} ({hello.name}, {channel.address})"
        if hello.num_hosts != self.num_hosts or not 0 < hello.rank < self.num_hosts:
            return _refuse(channel, f"{who} is none of the {self.num_hosts - 1} followers of this replica")
        if hello.rank in self._leader.names:
            return _refuse(channel, f"{who} has come already: {self._leader.names[hello.rank]}")
        mine, theirs = self._identity, hello.identity
        differences = [
            f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} on the leader"
            for name in sorted(mine.keys() | theirs.keys())
            if theirs.get(name) != mine.get(name)
        ]
        if differences:
            self._mismatch = ConfigError(f"{who} differs from the leader: {'; '.join(differences)}")
            return _refuse(channel, str(self._mismatch))
        self._leader.admit(hello.rank, hello.name, channel)

    def _who_is_missing(self) -> str:
        names = self._leader.names
        missing = [f"host {rank}" for rank in range(1, self.num_hosts) if rank not in names]
        came = f"; {' and '.join(names.values())} came" if names else ""
        return (
            f"{' and '.join(missing)} of {self.num_hosts} did not come to {self.host}:{self.port} within "
            f"{self.timeouts.start_s:g} s{came}"
        )


def join(
    invitation: Invitation, identity: Mapping[str, str] | None = None, on_failure: OnFailure = exit_process
) -> Member:
    """Comes to the leader and starts `jax.distributed` with all hosts.

    Raises `ReplicaGroupError` where the leader is not there in time, gives up or goes, and `ConfigError` where it takes
    no such host.
    """
    give_up_at = time.monotonic() + invitation.timeouts.start_s
    channel = _connect(invitation, give_up_at)
    name = f"{socket.gethostname()}, process {os.getpid()}"
    channel.send(encode(Hello(invitation.rank, invitation.num_hosts, name, _full_identity(identity))))
    member = Member(channel, invitation.rank, invitation.num_hosts, invitation.timeouts, on_failure)
    message, _ = member.receive()
    if isinstance(message, Refused):
        member.close()
        raise ConfigError(f"the leader takes no such host: {message.reason}")
    if not isinstance(message, Begin):
        member.close()
        raise ReplicaGroupError(f"the leader at {channel.address} sent a {type(message).__name__}; expected Begin")
    seconds_left = max(1.0, give_up_at - time.monotonic())
    try:
        _start_jax(message.coordinator_address, invitation.num_hosts, invitation.rank, seconds_left)
    except Exception as error:
        member.fail(f"jax.distributed does not start: {error}")
        raise ReplicaGroupError(
            f"jax.distributed does not start with {message.coordinator_address}: {error}"
        ) from error
    return member


def leave() -> None:
    """Ends `jax.distributed` in this process; all hosts do so together. Nothing where it does not run."""
    jax.distributed.shutdown()


def _connect(invitation: Invitation, give_up_at: float) -> Channel:
    where = f"{invitation.host}:{invitation.port}"
    while True:
        try:
            return Channel.connect(invitation.host, invitation.port, invitation.token, _HANDSHAKE_S)
        except OSError as error:
            if time.monotonic() + _CONNECT_RETRY_S > give_up_at:
                raise ReplicaGroupError(
                    f"host {invitation.rank} of {invitation.num_hosts} cannot reach the leader (host 0) at {where} "
                    f"within {invitation.timeouts.start_s:g} s: {error}"
                ) from None
            time.sleep(_CONNECT_RETRY_S)


def _refuse(channel: Channel, reason: str) -> None:
    logger.warning("%s", reason)
    with contextlib.suppress(OSError):
        channel.send(encode(Refused(reason)))
    channel.close()


def _full_identity(identity: Mapping[str, str] | None) -> dict[str, str]:
    return {**(identity or {}), "jax": jax.__version__, "jaxlib": jax.lib.__version__}


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A free port that only jax's coordinator can take: bound, but not listened on.

    The coordinator binds with SO_REUSEPORT, which lets it share a port with this socket, and no other process.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, 0))
        yield reserved.getsockname()[1]


def _start_jax(address: str, num_hosts: int, rank: int, timeout_s: float) -> None:
    # Of the CPU's collectives only these work between processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        num_processes=num_hosts,
        process_id=rank,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(timeout_s)),
        # The replica's own watch is faster, and names the host.
        heartbeat_timeout_seconds=_JAX_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
        coordinator_bind_address=address,
    )
    # Every process waits here for the devices of all: together, and not whenever each happens to need its own.
    jax.devices()
