"""Several tokens in one step: the same ones, fewer steps, and no token after the end."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequestError
from engine.request import FinishReason, Request, SamplingParams

from .fake_device import Loop, make_limits
from .tiny_models import LLAMA, WIDE, make_engine, random_params, reason_of, run, tokens_of

CHUNK = 64
CONFIG = EngineConfig(
    num_slots=4,
    prefill_buckets=(32,),
    max_model_len=160,
    decode_chunk=CHUNK,
    decode_chunk_min=4,
    # Otherwise schedules differ in their row counts, and these in the last bits of log-probabilities.
    batch_invariant=True,
)
KINDS: tuple[dict, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.5, "stop_token_ids": (5, 9, 17)},
    {"temperature": 1.5, "ignore_eos": False},
)


def requests(decode_chunk: int | None) -> list[Request]:
    """Every kind of sampling, two lengths each."""
    return [
        Request(
            f"{index}-{length}",
            tuple((3 * i + index) % LLAMA.vocab_size for i in range(length)),
            SamplingParams(max_tokens, seed=index, **{"ignore_eos": True} | kind),
            decode_chunk=decode_chunk,
        )
        for index, kind in enumerate(KINDS)
        for length, max_tokens in ((3, 70), (20, 33))
    ]


@pytest.fixture(scope="module", params=[(1, 1), (2, 4)], ids=["1x1", "2x4"])
def engine(request: pytest.FixtureRequest) -> Engine:
    model = LLAMA if request.param == (1, 1) else WIDE
    engine = make_engine(model, random_params(model), CONFIG, request.param)
    engine.warm_up()
    return engine


def answers(outputs: dict) -> dict:
    """(tokens, reason, log-probabilities) of each request."""
    reports = {name: [x for output in each for x in output.logprobs or ()] for name, each in outputs.items()}
    return {name: (tokens_of(each), reason_of(each), reports[name]) for name, each in outputs.items()}


def test_chunks_of_any_length_give_the_tokens_of_single_steps(engine):
    before = engine.stats().num_steps
    expected = answers(run(engine, requests(1)))
    num_single = engine.stats().num_steps - before
    assert {reason for _, reason, _ in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for chunk in (7, CHUNK, None):
        before = engine.stats().num_steps
        assert answers(run(engine, requests(chunk))) == expected
        assert engine.stats().num_steps - before < num_single / 3


def test_a_chunk_comes_as_one_output_and_ends_with_the_request(engine):
    (alone,) = run(engine, [Request("r", (1, 2, 3), SamplingParams(70, temperature=0, ignore_eos=True))]).values()
    sizes = [len(output.token_ids) for output in alone if output.token_ids]
    assert sum(sizes) == 70
    # The first token comes from the prompt's own step; chunks double from the least.
    assert sizes == [1, 4, 8, 16, 32, 9]


def test_a_stop_token_in_a_chunk_leaves_nothing_computed_behind_it_in_the_prefix_cache(engine):
    greedy = SamplingParams(40, temperature=0, ignore_eos=True)
    prompt = tuple(range(14))
    full = tokens_of(run(engine, [Request("a", prompt, greedy)])["a"])
    stop = next(t for i, t in enumerate(full) if i > 4 and t not in full[:i])
    expected = full[: full.index(stop) + 1]
    engine.scheduler.forget_cached()
    stopped = replace(greedy, stop_token_ids=(stop,))
    assert tokens_of(run(engine, [Request("b", prompt, stopped)])["b"]) == expected
    # Goes on from whatever pages the stopped request left in the cache.
    again = Request("c", (*prompt, *expected), SamplingParams(40 - len(expected), temperature=0, ignore_eos=True))
    assert tokens_of(run(engine, [again])["c"]) == full[len(expected) :]


def test_one_program_serves_every_chunk_length(engine):
    before = engine.stats().num_compilations_since_warm_up
    for chunk in (2, 3, 50):
        run(engine, requests(chunk)[:2])
    assert engine.stats().num_compilations_since_warm_up == before


FOREVER = SamplingParams(max_tokens=30, ignore_eos=True)


def test_something_that_waits_shortens_chunks():
    loop = Loop(make_limits(num_slots=2, decode_chunk=8, decode_chunk_min=2))
    chunks = []

    def step() -> None:
        chunks.append(loop.scheduler.next_chunk())
        loop.step()

    loop.add("a", (1, 2), FOREVER)
    for _ in range(4):
        step()
    assert chunks == [1, 2, 4, 8]
    loop.add("b", (3, 4), FOREVER)
    step()
    assert chunks[-1] == 2
    loop.drain()
    loop.check_answers()


def test_a_request_that_wants_single_steps_gets_them():
    loop = Loop(make_limits(decode_chunk=8, decode_chunk_min=8))
    loop.add("a", (1, 2), FOREVER)
    loop.add("single", (3, 4), SamplingParams(max_tokens=5, ignore_eos=True), decode_chunk=1)
    loop.drain()
    loop.check_answers()
    rows = [row for plan in loop.device.plans for row in plan.decode]
    beside = [row.max_new_tokens for row in rows if row.sequence_id == 1]
    assert set(beside) == {1}
    assert max(row.max_new_tokens for row in rows) == 8


def test_a_chunk_longer_than_the_engines_is_refused():
    loop = Loop(make_limits(decode_chunk=8))
    with pytest.raises(InvalidRequestError, match="decode_chunk is 9; this engine samples up to 8"):
        loop.scheduler.add(Request("a", (1, 2), FOREVER, decode_chunk=9))
    with pytest.raises(InvalidRequestError, match="decode_chunk is 0"):
        Request("a", (1, 2), FOREVER, decode_chunk=0)
    with pytest.raises(ConfigError, match="decode_chunk_min is 3 and decode_chunk 2"):
        EngineConfig(decode_chunk=2, decode_chunk_min=3)
