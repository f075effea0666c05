"""The OpenAI API's requests: what is accepted, of which type, and how the rest is refused."""

import itertools
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, FailFast, Field, ValidationError, model_validator

from engine.errors import InvalidRequestError, UnsupportedParameterError
from serve_app.config import MAX_RERANK
from serve_app.parameters import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, UNSUPPORTED_MESSAGE, is_neutral
from serve_app.strict import StrictModel, complaints, suggestion

# A body may hold a million items: the first wrong one is all that its client needs to hear of.
Prompts = Annotated[tuple[str | tuple[int, ...], ...], FailFast()]
Texts = Annotated[tuple[str, ...], FailFast()]
TokenIds = Annotated[tuple[int, ...], FailFast()]


def _prompts(value: object) -> Prompts:
    """The four forms of `prompt` (text, ids, a list of either) as a tuple of texts and id tuples."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, a list of token ids, or a non-empty list of either")
    if _is_ids(value):
        return (tuple(value),)
    return tuple(_prompt(item, index) for index, item in enumerate(value))


def _prompt(item: object, index: int) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _is_ids(item):
        return tuple(item)
    raise ValueError(f"item {index} is neither a text nor a list of token ids")


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("expected a text or a list of texts")


def _window(value: object) -> object:
    if value is None or value == "adaptive" or (type(value) is int and 1 <= value < 2**30):
        return value
    raise ValueError(f'expected a number of positions of at least 1, or "adaptive" (given: {value!r:.80})')


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class NestedModel(StrictModel):
    """An object inside a body, read as the official clients write it: null is "not given"."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are known of and not served; see `serve_app.parameters`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_not_given(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        known = {name: value[name] for name in cls.model_fields if value.get(name) is not None}
        # The first that is refused stands for all: each would be a complaint of its own.
        refused = (name for name in value if name not in cls.model_fields and not cls._is_neutral(name, value[name]))
        return known | {name: value[name] for name in itertools.islice(refused, 1)}

    @classmethod
    def _is_neutral(cls, name: str, value: object) -> bool:
        return name in cls.unsupported and is_neutral(value, cls.unsupported[name])


class StreamOptions(NestedModel):
    """Options of a streamed answer."""

    include_usage: bool = Field(default=False, description="Send one last chunk with the token counts and no choices.")


class GenerationRequest(StrictModel):
    """The parameters that completions and chat completions share."""

    model: str = Field(description="The served model's name.")
    stream: bool = Field(default=False, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    max_tokens: int | None = Field(default=None, description="Most tokens to generate.")
    temperature: float = Field(default=1.0, description="0: greedy.")
    top_p: float = Field(default=1.0, description="Keep the most likely tokens up to this probability.")
    top_k: int = Field(default=0, description="Keep the k most likely tokens; 0 keeps all.")
    min_p: float = Field(default=0.0, description="Drop tokens less likely than this share of the most likely.")
    seed: int | None = Field(default=None, description="Same seed, same answer. Default: drawn for each request.")
    n: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Answers to each prompt. Answer i, from 0, is the one that `seed` + i alone gives; at temperature "
        "0 all are alike. Answer i to prompt p has the index p * n + i.",
    )
    stop: Annotated[Texts, BeforeValidator(_stop)] = Field(default=(), description="Texts that end the answer.")
    stop_token_ids: Annotated[TokenIds, BeforeValidator(_as_tuple)] = Field(
        default=(), description="Tokens that end the answer."
    )
    ignore_eos: bool = Field(default=False, description="Generate past the model's end-of-sequence tokens.")
    timeout_s: float | None = Field(default=None, gt=0, description="Deadline in seconds from arrival.")
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        description="Lower runs earlier. Waiting counts, too: see `engine.priority_ageing_s`.",
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        description="Share cached prefixes only with requests of the same salt. Default: with all that have none.",
    )
    window: Annotated[int | Literal["adaptive"] | None, BeforeValidator(_window)] = Field(
        default=None,
        description="Each position attends to this many positions at most, itself included, where the model's own "
        'windows are not smaller still. "adaptive": more in longer contexts, see `model.adaptive_window`. Default: the '
        "model's own.",
    )
    decode_chunk: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that one step may add to the answer, `engine.decode_chunk` at most; 1: each on its own. "
        "Changes no token. Default: as many as the engine sees fit.",
    )
    chunk_overlap: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Positions at the end of each chunk whose keys and values the next one computes again: for "
        "comparisons, as it changes no token and costs time.",
    )
    rerank: int | None = Field(
        default=None,
        ge=2,
        le=MAX_RERANK,
        description="Candidates of which the likeliest is the answer: that of the lowest perplexity. Candidate i, from "
        "0, is what `seed` + i gives. Needs a temperature above 0, no `n`, and `limits.max_rerank`. Streams get the "
        "answer in one piece.",
    )
    user: str | None = Field(default=None, description="An end user's identifier; it is logged and changes nothing.")

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives to report at each position; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """The `max_tokens` that the client named."""
        return self.max_tokens

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream: true")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompts, BeforeValidator(_prompts)] = Field(description="Texts or token ids.")
    logprobs: int | None = Field(default=None, ge=0, description="Report this many alternatives at each position.")
    add_special_tokens: bool = Field(default=True, description="Begin a text as the model expects (BOS).")

    @property
    def num_alternatives(self) -> int | None:
        """See the base class."""
        return self.logprobs


