"""The OpenAI API as an ASGI application, over any `Backend`."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from engine.errors import DrainingError, EngineError, InvalidRequestError
from engine.request import AdaptiveWindow
from serve_app.auth import Authenticator
from serve_app.backend import Backend
from serve_app.config import AppConfig
from serve_app.errors import HTTPError, ModelNotFoundError
from serve_app.generation import GenerationCall
from serve_app.generation_response import GenerationResponse, StreamMode
from serve_app.http import RequestContext, read_json_body, request_id_of
from serve_app.limits import check_stop, deadline_s, num_candidates, sampling_params
from serve_app.metrics import Metrics
from serve_app.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestT,
    TokenizeRequest,
    parse_request,
)
from serve_app.responses import ChatShape, CompletionShape
from serve_app.text.base import Tokenizer
from serve_app.text.chat import ChatTemplate

logger = logging.getLogger(__name__)

# Where nobody names a limit, the context is it.
_UNLIMITED = 2**31 - 1

# Longer texts are tokenized off the event loop, so that other clients' streams go on.
_INLINE_CHARS = 2_000


@dataclass(frozen=True)
class TextTools:
    """What turns text into tokens and back."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: the model has none, and chat completions are refused."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids, with special tokens recognised in the text."""
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks."""
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        text = self.chat_template.render([message.model_dump() for message in messages], add_generation_prompt=True)
        return await self.encode(text, add_special_tokens=False)


