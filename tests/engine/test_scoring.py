"""Log-probabilities of given sequences, against a plain forward pass."""

import math
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.errors import ConfigError, InvalidRequestError
from engine.models.decoder import Decoder
from engine.request import Request, SamplingParams
from engine.scoring import Scorer
from engine.sharding import make_mesh

from .oracle import full_logits
from .tiny_models import LLAMA, MODELS, WIDE, place, random_params

TOKENS = tuple((7 * i * i + 3) % 53 for i in range(45))

SMALL = replace(LLAMA, num_layers=1, intermediate_size=34)


def expected(config, tokens):
    logits = full_logits(config, random_params(config), tokens[:-1])
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(tokens) - 1), list(tokens[1:])]


def make_scorer(config, mesh=(1, 1), **sizes):
    decoder = Decoder(config, make_mesh(*mesh), "float32", "float32")
    return Scorer(decoder, place(random_params(config), decoder.mesh), **{"max_len": 64, "bucket": 16} | sizes)


@pytest.mark.parametrize(
    ("config", "mesh"),
    [(LLAMA, (1, 1)), (MODELS["window, llama 3 rope, one KV head"], (1, 1)), (WIDE, (2, 4))],
    ids=["llama", "window", "2x4"],
)
def test_log_probabilities_are_those_of_a_full_forward_pass(config, mesh):
    scorer = make_scorer(config, mesh)
    for length in (45, 2, 17, 33):
        got = scorer.logprobs(TOKENS[:length])
        np.testing.assert_allclose(got, expected(config, TOKENS[:length]), rtol=0, atol=2e-4)


def test_perplexity_is_over_the_answer_alone():
    scorer = make_scorer(LLAMA)
    logprobs = expected(LLAMA, TOKENS)
    assert scorer.perplexity(TOKENS[:30], TOKENS[30:]) == pytest.approx(math.exp(-logprobs[29:].mean()), rel=1e-3)


def test_what_cannot_be_scored_is_refused():
    scorer = make_scorer(LLAMA, max_len=20)
    with pytest.raises(InvalidRequestError, match="1 tokens to score; expected 2 to 20"):
        scorer.logprobs((3,))
    with pytest.raises(InvalidRequestError, match="21 tokens to score"):
        scorer.logprobs(TOKENS[:21])
    with pytest.raises(InvalidRequestError, match="at least one token each"):
        scorer.perplexity((), (1, 2))


def test_a_perplexity_beyond_all_numbers_is_infinite(monkeypatch):
    scorer = make_scorer(LLAMA)
    monkeypatch.setattr(scorer, "logprobs", lambda tokens: np.full(len(tokens) - 1, -710.0, np.float32))
    assert scorer.perplexity((1,), (2, 3)) == math.inf


class TestScoringByAnEngine:
    """`Engine.score`, by the model itself and by another."""

    CONFIG = EngineConfig(num_slots=2, prefill_buckets=(16,), max_model_len=64, num_draft_tokens=2)

    def engine(self, **options):
        mesh = make_mesh(1, 1)
        model = Decoder(LLAMA, mesh, "float32", "float32"), place(random_params(LLAMA), mesh)
        small = Decoder(SMALL, mesh, "float32", "float32"), place(random_params(SMALL), mesh)
        models = {"model": model, "small": small}
        return build_engine(*model, self.CONFIG, **{name: models[which] for name, which in options.items()})

    @pytest.mark.parametrize(("judge", "config"), [("model", LLAMA), ("small", SMALL)])
    def test_scores_are_the_judges_and_nothing_compiles_for_them(self, judge, config):
        engine = self.engine(judge=judge, draft="small")
        assert "score" in engine.warm_up()
        engine.add_request(Request("r", TOKENS[:9], SamplingParams(12, temperature=0, ignore_eos=True)))
        for num_prompt, length in ((1, 2), (9, 20), (17, 45), (60, 64)):
            engine.step()
            tokens = (TOKENS * 2)[:length]
            wanted = math.exp(-expected(config, tokens)[num_prompt - 1 :].mean())
            assert engine.score(tokens[:num_prompt], tokens[num_prompt:]) == pytest.approx(wanted, rel=2e-3)
        while engine.has_work():
            engine.step()
        assert engine.stats().num_compilations_since_warm_up == 0

    def test_without_a_judge_it_says_so(self):
        with pytest.raises(ConfigError, match="this engine has no scorer"):
            self.engine().score((1,), (2,))

    def test_a_judge_of_another_vocabulary_is_refused(self):
        mesh = make_mesh(1, 1)
        model = Decoder(LLAMA, mesh, "float32", "float32"), place(random_params(LLAMA), mesh)
        other = replace(SMALL, vocab_size=47)
        judge = Decoder(other, mesh, "float32", "float32"), place(random_params(other), mesh)
        with pytest.raises(ConfigError, match="the scoring model has 47 tokens and the model 53"):
            build_engine(*model, self.CONFIG, judge=judge)
