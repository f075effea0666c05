"""The serving layer in one process, over the fake engine, driven by hand-made ASGI messages."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from engine.request import SamplingParams
from serve_app.api import Api
from serve_app.async_engine import AsyncEngine
from serve_app.backend import LocalBackend
from serve_app.config import AppConfig, parse_app_config
from serve_app.generation import GenerationCall
from tests.fakes.engine import ByteTokenizer, FakeEngine
from tests.fakes.serving import TEMPLATE, fake_text

Message = dict[str, Any]

NUM_SLOTS, MAX_QUEUE_LEN, MAX_MODEL_LEN = 2, 1, 64


class Gate:
    """Lets the fake engine's steps through one by one. Open it at the end, or its thread stays in a step."""

    def __init__(self) -> None:
        self.semaphore = threading.Semaphore(0)

    def let_through(self, num_steps: int) -> None:
        """Lets that many steps run."""
        self.semaphore.release(num_steps)

    def open(self) -> None:
        """Lets every step run."""
        self.semaphore.release(1_000)


def app_config(
    auth: Mapping[str, object] | None = None,
    decode_chunk: int = 1,
    max_queue_len: int = MAX_QUEUE_LEN,
    **limits: object,
) -> AppConfig:
    """A config whose model is called "fake"."""
    return parse_app_config(
        {
            "model": {"source": "nowhere/fake", "adaptive_window": {"least": 5, "divisor": 3, "most": 17}},
            "engine": {
                "num_slots": NUM_SLOTS,
                "max_queue_len": max_queue_len,
                "max_model_len": MAX_MODEL_LEN,
                "decode_chunk": decode_chunk,
            },
            "limits": limits,
            "auth": auth or {},
        }
    )


class Harness:
    """Fake engine, `AsyncEngine` and API."""

    def __init__(self, engine: FakeEngine, config: AppConfig) -> None:
        self.engine = engine
        self.serving = AsyncEngine(
            engine, ByteTokenizer(TEMPLATE), max_in_flight=config.max_in_flight, step_timeout_s=600.0
        )
        self.api = Api(LocalBackend(self.serving), fake_text(config), config)

    @property
    def client(self) -> httpx.AsyncClient:
        """A client that reads whole bodies."""
        transport = httpx.ASGITransport(self.api.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, body: Mapping[str, object], **options: Any) -> httpx.Response:
        """POSTs a JSON body."""
        async with self.client as client:
            return await client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """GETs a path."""
        async with self.client as client:
            return await client.get(path, **options)

    async def idle(self) -> None:
        """Returns once the engine holds no request."""
        await eventually(lambda: self.serving.stats().num_in_flight == 0)


@asynccontextmanager
async def running(
    gate: Gate | None = None,
    fail_at_step: int | None = None,
    auth: Mapping[str, object] | None = None,
    decode_chunk: int = 1,
    max_queue_len: int = MAX_QUEUE_LEN,
    **limits: object,
) -> AsyncIterator[Harness]:
    """A harness whose engine thread ends with the block."""
    engine = FakeEngine(
        num_slots=NUM_SLOTS,
        max_queue_len=max_queue_len,
        max_model_len=MAX_MODEL_LEN,
        decode_chunk=decode_chunk,
        gate=None if gate is None else gate.semaphore,
        fail_at_step=fail_at_step,
    )
    harness = Harness(engine, app_config(auth, decode_chunk, max_queue_len, **limits))
    try:
        yield harness
    finally:
        if gate is not None:
            gate.open()
        harness.serving.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds; other threads and tasks run meanwhile. The limit only ends a broken test."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs an async test to its end."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


def call(*prompts: str, **options: Any) -> GenerationCall:
    """A call with text prompts; `params` are keywords of `SamplingParams`."""
    params = SamplingParams(**{"max_tokens": 6, **options.pop("params", {})})
    return GenerationCall("r", tuple(tuple(prompt.encode()) for prompt in prompts), params, **options)


class Connection:
    """One HTTP connection, message by message: sees each write when it is made, and can hang up."""

    def __init__(
        self, app: Any, path: str, body: Mapping[str, object] | bytes, method: str = "POST", *, is_whole: bool = True
    ) -> None:
        """`is_whole`: whether `body` is all of it; otherwise the rest never comes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self._hung_up = asyncio.Event()
        self._inbox: list[Message] = [{"type": "http.request", "body": raw, "more_body": not is_whole}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self.sent.put))

    async def _receive(self) -> Message:
        if self._inbox:
            return self._inbox.pop(0)
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    def hang_up(self) -> None:
        """The client goes away."""
        self._hung_up.set()

    async def events(self) -> AsyncIterator[Any]:
        """The data of each server-sent event as it is written: parsed JSON, or "[DONE]"."""
        while True:
            message = await self.sent.get()
            for line in message.get("body", b"").decode().split("\n\n"):
                if line:
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
