"""The deployment that speaks HTTP, and its way to the engine replicas."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from engine.errors import EngineDeadError, EngineError, QueueFullError
from serve_app.api import Api
from serve_app.async_engine import AsyncEngineStats
from serve_app.backend import SIGN_OF_LIFE_S, ReplicaInfo
from serve_app.config import AppConfig
from serve_app.console import configure_logging, say, told_on_failure
from serve_app.errors import NotReadyError
from serve_app.factories import TextFactory
from serve_app.generation import Delta, GenerationCall

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

# How long questions about a replica (not generation) may take.
_ASK_TIMEOUT_S = 5.0

# Several signs of life.
SILENCE_LIMIT_S = 4 * SIGN_OF_LIFE_S

_REPLICA_SILENT = "the replica that served this request is silent; try again"
_REPLICA_DIED = "the replica that served this request died; try again"


class HandleBackend:
    """The engine replicas behind a Serve handle; see `serve_app.backend.Backend`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streams = handle.options(method_name="generate", stream=True)

    async def generate(self, call: GenerationCall) -> AsyncGenerator[list[Delta], None]:
        """Errors travel as items: an exception would arrive wrapped by Ray and fill its log with tracebacks."""
        response = cast(DeploymentResponseGenerator, self._streams.remote(call))
        ended = False
        try:
            async with aclosing(_until_silent(response)) as items:
                async for item in items:
                    if isinstance(item, EngineError):
                        ended = True
                        raise item
                    if item:
                        yield item
            ended = True
        except BackPressureError:
            raise QueueFullError("every replica's queue is full; try again later") from None
        except (RayError, RayServeException) as error:
            raise EngineDeadError(_REPLICA_DIED) from error
        except asyncio.CancelledError:
            # Ray reports a call that died with its replica as cancelled, too; only ours is a cancellation.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineDeadError(_REPLICA_DIED) from None
        finally:
            if not ended:
                response.cancel()

    async def info(self) -> ReplicaInfo:
        """See `Backend`."""
        return await _answer(self._handle.info.remote())

    async def stats(self) -> dict[str, AsyncEngineStats]:
        """See `Backend`."""
        return dict(await _answer(self._handle.broadcast("stats").results_async()))

    async def drain(self) -> None:
        """See `Backend`. A replica that dies, or of which there is none, has nothing more to end: it is logged."""
        try:
            outcomes = await self._handle.broadcast("drain").results_async(return_exceptions=True)
        except (RayError, RayServeException) as error:
            outcomes = [error]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                logger.warning("a replica did not drain to its end: %s: %s", type(outcome).__name__, outcome)


async def _until_silent(response: AsyncIterator[Item]) -> AsyncGenerator[Item, None]:
    """The items of a call. Raises `EngineDeadError` where its replica, having begun, gives no sign of life any more.

    A machine that vanishes closes no connection: nothing else would tell for minutes. Before the first item the call
    may be waiting for a replica; that ends at its deadline.
    """
    limit_s: float | None = None
    while True:
        try:
            async with asyncio.timeout(limit_s):
                item = await anext(response)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise EngineDeadError(_REPLICA_SILENT) from None
        yield item
        limit_s = SILENCE_LIMIT_S


async def _answer(question: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(question, _ASK_TIMEOUT_S)
    except TimeoutError:
        raise NotReadyError("no replica is ready yet", retry_after_s=5) from None
    except (RayError, RayServeException) as error:
        raise EngineDeadError("no replica answers") from error


@serve.ingress()
class Ingress:
    """One ingress process: HTTP, validation, text, streaming."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an async constructor
        self, config: AppConfig, text_factory: TextFactory, replicas: DeploymentHandle
    ) -> None:
        configure_logging(config.log_level)
        self._backend = HandleBackend(replicas)
        with told_on_failure("an ingress process"):
            text = text_factory(config)
        self._api = Api(self._backend, text, config, returns_request_id=False)
        # The reference keeps the task alive; nobody waits for it.
        self._announcement = asyncio.create_task(_announce(self._backend, config.model.name))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the application after the constructor."""
        return self._api.app

    async def drain(self) -> None:
        """Refuses new requests on every replica; returns when those that run have ended."""
        await self._api.drain()


async def _announce(backend: HandleBackend, model: str) -> None:
    """Waits for the first warm replica and says where the server answers."""
    while True:
        try:
            await backend.info()
            break
        except EngineError:
            await asyncio.sleep(1.0)
    url = _address()
    say(
        f"ready: {model} at {url}  try:  curl {url}/v1/completions -H 'content-type: application/json'"
        f""" -d '{{"model":"{model}","prompt":"Hello","max_tokens":16}}'"""
    )


def _address() -> str:
    """Where Serve's proxies listen, and the path under which this application does."""
    client = _get_global_client()
    assert client is not None  # this runs in a replica
    options = client.http_config
    host = "127.0.0.1" if options.host in (None, "0.0.0.0", "::") else options.host
    details = client.get_serve_details()["applications"][serve.get_replica_context().app_name]
    return f"http://{host}:{options.port}{(details['route_prefix'] or '').rstrip('/')}"
