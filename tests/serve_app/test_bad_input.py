"""Everything a client can send wrong is a 4xx that names it, and none of it reaches the engine."""

import json
from typing import Any

import pytest

from serve_app.parameters import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION
from tests.serve_app.harness import run, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "a", "max_tokens": 2},
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def check(
    path: str, body: bytes, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> None:
    """The body is refused with that status, a message that holds `message`, and that param."""

    async def test() -> None:
        async with running(max_body_bytes=100_000) as h, h.client as client:
            sent = {"content-type": "application/json", **(headers or {})}
            answer = await client.post(path, content=body, headers=sent)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), error
            assert message in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
            assert h.engine.requests == []

    run(test)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "0.5", "temperature: Input should be a valid number (given: '0.5')"),
        ("temperature", True, "temperature"),
        ("temperature", -0.1, "temperature is -0.1; expected a number in [0, 100]"),
        ("temperature", [1], "temperature"),
        ("top_p", 0, "top_p is 0.0; expected a number in (0, 1]"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_k", -1, "top_k is -1"),
        ("top_k", 1.5, "top_k"),
        ("top_k", True, "top_k"),
        ("min_p", 2, "min_p is 2.0"),
        ("seed", -1, "seed is -1"),
        ("seed", 2**64, "seed is 18446744073709551616"),
        ("seed", "1", "seed"),
        ("max_tokens", 0, "max_tokens is 0; expected an integer of at least 1"),
        ("max_tokens", -5, "max_tokens is -5"),
        ("max_tokens", 10**9, "together at most 64 fit the context"),
        ("max_tokens", 10**30, "together at most 64 fit the context"),
        ("max_tokens", 3.0, "max_tokens"),
        ("max_tokens", "3", "max_tokens"),
        ("stop", 3, "stop: expected a text or a list of texts"),
        ("stop", ["a", 3], "stop: expected a text or a list of texts"),
        ("stop", "", "stop has an empty text"),
        ("stop", ["a", "b", "c", "d", "e"], "stop has 5 texts; this server allows at most 4"),
        ("stop", "x" * 257, "a stop text has 257 characters; this server allows at most 256"),
        ("stop_token_ids", [1.5], "stop_token_ids"),
        ("stop_token_ids", list(range(17)), "expected at most 16 token ids"),
        ("stream", "yes", "stream"),
        ("stream", 1, "stream"),
        ("stream_options", {"include_usage": True}, "stream_options is given without stream"),
        ("ignore_eos", 1, "ignore_eos"),
        ("timeout_s", 0, "timeout_s"),
        ("timeout_s", 1e9, "timeout_s is 1e+09; this server allows at most 3600 seconds"),
        ("user", 5, "user"),
        ("n", 0, "n: Input should be greater than or equal to 1 (given: 0)"),
        ("n", -1, "n: Input should be greater than or equal to 1"),
        ("n", 129, "n: Input should be less than or equal to 128 (given: 129)"),
        ("n", 4, "1 prompts in one request, n is 4; this server holds 3 at a time"),
        ("n", 2.0, "n: Input should be a valid integer"),
        ("n", "2", "n: Input should be a valid integer"),
        ("n", True, "n: Input should be a valid integer"),
        ("priority", 0.5, "priority: Input should be a valid integer"),
        ("priority", "high", "priority: Input should be a valid integer"),
        ("priority", False, "priority: Input should be a valid integer"),
        ("priority", 2**31, "priority: Input should be less than 2147483648"),
        ("priority", -(10**30), "priority: Input should be greater than or equal to -2147483648"),
        ("cache_salt", "", "cache_salt: String should have at least 1 character"),
        ("cache_salt", 7, "cache_salt: Input should be a valid string"),
        ("window", 0, 'window: expected a number of positions of at least 1, or "adaptive" (given: 0)'),
        ("window", -8, '"adaptive" (given: -8)'),
        ("window", 8.5, '"adaptive" (given: 8.5)'),
        ("window", True, '"adaptive" (given: True)'),
        ("window", "full", "\"adaptive\" (given: 'full')"),
        ("window", 2**30, '"adaptive" (given: 1073741824)'),
        ("decode_chunk", 0, "decode_chunk: Input should be greater than or equal to 1"),
        ("decode_chunk", 2, "decode_chunk is above 1"),
        ("decode_chunk", 1.5, "decode_chunk: Input should be a valid integer"),
        ("decode_chunk", True, "decode_chunk: Input should be a valid integer"),
        ("chunk_overlap", -1, "chunk_overlap: Input should be greater than or equal to 0"),
        ("chunk_overlap", "2", "chunk_overlap: Input should be a valid integer"),
        ("chunk_overlap", 2**31, "chunk_overlap: Input should be less than 2147483648"),
        ("rerank", 1, "rerank: Input should be greater than or equal to 2"),
        ("rerank", 17, "rerank: Input should be less than or equal to 16"),
        ("rerank", True, "rerank: Input should be a valid integer"),
        ("rerank", 2, "rerank is not enabled on this server"),
        ("model", "gpt-4", "the model 'gpt-4' does not exist; this server serves 'fake'"),
        ("model", 3, "model"),
        ("temprature", 1, 'temprature is no parameter of this API; did you mean "temperature"?'),
        ("zzz", None, "zzz is no parameter of this API"),
    ],
)
def test_parameters(path: str, name: str, value: object, message: str) -> None:
    status = 404 if value == "gpt-4" else 400
    param = None if name == "stream_options" else name
    check(path, json.dumps({**VALID[path], name: value}).encode(), status, message, param)


