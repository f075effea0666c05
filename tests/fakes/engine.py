"""An engine and a tokenizer that can be computed by hand.

Tokens are the bytes 0 to 255; 256 is end-of-sequence, 257 begin-of-sequence. The next token is the last one plus one,
within the letters a to z ("x" is followed by "yzabc..."). "!" in the prompt ends the answer after as many tokens as
there are "!". At temperatures above 1 the seed counts, too: each next letter is further on by the seed (modulo 26), so
that seed 1 makes "x" be followed by "zbdf...".

Requests of lower priority start earlier. A prompt finds in the cache what it has in common with the beginning of an
earlier one of the same salt, its last token excepted. A step adds as many tokens as `decode_chunk` says. Windows,
tenants and overlaps change nothing; `requests` shows them. An answer is the likelier the later its last letter is.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from engine.errors import InvalidRequestError, QueueFullError
from engine.request import EngineStats, FinishReason, Request, RequestOutput, TokenLogprobs
from serve_app.text.base import Tokenizer, TokenizerInfo

EOS, BOS, VOCAB_SIZE = 256, 257, 258


class ByteTokenizer(Tokenizer):
    """One token for each byte."""

    def __init__(self, chat_template: str | None = None) -> None:
        super().__init__(TokenizerInfo(VOCAB_SIZE, BOS, (EOS,), frozenset({EOS, BOS}), chat_template))

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        pieces = text.split("<eos>") if parse_special else [text]
        ids = [BOS] if add_special_tokens else []
        for position, piece in enumerate(pieces):
            ids += ([EOS] if position else []) + list(piece.encode())
        return ids

    def _piece_bytes(self, token_id: int) -> bytes:
        return {EOS: b"<eos>", BOS: b"<bos>"}.get(token_id) or bytes([token_id])


def next_token(token_id: int, skip: int = 0) -> int:
    """The letter after this one and `skip` more, z being followed by a; anything else is followed by a and so on."""
    place = token_id - ord("a") if ord("a") <= token_id <= ord("z") else -1
    return ord("a") + (place + 1 + skip) % 26


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Running:
    def __init__(self, request: Request, num_cached_tokens: int) -> None:
        self.request = request
        self.num_cached_tokens = num_cached_tokens
        self.tokens: list[int] = []
        num_marks = request.prompt_token_ids.count(ord("!"))
        self.eos_after = None if num_marks == 0 or request.params.ignore_eos else num_marks

    def advance(self, num_tokens: int) -> RequestOutput:
        """The next tokens, that many or as many as there are."""
        outputs = [self._advance()]
        while len(outputs) < num_tokens and outputs[-1].finish_reason is None:
            outputs.append(self._advance())
        return RequestOutput(
            self.request.request_id,
            tuple(token for output in outputs for token in output.token_ids),
            tuple(entry for output in outputs for entry in output.logprobs or ()) or None,
            outputs[-1].finish_reason,
            self.num_cached_tokens,
        )

    def _advance(self) -> RequestOutput:
        last = self.tokens[-1] if self.tokens else self.request.prompt_token_ids[-1]
        skip = self.request.params.seed if self.request.params.temperature > 1 else 0
        token = EOS if self.eos_after == len(self.tokens) else next_token(last, skip)
        self.tokens.append(token)
        finish = None
        if token == EOS or token in self.request.params.stop_token_ids:
            finish = FinishReason.STOP
        elif len(self.tokens) == self.request.params.max_tokens:
            finish = FinishReason.LENGTH
        num_top = self.request.params.logprobs
        logprobs = None
        if num_top is not None:
            top = tuple((token + rank, -0.5 - rank) for rank in range(num_top))
            logprobs = (TokenLogprobs(-0.5, top),)
        return RequestOutput(self.request.request_id, (token,), logprobs, finish, self.num_cached_tokens)


class FakeEngine:
    """A chunk a step for every running request. `gate`, where given, must be released once for each step."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        max_queue_len: int = 4,
        max_model_len: int = 64,
        decode_chunk: int = 1,
        gate: threading.Semaphore | None = None,
        fail_at_step: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.num_slots = num_slots
        self.max_queue_len = max_queue_len
        self.decode_chunk = decode_chunk
        self.gate = gate
        self.fail_at_step = fail_at_step
        self.threads: set[int] = set()
        self.requests: list[Request] = []
        """Every request that was taken, in the order of arrival."""
        self.started: list[Request] = []
        """The same in the order in which they got a slot."""
        self.scored: list[tuple[str, int]] = []
        """(answer as text, steps before) of each score."""
        self.fail_at_score: str | None = None
        """The answer at whose score the engine dies."""
        self.num_steps = 0
        self.num_cached_tokens = 0
        self._waiting: list[_Running] = []
        self.running: list[_Running] = []
        self._aborted: list[str] = []

    def add_request(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if request.prompt_token_ids[-1] == ord("#"):
            raise InvalidRequestError("the fake engine refuses '#'", "prompt")
        if request.decode_chunk is not None and request.decode_chunk > self.decode_chunk:
            raise InvalidRequestError(f"decode_chunk is above {self.decode_chunk}", "decode_chunk")
        if len(self._waiting) >= self.max_queue_len + self.num_slots:
            raise QueueFullError("the fake engine's queue is full")
        num_cached_tokens = self._find_cached(request)
        self.num_cached_tokens += num_cached_tokens
        self.requests.append(request)
        self._waiting.append(_Running(request, num_cached_tokens))
        self._waiting.sort(key=lambda running: running.request.priority)

    def _find_cached(self, request: Request) -> int:
        prompt = request.prompt_token_ids
        alike = [earlier for earlier in self.requests if earlier.cache_salt == request.cache_salt]
        return max((common_prefix_len(e.prompt_token_ids, prompt[:-1]) for e in alike), default=0)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        for held in (self._waiting, self.running):
            for running in held:
                if running.request.request_id == request_id:
                    held.remove(running)
                    self._aborted.append(request_id)
                    return

    def has_work(self) -> bool:
        return bool(self._waiting or self.running or self._aborted)

    def step(self) -> Sequence[RequestOutput]:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            self.gate.acquire()
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("secret inner detail")
        while self._waiting and len(self.running) < self.num_slots:
            self.running.append(self._waiting.pop(0))
            self.started.append(self.running[-1].request)
        outputs = [RequestOutput(request_id, (), None, FinishReason.ABORTED) for request_id in self._aborted]
        self._aborted.clear()
        for running in list(self.running):
            outputs.append(running.advance(running.request.decode_chunk or self.decode_chunk))
            if outputs[-1].finish_reason is not None:
                self.running.remove(running)
        return outputs

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        self.threads.add(threading.get_ident())
        text = bytes(token for token in answer if token < 256).decode()
        if text == self.fail_at_score:
            raise RuntimeError("secret inner detail")
        self.scored.append((text, self.num_steps))
        return float(VOCAB_SIZE - answer[-1])

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> Mapping[str, float]:
        self.threads.add(threading.get_ident())
        if progress is not None:
            progress(0, 1, "nothing")
        return {"nothing": 0.0}

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            num_slots=self.num_slots,
            num_steps=self.num_steps,
            num_cached_tokens=self.num_cached_tokens,
        )
