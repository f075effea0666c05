"""What the HTTP layer talks to: an engine in this process, or the replicas behind a Serve handle."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from serve_app.async_engine import AsyncEngine, AsyncEngineStats
from serve_app.generation import Delta, GenerationCall

SIGN_OF_LIFE_S = 5.0
"""A replica sends something at least this often to each call that it answers."""


@dataclass(frozen=True)
class ReplicaInfo:
    """What a warm replica says of itself."""

    max_model_len: int
    """Context length in tokens."""


class Backend(Protocol):
    """Generates. Errors are those of `engine.errors`."""

    def generate(self, call: GenerationCall) -> AsyncGenerator[list[Delta], None]:
        """See `AsyncEngine.generate`. Closing it cancels the call."""

    async def info(self) -> ReplicaInfo:
        """Raises `OverloadedError` or `EngineDeadError` where no replica is warm and well."""

    async def stats(self) -> dict[str, AsyncEngineStats]:
        """Counters by replica."""

    async def drain(self) -> None:
        """Refuses new calls; returns when those that run have ended."""


class LocalBackend:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def generate(self, call: GenerationCall) -> AsyncGenerator[list[Delta], None]:
        """See `Backend`."""
        return self._engine.generate(call)

    async def info(self) -> ReplicaInfo:
        """See `Backend`."""
        self._engine.check_health()
        return ReplicaInfo(self._engine.max_model_len)

    async def stats(self) -> dict[str, AsyncEngineStats]:
        """See `Backend`."""
        return {"0": self._engine.stats()}

    async def drain(self) -> None:
        """See `Backend`."""
        await self._engine.drain()