def test_an_unknown_name_is_repeated_in_part() -> None:
    body = json.dumps({**VALID[COMPLETIONS], "z" * 5000: 1}).encode()
    check(COMPLETIONS, body, 400, f"{'z' * 80} is no parameter", "z" * 80)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "expected a text, a list of token ids, or a non-empty list of either"),
        ({}, "expected a text"),
        (5, "expected a text"),
        ([1, "a"], "item 0 is neither a text nor a list of token ids"),
        (["a", [1.5]], "item 1 is neither"),
        ([[True]], "item 0 is neither"),
        ([[[1]]], "item 0 is neither"),
        (["a"] * 65, "prompt has 65 items; "),
        ([-1], "prompt has token id -1; expected ids from 0 to 257"),
        ([258], "prompt has token id 258; expected ids from 0 to 257"),
        ([[1], []], "prompt is empty"),
        ([7] * 64, "the prompt has 64 tokens; the context holds 64"),
        ([7] * 63, "the prompt has 63 tokens and max_tokens is 2"),
        ("a" * 20_000, "the prompt has 20001 tokens; the context holds 64"),
        ("half \ud800", "surrogate"),
    ],
)
def test_prompts(prompt: object, message: str) -> None:
    async def test() -> None:
        async with running() as h, h.client as client:
            body = json.dumps({**VALID[COMPLETIONS], "prompt": prompt})
            answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
            assert h.engine.requests == []

    run(test)


def test_an_empty_text_without_bos_is_an_empty_prompt() -> None:
    body = {**VALID[COMPLETIONS], "prompt": "", "add_special_tokens": False}
    check(COMPLETIONS, json.dumps(body).encode(), 400, "prompt is empty", "prompt")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages.0.content: is missing"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 3}], "messages.0.content: expected a text or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a part has the type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part is not of the form"),
        ([{"role": "user", "content": "x", "nmae": "y"}], "messages.0.nmae: unknown field"),
    ],
)
def test_messages(messages: object, message: str) -> None:
    check(CHAT, json.dumps({**VALID[CHAT], "messages": messages}).encode(), 400, message, "messages")


@pytest.mark.parametrize(
    ("path", "extra", "message", "param"),
    [
        (COMPLETIONS, {"logprobs": True}, "logprobs", "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs is 21; this server allows at most 20", "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs", "logprobs"),
        (
            COMPLETIONS,
            {"top_logprobs": 2},
            'top_logprobs is no parameter of this API; did you mean "logprobs"',
            "top_logprobs",
        ),
        (CHAT, {"logprobs": 2}, "logprobs", "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs is given without logprobs: true", None),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21", "top_logprobs"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "expected one of them", None),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens is no parameter", "max_completion_tokens"),
    ],
)
def test_parameters_of_one_endpoint(path: str, extra: dict[str, object], message: str, param: str | None) -> None:
    check(path, json.dumps({**VALID[path], **extra}).encode(), 400, message, param)


