"""The OpenAI API's answers, as plain dicts: streamed chunks and whole objects."""

import codecs
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from engine.request import FinishReason, TokenLogprobs
from serve_app.generation import Delta
from serve_app.text.base import Tokenizer

Json = dict[str, Any]


@dataclass
class Usage:
    """Token counts of one call, over all its choices."""

    num_prompt_tokens: int
    """Each prompt once, whatever the number of its choices, as OpenAI counts."""
    choices_per_prompt: int = 1
    num_generated: dict[int, int] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Takes a delta's counts over."""
        self.num_generated[delta.index] = delta.num_tokens
        self.num_cached[delta.index] = max(delta.num_cached_tokens, self.num_cached.get(delta.index, 0))

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(self.num_generated.values())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache, each prompt once: what its choice that found the least did.

        The others may have found what that one computed.
        """
        found: dict[int, int] = {}
        for index, num_tokens in self.num_cached.items():
            prompt = index // self.choices_per_prompt
            found[prompt] = min(num_tokens, found.get(prompt, num_tokens))
        return sum(found.values())

    def to_json(self) -> Json:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class AnswerShape(ABC):
    """How one request's deltas become JSON. One object serves one request."""

    chunk_object: str
    whole_object: str

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._created = int(time.time())

    def chunk(self, delta: Delta) -> Json:
        """One streamed chunk."""
        return self._frame(self.chunk_object, [self._chunk_choice(delta)])

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk, where the client asked for it."""
        return self._frame(self.chunk_object, []) | {"usage": usage.to_json()}

    def whole(self, deltas: list[Delta], usage: Usage) -> Json:
        """The answer that is not streamed: one choice for each delta, in their order."""
        choices = [self._whole_choice(delta) for delta in deltas]
        return self._frame(self.whole_object, choices) | {"usage": usage.to_json()}

    def opening(self, num_choices: int) -> list[Json]:
        """Chunks to send before any text."""
        return []

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> Json: ...

    @abstractmethod
    def _whole_choice(self, delta: Delta) -> Json: ...

    def _token(self, token_id: int) -> str:
        """A token as text; in OpenAI's `bytes:` notation where it is no whole text."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionShape(AnswerShape):
    """POST /v1/completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        super().__init__(f"cmpl-{request_id}", model, tokenizer, logprobs=logprobs)
        self._offsets: dict[int, _Offsets] = {}

    def _chunk_choice(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs_of(delta) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    _whole_choice = _chunk_choice

    def _logprobs_of(self, delta: Delta) -> Json:
        offsets = self._offsets.setdefault(delta.index, _Offsets(self._tokenizer))
        return {
            "tokens": [self._token(token_id) for token_id in delta.token_ids],
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [
                {self._token(token_id): logprob for token_id, logprob in entry.top} for entry in delta.logprobs
            ],
            "text_offset": [offsets.advance(token_id) for token_id in delta.token_ids],
        }


class ChatShape(AnswerShape):
    """POST /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        super().__init__(f"chatcmpl-{request_id}", model, tokenizer, logprobs=logprobs)

    def opening(self, num_choices: int) -> list[Json]:
        """The role comes first, once for each choice."""
        return [
            self._frame(self.chunk_object, [self._choice(index, "delta", {"role": "assistant", "content": ""}, None)])
            for index in range(num_choices)
        ]

    def _chunk_choice(self, delta: Delta) -> Json:
        content = {"content": delta.text} if delta.text else {}
        return self._choice(delta.index, "delta", content, delta)

    def _whole_choice(self, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(delta.index, "message", message, delta)

    def _choice(self, index: int, key: str, content: Json, delta: Delta | None) -> Json:
        logprobs = self._logprobs_of(delta) if self._logprobs and delta is not None else None
        finish_reason = delta.finish_reason if delta is not None else None
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs_of(self, delta: Delta) -> Json:
        entries = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": [self._entry(token_id, entry) for token_id, entry in entries], "refusal": None}

    def _entry(self, token_id: int, entry: TokenLogprobs) -> Json:
        top = [self._scored(other, logprob) for other, logprob in entry.top]
        return self._scored(token_id, entry.logprob) | {"top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> Json:
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._token(token_id), "logprob": logprob, "bytes": data}


class _Offsets:
    """Where in the answer's text each token begins, in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def advance(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.output_bytes(token_id, True)))
        return offset


class Collector:
    """Joins the deltas of a call into one for each choice."""

    def __init__(self, num_choices: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self._finish_reasons: list[FinishReason | None] = [None] * num_choices

    def add(self, delta: Delta) -> None:
        """Takes one delta."""
        self._texts[delta.index].append(delta.text)
        self._token_ids[delta.index].extend(delta.token_ids)
        self._logprobs[delta.index].extend(delta.logprobs)
        self._finish_reasons[delta.index] = delta.finish_reason

    def whole(self) -> list[Delta]:
        """One delta for each choice."""
        return [
            Delta(
                index=index,
                text="".join(texts),
                num_tokens=0,
                token_ids=tuple(self._token_ids[index]),
                logprobs=tuple(self._logprobs[index]),
                finish_reason=self._finish_reasons[index],
            )
            for index, texts in enumerate(self._texts)
        ]
