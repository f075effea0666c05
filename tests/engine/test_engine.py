"""The engine on a real, tiny model: its answers against the plain forward pass, and what it promises of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.request import FinishReason, Request, SamplingParams
from engine.sampling import gumbel_noise

from .oracle import full_logits
from .tiny_models import LLAMA, WIDE, make_engine, random_params, reason_of, run, tokens_of

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ROUNDING = 1e-3
"""Scores closer than this may come out in either order."""


def prompt(length, seed=0):
    return tuple(np.random.default_rng([seed, length]).integers(0, 53, length).tolist())


def mixed_requests(longest=60):
    """Greedy and sampled requests of many lengths."""
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
    ]
    lengths = [1, 3, 16, 17, 31, 32, 33, 47, longest]
    return [
        Request(f"r{i}", prompt(n), SamplingParams(max_tokens=3 + i, seed=1000 + i, ignore_eos=True, **kind))
        for i, (n, kind) in enumerate(zip(lengths, itertools.cycle(kinds), strict=False))
    ]


def scores(config, request, tokens):
    """What the engine takes the largest of at each step [N, V]: logits, or logits over temperature plus noise."""
    p = request.params
    start = len(request.prompt_token_ids)
    logits = full_logits(config, random_params(config), (*request.prompt_token_ids, *tokens))[start - 1 : -1]
    if p.temperature == 0:
        return logits
    seed = jnp.asarray([p.seed >> 32, p.seed & 0xFFFFFFFF], jnp.uint32)
    noise = jax.vmap(lambda position: gumbel_noise(seed, position, config.vocab_size))
    return logits / p.temperature + np.asarray(noise(jnp.arange(start, start + len(tokens))))


def assert_best(config, request, tokens):
    """Each token has the largest score, up to rounding."""
    by_step = scores(config, request, tokens)
    assert len(by_step) == len(tokens) == request.params.max_tokens
    short = by_step.max(axis=1) - by_step[np.arange(len(tokens)), tokens]
    assert short.max() < ROUNDING, request


def test_greedy_and_sampled_answers_are_those_of_a_full_forward_pass(engine):
    requests = [r for r in mixed_requests() if r.params.top_p == 1 and not r.params.top_k and not r.params.min_p]
    assert {r.params.temperature for r in requests} == {0, 1.0}
    outputs = run(engine, requests)
    for request in requests:
        assert_best(LLAMA, request, tokens_of(outputs[request.request_id]))
        assert reason_of(outputs[request.request_id]) is FinishReason.LENGTH


def test_a_sharded_engine_answers_as_a_full_forward_pass(sharded_engine):
    requests = [Request(f"r{n}", prompt(n), GREEDY) for n in (1, 20, 40, 140)]
    requests.append(Request("sampled", prompt(9), SamplingParams(max_tokens=8, seed=2**40 + 3, ignore_eos=True)))
    before = sharded_engine.stats().num_compilations_since_warm_up
    outputs = run(sharded_engine, requests)
    assert sharded_engine.stats().num_compilations_since_warm_up == before
    for request in requests:
        assert_best(WIDE, request, tokens_of(outputs[request.request_id]))


def test_filtered_answers_stay_within_the_filter(engine):
    request = Request("r", prompt(20), SamplingParams(max_tokens=30, top_k=3, temperature=5.0, ignore_eos=True))
    tokens = tokens_of(run(engine, [request])["r"])
    logits = full_logits(LLAMA, random_params(LLAMA), (*request.prompt_token_ids, *tokens))[19:-1]
    ranks = [(row > row[token] + ROUNDING).sum() for row, token in zip(logits, tokens, strict=True)]
    assert max(ranks) <= 2
    assert len(set(ranks)) == 3


def test_log_probabilities_are_those_of_the_full_forward_pass(engine):
    params = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=5, ignore_eos=True, logprobs=4)
    silent = Request("silent", prompt(5), GREEDY)
    request = Request("r", prompt(33), params)
    outputs = run(engine, [silent, request])
    assert all(output.logprobs is None for output in outputs["silent"])
    tokens = tokens_of(outputs["r"])
    logits = full_logits(LLAMA, random_params(LLAMA), (*request.prompt_token_ids, *tokens))[32:-1]
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    reports = [report for output in outputs["r"] for report in output.logprobs]
    for row, token, report in zip(expected, tokens, reports, strict=True):
        assert report.logprob == pytest.approx(row[token], abs=ROUNDING)
        assert [value for _, value in report.top] == pytest.approx(np.sort(row)[::-1][:4], abs=ROUNDING)
        assert [row[i] for i, _ in report.top] == pytest.approx([value for _, value in report.top], abs=ROUNDING)


def test_the_same_seed_gives_the_same_answer_and_another_a_different_one(engine):
    def answer(seed):
        params = SamplingParams(max_tokens=20, seed=seed, ignore_eos=True)
        return tokens_of(run(engine, [Request("r", prompt(7), params)])["r"])

    assert answer(3) == answer(3)
    assert len({tuple(answer(seed)) for seed in (3, 4, 3 + 2**32, 3 + 2**63)}) == 4


@pytest.mark.parametrize("ends", ["eos", "stop token"])
def test_a_request_ends_at_its_stop_token(engine, ends):
    eos = LLAMA.eos_token_ids[0]
    for seed in range(40):
        free = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
        tokens = tokens_of(run(engine, [Request("r", prompt(7), free)])["r"])
        if eos in tokens[1:-1]:
            break
    else:
        raise AssertionError("no answer holds the end-of-sequence token")
    expected = tokens[: tokens.index(eos) + 1]
    stopping = (
        SamplingParams(max_tokens=60, seed=seed)
        if ends == "eos"
        else SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, stop_token_ids=(eos,))
    )
    outputs = run(engine, [Request("r", prompt(7), stopping)])["r"]
    assert (tokens_of(outputs), reason_of(outputs)) == (expected, FinishReason.STOP)


def test_nothing_compiles_after_warm_up_whatever_comes(engine):
    before = engine.stats().num_compilations_since_warm_up
    requests = mixed_requests()
    requests += [
        Request("logprobs", prompt(40), SamplingParams(max_tokens=5, logprobs=20)),
        Request("no alternatives", prompt(4), SamplingParams(max_tokens=5, logprobs=0, temperature=0)),
        Request("full context", prompt(90), SamplingParams(max_tokens=6, ignore_eos=True)),
        Request("stops", prompt(3), SamplingParams(max_tokens=50, stop_token_ids=tuple(range(16)))),
    ]
    for request in requests:
        engine.add_request(request)
    for name in ("r8", "r2", "full context", "logprobs", "nobody"):
        engine.step()
        engine.abort(name)
    while engine.has_work():
        engine.step()
    assert run(engine, [Request("alone", prompt(2), GREEDY)])["alone"]
    assert engine.stats().num_compilations_since_warm_up == before


def test_a_compilation_after_warm_up_is_counted(engine):
    before = engine.stats().num_compilations_since_warm_up
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert engine.stats().num_compilations_since_warm_up == before + 1


def staggered(engine, requests, steps_between):
    """Tokens of each request where one more joins every few steps."""
    tokens = {request.request_id: [] for request in requests}
    waiting = list(requests)
    for step in itertools.count():
        if waiting and step % steps_between == 0:
            engine.add_request(waiting.pop(0))
        if not waiting and not engine.has_work():
            return tokens
        for output in engine.step():
            tokens[output.request_id] += output.token_ids


def test_batch_invariant_answers_do_not_depend_on_what_else_runs(invariant_engine):
    requests = mixed_requests(longest=140)
    alone = {r.request_id: tokens_of(run(invariant_engine, [r])[r.request_id]) for r in requests}
    assert len({tuple(tokens) for tokens in alone.values()}) == len(requests)
    together = run(invariant_engine, requests)
    assert {name: tokens_of(outputs) for name, outputs in together.items()} == alone
    for order, steps_between in ((requests[::-1], 1), (requests[::2] + requests[1::2], 3)):
        assert staggered(invariant_engine, order, steps_between) == alone


def test_without_it_answers_differ_only_where_candidates_are_within_rounding(engine):
    requests = [
        Request(f"{n}-{seed}", prompt(n, seed), SamplingParams(12, temperature=seed % 2, seed=seed, ignore_eos=True))
        for n in (2, 17, 40)
        for seed in range(4)
    ]
    alone = {r.request_id: tokens_of(run(engine, [r])[r.request_id]) for r in requests}
    loaded = {name: tokens_of(outputs) for name, outputs in run(engine, requests).items()}
    different = [r for r in requests if alone[r.request_id] != loaded[r.request_id]]
    assert len(different) <= 0.05 * len(requests)
    for request in different:
        a, b = alone[request.request_id], loaded[request.request_id]
        first = next(i for i in range(len(a)) if a[i] != b[i])
        row = scores(LLAMA, request, a)[first]
        assert abs(row[a[first]] - row[b[first]]) < ROUNDING


def held(engine):
    stats = engine.stats()
    return stats.num_running, stats.num_waiting, stats.cache_usage


def test_a_finished_request_holds_nothing_after_the_step_that_ends_it(engine):
    engine.add_request(Request("r", prompt(20), SamplingParams(max_tokens=3, ignore_eos=True)))
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.step()
        if outputs and outputs[-1].finish_reason is None:
            assert held(engine)[2] > 0
    assert held(engine) == (0, 0, 0.0)
    while engine.has_work():
        assert engine.step() == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_aborted_request_holds_nothing_and_hears_of_its_end(engine, num_steps):
    engine.add_request(Request("r", prompt(60), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.add_request(Request("other", prompt(60), GREEDY))
    for _ in range(num_steps):
        engine.step()
    engine.abort("r")
    outputs = engine.step()
    assert [o.request_id for o in outputs if o.finish_reason is FinishReason.ABORTED] == ["r"]
    assert held(engine)[:2] == (1, 0)
    rest = list(outputs)
    while engine.has_work():
        rest += engine.step()
    engine.scheduler.check_integrity()
    assert held(engine) == (0, 0, 0.0)
    assert {o.request_id for o in rest if o.finish_reason is FinishReason.LENGTH} == {"other"}


def test_stats_count_what_was_computed(engine):
    engine.scheduler.forget_cached()
    before = engine.stats()
    run(engine, [Request("a", prompt(5), GREEDY), Request("b", prompt(39), GREEDY)])
    after = engine.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 44
    assert after.num_cached_tokens == before.num_cached_tokens
    # 5 tokens in a bucket of 8; 32 in one of 32, then 7 in one of 8.
    assert after.num_padding_tokens - before.num_padding_tokens == 3 + 0 + 1
    assert after.num_generated_tokens - before.num_generated_tokens == 16
    assert after.num_slots == 4


@pytest.mark.parametrize("mesh", [(2, 4), (1, 1)], ids=["2x4", "1x1"])
def test_chunks_computed_together_with_decode_rows_give_the_same_answers(mesh):
    config = EngineConfig(num_slots=3 * mesh[0], prefill_buckets=(8, 32), max_model_len=160, max_queue_len=64)
    model = WIDE if mesh == (2, 4) else LLAMA
    engine = make_engine(model, random_params(model), config, mesh)
    engine.warm_up()
    assert engine.runner.sizes.mixed_chunk == 8
    requests = [Request(f"r{n}", prompt(n), GREEDY) for n in (1, 20, 40, 60, 140, 33)]
    requests.append(Request("sampled", prompt(9), SamplingParams(max_tokens=8, seed=2**40 + 3, ignore_eos=True)))
    mixed = []
    dispatch = engine.runner.dispatch

    def watched(plan):
        mixed.append(engine.runner._is_mixed(plan))
        return dispatch(plan)

    engine.runner.dispatch = watched
    outputs = run(engine, requests)
    assert engine.stats().num_compilations_since_warm_up == 0
    assert sum(mixed) > 5
    for request in requests:
        assert_best(model, request, tokens_of(outputs[request.request_id]))