def _content(value: object) -> str:
    """Text of a message; parts are joined by newlines. Anything but text is refused by its type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a text or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            given = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part has the type {given!r}; this server takes text parts only")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part is not of the form {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(NestedModel):
    """One message of a conversation."""

    unsupported = UNSUPPORTED_MESSAGE

    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who speaks.")
    content: Annotated[str, BeforeValidator(_content)] = Field(description="Text, or a list of text parts.")


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: int | None = Field(default=None, description="OpenAI's newer name of `max_tokens`.")
    logprobs: bool = Field(default=False, description="Report log-probabilities of the tokens.")
    top_logprobs: int | None = Field(default=None, ge=0, description="Alternatives at each position; needs `logprobs`.")

    @property
    def num_alternatives(self) -> int | None:
        """See the base class."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """See the base class."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs: true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens};"
                " expected one of them"
            )
        return self


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a text, or a conversation."""

    model: str | None = Field(default=None, description="The served model's name.")
    prompt: str | None = Field(default=None, description="A text.")
    messages: Annotated[list[ChatMessage] | None, FailFast()] = Field(
        default=None, min_length=1, description="A conversation to render first."
    )
    add_special_tokens: bool = Field(
        default=True, description="Begin a text as the model expects (BOS). Not for messages."
    )

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected exactly one of prompt and messages")
        return self


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = Field(default=None, description="The served model's name.")
    tokens: Annotated[list[int], FailFast()] = Field(description="Token ids.")


RequestT = TypeVar("RequestT", bound=StrictModel)

_SHOWN_LEN = 80
"""Characters of a client's own words that an error repeats at most."""

_UNSUPPORTED: dict[type[StrictModel], dict[str, tuple[Any, ...]]] = {
    CompletionRequest: UNSUPPORTED_COMPLETION,
    ChatCompletionRequest: UNSUPPORTED_CHAT,
}


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no Infinity, no key twice. Raises `InvalidRequestError`."""
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_doubles)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    except RecursionError:
        raise InvalidRequestError("the body nests too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"the body is a JSON {type(content).__name__}; expected an object")
    return content


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name[:_SHOWN_LEN]!r} is there twice")
        content[name] = value
    return content


def parse_request(model: type[RequestT], body: bytes) -> RequestT:
    """The body as a request of the given kind. Raises `InvalidRequestError` that names the parameter."""
    content = parse_json(body)
    known = model.model_fields
    unsupported = _UNSUPPORTED.get(model, {})
    for name, value in content.items():
        if name in known:
            continue
        if name not in unsupported:
            hint = suggestion(name[:_SHOWN_LEN], [*known, *unsupported])
            raise InvalidRequestError(f"{name[:_SHOWN_LEN]} is no parameter of this API{hint}", name[:_SHOWN_LEN])
        if not is_neutral(value, unsupported[name]):
            raise UnsupportedParameterError(f"{name} is not supported by this server", name)
    # The official clients send null for "not given".
    given = {name: value for name, value in content.items() if name in known and value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        field, problem = complaints(model, error)[0]
        message = f"{field}: {problem}" if field else problem
        raise InvalidRequestError(message, field.split(".")[0] or None) from None
