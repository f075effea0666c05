"""The deployment that owns an engine: one replica, one mesh."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve

from engine.errors import EngineError
from serve_app.async_engine import AsyncEngine, AsyncEngineStats
from serve_app.backend import SIGN_OF_LIFE_S, ReplicaInfo
from serve_app.config import AppConfig
from serve_app.console import StartUpLines, configure_logging, say, told_on_failure
from serve_app.factories import EngineFactory
from serve_app.generation import Delta, GenerationCall


class Replica:
    """Holds a warm engine. Serve sends it nothing before its constructor is through."""

    def __init__(self, config: AppConfig, engine_factory: EngineFactory) -> None:
        """Builds the engine and compiles its programs. Raises what the factory raises."""
        configure_logging(config.log_level)
        with told_on_failure("an engine replica"):
            self._engine = _warm_engine(config, engine_factory)

    async def generate(self, call: GenerationCall) -> AsyncIterator[list[Delta] | EngineError]:
        """Yields what `AsyncEngine.generate` does, with signs of life; an error comes last (see `HandleBackend`)."""
        try:
            # Closed with this generator, and not when it is collected: the slot must be free at once.
            async with aclosing(self._engine.generate(call, SIGN_OF_LIFE_S)) as batches:
                async for deltas in batches:
                    yield deltas
        except EngineError as error:
            yield error

    async def info(self) -> ReplicaInfo:
        """Raises `EngineDeadError` where the engine has stopped."""
        self._engine.check_health()
        return ReplicaInfo(self._engine.max_model_len)

    async def stats(self) -> tuple[str, AsyncEngineStats]:
        """This replica's id and counters."""
        return serve.get_replica_context().replica_tag, self._engine.stats()

    async def drain(self) -> None:
        """Refuses new calls; returns when those that run have ended."""
        await self._engine.drain()

    def check_health(self) -> None:
        """Serve's health check: where it raises, the replica is replaced."""
        self._engine.check_health()

    async def __del__(self) -> None:
        """Serve's shut-down hook, after the running calls have ended (or their time is up)."""
        engine: Any = getattr(self, "_engine", None)
        if engine is not None:
            await asyncio.to_thread(engine.stop)


def _warm_engine(config: AppConfig, engine_factory: EngineFactory) -> AsyncEngine:
    engine, tokenizer = engine_factory(config)
    serving = AsyncEngine(
        engine, tokenizer, max_in_flight=config.max_in_flight, step_timeout_s=config.serving.step_timeout_s
    )
    started_at = time.monotonic()
    programs = serving.warm_up(StartUpLines().programs)
    say(f"programs compiled: {len(programs)} in {time.monotonic() - started_at:.1f} s")
    return serving
