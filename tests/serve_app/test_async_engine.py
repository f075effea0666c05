"""The engine thread and everything around it, over an engine whose every step the test lets through."""

import asyncio
import threading
from contextlib import suppress

import pytest

from engine.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from engine.request import FinishReason
from serve_app.async_engine import AsyncEngine
from serve_app.generation import Delta, GenerationCall
from tests.fakes.engine import BOS, EOS, VOCAB_SIZE, ByteTokenizer, FakeEngine
from tests.serve_app.harness import MAX_MODEL_LEN, NUM_SLOTS, Gate, call, eventually, run, running


async def collect(engine: AsyncEngine, generation: GenerationCall) -> list[Delta]:
    """Everything a call yields, one delta for each batch and prompt."""
    return [delta async for batch in engine.generate(generation) for delta in batch]


async def text_of(engine: AsyncEngine, generation: GenerationCall) -> tuple[str, FinishReason | None, int]:
    """(text, finish reason, tokens) of a call with one prompt."""
    deltas = await collect(engine, generation)
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].num_tokens


def test_tokens_become_text_until_max_tokens() -> None:
    async def test() -> None:
        async with running() as h:
            assert await text_of(h.serving, call("hx")) == ("yzabcd", FinishReason.LENGTH, 6)

    run(test)


def test_end_of_sequence_is_counted_but_is_no_text() -> None:
    async def test() -> None:
        async with running() as h:
            assert await text_of(h.serving, call("!!c")) == ("de", FinishReason.STOP, 3)
            assert await text_of(h.serving, call("!!c", params={"ignore_eos": True})) == (
                "defghi",
                FinishReason.LENGTH,
                6,
            )

    run(test)


def test_a_stop_token_ends_the_text_before_it() -> None:
    async def test() -> None:
        async with running() as h:
            params = {"stop_token_ids": (ord("e"),)}
            assert await text_of(h.serving, call("a", params=params)) == ("bcd", FinishReason.STOP, 4)

    run(test)


def test_a_stop_string_over_several_steps_ends_the_text_and_frees_the_slot() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            gate.let_through(5)
            stopped = call("a", stop=("def",), params={"max_tokens": 50})
            assert await text_of(h.serving, stopped) == ("bc", FinishReason.STOP, 5)
            gate.let_through(2)
            await h.idle()
            # The sixth step may have begun before the text of the fifth was known.
            assert h.engine.num_steps in (6, 7)
            assert h.serving.stats().num_ended == {"stop": 1}

    run(test)


def test_requests_are_counted_by_what_their_clients_were_told() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            stopped = call("a", stop=("fg",), params={"max_tokens": 6})
            batches = h.serving.generate(call("a", params={"max_tokens": 6}))
            gate.let_through(5)
            while (await anext(batches))[-1].num_tokens < 5:
                pass
            # The step that ends it at its limit has begun when its client goes away.
            await eventually(lambda: h.serving._thread.seconds_in_step() > 0)
            await batches.aclose()
            gate.open()
            await h.idle()
            # Its limit and its stop string come with the same token.
            assert await text_of(h.serving, stopped) == ("bcde", FinishReason.STOP, 6)
            await h.idle()
            assert h.serving.stats().num_ended == {"aborted": 1, "stop": 1}

    run(test)


def test_an_answer_that_ended_before_its_engine_died_is_counted_as_what_it_was() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate, fail_at_step=6) as h:
            gate.let_through(5)
            assert await text_of(h.serving, call("a", stop=("def",), params={"max_tokens": 50})) == (
                "bc",
                FinishReason.STOP,
                5,
            )
            # The abort that its text asked for may or may not come before the step that fails.
            with suppress(EngineDeadError):
                gate.open()
                await collect(h.serving, call("a"))
            await h.idle()
            assert h.serving.stats().num_ended["stop"] == 1

    run(test)


def test_what_was_held_back_for_a_stop_string_is_given_out_at_the_end() -> None:
    async def test() -> None:
        async with running() as h:
            unmatched = call("a", stop=("fgx",), params={"max_tokens": 6})
            assert await text_of(h.serving, unmatched) == ("bcdefg", FinishReason.LENGTH, 6)

    run(test)


def test_prompts_of_one_call_are_told_apart() -> None:
    async def test() -> None:
        async with running() as h:
            deltas = await collect(h.serving, call("a", "m", params={"max_tokens": 3}))
            texts = ["".join(d.text for d in deltas if d.index == index) for index in (0, 1)]
            assert texts == ["bcd", "nop"]

    run(test)


