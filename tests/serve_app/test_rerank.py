"""Several candidates for one answer: drawn as choices are, scored between steps, and the likeliest given.

At temperature 2 the fake engine's letters are further on by the seed: after "a", seed 1 gives "ceg", seed 2 "dgj",
seed 3 "eim", seed 4 "fkp". It finds an answer the likelier the later its last letter is.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from engine.errors import ConfigError, DeadlineExceededError, EngineDeadError, EngineError
from engine.request import FinishReason, Request, RequestOutput, SamplingParams
from serve_app.engine_thread import EngineThread
from serve_app.generation import Delta, GenerationCall
from serve_app.rerank import Candidates
from tests.fakes.engine import FakeEngine
from tests.serve_app.harness import Connection, Gate, Harness, call, eventually, run, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "temperature": 2, "seed": 1, "max_tokens": 3}
ROOM: dict[str, Any] = {"max_queue_len": 8, "max_rerank": 8}


async def complete(h: Harness, **body: object) -> dict[str, Any]:
    """A completion's whole answer."""
    answer = await h.post(COMPLETIONS, {**BODY, "prompt": "a", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def collect(h: Harness, generation: GenerationCall) -> list[Delta]:
    """All deltas of a call."""
    return [delta async for batch in h.serving.generate(generation) for delta in batch]


def reranked(*prompts: str, **options: Any) -> GenerationCall:
    """A call with three candidates for each prompt."""
    return call(*prompts, **{"num_candidates": 3, "params": {"temperature": 2, "seed": 1, "max_tokens": 3}, **options})


def test_the_answer_is_the_likeliest_of_what_as_many_choices_would_be() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            choices = (await complete(h, n=4))["choices"]
            assert [choice["text"] for choice in choices] == ["ceg", "dgj", "eim", "fkp"]
            answer = await complete(h, rerank=4)
            assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [(0, "fkp", "length")]
            assert sorted(text for text, _ in h.engine.scored) == ["ceg", "dgj", "eim", "fkp"]
            # Two tokens each: "ce", "dg", "ei", "fk", "gm", "ho", "iq".
            assert (await complete(h, rerank=7, max_tokens=2))["choices"][0]["text"] == "iq"

    run(test)


def test_all_candidates_are_counted_and_the_prompt_once() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            usage = (await complete(h, prompt="abc", rerank=4))["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 12, 16)
            # The others found what the first one computed; the request as a whole found nothing.
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
            metrics = (await h.get("/metrics")).text
            assert "llm_completion_tokens_total 12.0" in metrics
            assert "llm_time_per_output_token_seconds_count 0.0" in metrics

    run(test)


def test_each_prompt_has_candidates_of_its_own() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            answer = await complete(h, prompt=["a", "t"], rerank=3)
            # After "t": "vxz", "wzc", "xbf".
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "eim"), (1, "vxz")]

    run(test)


def test_a_chat_and_its_log_probabilities() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            body = {**BODY, "messages": [{"role": "user", "content": "hi"}], "rerank": 2, "logprobs": True}
            (choice,) = (await h.post(CHAT, body)).json()["choices"]
            assert choice["message"]["content"] == "cfi"
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["c", "f", "i"]

    run(test)


def test_without_log_probabilities_none_are_sent() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            assert [delta.token_ids for delta in await collect(h, reranked("a"))] == [()]
            assert (await complete(h, rerank=2))["choices"][0]["logprobs"] is None

    run(test)


def test_a_stream_gets_the_answer_in_one_piece() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            body = {**BODY, "prompt": "a", "rerank": 3, "stream": True, "stream_options": {"include_usage": True}}
            connection = Connection(h.api.app, COMPLETIONS, body)
            answer, usage, done = [event async for event in connection.events()]
            await connection.task
            assert answer["choices"][0]["text"] == "eim"
            assert (usage["usage"]["completion_tokens"], done) == (9, "[DONE]")

    run(test)


@pytest.mark.parametrize("chunk", [1, 8])
def test_stop_strings_end_candidates_and_what_follows_is_not_scored(chunk: int) -> None:
    async def test() -> None:
        async with running(decode_chunk=8, **ROOM) as h:
            answer = await complete(h, rerank=2, stop="eg", max_tokens=6, decode_chunk=chunk)
            # "ceg" of seed 1 ends there; "dgjmps" of seed 2 does not.
            assert sorted(text for text, _ in h.engine.scored) == ["ceg", "dgjmps"]
            assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("dgjmps", 9)
            h.engine.scored.clear()
            stopped = await complete(h, rerank=2, stop="mps", max_tokens=6, seed=2, prompt="a", decode_chunk=chunk)
            # "dgjmps" of seed 2 ends with its stop string and is the likelier for it, "eimquy" of seed 3 is not ended.
            assert sorted(text for text, _ in h.engine.scored) == ["dgjmps", "eimquy"]
            assert stopped["choices"][0]["text"] == "eimquy"
            only = await complete(h, rerank=2, stop=["ps", "x"], max_tokens=6, seed=2, decode_chunk=chunk, prompt="a")
            assert only["choices"][0]["finish_reason"] == "length"
            await h.idle()
            assert not h.engine.running

    run(test)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"temperature": 0}, "rerank is 3 at temperature 0, where all candidates are equal; expected a temperature"),
        ({"n": 2}, "rerank is 3 and n is 2; rerank gives one answer to each prompt"),
        ({"rerank": 9}, "rerank is 9; this server allows at most 8 candidates"),
        ({"rerank": 8, "prompt": ["a", "b"]}, "2 prompts in one request, rerank is 8; this server holds 10 at a time"),
    ],
)
def test_what_makes_no_sense_is_refused(extra: dict[str, Any], message: str) -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            answer = await h.post(COMPLETIONS, {**BODY, "prompt": "a", "rerank": 3, **extra})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "rerank"
            assert h.engine.requests == []

    run(test)


