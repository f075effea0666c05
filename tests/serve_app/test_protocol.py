"""What a body may hold, and that a long one that is wrong costs no more than a short one."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import InvalidRequestError
from serve_app import protocol
from serve_app.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from serve_app.strict import StrictModel

HI = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "fake", "messages": [HI]}
MANY = 10_000


def chat(**extra: object) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps(CHAT | extra).encode())


@pytest.mark.parametrize(
    ("model", "body", "first"),
    [
        (ChatCompletionRequest, {**CHAT, "messages": [HI] + [0] * MANY}, "messages.1: Input should be a valid dict"),
        (TokenizeRequest, {"messages": [HI] + [0] * MANY}, "messages.1: Input should be a valid dict"),
        (DetokenizeRequest, {"tokens": [5] + ["a"] * MANY}, "tokens.1: Input should be a valid integer"),
        (
            CompletionRequest,
            {"model": "fake", "prompt": "a", "stop_token_ids": [5] + [1.5] * MANY},
            "stop_token_ids.1: Input should be a valid integer",
        ),
        (CompletionRequest, {"model": "fake", "prompt": ["a"] + [1.5] * MANY}, "prompt: item 1 is neither"),
        (CompletionRequest, {"model": "fake", "prompt": "a", "stop": ["a"] + [1] * MANY}, "stop: expected"),
        (
            ChatCompletionRequest,
            {**CHAT, "messages": [HI, HI | {f"x{i}": i for i in range(MANY)}]},
            "messages.1.x0: unknown field",
        ),
        (
            ChatCompletionRequest,
            {**CHAT, "stream": True, "stream_options": {f"x{i}": i for i in range(MANY)}},
            "stream_options.x0: unknown field",
        ),
    ],
)
def test_of_many_wrong_items_the_first_is_the_only_complaint(
    model: type[StrictModel], body: dict[str, object], first: str
) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() == 1
    with pytest.raises(InvalidRequestError) as told:
        parse_request(model, json.dumps(body).encode())
    assert str(told.value).startswith(first)


def test_a_key_that_is_there_twice_is_found_in_one_pass() -> None:
    num_comparisons = 0

    class Key(str):
        def __eq__(self, other: object) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Key(f"k{i}"), i) for i in range(1000)] + [(Key("k999"), 0)]
    with pytest.raises(ValueError, match="the key 'k999' is there twice"):
        protocol._refuse_doubles(pairs)
    assert num_comparisons <= len(pairs)


ANSWERED = {
    "role": "assistant",
    "content": "Hello.",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "name": None,
}


def test_an_answer_comes_back_as_the_official_client_has_it() -> None:
    plain = {"role": "assistant", "content": "Hello."}
    assert chat(messages=[HI, ANSWERED]) == chat(messages=[HI, plain])
    assert chat(messages=[HI, ANSWERED | {"annotations": None}]) == chat(messages=[HI, plain])
    tokenized = parse_request(TokenizeRequest, json.dumps({"messages": [ANSWERED]}).encode())
    assert tokenized.messages == [ChatMessage(role="assistant", content="Hello.")]


def test_an_option_of_streams_that_is_null_is_not_given() -> None:
    request = chat(stream=True, stream_options={"include_usage": None})
    assert request.stream_options is not None
    assert not request.stream_options.include_usage


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"messages": [ANSWERED | {"refusal": "No."}]}, "messages.0.refusal: unknown field"),
        ({"messages": [ANSWERED | {"tool_calls": []}]}, "messages.0.tool_calls: unknown field"),
        ({"messages": [ANSWERED | {"annotations": [{}]}]}, "messages.0.annotations: unknown field"),
        ({"messages": [ANSWERED | {"nmae": None}]}, "messages.0.nmae: unknown field"),
        ({"messages": [ANSWERED | {"content": None}]}, "messages.0.content: is missing"),
        ({"stream": True, "stream_options": {"refusal": None}}, "stream_options.refusal: unknown field"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage: Input should be"),
    ],
)
def test_what_is_given_or_unknown_is_named(extra: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError) as told:
        chat(**extra)
    assert str(told.value).startswith(message)