def test_each_step_comes_at_once_and_waiting_ones_come_joined() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            batches = h.serving.generate(call("a"))
            gate.let_through(1)
            assert [delta.text for delta in await anext(batches)] == ["b"]
            gate.let_through(5)
            await h.idle()
            last = await anext(batches)
            assert [(delta.text, delta.num_tokens) for delta in last] == [("cdefg", 6)]
            assert [batch async for batch in batches] == []

    run(test)


def test_log_probabilities_come_with_their_tokens() -> None:
    async def test() -> None:
        async with running() as h:
            deltas = await collect(h.serving, call("a", params={"max_tokens": 2, "logprobs": 2}))
            ids = [token_id for delta in deltas for token_id in delta.token_ids]
            tops = [entry.top for delta in deltas for entry in delta.logprobs]
            assert ids == [ord("b"), ord("c")]
            assert tops == [((98, -0.5), (99, -1.5)), ((99, -0.5), (100, -1.5))]

    run(test)


def test_the_engine_is_called_from_one_thread_only() -> None:
    async def test() -> None:
        async with running() as h:
            await asyncio.to_thread(h.serving.warm_up)
            await collect(h.serving, call("a"))
            abandoned = h.serving.generate(call("a", params={"max_tokens": 60}))
            await anext(abandoned)
            await abandoned.aclose()
            await h.idle()
            assert len(h.engine.threads) == 1
            assert threading.get_ident() not in h.engine.threads

    run(test)


def test_a_full_queue_refuses_at_once_even_during_a_step() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            tasks = [asyncio.ensure_future(collect(h.serving, call("a"))) for _ in range(3)]
            await eventually(lambda: h.serving.stats().num_in_flight == 3)
            with pytest.raises(QueueFullError, match="3 of 3 places are taken") as caught:
                await collect(h.serving, call("a"))
            assert caught.value.retry_after_s >= 1
            gate.open()
            assert all(await asyncio.gather(*tasks))
            assert await text_of(h.serving, call("hx")) == ("yzabcd", FinishReason.LENGTH, 6)

    run(test)


def test_prompts_of_one_call_are_admitted_together_or_not_at_all() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            task = asyncio.ensure_future(collect(h.serving, call("a", "b")))
            await eventually(lambda: h.serving.stats().num_in_flight == 2)
            with pytest.raises(QueueFullError):
                await collect(h.serving, call("a", "b"))
            assert h.serving.stats().num_in_flight == 2
            with pytest.raises(InvalidRequestError, match="4 prompts in one request; this server holds 3"):
                await collect(h.serving, call("a", "b", "c", "d"))
            gate.open()
            await task

    run(test)


def test_closing_the_iterator_frees_the_slot_within_one_step() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            batches = h.serving.generate(call("a", params={"max_tokens": 60}))
            gate.let_through(1)
            await anext(batches)
            await eventually(lambda: h.serving._thread.seconds_in_step() > 0)  # the second step has begun
            await batches.aclose()
            gate.let_through(2)
            await h.idle()
            assert h.engine.num_steps == 3
            assert not h.engine.running

    run(test)


def test_cancelling_the_waiting_task_frees_the_slot() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            task = asyncio.ensure_future(collect(h.serving, call("a", params={"max_tokens": 60})))
            await eventually(lambda: h.serving.stats().num_in_flight == 1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            gate.let_through(3)
            await h.idle()
            assert h.serving.stats().num_ended == {"aborted": 1}

    run(test)


def test_a_missed_deadline_is_an_error_and_frees_the_slot() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            with pytest.raises(DeadlineExceededError, match=r"within 0\.001 s"):
                await collect(h.serving, call("a", deadline_s=0.001))
            gate.open()
            await h.idle()
            assert not h.engine.running

    run(test)


def test_a_refusal_by_the_engine_ends_the_whole_call() -> None:
    async def test() -> None:
        async with running() as h:
            with pytest.raises(InvalidRequestError, match="refuses '#'"):
                await collect(h.serving, call("a", "#", params={"max_tokens": 60}))
            await h.idle()
            assert h.serving.stats().num_ended["refused"] == 1

    run(test)


def test_death_of_the_engine_reaches_every_client_and_the_health_check() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate, fail_at_step=3) as h:
            tasks = [asyncio.ensure_future(collect(h.serving, call("a"))) for _ in range(NUM_SLOTS + 1)]
            await eventually(lambda: h.serving.stats().num_in_flight == NUM_SLOTS + 1)
            h.serving.check_health()
            gate.open()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in errors] == [EngineDeadError] * (NUM_SLOTS + 1)
            assert "secret" not in str(errors[0])
            with pytest.raises(EngineDeadError):
                h.serving.check_health()
            with pytest.raises(EngineDeadError):
                await collect(h.serving, call("a"))

    run(test)


