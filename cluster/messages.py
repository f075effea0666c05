"""What the processes of a replica say to each other, and how it is written down.

A message is a pickle that may hold the classes listed here and those that a step plan is made of, and nothing else: any
other name in it is an error, and is not looked up.
"""

import dataclasses
import enum
import io
import pickle
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType

from engine.plan import PlanRow, StepPlan


@dataclass(frozen=True)
class Hello:
    """A follower's first message."""

    rank: int
    num_hosts: int
    name: str
    """The host's name and the process's id, for messages."""
    identity: Mapping[str, str]
    """What must be the same on every host: versions, configs, the checkpoint."""


@dataclass(frozen=True)
class Refused:
    """The leader's answer to a follower that it cannot take."""

    reason: str


@dataclass(frozen=True)
class Begin:
    """All have come: start `jax.distributed`."""

    coordinator_address: str


@dataclass(frozen=True)
class Heartbeat:
    """Says that the sender lives, and how far it is: numbers of commands, 0 for none."""

    num_started: int = 0
    num_finished: int = 0


@dataclass(frozen=True)
class WarmUp:
    """Compile and run every program."""

    number: int


@dataclass(frozen=True)
class Step:
    """Run a step."""

    number: int
    plan: StepPlan


@dataclass(frozen=True)
class Logits:
    """Run a step that returns logits."""

    number: int
    rows: tuple[PlanRow, ...]
    rows_per_shard: int
    num_tokens: int


@dataclass(frozen=True)
class Stop:
    """The end. With a reason: at once, whatever runs."""

    reason: str | None


@dataclass(frozen=True)
class Answer:
    """What came of a command on a follower."""

    number: int
    digest: bytes
    """Of all commands and results so far."""
    num_compilations: int
    """Since the warm-up."""


@dataclass(frozen=True)
class Failure:
    """A follower cannot go on."""

    reason: str


Command = WarmUp | Step | Logits
FromLeader = Refused | Begin | Heartbeat | Command | Stop
FromFollower = Hello | Heartbeat | Answer | Failure
Message = FromLeader | FromFollower


def classes_of(annotation: object) -> set[type]:
    """All dataclasses and enumerations that a value of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {annotation}
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        fields = [hints[field.name] for field in dataclasses.fields(annotation)]
        return {annotation}.union(*map(classes_of, fields))
    if isinstance(annotation, UnionType) or typing.get_origin(annotation) is not None:
        return set().union(*map(classes_of, typing.get_args(annotation)))
    return set()


_CLASSES = {(c.__module__, c.__qualname__): c for c in classes_of(Message)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a message") from None


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Message:
    """The message of `encode`. Raises `ConnectionError` where the bytes are none."""
    try:
        message = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ConnectionError(f"a message cannot be read: {error}") from None
    if not isinstance(message, Message):
        raise ConnectionError(f"a {type(message).__name__} is no message")
    return message
