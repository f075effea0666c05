"""What has come for a call, and signs of life while nothing has."""

import asyncio

from serve_app.call_stream import CallStream
from serve_app.generation import Delta
from tests.serve_app.harness import Gate, call, run, running

DELTA = Delta(0, "a", 1)


def test_nothing_within_the_time_is_an_empty_batch_and_loses_nothing() -> None:
    async def test() -> None:
        stream = CallStream()
        assert await stream.take(0.001) == []
        stream.push(DELTA)
        assert await stream.take(0.001) == [DELTA]
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.push(DELTA)
        assert await waiting == [DELTA]

    run(test)


def test_a_call_that_waits_for_its_first_token_gives_signs_of_life() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as harness:
            batches = harness.serving.generate(call("hx", params={"max_tokens": 2}), sign_of_life_s=0.001)
            assert [await anext(batches) for _ in range(3)] == [[], [], []]
            gate.open()
            text = "".join([delta.text async for batch in batches for delta in batch])
        assert text == "yz"

    run(test)