class Heard:
    """An `EngineListener` that keeps scores."""

    def __init__(self) -> None:
        self.scores: dict[str, float | None] = {}
        self.all_there = threading.Event()

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        pass

    def on_refused(self, request_id: str, error: EngineError) -> None:
        raise error

    def on_scored(self, request_id: str, perplexity: float | None) -> None:
        self.scores[request_id] = perplexity
        if len(self.scores) == 3:
            self.all_there.set()

    def on_death(self) -> None:
        pass


def scored_by(engine: FakeEngine, *commands: Callable[[EngineThread], None]) -> Heard:
    """What is heard of these commands, three scores among them, all there before the first step."""
    heard = Heard()
    thread = EngineThread(engine, heard)
    for command in commands:
        command(thread)
    thread.start()
    assert heard.all_there.wait(20)
    thread.stop()
    thread.join(20)
    return heard


def test_steps_of_others_go_on_between_scores() -> None:
    engine = FakeEngine()
    heard = scored_by(
        engine,
        lambda thread: thread.add(Request("other", (97,), SamplingParams(max_tokens=9))),
        *(partial(EngineThread.score, request_id=f"r{i}", prompt=(97,), tokens=(98 + i,)) for i in range(3)),
    )
    assert engine.scored == [("b", 0), ("c", 1), ("d", 2)]
    assert heard.scores == {"r0": 160.0, "r1": 159.0, "r2": 158.0}


def test_an_abort_forgets_what_waits_to_be_scored_and_says_so() -> None:
    engine = FakeEngine()
    heard = scored_by(
        engine,
        *(partial(EngineThread.score, request_id=f"r{i}", prompt=(97,), tokens=(98 + i,)) for i in range(3)),
        lambda thread: thread.abort("r1"),
    )
    assert engine.scored == [("b", 0), ("d", 0)]
    assert heard.scores == {"r1": None, "r0": 160.0, "r2": 158.0}


def test_an_answer_that_cannot_be_scored_is_refused_and_the_engine_lives() -> None:
    class Unable(FakeEngine):
        def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
            raise ConfigError("no scorer")

    async def test() -> None:
        async with running(**ROOM) as h:
            h.engine.score = Unable().score  # type: ignore[method-assign]
            with pytest.raises(ConfigError, match="no scorer"):
                await collect(h, reranked("a"))
            await h.idle()
            h.serving.check_health()
            assert (await complete(h))["choices"][0]["text"] == "ceg"

    run(test)


