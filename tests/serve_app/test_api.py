"""The endpoints: what a client gets, streamed and whole, and what happens when it goes away."""

import asyncio
import logging
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest

from tests.serve_app.harness import Connection, Gate, Harness, eventually, run, running

CHAT = [{"role": "user", "content": "hi"}]


async def stream(harness: Harness, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a streamed answer."""
    connection = Connection(harness.api.app, path, {"model": "fake", "stream": True, **body})
    start = await connection.sent.get()
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    events = [event async for event in connection.events()]
    await connection.task
    return events


def test_completion() -> None:
    async def test() -> None:
        async with running() as h:
            answer = (await h.post("/v1/completions", {"model": "fake", "prompt": "hx", "max_tokens": 4})).json()
            assert answer["object"] == "text_completion"
            assert answer["choices"] == [{"index": 0, "text": "yzab", "logprobs": None, "finish_reason": "length"}]
            assert answer["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 0},
            }

    run(test)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bc"]),
        ([97], ["bc"]),
        (["a", "m"], ["bc", "no"]),
        ([[97], [109]], ["bc", "no"]),
        (["a", [109]], ["bc", "no"]),
    ],
)
def test_every_form_of_prompt(prompt: object, texts: list[str]) -> None:
    async def test() -> None:
        async with running() as h:
            answer = (await h.post("/v1/completions", {"model": "fake", "prompt": prompt, "max_tokens": 2})).json()
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))

    run(test)


def test_special_tokens_are_recognised_in_a_prompt_and_bos_can_be_left_out() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "prompt": "a<eos>b", "max_tokens": 1}
            await h.post("/v1/completions", body)
            await h.post("/v1/completions", {**body, "add_special_tokens": False})
            assert [request.prompt_token_ids for request in h.engine.requests] == [(257, 97, 256, 98), (97, 256, 98)]

    run(test)


def test_a_completion_that_names_no_limit_gets_the_default_or_what_the_context_leaves() -> None:
    async def test() -> None:
        async with running(default_max_tokens=5) as h:
            short = (await h.post("/v1/completions", {"model": "fake", "prompt": "a"})).json()
            long = (await h.post("/v1/completions", {"model": "fake", "prompt": [97] * 61})).json()
            assert [a["usage"]["completion_tokens"] for a in (short, long)] == [5, 3]
            chat = (await h.post("/v1/chat/completions", {"model": "fake", "messages": CHAT})).json()
            assert chat["usage"]["total_tokens"] == 64

    run(test)


def test_a_completion_is_streamed_step_by_step() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body = {"model": "fake", "stream": True, "prompt": "hx", "max_tokens": 3}
            connection = Connection(h.api.app, "/v1/completions", body)
            events = connection.events()
            for text, finish_reason in (("y", None), ("z", None), ("a", "length")):
                gate.let_through(1)
                choice = (await anext(events))["choices"][0]
                assert (choice["text"], choice["finish_reason"]) == (text, finish_reason)
            assert [event async for event in events] == ["[DONE]"]
            await connection.task

    run(test)


def test_usage_of_a_stream_comes_last_where_it_is_asked_for() -> None:
    async def test() -> None:
        async with running() as h:
            body: dict[str, Any] = {"prompt": "hx", "max_tokens": 3}
            plain = await stream(h, "/v1/completions", body)
            assert all("usage" not in event for event in plain[:-1])
            *chunks, last, done = await stream(
                h, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
            )
            assert done == "[DONE]"
            assert last["choices"] == []
            assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 3)
            assert all(chunk["usage"] is None for chunk in chunks)

    run(test)


def test_chat_completion() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "messages": CHAT, "max_completion_tokens": 3}
            answer = (await h.post("/v1/chat/completions", body)).json()
            assert answer["object"] == "chat.completion"
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}
            assert bytes(h.engine.requests[0].prompt_token_ids) == b"u:hi;a:"

    run(test)


def test_a_streamed_chat_begins_with_the_role() -> None:
    async def test() -> None:
        async with running() as h:
            first, *chunks, done = await stream(h, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3})
            assert first["object"] == "chat.completion.chunk"
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abc"
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
            assert done == "[DONE]"

    run(test)


def test_text_parts_are_joined() -> None:
    async def test() -> None:
        async with running() as h:
            parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
            body = {"model": "fake", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            assert (await h.post("/v1/chat/completions", body)).status_code == 200
            assert bytes(h.engine.requests[0].prompt_token_ids) == b"u:hi\nyou;a:"

    run(test)


def test_stop_strings_end_the_text() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "prompt": "a", "max_tokens": 30, "stop": ["zz", "efg"]}
            choice = (await h.post("/v1/completions", body)).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("bcd", "stop")
            chunks = await stream(h, "/v1/completions", body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "bcd"

    run(test)


def test_log_probabilities_of_a_completion() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "prompt": "a", "max_tokens": 2, "logprobs": 2}
            logprobs = (await h.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
            assert logprobs == {
                "tokens": ["b", "c"],
                "token_logprobs": [-0.5, -0.5],
                "top_logprobs": [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
                "text_offset": [0, 1],
            }

    run(test)


def test_log_probabilities_of_a_chat() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "messages": CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
            logprobs = (await h.post("/v1/chat/completions", body)).json()["choices"][0]["logprobs"]
            entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
            assert logprobs == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}

    run(test)


def test_sampling_parameters_reach_the_engine() -> None:
    async def test() -> None:
        async with running() as h:
            given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "stop_token_ids": [3, 4]}
            await h.post(
                "/v1/completions", {"model": "fake", "prompt": "a", "max_tokens": 1, "ignore_eos": True, **given}
            )
            params = h.engine.requests[0].params
            assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
            assert (params.seed, params.stop_token_ids, params.ignore_eos) == (11, (3, 4), True)

    run(test)


def test_requests_without_a_seed_get_different_ones() -> None:
    async def test() -> None:
        async with running() as h:
            for _ in range(2):
                await h.post("/v1/completions", {"model": "fake", "prompt": "a", "max_tokens": 1})
            first, second = (request.params.seed for request in h.engine.requests)
            assert first != second

    run(test)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_slot_within_one_step(streamed: bool) -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body = {"model": "fake", "stream": streamed, "prompt": "a", "max_tokens": 60}
            connection = Connection(h.api.app, "/v1/completions", body)
            gate.let_through(1)
            await eventually(lambda: h.engine.num_steps == 1)
            if streamed:
                assert (await connection.sent.get())["type"] == "http.response.start"
            connection.hang_up()
            await connection.task
            gate.let_through(2)
            await h.idle()
            assert h.engine.num_steps <= 3
            assert h.serving.stats().num_ended == {"aborted": 1}
            assert b"llm_client_disconnects_total 1.0" in h.api.metrics.render({})

    run(test)


def test_a_cancelled_server_task_frees_its_slot() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            connection = Connection(h.api.app, "/v1/completions", {"model": "fake", "prompt": "a", "max_tokens": 60})
            await eventually(lambda: h.serving.stats().num_in_flight == 1)
            connection.task.cancel()
            await asyncio.wait([connection.task])
            gate.let_through(3)
            await h.idle()

    run(test)


@pytest.mark.parametrize("how", ["body", "header"])
def test_a_missed_deadline_is_a_504(how: str) -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body: dict[str, object] = {"model": "fake", "prompt": "a"}
            headers = {}
            if how == "body":
                body["timeout_s"] = 0.01
            else:
                headers["x-request-timeout-s"] = "0.01"
            answer = await h.post("/v1/completions", body, headers=headers)
            assert answer.status_code == 504
            assert answer.json()["error"] == {
                "message": "the request did not finish within 0.01 s",
                "type": "timeout_error",
                "param": None,
                "code": "deadline_exceeded",
            }

    run(test)


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def test() -> None:
        async with running(fail_at_step=3) as h:
            events = await stream(h, "/v1/completions", {"prompt": "a", "max_tokens": 20})
            assert events[-1]["error"]["code"] == "engine_dead"
            assert "secret" not in str(events)
            assert "[DONE]" not in events

    run(test)


def test_a_dead_engine_is_a_503_and_is_not_ready_but_alive() -> None:
    async def test() -> None:
        async with running(fail_at_step=1) as h:
            for _ in range(2):
                answer = await h.post("/v1/completions", {"model": "fake", "prompt": "a"})
                assert answer.status_code == 503
                assert answer.json()["error"]["type"] == "service_unavailable_error"
                assert "secret" not in answer.text
            assert (await h.get("/ready")).status_code == 503
            assert (await h.get("/health")).status_code == 200

    run(test)


def test_a_full_queue_is_a_503_at_once_with_retry_after() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body = {"model": "fake", "prompt": "a", "max_tokens": 2}
            held = [Connection(h.api.app, "/v1/completions", body) for _ in range(3)]
            await eventually(lambda: h.serving.stats().num_in_flight == 3)
            answer = await h.post("/v1/completions", {**body, "stream": True})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "overloaded_error"
            gate.open()
            await asyncio.gather(*(connection.task for connection in held))
            assert (await h.post("/v1/completions", body)).status_code == 200

    run(test)


def test_draining_refuses_with_a_503_and_finishes_what_runs() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            body = {"model": "fake", "prompt": "a", "max_tokens": 2}
            held = Connection(h.api.app, "/v1/completions", body)
            await eventually(lambda: h.serving.stats().num_in_flight == 1)
            drained = asyncio.ensure_future(h.api.drain())
            await eventually(lambda: h.serving.stats().draining)
            answer = await h.post("/v1/completions", body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
            gate.open()
            await drained
            assert (await held.sent.get())["status"] == 200
            await held.task

    run(test)


def test_a_replica_that_knows_of_no_drain_gets_nothing_new() -> None:
    async def test() -> None:
        async with running() as h:
            drained = AsyncMock()
            h.serving.drain = drained  # type: ignore[method-assign]
            assert (await h.get("/ready")).status_code == 200
            await h.api.drain()
            drained.assert_awaited_once()
            chat = {"model": "fake", "messages": CHAT}
            for path, body in (("completions", {"model": "fake", "prompt": "a"}), ("chat/completions", chat)):
                for streamed in (True, False):
                    answer = await h.post(f"/v1/{path}", {**body, "stream": streamed})
                    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
                    assert int(answer.headers["retry-after"]) >= 1
            assert h.engine.requests == []
            assert (await h.get("/ready")).status_code == 503
            assert (await h.get("/health")).status_code == 200

    run(test)


def test_a_fault_of_our_own_shows_the_request_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running() as h:
            h.serving.generate = broken  # type: ignore[method-assign]
            answer = await h.post(
                "/v1/completions", {"model": "fake", "prompt": "a"}, headers={"x-request-id": "ticket-7"}
            )
            assert answer.status_code == 500
            assert "ticket-7" in answer.json()["error"]["message"]
            assert "secret" not in answer.text

    async def broken(call: object) -> Any:
        raise ZeroDivisionError("secret inner detail")
        yield

    run(test)
    assert "secret inner detail" in caplog.text


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
def test_the_user_is_logged_once_with_the_request_id(prompts: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_app")
    user = "alice\nrequest x is of the user 'bob'" + "." * 100

    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "prompt": prompts, "max_tokens": 1, "user": user}
            answer = await h.post("/v1/completions", body, headers={"x-request-id": "ticket-7"})
            assert answer.status_code == 200

    run(test)
    (line,) = [record.getMessage() for record in caplog.records if "of the user" in record.getMessage()]
    assert line == f"request ticket-7 is of the user {user!r}"[: len("request ticket-7 is of the user ") + 64]
    assert "\\n" in line


def test_request_ids_are_kept_or_made() -> None:
    async def test() -> None:
        async with running() as h:
            body = {"model": "fake", "prompt": "a", "max_tokens": 1}
            kept = await h.post("/v1/completions", body, headers={"x-request-id": "mine.1"})
            assert kept.headers["x-request-id"] == "mine.1"
            assert "mine.1" in kept.json()["id"]
            made = await h.post("/v1/completions", body, headers={"x-request-id": "no spaces, please"})
            assert made.headers["x-request-id"] != "no spaces, please"
            assert len(made.headers["x-request-id"]) == 32

    run(test)


def test_models_tokenize_detokenize_version_and_metrics() -> None:
    async def test() -> None:
        async with running() as h:
            models = (await h.get("/v1/models")).json()
            assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("fake", 64)]
            assert (await h.get("/v1/models/fake")).json()["id"] == "fake"
            assert (await h.get("/v1/models/other")).status_code == 404
            assert (await h.post("/tokenize", {"prompt": "hi"})).json() == {"count": 3, "tokens": [257, 104, 105]}
            chat = (await h.post("/tokenize", {"messages": CHAT})).json()["tokens"]
            assert bytes(chat) == b"u:hi;a:"
            assert (await h.post("/detokenize", {"tokens": [104, 256]})).json() == {"prompt": "h<eos>"}
            assert (await h.get("/ready")).json()["max_model_len"] == 64
            assert "version" in (await h.get("/version")).json()
            await h.post("/v1/completions", {"model": "fake", "prompt": "a", "max_tokens": 5})
            text = (await h.get("/metrics")).text
            assert "llm_completion_tokens_total 5.0" in text
            assert 'llm_engine_num_steps_total{replica="0"} 5.0' in text
            assert 'llm_http_requests_total{path="/v1/completions",status="200"} 1.0' in text
            assert "llm_time_to_first_token_seconds_count 1.0" in text

    run(test)


def test_paths_and_methods_that_are_not_there() -> None:
    async def test() -> None:
        async with running() as h:
            nowhere = await h.get("/v1/nothing")
            assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
            wrong = await h.get("/v1/completions")
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
            assert "POST" in wrong.headers["allow"]

    run(test)


def test_the_official_client() -> None:
    async def test() -> None:
        async with running() as h, h.client as http_client:
            transport: Any = http_client  # releases of the client differ in which httpx they name in their types
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=transport, max_retries=0)
            completion = await client.completions.create(model="fake", prompt="hx", max_tokens=3)
            assert completion.choices[0].text == "yza"
            chat = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
            assert chat.choices[0].message.content == "abc"
            pieces = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
            )
            assert "".join([piece.choices[0].delta.content or "" async for piece in pieces]) == "abc"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="fake", prompt="hx", presence_penalty=0.5)
            assert caught.value.param == "presence_penalty"
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="gpt-4", prompt="hx")

    run(test)
