"""Several tokens of a step: told at once, and cut where the answer ends, as if they had come one by one."""

from typing import Any

import pytest

from tests.serve_app.harness import Connection, Harness, run, running

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 12, "logprobs": 1}


async def complete(h: Harness, **body: object) -> dict[str, Any]:
    """A completion's whole answer without what differs from call to call."""
    answer = await h.post(COMPLETIONS, {**BODY, **body})
    assert answer.status_code == 200, answer.text
    return {"choices": answer.json()["choices"], "usage": answer.json()["usage"]}


@pytest.mark.parametrize(
    ("body", "text", "num_tokens", "reason"),
    [
        ({}, "bcdefghijklm", 12, "length"),
        # Within a chunk, at its end, over two chunks, and two in one chunk.
        ({"stop": "de"}, "bc", 4, "stop"),
        ({"stop": "hi"}, "bcdefg", 8, "stop"),
        ({"stop": ["ghijk"]}, "bcdef", 10, "stop"),
        ({"stop": ["fg", "cd"]}, "b", 3, "stop"),
        # What was held back for a stop string that does not come.
        ({"stop": "lmx"}, "bcdefghijklm", 12, "length"),
        ({"stop_token_ids": [ord("e")]}, "bcd", 4, "stop"),
        ({"stop_token_ids": [ord("e")], "stop": "de"}, "bcd", 4, "stop"),
        ({"stop_token_ids": [ord("e")], "stop": "cd"}, "b", 3, "stop"),
        ({"prompt": "!!!a"}, "bcd", 4, "stop"),
        ({"prompt": "!!!a", "stop": "d"}, "bc", 3, "stop"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_an_answer_does_not_depend_on_the_chunk(
    chunk: int, body: dict[str, Any], text: str, num_tokens: int, reason: str
) -> None:
    async def test() -> None:
        async with running(decode_chunk=64) as h:
            answer = await complete(h, decode_chunk=chunk, **body)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text, reason)
            assert answer["usage"]["completion_tokens"] == num_tokens
            # Log-probabilities are those of the tokens that count, and no others.
            tokens = choice["logprobs"]["tokens"]
            assert len(tokens) == len(choice["logprobs"]["token_logprobs"]) == num_tokens
            assert "".join(tokens).startswith(text)
            await h.idle()
            assert not h.engine.running

    run(test)


def test_the_tokens_of_a_chunk_come_in_one_event() -> None:
    async def test() -> None:
        async with running(decode_chunk=8) as h:
            connection = Connection(h.api.app, COMPLETIONS, {**BODY, "stream": True, "max_tokens": 4})
            *events, _ = [event async for event in connection.events()]
            await connection.task
            assert [event["choices"][0]["text"] for event in events] == ["bcde"]

    run(test)


def test_tokens_that_came_first_together_are_not_measured() -> None:
    async def test() -> None:
        async with running(decode_chunk=8) as h:
            await complete(h, max_tokens=8)
            assert "llm_time_per_output_token_seconds_count 0.0" in (await h.get("/metrics")).text
            await complete(h, max_tokens=9)
            await complete(h, max_tokens=9, decode_chunk=1)
            assert "llm_time_to_first_token_seconds_count 3.0" in (await h.get("/metrics")).text

    run(test)
