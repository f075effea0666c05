"""Several answers to one prompt (`n`): told apart, drawn from seeds of their own, admitted and ended together.

At temperature 2 the fake engine's letters are further on by the seed: after "a", seed 1 gives "ceg", seed 2 "dgj".
"""

import asyncio
from typing import Any

import pytest

from engine.errors import InvalidRequestError, QueueFullError
from engine.request import SamplingParams
from serve_app.generation import Delta, GenerationCall
from serve_app.responses import Usage
from tests.serve_app.harness import Connection, Gate, Harness, call, eventually, run, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEEDED: dict[str, Any] = {"model": "fake", "temperature": 2, "seed": 1, "max_tokens": 3}
CONVERSATION = [{"role": "user", "content": "hi"}]


async def complete(h: Harness, **body: object) -> dict[str, Any]:
    """A completion's whole answer."""
    answer = await h.post(COMPLETIONS, {**SEEDED, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(h: Harness, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a streamed answer, without the closing one."""
    connection = Connection(h.api.app, path, {**SEEDED, "stream": True, **body})
    found = [event async for event in connection.events()]
    await connection.task
    assert found.pop() == "[DONE]"
    return found


def test_choice_i_is_what_the_seed_plus_i_gives_alone() -> None:
    async def test() -> None:
        async with running() as h:
            several = await complete(h, prompt="a", n=3)
            assert [(c["index"], c["text"]) for c in several["choices"]] == [(0, "ceg"), (1, "dgj"), (2, "eim")]
            for i, choice in enumerate(several["choices"]):
                alone = await complete(h, prompt="a", seed=1 + i)
                assert [c["text"] for c in alone["choices"]] == [choice["text"]]

    run(test)


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    async def test() -> None:
        async with running() as h:
            h.serving._max_in_flight = h.engine.max_queue_len = 4
            answer = await complete(h, prompt=["a", "m"], n=2)
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [
                (0, "ceg"),
                (1, "dgj"),
                (2, "oqs"),
                (3, "psv"),
            ]

    run(test)


def test_the_largest_seed_is_followed_by_zero() -> None:
    generation = GenerationCall("r", ((97,),), SamplingParams(seed=2**64 - 1), choices_per_prompt=2)
    assert [generation.request_seed(index) for index in range(2)] == [2**64 - 1, 0]


def test_one_choice_keeps_the_seed_of_the_request_for_every_prompt() -> None:
    async def test() -> None:
        async with running() as h:
            for extra in ({}, {"n": 1}, {"n": None}):
                await complete(h, prompt=["a", "b"], seed=11, **extra)
            assert [request.params.seed for request in h.engine.requests] == [11] * 6

    run(test)


def test_choices_without_a_seed_differ_too() -> None:
    async def test() -> None:
        async with running() as h:
            answer = await complete(h, prompt="a", n=3, seed=None)
            assert len({choice["text"] for choice in answer["choices"]}) == 3

    run(test)


def test_usage_counts_each_prompt_once_and_every_answer() -> None:
    async def test() -> None:
        async with running() as h:
            usage = (await complete(h, prompt="abc", n=3))["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 9, 13)
            # Two of the three found what the first one computed; the request as a whole found nothing.
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
            *_, last = await events(
                h, COMPLETIONS, {"prompt": "abc", "n": 2, "stream_options": {"include_usage": True}}
            )
            assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 6)
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
            metrics = (await h.get("/metrics")).text
            assert "llm_prompt_tokens_total 8.0" in metrics
            assert "llm_completion_tokens_total 15.0" in metrics

    run(test)


def test_cached_tokens_are_those_of_each_prompts_least_lucky_choice() -> None:
    usage = Usage(num_prompt_tokens=20, choices_per_prompt=2)
    for index, num_cached_tokens in ((0, 8), (1, 5), (2, 0), (3, 7)):
        usage.add(Delta(index, "x", 1, num_cached_tokens=num_cached_tokens))
        usage.add(Delta(index, "y", 2))
    assert usage.num_cached_tokens == 5


def test_choices_of_a_chat() -> None:
    async def test() -> None:
        async with running() as h:
            answer = (await h.post(CHAT, {**SEEDED, "messages": CONVERSATION, "n": 2})).json()
            assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "bdf"), (1, "cfi")]

    run(test)


def test_streamed_choices_are_told_apart_and_each_ends() -> None:
    async def test() -> None:
        async with running() as h:
            chunks = await events(h, COMPLETIONS, {"prompt": "a", "n": 3})
            choices = [chunk["choices"][0] for chunk in chunks]
            for index, text in enumerate(("ceg", "dgj", "eim")):
                own = [choice for choice in choices if choice["index"] == index]
                assert "".join(choice["text"] for choice in own) == text
                assert [c["finish_reason"] for c in own][-1] == "length"
            chat = await events(h, CHAT, {"messages": CONVERSATION, "n": 2})
            opening = [chunk["choices"][0] for chunk in chat[:2]]
            assert [(c["index"], c["delta"]["role"]) for c in opening] == [(0, "assistant"), (1, "assistant")]

    run(test)


def test_log_probabilities_are_those_of_the_choice() -> None:
    async def test() -> None:
        async with running() as h:
            answer = await complete(h, prompt="a", n=2, logprobs=1)
            assert [c["logprobs"]["tokens"] for c in answer["choices"]] == [["c", "e", "g"], ["d", "g", "j"]]

    run(test)


def test_a_stop_string_ends_its_choice_only() -> None:
    async def test() -> None:
        async with running() as h:
            answer = await complete(h, prompt="a", n=2, stop="eg", max_tokens=5)
            assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("c", "stop"), ("dgjmp", "length")]

    run(test)


def test_a_client_that_goes_away_ends_every_choice() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body = {**SEEDED, "prompt": "a", "n": 3, "max_tokens": 60}
            connection = Connection(h.api.app, COMPLETIONS, body)
            await eventually(lambda: h.serving.stats().num_in_flight == 3)
            connection.hang_up()
            await connection.task
            gate.let_through(2)
            await h.idle()
            assert h.serving.stats().num_ended == {"aborted": 3}

    run(test)


def test_choices_are_admitted_together_or_not_at_all() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:

            async def collect(generation: GenerationCall) -> None:
                async for _ in h.serving.generate(generation):
                    pass

            task = asyncio.ensure_future(collect(call("a", choices_per_prompt=2)))
            await eventually(lambda: h.serving.stats().num_in_flight == 2)
            with pytest.raises(QueueFullError, match="2 of 3 places are taken, 2 wanted"):
                await collect(call("a", choices_per_prompt=2))
            assert h.serving.stats().num_in_flight == 2
            with pytest.raises(InvalidRequestError, match="2 prompts in one request, n is 2; this server") as caught:
                await collect(call("a", "b", choices_per_prompt=2))
            assert caught.value.param == "n"
            gate.open()
            await task

    run(test)
