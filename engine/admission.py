"""Which requests are refused at once, and why. Host only."""

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.request import Request
from engine.sequence import SchedulerLimits, Sequence
from engine.shard_cache import ShardCache
from engine.waiting_queue import WaitingQueue


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """Raises `InvalidRequestError` or `PromptTooLongError` where the request could never run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty; expected at least one token", "prompt")
    outside = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(
            f"prompt token id {outside} is outside the vocabulary [0, {limits.vocab_size})", "prompt"
        )
    stop = next((t for t in request.params.stop_token_ids if not 0 <= t < limits.vocab_size), None)
    if stop is not None:
        raise InvalidRequestError(
            f"stop token id {stop} is outside the vocabulary [0, {limits.vocab_size})", "stop_token_ids"
        )
    if len(prompt) >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens; the context length is {limits.max_model_len}, one of which must "
            "be left for the answer",
            "prompt",
        )
    if request.decode_chunk is not None and request.decode_chunk > limits.decode_chunk:
        raise InvalidRequestError(
            f"decode_chunk is {request.decode_chunk}; this engine samples up to {limits.decode_chunk} tokens in a step",
            "decode_chunk",
        )
    if len(prompt) + request.params.max_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"{len(prompt)} prompt tokens and max_tokens {request.params.max_tokens} are "
            f"{len(prompt) + request.params.max_tokens} tokens together; the context length is "
            f"{limits.max_model_len}",
            "max_tokens",
        )


def check_pages(s: Sequence, shard: ShardCache) -> None:
    """Raises `PromptTooLongError` where the request would need more pages than there are, with nothing else running."""
    num_prompt, max_tokens, num_pages = s.num_prompt_tokens, s.request.params.max_tokens, shard.pool.num_pages
    needed = shard.num_pages_needed(s, num_prompt + max_tokens)
    if needed <= num_pages:
        return
    prompt_fits = shard.num_pages_needed(s, num_prompt + 1) <= num_pages
    raise PromptTooLongError(
        f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {needed} cache pages of "
        f"{shard.limits.page_size} positions; there are {num_pages}",
        "max_tokens" if prompt_fits else "prompt",
    )


def check_queue(request: Request, waiting: WaitingQueue, num_free_slots: int, limits: SchedulerLimits) -> None:
    """Raises `QueueFullError` where the queue has no room for the request. A single one always has.

    Those that wait for nothing but the next step, as many as there are slots free, are not in the way.
    """
    queued_tokens = waiting.num_queued_tokens
    if len(waiting) < num_free_slots:
        return
    if len(waiting) - num_free_slots >= limits.max_queue_len:
        raise QueueFullError(f"the queue is full: {len(waiting)} requests are waiting; try again later")
    if (
        limits.max_queued_tokens is not None
        and queued_tokens
        and queued_tokens + len(request.prompt_token_ids) > limits.max_queued_tokens
    ):
        raise QueueFullError(
            f"the queue is full: {queued_tokens} prompt tokens are waiting, {limits.max_queued_tokens} may; "
            "try again later"
        )
