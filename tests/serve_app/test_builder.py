"""From a config to an engine with real, if random, weights: the draft model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, ConfigError
from engine.request import EngineProtocol, Request, SamplingParams
from serve_app.builder import build_engine
from serve_app.config import parse_app_config
from tests.engine.weights.grok1_checkpoints import CONFIG, make_tensors, write_grok1
from tests.tiny_tokenizer import TINY_TOKENIZER

PROMPT = (5, 7, 11, 13, 17)
NUM_TOKENS = 12
ONE_LAYER = CONFIG | {"layers": 1, "vocab": 512, "seq": 64}
ENGINE = {"num_slots": 2, "prefill_buckets": [16], "max_model_len": 64}


@dataclass(frozen=True)
class Checkpoints:
    """Where the models lie."""

    model: Path
    other_weights: Path
    other_vocabulary: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Random models of one layer."""
    smaller = ONE_LAYER | {"vocab": 256}
    return Checkpoints(
        write_grok1(tmp_path_factory.mktemp("model"), dict[str, object](make_tensors(config=ONE_LAYER)), ONE_LAYER),
        write_grok1(tmp_path_factory.mktemp("weights"), dict[str, object](make_tensors(1, ONE_LAYER)), ONE_LAYER),
        write_grok1(tmp_path_factory.mktemp("other"), dict[str, object](make_tensors(config=smaller)), smaller),
    )


@pytest.fixture(autouse=True)
def own_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder sets it for the whole process."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")


def build(
    model: Path, draft: Path | None, num_draft_tokens: int, max_rerank: int = 0, window: object = None
) -> EngineProtocol:
    """The engine on a mesh of two devices."""
    args: dict[str, Any] = {
        "model": {"source": str(model), "tokenizer": str(TINY_TOKENIZER), "window": window},
        "engine": {**ENGINE, "num_draft_tokens": num_draft_tokens},
        "mesh": {"model": 2, "platform": "cpu"},
        "limits": {"max_rerank": max_rerank},
        "compilation_cache_dir": None,
    }
    if draft is not None:
        args["model"]["draft_source"] = str(draft)
    return build_engine(parse_app_config(args))[0]


def greedy_tokens(engine: EngineProtocol) -> list[int]:
    """The answer to `PROMPT`."""
    engine.add_request(Request("r", PROMPT, SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def test_a_draft_model_guesses_tokens_and_changes_none(
    checkpoints: Checkpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = build(checkpoints.model, None, 0)
    expected = greedy_tokens(plain)
    assert len(expected) == NUM_TOKENS
    assert plain.stats().num_draft_tokens == 0
    capfd.readouterr()
    # A model that is its own draft guesses right, so far as the last guesses are not cut off.
    guessing = build(checkpoints.model, checkpoints.model, 3)
    assert f"draft model found: {checkpoints.model}" in capfd.readouterr().out
    assert greedy_tokens(guessing) == expected
    stats = guessing.stats()
    assert stats.num_draft_tokens >= stats.num_accepted_tokens > NUM_TOKENS // 2
    assert stats.num_steps < plain.stats().num_steps


def test_a_draft_model_with_another_vocabulary_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="the draft model has 256 tokens and the model 512"):
        build(checkpoints.model, checkpoints.other_vocabulary, 3)


def test_a_draft_model_that_is_not_there_is_named(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="no/such/draft"):
        build(checkpoints.model, Path("no/such/draft"), 3)


def test_the_judge_is_the_draft_model_or_else_the_model(checkpoints: Checkpoints) -> None:
    answer = (19, 23, 29)
    own = build(checkpoints.model, None, 0, max_rerank=2).score(PROMPT, answer)
    # With other weights, and no guesses.
    judged = build(checkpoints.model, checkpoints.other_weights, 0, max_rerank=2)
    assert judged.score(PROMPT, answer) == build(checkpoints.other_weights, None, 0, max_rerank=2).score(PROMPT, answer)
    assert judged.score(PROMPT, answer) != own
    greedy_tokens(judged)
    assert judged.stats().num_draft_tokens == 0
    with pytest.raises(ConfigError, match="this engine has no scorer"):
        build(checkpoints.model, checkpoints.model, 3).score(PROMPT, answer)


def logprobs(engine: EngineProtocol, window: int | None = None) -> list[float]:
    """Of the greedy answer to `PROMPT`."""
    params = SamplingParams(NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    engine.add_request(Request("r", PROMPT, params, window=window))
    found: list[float] = []
    while engine.has_work():
        for output in engine.step():
            found += [entry.logprob for entry in output.logprobs or ()]
    assert len(found) == NUM_TOKENS
    return found


def test_the_window_of_the_config_replaces_that_of_every_layer(checkpoints: Checkpoints) -> None:
    own, two, full = [build(checkpoints.model, None, 0, window=window) for window in (None, 2, "full")]
    expected = logprobs(own)
    assert logprobs(full) == expected
    narrow = logprobs(two)
    assert max(abs(a - b) for a, b in zip(narrow, expected, strict=True)) > 1e-3
    # As a request's own window.
    assert logprobs(own, window=2) == pytest.approx(narrow, abs=1e-5)
