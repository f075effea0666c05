"""Windows of requests: what is seen, that pages are let go of, and that chunks of any kind make no difference."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.request import AdaptiveWindow, Request, SamplingParams

from . import oracle
from .tiny_models import LLAMA, make_engine, random_params, run, tokens_of

CONFIG = EngineConfig(num_slots=3, prefill_buckets=(32,), max_model_len=192, decode_chunk=16, batch_invariant=True)
PROMPT = tuple((5 * i * i + i) % 53 for i in range(70))
ADAPTIVE = AdaptiveWindow(least=8, divisor=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = make_engine(LLAMA, random_params(LLAMA), CONFIG)
    engine.warm_up()
    return engine


def request(name, max_tokens=40, prompt=PROMPT, **more):
    return Request(name, prompt, SamplingParams(max_tokens, temperature=0, ignore_eos=True), **more)


def expected(sizes, count):
    """Greedy tokens of a plain forward pass in which position i sees `sizes(i)` positions."""
    tokens = list(PROMPT)
    params = random_params(LLAMA)
    for _ in range(count):
        tokens.append(int(np.argmax(windowed_logits(params, tuple(tokens), sizes)[-1])))
    return tokens[len(PROMPT) :]


def windowed_logits(params, tokens, sizes):
    class PerPosition:
        """Stands in for the oracle's window: `i - window + 1` is what it takes of it."""

        def __rsub__(self, i):
            return i - sizes(i)

    windows = (PerPosition(),) * LLAMA.num_layers
    config = type(
        "Config", (), {**{n: getattr(LLAMA, n) for n in LLAMA.__dataclass_fields__}, "layer_windows": windows}
    )
    return oracle.full_logits(config, params, tokens)


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({}, lambda i: i + 1),
        ({"window": 20}, lambda i: 20),
        ({"window": 30, "adaptive_window": ADAPTIVE}, lambda i: min(30, max(8, (i + 1) // 3))),
    ],
    ids=["full", "fixed", "adaptive"],
)
def test_a_request_sees_its_window_and_no_more(engine, more, sizes):
    answers = {}
    for chunk in (1, 16):
        outputs = run(engine, [request(f"{chunk}", 12, decode_chunk=chunk, **more), request("full beside it", 12)])
        answers[chunk] = tokens_of(outputs[f"{chunk}"])
    assert answers[1] == answers[16] == expected(sizes, 12)


def test_windows_differ_so_that_mixing_them_up_would_show():
    answers = [
        expected(sizes, 12) for sizes in (lambda i: i + 1, lambda i: 20, lambda i: min(30, max(8, (i + 1) // 3)))
    ]
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize(
    "more", [{"window": 20}, {"window": 30, "adaptive_window": ADAPTIVE}], ids=["fixed", "adaptive"]
)
def test_pages_outside_the_window_are_let_go_of(engine, more):
    engine.add_request(request("r", 100, **more))
    held = []
    while engine.has_work():
        engine.step()
        held.append(sum(shard.pool.num_held for shard in engine.scheduler.shards))
        engine.scheduler.check_integrity()
    # 170 positions are 11 pages; the window, a chunk of 16 and their ragged ends are 5.
    assert max(held[5:]) <= 5


@pytest.mark.parametrize("overlap", [1, 5, 40])
def test_computing_the_end_of_a_chunk_again_changes_nothing(engine, overlap):
    plain = tokens_of(run(engine, [request("r", 60)])["r"])
    together = run(engine, [request("r", 60, chunk_overlap=overlap), request("other", 50)])
    assert tokens_of(together["r"]) == plain
    assert tokens_of(together["other"]) == plain[:50]


def test_what_a_window_cannot_be_is_refused():
    with pytest.raises(InvalidRequestError, match="window is 0"):
        request("r", window=0)
    with pytest.raises(InvalidRequestError, match="adaptive_window is given without the window"):
        request("r", adaptive_window=ADAPTIVE)
    with pytest.raises(InvalidRequestError, match="at least 0 and 1/2"):
        AdaptiveWindow(least=0)
    with pytest.raises(InvalidRequestError, match="chunk_overlap is -1"):
        request("r", chunk_overlap=-1)