NOT_NEUTRAL: dict[str, object] = {
    "best_of": 2,
    "store": True,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "detokenize": False,
    "skip_special_tokens": False,
    "add_generation_prompt": False,
}


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETIONS, name) for name in UNSUPPORTED_COMPLETION] + [(CHAT, name) for name in UNSUPPORTED_CHAT],
)
def test_known_but_unsupported_parameters(path: str, name: str) -> None:
    value = NOT_NEUTRAL.get(name, {"some": "value"})
    check(path, json.dumps({**VALID[path], name: value}).encode(), 400, f"{name} is not supported", name)


def test_unsupported_parameters_are_accepted_with_values_that_change_nothing() -> None:
    async def test() -> None:
        async with running() as h:
            for path, table in ((COMPLETIONS, UNSUPPORTED_COMPLETION), (CHAT, UNSUPPORTED_CHAT)):
                nulls = dict.fromkeys(table)
                neutral = {name: values[0] for name, values in table.items() if values}
                for extra in (nulls, neutral):
                    answer = await h.post(path, {**VALID[path], **extra})
                    assert answer.status_code == 200, answer.text

    run(test)


def test_true_is_no_neutral_number() -> None:
    best = json.dumps({**VALID[COMPLETIONS], "best_of": True}).encode()
    check(COMPLETIONS, best, 400, "best_of is not supported", "best_of")
    zero = json.dumps({**VALID[COMPLETIONS], "presence_penalty": False}).encode()
    check(COMPLETIONS, zero, 400, "presence_penalty is not supported", "presence_penalty")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"[]", "the body is a JSON list; expected an object"),
        (b"null", "expected an object"),
        (b'{"model": "fake", "prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"model": "fake", "prompt": "a", "temperature": -Infinity}', "-Infinity is no JSON number"),
        (b'{"model": "fake", "model": "fake"}', "the key 'model' is there twice"),
        (b'{"model": "\xff\xfe"}', "the body is not UTF-8: byte 11 is 0xff"),
        (b'{"model": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nests too deeply"),
        (b'{"seed": ' + b"9" * 5_000 + b"}", "the body is not valid JSON"),
    ],
)
def test_bodies(body: bytes, message: str) -> None:
    check(COMPLETIONS, body, 400, message)


def test_a_number_beyond_floating_point_is_refused() -> None:
    body = b'{"model": "fake", "prompt": "a", "temperature": 1e999}'
    check(COMPLETIONS, body, 400, "temperature", "temperature")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_limit_is_a_413(declared: bool) -> None:
    async def test() -> None:
        async with running(max_body_bytes=1000) as h, h.client as client:

            async def pieces() -> Any:
                for _ in range(4):
                    yield b"x" * 300

            content = b"x" * 1200 if declared else pieces()
            answer = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert "1000 bytes" in answer.json()["error"]["message"]

    run(test)


def test_other_media_types_are_a_415() -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    check(COMPLETIONS, b"{}", 415, "expected application/json", headers=headers)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_deadline_header_that_is_no_time(value: str) -> None:
    headers = {"x-request-timeout-s": value}
    body = json.dumps(VALID[COMPLETIONS]).encode()
    check(COMPLETIONS, body, 400, f"x-request-timeout-s is '{value}'", "x-request-timeout-s", headers)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "expected exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "expected exactly one"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens has the id 258; expected ids from 0 to 257"),
        ("/detokenize", {"tokens": [-1]}, "tokens has the id -1"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_tokenize_and_detokenize(path: str, body: dict[str, object], message: str) -> None:
    async def test() -> None:
        async with running() as h:
            answer = await h.post(path, body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]

    run(test)


def test_limits_of_the_config_are_the_limits_of_requests() -> None:
    async def test() -> None:
        async with running(max_tokens=5, max_logprobs=1, max_prompts=1) as h:
            for extra, message in (
                ({"max_tokens": 6}, "max_tokens is 6; this server allows at most 5"),
                ({"logprobs": 2}, "logprobs is 2; this server allows at most 1"),
                ({"prompt": ["a", "b"]}, "prompt has 2 items; "),
            ):
                answer = await h.post(COMPLETIONS, {**VALID[COMPLETIONS], **extra})
                assert answer.status_code == 400
                assert message in answer.json()["error"]["message"]

    run(test)
