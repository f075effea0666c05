"""Guessing tokens: where guesses come from, how many, and that they change no distribution."""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafting import NgramDrafter, Paces
from engine.engine import Engine, build_engine
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.plan import DraftRequest
from engine.request import Request, SamplingParams
from engine.sharding import make_mesh

from .oracle import full_logits
from .tiny_models import LLAMA, make_engine, place, random_params, run, tokens_of


def draft_request(tokens, count=4, sequence_id=0):
    return DraftRequest(sequence_id, 0, list(tokens), 1, (0,), SamplingParams(), None, None, count)


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ((1, 2, 3, 4, 5, 1, 2), (3, 4, 5, 1)),
        ((1, 2, 9, 1, 2, 8, 1, 2), (8, 1, 2)),  # the last occurrence
        ((7, 1, 2, 9, 5, 1, 2, 8, 7, 1, 2), (9, 5, 1, 2)),  # a longer match goes before a later one
        ((4, 4, 4, 4), (4,)),
        ((1, 2, 3, 4), ()),
        ((1, 2), ()),
        # As bytes, the last two tokens stand earlier, but not at a token's place.
        ((0x01000000, 0x02000000, 5, 1, 2), ()),
    ],
)
def test_the_guess_is_what_followed_the_last_tokens_before(tokens, guess):
    drafter = NgramDrafter(min_len=2, max_len=3)
    assert drafter.propose([draft_request(tokens)]) == {0: guess}


def test_a_request_that_asks_for_no_guess_gets_none():
    assert NgramDrafter(1, 3).propose([draft_request((1, 1, 1), count=0)]) == {}


def test_the_number_of_guesses_follows_what_came_of_them():
    paces = Paces(8)
    tokens, limits = [1], []
    for num_right in (3, 6, 8, 2, 0, 0, 0):
        request = draft_request(tokens, count=8)
        limit = paces.limits([request])[0]
        limits.append(limit)
        paces.note([request], {0: limit})
        tokens += [5] * (min(num_right, limit) + 1)
    assert limits == [3, 6, 8, 8, 3, 1, 1]
    # Three times without a right one: left alone until 24 more tokens have come.
    assert paces.limits([draft_request(tokens, 8)]) == {0: 0}
    assert paces.limits([draft_request([*tokens, *[5] * 23], 8)]) == {0: 0}
    assert paces.limits([draft_request([*tokens, *[5] * 24], 8)]) == {0: 1}


def test_guesses_that_no_step_had_room_for_are_not_held_against_a_request():
    paces = Paces(8)
    tokens = [1]
    for _ in range(5):
        request = draft_request(tokens, count=8)
        assert paces.limits([request]) == {0: 3}
        paces.note([request], {})
        tokens += [5]


def test_after_nothing_to_guess_the_host_works_ahead_for_some_steps():
    paces = Paces(4)
    request = draft_request((1, 2, 3))
    assert paces.wants_turn()
    paces.limits([request])
    paces.note([request], {0: 0})
    assert [paces.wants_turn() for _ in range(9)] == [False] * 7 + [True] * 2


class Fixed:
    """Always guesses the same tokens."""

    def __init__(self, guess):
        self.guess = guess

    def propose(self, requests):
        return {r.sequence_id: self.guess[: r.num_tokens] for r in requests}

    def observe(self, plan):
        pass

    def warm_up(self):
        pass


def test_sampled_tokens_keep_their_distribution_under_guesses():
    """Chi-square over the pairs of the two tokens after the first, sampled with top-k 3."""
    params = random_params(LLAMA, scale=0.1)
    config = EngineConfig(num_slots=6, prefill_buckets=(16,), max_model_len=32, num_draft_tokens=3, max_queue_len=1000)
    prompt, num_samples = (3, 1, 4, 1, 5), 900

    def best(tokens):
        logits = full_logits(LLAMA, params, tokens)[-1]
        ids = np.argsort(-logits)[:3]
        p = np.exp(logits[ids] - logits[ids].max())
        return ids.tolist(), p / p.sum()

    expected = {}
    for first, p_first in zip(*best(prompt), strict=True):
        for second, p_second in zip(*best((*prompt, first)), strict=True):
            expected[first, second] = num_samples * p_first * p_second
    guesses = max(expected, key=lambda pair: expected[pair])
    engine = make_engine(LLAMA, params, config)
    engine._drafter = Fixed((guesses[1], guesses[1], guesses[1]))
    sampling = SamplingParams(3, temperature=1.0, top_k=3, ignore_eos=True)
    requests = [Request(str(i), prompt, replace(sampling, seed=i)) for i in range(num_samples)]
    pairs = [tuple(tokens_of(outputs)[:2]) for outputs in run(engine, requests).values()]
    stats = engine.stats()
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
    counts = {pair: pairs.count(pair) for pair in expected}
    assert sum(counts.values()) == num_samples
    assert min(expected.values()) > 5
    chi_square = sum((counts[pair] - n) ** 2 / n for pair, n in expected.items())
    assert chi_square < 26.1  # 8 degrees of freedom, p = 0.001


def test_a_draft_model_must_fit():
    decoder = Decoder(LLAMA, make_mesh(1, 1), "float32", "float32")
    params = place(random_params(LLAMA), decoder.mesh)
    other = replace(LLAMA, vocab_size=59)
    draft = Decoder(other, decoder.mesh, "float32", "float32"), place(random_params(other), decoder.mesh)
    config = EngineConfig(num_slots=1, prefill_buckets=(16,), max_model_len=32, num_draft_tokens=2)
    with pytest.raises(ConfigError, match="59 tokens and the model 53"):
        build_engine(decoder, params, config, draft)
    with pytest.raises(ConfigError, match="num_draft_tokens is 0"):
        build_engine(decoder, params, replace(config, num_draft_tokens=0), (decoder, params))


def test_a_stream_with_guesses_gets_several_tokens_a_step():
    config = EngineConfig(num_slots=1, prefill_buckets=(16,), max_model_len=128, num_draft_tokens=7)
    engine = make_engine(LLAMA, random_params(LLAMA), config)
    greedy = SamplingParams(60, temperature=0, ignore_eos=True)
    alone = Engine(engine.runner, replace(config, num_draft_tokens=0))
    expected = tokens_of(run(alone, [Request("r", (1, 2, 3), greedy)])["r"])

    class Oracle(Fixed):
        def propose(self, requests):
            return {r.sequence_id: tuple(expected[len(r.token_ids) - 3 :][: r.num_tokens]) for r in requests}

    engine._drafter = Oracle(())
    outputs = run(engine, [Request("r", (1, 2, 3), greedy)])["r"]
    assert tokens_of(outputs) == expected
    assert len(outputs) < 60 / 4
    assert max(len(output.token_ids) for output in outputs) == 8
