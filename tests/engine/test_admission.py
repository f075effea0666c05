import pytest

from engine.admission import check_pages, check_queue, check_request
from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.shard_cache import ShardCache
from engine.waiting_queue import WaitingQueue

from .fake_device import VOCAB_SIZE, make_limits


def a_request(num_tokens: int, max_tokens: int = 1, window: int | None = None) -> Request:
    return Request("r", (1,) * num_tokens, SamplingParams(max_tokens=max_tokens), window=window)


def waiting(*num_tokens: int) -> WaitingQueue:
    queue = WaitingQueue()
    for index, count in enumerate(num_tokens):
        queue.add(Sequence(index, a_request(count), [1] * count))
    return queue


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message", "param"),
    [
        ((), 1, InvalidRequestError, "the prompt is empty", "prompt"),
        ((1, VOCAB_SIZE), 1, InvalidRequestError, r"token id 13 is outside the vocabulary \[0, 13\)", "prompt"),
        ((1, -1), 1, InvalidRequestError, "token id -1 is outside", "prompt"),
        ((1,) * 40, 1, PromptTooLongError, "has 40 tokens; the context length is 40", "prompt"),
        ((1,) * 35, 6, PromptTooLongError, "35 prompt tokens and max_tokens 6 are 41 .* length is 40", "max_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(prompt, max_tokens, error, message, param):
    with pytest.raises(error, match=message) as caught:
        check_request(Request("r", prompt, SamplingParams(max_tokens=max_tokens)), make_limits())
    assert caught.value.param == param


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31])
def test_a_stop_token_that_can_never_come_is_refused(token_id):
    params = SamplingParams(max_tokens=1, stop_token_ids=(3, token_id))
    with pytest.raises(
        InvalidRequestError, match=rf"token id {token_id} is outside the vocabulary \[0, 13\)"
    ) as caught:
        check_request(Request("r", (1,), params), make_limits())
    assert caught.value.param == "stop_token_ids"


def test_a_request_may_fill_the_context_exactly():
    check_request(a_request(35, 5), make_limits())


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "window", "param"),
    [
        (19, 1, None, None),
        (19, 2, None, "max_tokens"),
        (20, 1, None, "prompt"),
        (30, 9, 1, None),  # 1 + 8 positions at once: 3 pages, and one for a window that begins inside a page
        (30, 9, 5, "prompt"),
    ],
)
def test_a_request_that_needs_more_pages_than_there_are_is_refused(num_tokens, max_tokens, window, param):
    pages = 4 if window else 5
    shard = ShardCache(0, make_limits(num_slots=1, num_pages=pages))
    request = a_request(num_tokens, max_tokens, window)
    s = Sequence(0, request, list(request.prompt_token_ids))
    if param is None:
        check_pages(s, shard)
        return
    with pytest.raises(PromptTooLongError, match=f"need .* cache pages of 4 positions; there are {pages}") as caught:
        check_pages(s, shard)
    assert caught.value.param == param


def test_a_full_queue_refuses():
    limits = make_limits(max_queue_len=2)
    check_queue(a_request(1), waiting(1), 0, limits)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        check_queue(a_request(1), waiting(1, 1), 0, limits)


def test_requests_for_which_slots_are_free_are_not_in_the_way():
    limits = make_limits(max_queue_len=2, max_queued_tokens=3)
    check_queue(a_request(9), waiting(1, 1, 1), 4, limits)
    check_queue(a_request(1), waiting(1, 1), 1, limits)
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        check_queue(a_request(1), waiting(1, 1, 1), 1, limits)
    with pytest.raises(QueueFullError, match="2 prompt tokens are waiting, 3 may"):
        check_queue(a_request(2), waiting(1, 1), 1, limits)


def test_queued_prompt_tokens_are_bounded_but_one_prompt_always_fits():
    limits = make_limits(max_queued_tokens=6)
    check_queue(a_request(9), waiting(), 0, limits)
    check_queue(a_request(2), waiting(4), 0, limits)
    with pytest.raises(QueueFullError, match="4 prompt tokens are waiting, 6 may"):
        check_queue(a_request(3), waiting(4), 0, limits)
