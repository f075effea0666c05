"""From the engine's exception tree to HTTP: one table of statuses, one JSON shape."""

from dataclasses import dataclass

from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RequestCancelledError,
    UnsupportedParameterError,
)


class HTTPError(EngineError):
    """A request refused before it is looked at in detail (no such path, body too large, wrong media type)."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this server does not serve."""


class InvalidApiKeyError(EngineError):
    """The request has no API key, or one that this server does not know."""


class NotReadyError(OverloadedError):
    """No replica is warm yet."""


@dataclass(frozen=True)
class ErrorKind:
    """How one class of errors is told to a client."""

    status: int
    type: str
    code: str | None


# The first class that matches an exception counts: subclasses stand before their parents.
ERROR_TABLE: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (InvalidApiKeyError, ErrorKind(401, "invalid_request_error", "invalid_api_key")),
    (ModelNotFoundError, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (PromptTooLongError, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (UnsupportedParameterError, ErrorKind(400, "invalid_request_error", "unsupported_parameter")),
    (InvalidRequestError, ErrorKind(400, "invalid_request_error", "invalid_value")),
    (OverloadedError, ErrorKind(503, "overloaded_error", "overloaded")),
    (DeadlineExceededError, ErrorKind(504, "timeout_error", "deadline_exceeded")),
    (RequestCancelledError, ErrorKind(499, "cancelled_error", "request_cancelled")),
    (EngineDeadError, ErrorKind(503, "service_unavailable_error", "engine_dead")),
)

INTERNAL = ErrorKind(500, "internal_error", "internal_error")


@dataclass(frozen=True)
class ErrorAnswer:
    """One error, ready to be sent."""

    status: int
    body: dict[str, object]
    headers: dict[str, str]


def answer_for(error: BaseException, request_id: str) -> ErrorAnswer:
    """OpenAI's error object for `error`. What is not in the table shows the request id and nothing of the exception."""
    if isinstance(error, HTTPError):
        kind = ErrorKind(error.status, "invalid_request_error", error.code)
        return ErrorAnswer(error.status, _body(str(error), kind, None), error.headers)
    for error_class, kind in ERROR_TABLE:
        if isinstance(error, error_class):
            param = error.param if isinstance(error, InvalidRequestError) else None
            return ErrorAnswer(kind.status, _body(str(error), kind, param), _headers(error))
    message = f"internal error; quote the request id {request_id} when you report it"
    return ErrorAnswer(INTERNAL.status, _body(message, INTERNAL, None), {})


def _body(message: str, kind: ErrorKind, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def _headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, EngineDeadError):
        return {"retry-after": "5"}
    if isinstance(error, InvalidApiKeyError):
        return {"www-authenticate": "Bearer"}
    return {}