def test_candidates_hold_their_places_until_they_are_scored() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate, **ROOM) as h:
            hold, scoring = threading.Event(), threading.Event()
            score = h.engine.score

            def held(prompt: Any, answer: Any) -> float:
                scoring.set()
                hold.wait()
                return score(prompt, answer)

            h.engine.score = held  # type: ignore[method-assign]
            gate.open()
            task = asyncio.ensure_future(collect(h, reranked("a")))
            await eventually(scoring.is_set)
            assert h.serving.stats().num_in_flight == 3
            hold.set()
            assert [delta.text for delta in await task] == ["eim"]
            assert h.serving.stats().num_in_flight == 0
            assert h.serving.stats().num_ended == {"length": 3}

    run(test)


@pytest.mark.parametrize("how", ["deadline", "client"])
def test_a_call_that_ends_while_it_is_scored_leaves_nothing_behind(how: str) -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            hold, scoring = threading.Event(), threading.Event()
            score = h.engine.score

            def held(prompt: Any, answer: Any) -> float:
                scoring.set()
                hold.wait()
                return score(prompt, answer)

            h.engine.score = held  # type: ignore[method-assign]
            generation = reranked("a", deadline_s=0.5 if how == "deadline" else None)
            task = asyncio.ensure_future(collect(h, generation))
            await eventually(lambda: scoring.is_set() and len(h.serving._thread._to_score) > 0)
            if how == "client":
                task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, DeadlineExceededError if how == "deadline" else asyncio.CancelledError)
            hold.set()
            await h.idle()
            assert len(h.engine.scored) < 3
            assert not h.engine.running
            assert h.serving.stats().num_ended == {"aborted": 3}
            assert (await complete(h, rerank=2))["choices"][0]["text"] == "dgj"

    run(test)


def test_an_engine_that_dies_of_a_score_is_told_to_all() -> None:
    async def test() -> None:
        async with running(**ROOM) as h:
            h.engine.fail_at_score = "dgj"
            (error,) = await asyncio.gather(collect(h, reranked("a")), return_exceptions=True)
            assert isinstance(error, EngineDeadError)
            assert "secret" not in str(error)
            assert h.serving.stats().num_in_flight == 0
            with pytest.raises(EngineDeadError):
                h.serving.check_health()

    run(test)


def test_draining_waits_for_scores() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate, **ROOM) as h:
            task = asyncio.ensure_future(collect(h, reranked("a")))
            await eventually(lambda: h.serving.stats().num_in_flight == 3)
            drained = asyncio.ensure_future(h.serving.drain())
            gate.open()
            assert [delta.text for delta in await task] == ["eim"]
            await drained

    run(test)


def candidates(num_prompts: int = 1, **perplexities: float) -> list[Delta | None]:
    """What is chosen, score by score, of candidates whose texts are the names."""
    of_each = len(perplexities) // num_prompts
    rivals = Candidates(call(*"ab"[:num_prompts], num_candidates=of_each))
    for index, text in enumerate(perplexities):
        rivals.add(Delta(index, text[:1], 1, token_ids=(ord(text[0]),)))
        rivals.add(
            Delta(index, text[1:], len(text), token_ids=tuple(text[1:].encode()), finish_reason=FinishReason.STOP)
        )
        assert rivals.to_score(index) == ((ord("ab"[index // of_each]),), tuple(text.encode()))
    return [rivals.choose(index, perplexity) for index, perplexity in enumerate(perplexities.values())]


def test_nothing_is_chosen_before_every_score_is_there() -> None:
    *early, last = candidates(pq=3.0, rst=1.5, uv=2.0)
    assert early == [None, None]
    assert last is not None
    assert (last.text, last.index, last.num_tokens, last.finish_reason) == ("rst", 0, 7, FinishReason.STOP)


def test_prompts_do_not_wait_for_each_other() -> None:
    found = [
        None if delta is None else (delta.index, delta.text) for delta in candidates(2, p=2.0, q=1.0, r=0.5, s=4.0)
    ]
    assert found == [None, (0, "q"), None, (1, "r")]


@pytest.mark.parametrize(
    ("perplexities", "text"),
    [
        ({"pp": 2.0, "qq": 2.0}, "pp"),
        ({"pp": float("nan"), "qq": 9.0}, "qq"),
        ({"pp": float("inf"), "qq": 1e300}, "qq"),
        ({"pp": float("nan"), "qq": float("inf")}, "pp"),
    ],
)
def test_equal_and_unusable_scores(perplexities: dict[str, float], text: str) -> None:
    last = candidates(1, **perplexities)[-1]
    assert last is not None
    assert last.text == text