class Api:
    """The endpoints. `app` is the ASGI application."""

    def __init__(
        self, backend: Backend, text: TextTools, config: AppConfig, *, returns_request_id: bool = True
    ) -> None:
        """`returns_request_id`: see `RequestContext`. Raises `ConfigError` where an API key's variable is not set."""
        self._authenticator = Authenticator(config.auth)
        self._backend = backend
        self._text = text
        self._limits = config.limits
        self._model = config.model.name
        self._adaptive = config.model.adaptive_window
        self._started_at = int(time.time())
        self._draining = False
        self.metrics = Metrics()
        self.app = self._build_app(returns_request_id)

    def _build_app(self, returns_request_id: bool) -> FastAPI:
        app = FastAPI(title="jax-serve", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(RequestContext, metrics=self.metrics, returns_id=returns_request_id)
        app.add_exception_handler(HTTPException, _raise_as_json_error)
        guarded = [Depends(self._authenticate)]
        app.post("/v1/completions", dependencies=guarded)(self.completions)
        app.post("/v1/chat/completions", dependencies=guarded)(self.chat_completions)
        app.get("/v1/models", dependencies=guarded)(self.models)
        app.get("/v1/models/{name:path}", dependencies=guarded)(self.model)
        app.post("/tokenize", dependencies=guarded)(self.tokenize)
        app.post("/detokenize", dependencies=guarded)(self.detokenize)
        app.get("/version", dependencies=guarded)(self.version)
        # Probes and scrapers have no key.
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics")(self.prometheus)
        return app

    async def _authenticate(self, request: Request) -> None:
        """Sets the request's tenant. Raises `InvalidApiKeyError`, before the body is read."""
        request.state.tenant = self._authenticator.tenant_of(request.headers.get("authorization"))

    async def drain(self) -> None:
        """Refuses new requests and returns when those that run have ended.

        A replica that starts later, in the place of one that died, knows of no drain: it gets none, either.
        """
        self._draining = True
        await self._backend.drain()

    # ---- generation ----

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at = time.monotonic()
        parsed = await self._parse(CompletionRequest, request)
        if len(parsed.prompt) > self._limits.max_prompts:
            raise InvalidRequestError(
                f"prompt has {len(parsed.prompt)} items; this server allows at most {self._limits.max_prompts}",
                "prompt",
            )
        prompts = tuple(
            [
                tuple(await self._text.encode(prompt, add_special_tokens=parsed.add_special_tokens))
                if isinstance(prompt, str)
                else prompt
                for prompt in parsed.prompt
            ]
        )
        call = self._call(request, parsed, prompts, self._limits.default_max_tokens)
        shape = CompletionShape(
            call.request_id, self._model, self._text.tokenizer, logprobs=parsed.logprobs is not None
        )
        return self._generate(call, shape, parsed, arrived_at)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at = time.monotonic()
        parsed = await self._parse(ChatCompletionRequest, request)
        prompt = tuple(await self._text.encode_chat(parsed.messages))
        default = self._limits.default_chat_max_tokens or self._limits.max_tokens or _UNLIMITED
        call = self._call(request, parsed, (prompt,), default)
        shape = ChatShape(call.request_id, self._model, self._text.tokenizer, logprobs=parsed.logprobs)
        return self._generate(call, shape, parsed, arrived_at)

    def _call(
        self, request: Request, parsed: GenerationRequest, prompts: tuple[tuple[int, ...], ...], default_max_tokens: int
    ) -> GenerationCall:
        check_stop(parsed.stop, self._limits)
        if parsed.user is not None:
            # repr: it cannot look like another line, or like none.
            logger.info("request %s is of the user %.64r", request_id_of(request.scope), parsed.user)
        adaptive = parsed.window == "adaptive"
        return GenerationCall(
            request_id=f"{request_id_of(request.scope)}-{secrets.token_hex(4)}",
            prompts=prompts,
            params=sampling_params(parsed, self._limits, default_max_tokens),
            stop=parsed.stop,
            continues_text=isinstance(parsed, CompletionRequest),
            deadline_s=deadline_s(parsed, request.headers.get("x-request-timeout-s"), self._limits),
            clip_max_tokens=parsed.limit is None,
            choices_per_prompt=parsed.n,
            num_candidates=num_candidates(parsed, self._limits),
            priority=parsed.priority,
            tenant=request.state.tenant,
            cache_salt=parsed.cache_salt,
            window=self._adaptive.most if parsed.window == "adaptive" else parsed.window,
            adaptive_window=AdaptiveWindow(self._adaptive.least, self._adaptive.divisor) if adaptive else None,
            decode_chunk=parsed.decode_chunk,
            chunk_overlap=parsed.chunk_overlap,
        )

    def _generate(
        self, call: GenerationCall, shape: ChatShape | CompletionShape, parsed: GenerationRequest, arrived_at: float
    ) -> Response:
        self._check_not_draining()
        options = parsed.stream_options
        mode = StreamMode(options is not None and options.include_usage) if parsed.stream else None
        return GenerationResponse(self._backend, call, shape, self.metrics, stream=mode, arrived_at=arrived_at)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise DrainingError("the server is shutting down and takes no new requests")

    # ---- the rest ----

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [await self._model_object()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        self._check_model(name)
        return JSONResponse(await self._model_object())

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: what a prompt or a conversation becomes."""
        parsed = await self._parse(TokenizeRequest, request)
        if parsed.messages is not None:
            tokens = await self._text.encode_chat(parsed.messages)
        else:
            tokens = await self._text.encode(parsed.prompt or "", add_special_tokens=parsed.add_special_tokens)
        return JSONResponse({"count": len(tokens), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, special tokens included."""
        parsed = await self._parse(DetokenizeRequest, request)
        size = self._text.tokenizer.vocab_size
        for token_id in parsed.tokens:
            if not 0 <= token_id < size:
                raise InvalidRequestError(f"tokens has the id {token_id}; expected ids from 0 to {size - 1}", "tokens")
        return JSONResponse({"prompt": self._text.tokenizer.decode(parsed.tokens, skip_special_tokens=False)})

    async def health(self) -> Response:
        """GET /health: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: a replica is warm and takes requests; 503 otherwise."""
        self._check_not_draining()
        info = await self._backend.info()
        return JSONResponse({"status": "ready", "model": self._model, "max_model_len": info.max_model_len})

    async def version(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": _version()})

    async def prometheus(self) -> Response:
        """GET /metrics."""
        try:
            engines = await self._backend.stats()
        except EngineError:
            engines = {}  # no replica: this process's own counts are still worth having
        return Response(self.metrics.render(engines), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _model_object(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": self._started_at, "owned_by": "jax-serve"}
        try:
            info = await self._backend.info()
        except EngineError:
            return model  # not warm yet: the name is known, the context length is not
        return {**model, "max_model_len": info.max_model_len}

    async def _parse(self, kind: type[RequestT], request: Request) -> RequestT:
        body = await read_json_body(request, self._limits.max_body_bytes, self._limits.body_timeout_s)
        parsed = parse_request(kind, body)
        name = getattr(parsed, "model", None)
        if name is not None:
            self._check_model(name)
        return parsed

    def _check_model(self, name: str) -> None:
        if name != self._model:
            raise ModelNotFoundError(f"the model {name!r} does not exist; this server serves {self._model!r}", "model")


def _version() -> str:
    try:
        return version("jax-serve")
    except PackageNotFoundError:
        return "unknown (runs from a source tree that is not installed)"


async def _raise_as_json_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such path, wrong method) in the API's shape."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    raise HTTPError(
        error.status_code, message, code=codes.get(error.status_code, "http_error"), headers=dict(error.headers or {})
    )
