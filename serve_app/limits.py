"""What requests ask for, held against what the config allows. Everything raised is an `InvalidRequestError`."""

import secrets

from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from serve_app.config import LimitsSection
from serve_app.protocol import CompletionRequest, GenerationRequest


def sampling_params(request: GenerationRequest, limits: LimitsSection, default_max_tokens: int) -> SamplingParams:
    """The engine's parameters. Raises `InvalidRequestError` that names the one out of range."""
    max_tokens = default_max_tokens if request.limit is None else request.limit
    if request.limit is not None and limits.max_tokens is not None and request.limit > limits.max_tokens:
        raise InvalidRequestError(
            f"max_tokens is {request.limit}; this server allows at most {limits.max_tokens}", "max_tokens"
        )
    if request.num_alternatives is not None and request.num_alternatives > limits.max_logprobs:
        name = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
        raise InvalidRequestError(
            f"{name} is {request.num_alternatives}; this server allows at most {limits.max_logprobs}", name
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        logprobs=request.num_alternatives,
    )


def check_stop(stop: tuple[str, ...], limits: LimitsSection) -> None:
    """Raises `InvalidRequestError` where there are too many stop strings, or one is empty or too long."""
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequestError(
            f"stop has {len(stop)} texts; this server allows at most {limits.max_stop_strings}", "stop"
        )
    if "" in stop:
        raise InvalidRequestError("stop has an empty text; expected at least one character", "stop")
    longest = max(map(len, stop), default=0)
    if longest > limits.max_stop_string_chars:
        raise InvalidRequestError(
            f"a stop text has {longest} characters; this server allows at most {limits.max_stop_string_chars}", "stop"
        )


def deadline_s(request: GenerationRequest, header: str | None, limits: LimitsSection) -> float:
    """Seconds that the request may take: the smaller of `timeout_s` and the header, else the default."""
    named = [request.timeout_s] if request.timeout_s is not None else []
    if header is not None:
        named.append(_seconds(header))
    if not named:
        return limits.default_deadline_s
    if min(named) > limits.max_deadline_s:
        raise InvalidRequestError(
            f"timeout_s is {min(named):g}; this server allows at most {limits.max_deadline_s:g} seconds", "timeout_s"
        )
    return min(named)


def _seconds(header: str) -> float:
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequestError(f"x-request-timeout-s is {header!r}; expected seconds above 0", "x-request-timeout-s")
    return seconds


def num_candidates(request: GenerationRequest, limits: LimitsSection) -> int:
    """Candidates for each answer; 1 without `rerank`."""
    if request.rerank is None:
        return 1
    if not limits.max_rerank:
        raise InvalidRequestError("rerank is not enabled on this server (limits.max_rerank of its config)", "rerank")
    if request.rerank > limits.max_rerank:
        raise InvalidRequestError(
            f"rerank is {request.rerank}; this server allows at most {limits.max_rerank} candidates", "rerank"
        )
    if request.n > 1:
        raise InvalidRequestError(
            f"rerank is {request.rerank} and n is {request.n}; rerank gives one answer to each prompt", "rerank"
        )
    if request.temperature == 0:
        raise InvalidRequestError(
            f"rerank is {request.rerank} at temperature 0, where all candidates are equal; expected a temperature "
            "above 0",
            "rerank",
        )
    return request.rerank
