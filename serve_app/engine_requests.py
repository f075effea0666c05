"""From a call to the engine's requests."""

from collections.abc import Iterator
from dataclasses import replace

from engine.errors import InvalidRequestError, PromptTooLongError
from engine.request import Request, SamplingParams
from serve_app.generation import GenerationCall


def engine_requests(call: GenerationCall, ids: Iterator[int], max_model_len: int, vocab_size: int) -> list[Request]:
    """One for each choice or candidate, in the order of their indices; `ids` makes theirs unique.

    Raises `InvalidRequestError` or `PromptTooLongError` where one can never run.
    """
    params = [_fitted_params(call, prompt, max_model_len, vocab_size) for prompt in call.prompts]
    return [
        Request(
            f"{next(ids)}:{call.request_id}",
            call.prompts[index // call.requests_per_prompt],
            replace(params[index // call.requests_per_prompt], seed=call.request_seed(index)),
            priority=call.priority,
            tenant=call.tenant,
            cache_salt=call.cache_salt,
            window=call.window,
            adaptive_window=call.adaptive_window,
            decode_chunk=call.decode_chunk,
            chunk_overlap=call.chunk_overlap,
        )
        for index in range(call.num_requests)
    ]


def _fitted_params(
    call: GenerationCall, prompt: tuple[int, ...], max_model_len: int, vocab_size: int
) -> SamplingParams:
    """The call's parameters with `max_tokens` as the context allows for this prompt."""
    if not prompt:
        raise InvalidRequestError("prompt is empty; expected at least one token", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InvalidRequestError(f"prompt has token id {wrong}; expected ids from 0 to {vocab_size - 1}", "prompt")
    params, num_left = call.params, max_model_len - len(prompt)
    if num_left < 1:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens; the context holds {max_model_len},"
            " of which at least one is for the answer",
            "prompt",
        )
    if params.max_tokens <= num_left:
        return params
    if call.clip_max_tokens:
        return replace(params, max_tokens=num_left)
    raise PromptTooLongError(
        f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together at most"
        f" {max_model_len} fit the context: lower max_tokens to {num_left} or shorten the prompt",
        "max_tokens",
    )