def test_a_step_without_end_fails_the_health_check() -> None:
    async def test() -> None:
        gate = Gate()
        engine = FakeEngine(gate=gate.semaphore)
        serving = AsyncEngine(engine, ByteTokenizer(), max_in_flight=4, step_timeout_s=1e-6)
        serving.check_health()
        task = asyncio.ensure_future(collect(serving, call("a")))
        await eventually(lambda: serving._thread.seconds_in_step() > 1e-6)
        with pytest.raises(EngineDeadError, match="a step has taken"):
            serving.check_health()
        gate.open()
        await task
        serving.check_health()
        serving.stop()

    run(test)


def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            before = asyncio.ensure_future(text_of(h.serving, call("hx")))
            await eventually(lambda: h.serving.stats().num_in_flight == 1)
            drained = asyncio.ensure_future(h.serving.drain())
            await eventually(lambda: h.serving.stats().draining)
            with pytest.raises(DrainingError):
                await collect(h.serving, call("a"))
            assert not drained.done()
            gate.open()
            assert await before == ("yzabcd", FinishReason.LENGTH, 6)
            await drained

    run(test)


def test_stopping_fails_what_still_runs() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(gate) as h:
            task = asyncio.ensure_future(collect(h.serving, call("a", params={"max_tokens": 60})))
            await eventually(lambda: h.serving._thread.seconds_in_step() > 0)
            stopped = asyncio.ensure_future(asyncio.to_thread(h.serving.stop))
            await eventually(lambda: h.serving._thread._commands.qsize() == 1)
            gate.let_through(1)
            await stopped
            with pytest.raises(EngineDeadError, match="shut down"):
                await task

    run(test)


def test_what_cannot_run_is_refused_with_both_numbers() -> None:
    async def test() -> None:
        async with running() as h:
            with pytest.raises(PromptTooLongError, match=f"has {MAX_MODEL_LEN} tokens; the context holds 64"):
                await collect(h.serving, call("a" * MAX_MODEL_LEN))
            with pytest.raises(PromptTooLongError, match="has 60 tokens and max_tokens is 5") as caught:
                await collect(h.serving, call("a" * 60, params={"max_tokens": 5}))
            assert "lower max_tokens to 4" in str(caught.value)
            with pytest.raises(InvalidRequestError, match="prompt is empty"):
                await collect(h.serving, call(""))
            for wrong in (-1, VOCAB_SIZE):
                with pytest.raises(InvalidRequestError, match=f"token id {wrong}; expected ids from 0 to 257"):
                    await collect(h.serving, GenerationCall("r", ((wrong, 3),), call("a").params))
            assert h.engine.requests == []

    run(test)


def test_an_unnamed_limit_is_lowered_to_what_the_context_leaves() -> None:
    async def test() -> None:
        async with running() as h:
            clipped = call("a" * 60, params={"max_tokens": 500}, clip_max_tokens=True)
            assert await text_of(h.serving, clipped) == ("bcde", FinishReason.LENGTH, 4)

    run(test)


def test_special_ids_are_ordinary_in_a_prompt() -> None:
    async def test() -> None:
        async with running() as h:
            special = GenerationCall("r", ((BOS, EOS, ord("a")),), call("a").params)
            assert await text_of(h.serving, special) == ("bcdefg", FinishReason.LENGTH, 6)

    run(test)


def test_a_failing_warm_up_raises_and_kills_the_engine() -> None:
    class Broken(FakeEngine):
        def warm_up(self, progress: object = None) -> dict[str, float]:
            raise RuntimeError("no kernel")

    serving = AsyncEngine(Broken(), ByteTokenizer(), max_in_flight=4)
    with pytest.raises(RuntimeError, match="no kernel"):
        serving.warm_up()
    serving._thread.join(10)
    with pytest.raises(EngineDeadError):
        serving.check_health()
