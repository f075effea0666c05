"""HTTP plumbing: bodies with a limit, disconnects, request ids, errors as JSON."""

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import RequestCancelledError
from serve_app.errors import ErrorAnswer, HTTPError, answer_for
from serve_app.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def to_json(content: object) -> bytes:
    """Compact UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


class ClientDisconnectedError(RequestCancelledError):
    """The client went away. There is nobody to tell."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it where the client goes away first: then raises `ClientDisconnectedError`.

    The request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()
        raise ClientDisconnectedError("the client went away")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises `ClientDisconnectedError` where the client goes away before its end.

    Raises `HTTPError` (408, 413, 415) for one that is not there in time, is too large or is not declared as JSON.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPError(
            415, f"content-type is {content_type!r}; expected application/json", code="unsupported_media_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        message = f"the body did not come within {timeout_s:g} s, the limit of this server"
        raise _unread(408, message, "request_timeout") from None
    except ClientDisconnect:
        raise ClientDisconnectedError("the client went away before the end of its body") from None
    return bytes(body)


def _too_large(max_bytes: int) -> HTTPError:
    return _unread(413, f"the body is larger than {max_bytes} bytes, the limit of this server", "body_too_large")


def _unread(status: int, message: str, code: str) -> HTTPError:
    # What is still on its way is not read, so the connection cannot be used again.
    return HTTPError(status, message, code, headers={"connection": "close"})


async def send_json(send: Send, status: int, content: object, headers: dict[str, str] | None = None) -> None:
    """Sends a whole JSON answer."""
    body = to_json(content)
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, answer: ErrorAnswer) -> None:
    """Sends an error as the whole answer."""
    await send_json(send, answer.status, answer.body, answer.headers)


def request_id_of(scope: Scope) -> str:
    """The id that `RequestContext` gave the request."""
    return scope["state"]["request_id"]


def log_error(error: BaseException, request_id: str, status: int) -> None:
    """Internal failures with their traceback; the rest, which the client can read, in a line."""
    if status >= 500 and status not in (503, 504):
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.info("request %s refused with %d: %s", request_id, status, error)


class RequestContext:
    """The outermost ASGI layer: request ids, errors as JSON, counts."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, returns_id: bool) -> None:
        """`returns_id`: whether to answer with x-request-id; behind Serve's proxy, the proxy does."""
        self._app = app
        self._metrics = metrics
        self._returns_id = returns_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _chosen_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._returns_id:
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            self._metrics.disconnects.inc()
            status = 499
        except Exception as error:
            answer = answer_for(error, request_id)
            log_error(error, request_id, answer.status)
            if status is not None:
                raise
            await send_error(send_with_id, answer)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._metrics.http_requests.labels(path, str(status or 499)).inc()


def _chosen_id(scope: Scope) -> str:
    """The client's x-request-id where it is a plain word, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return uuid.uuid4().hex
