"""Log-probabilities of given sequences, against a plain forward pass."""

import math

import numpy as np
import pytest

from engine.errors import InvalidRequestError
from engine.models.decoder import Decoder
from engine.scoring import Scorer
from engine.sharding import make_mesh

from .oracle import full_logits
from .tiny_models import LLAMA, MODELS, WIDE, place, random_params

TOKENS = tuple((7 * i * i + 3) % 53 for i in range(45))


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
