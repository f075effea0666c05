"""What a request says to the scheduler and the cache: priority, cache_salt, window; and what it hears of them."""

import asyncio
from typing import Any

import openai
import pytest

from engine.request import AdaptiveWindow
from tests.serve_app.harness import Connection, Gate, Harness, eventually, run, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "abcdef", "max_tokens": 2},
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_they_reach_the_engine(path: str) -> None:
    async def test() -> None:
        async with running() as h:
            given = {"priority": -3, "cache_salt": "pepper", "window": 17}
            for extra in (given, {}, dict.fromkeys(given)):
                assert (await h.post(path, {**BODIES[path], **extra})).status_code == 200
            found = [(r.priority, r.cache_salt, r.window) for r in h.engine.requests]
            assert found == [(-3, "pepper", 17), (0, None, None), (0, None, None)]

    run(test)


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1])
def test_the_largest_and_smallest_priority(value: int) -> None:
    async def test() -> None:
        async with running() as h:
            assert (await h.post(COMPLETIONS, {**BODIES[COMPLETIONS], "priority": value})).status_code == 200
            assert h.engine.requests[0].priority == value

    run(test)


@pytest.mark.parametrize("path", BODIES)
def test_chunks_and_windows_reach_the_engine(path: str) -> None:
    async def test() -> None:
        async with running(decode_chunk=8) as h:
            given = {"decode_chunk": 7, "chunk_overlap": 3, "window": "adaptive"}
            for extra in (given, {}, dict.fromkeys(given)):
                assert (await h.post(path, {**BODIES[path], **extra})).status_code == 200
            found = [(r.decode_chunk, r.chunk_overlap, r.window, r.adaptive_window) for r in h.engine.requests]
            # The adaptive window is that of the config.
            assert found == [
                (7, 3, 17, AdaptiveWindow(least=5, divisor=3)),
                (None, 0, None, None),
                (None, 0, None, None),
            ]

    run(test)


def test_a_lower_priority_starts_earlier() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            first = Connection(h.api.app, COMPLETIONS, BODIES[COMPLETIONS])
            await eventually(lambda: h.serving._thread.seconds_in_step() > 0)
            # Both come while that step is held, in this order.
            later = Connection(h.api.app, COMPLETIONS, {**BODIES[COMPLETIONS], "priority": 5})
            sooner = Connection(h.api.app, COMPLETIONS, {**BODIES[COMPLETIONS], "priority": 4})
            await eventually(lambda: h.serving.stats().num_in_flight == 3)
            gate.open()
            await asyncio.gather(*(connection.task for connection in (first, later, sooner)))
            assert [request.priority for request in h.engine.requests] == [0, 5, 4]
            assert [request.priority for request in h.engine.started] == [0, 4, 5]

    run(test)


async def cached(h: Harness, **extra: object) -> int:
    """`usage.prompt_tokens_details.cached_tokens` of a completion."""
    answer = await h.post(COMPLETIONS, {**BODIES[COMPLETIONS], **extra})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_tells_how_many_prompt_tokens_were_cached() -> None:
    async def test() -> None:
        async with running() as h:
            # Seven tokens with the one that begins the text; the last one is always computed.
            assert [await cached(h), await cached(h), await cached(h, prompt="abcxyz")] == [0, 6, 4]
            assert [await cached(h, cache_salt="s"), await cached(h, cache_salt="s")] == [0, 6]
            body = {**BODIES[COMPLETIONS], "stream": True, "stream_options": {"include_usage": True}}
            connection = Connection(h.api.app, COMPLETIONS, body)
            *_, last, _ = [event async for event in connection.events()]
            await connection.task
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
            assert 'llm_engine_num_cached_tokens_total{replica="0"} 22.0' in (await h.get("/metrics")).text

    run(test)


def test_cached_tokens_of_several_prompts_add_up() -> None:
    async def test() -> None:
        async with running() as h:
            await cached(h)
            assert await cached(h, prompt=["abcdef", "abc"]) == 6 + 3

    run(test)


def test_the_official_client_sends_them() -> None:
    async def test() -> None:
        async with running() as h, h.client as http_client:
            transport: Any = http_client  # releases of the client differ in which httpx they name in their types
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=transport, max_retries=0)
            extra = {"priority": 2, "cache_salt": "s", "window": 9}
            answer = await client.completions.create(model="fake", prompt="a", n=2, max_tokens=2, extra_body=extra)
            assert [choice.index for choice in answer.choices] == [0, 1]
            first = h.engine.requests[0]
            assert (first.priority, first.cache_salt, first.window) == (2, "s", 9)
            assert first.tenant is not None

    run(test)
