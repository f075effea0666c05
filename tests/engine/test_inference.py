"""The release's API on a random Grok-1 of one layer, and on the reference model."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError
from engine.inference import TOP_K, Completion, InferenceRunner, ModelRunner, Request, sample_from_model
from engine.sharding import make_mesh

from .weights.grok1_checkpoints import CONFIG, make_tensors, write_grok1

RANDOM = CONFIG | {"layers": 1, "emb_mult": 1.0}
ENGINE = EngineConfig(num_slots=3, prefill_buckets=(16,), max_queue_len=8, batch_invariant=True)


class NumberTokenizer:
    """Token ids as text: "3 5 7"."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def make_runner(source, mesh=(1, 1)):
    model = ModelRunner(str(source), make_mesh(*mesh), "float32", "float32")
    runner = InferenceRunner(model, NumberTokenizer(), ENGINE)
    runner.initialize()
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    tensors = make_tensors(3, RANDOM)
    return make_runner(write_grok1(tmp_path_factory.mktemp("random"), tensors, RANDOM))


def request(prompt="3 5 7", **changes):
    return replace(Request(prompt, temperature=1.0, nucleus_p=1.0, rng_seed=0, max_len=6), **changes)


def ask(server, what):
    next(server)
    return server.send(what)


def test_the_generator_takes_a_request_after_each_next_and_gives_its_text(runner):
    server = runner.run()
    assert next(server) is None
    first = server.send(request())
    assert len(first.split()) == 6
    assert next(server) is None
    other = server.send(request(rng_seed=1))
    assert next(server) is None
    assert server.send(request()) == first != other


def test_next_alone_waits_for_a_request(runner):
    server = runner.run()
    assert [next(server) for _ in range(3)] == [None, None, None]
    assert server.send(request()) == runner.generate(request()).text


def test_sample_from_model_has_the_releases_settings(runner):
    expected = runner.generate(request(temperature=0.7, rng_seed=42)).text
    assert sample_from_model(runner.run(), "3 5 7", max_len=6, temperature=0.7) == expected


@pytest.mark.parametrize("max_len", [1, 5, 40])
def test_max_len_counts_new_tokens(runner, max_len):
    completion = runner.generate(request(max_len=max_len))
    assert len(completion.outputs) == len(completion.text.split()) == max_len


def test_generation_goes_on_past_an_end_of_sequence_token(runner):
    completions = [runner.generate(request(rng_seed=seed, max_len=40, temperature=100)) for seed in range(3)]
    tokens = [[o.token_id for o in c.outputs] for c in completions]
    assert all(len(t) == 40 for t in tokens)
    assert any(2 in t[:-1] for t in tokens)


def test_the_report_holds_the_models_own_probabilities_of_the_best_8(runner):
    heard: list[Completion] = []
    server = runner.run(heard.append)
    text = ask(server, request(temperature=3.0, max_len=12))
    (completion,) = heard
    assert completion.text == text
    for output in completion.outputs:
        assert len(output.top_k_token_ids) == len(set(output.top_k_token_ids)) == TOP_K == 8
        assert list(output.top_k_probs) == sorted(output.top_k_probs, reverse=True)
        assert sum(output.top_k_probs) <= 1 + 1e-5
        if output.token_id in output.top_k_token_ids:
            assert output.prob == pytest.approx(output.top_k_probs[output.top_k_token_ids.index(output.token_id)])
        else:
            assert output.prob <= output.top_k_probs[-1] * (1 + 1e-5)
    # The temperature chooses among them and does not change them.
    greedy = runner.generate(request(temperature=0, max_len=1)).outputs[0]
    assert greedy.top_k_probs == pytest.approx(completion.outputs[0].top_k_probs)
    assert greedy.token_id == greedy.top_k_token_ids[0]


def test_a_small_nucleus_is_greedy(runner):
    greedy = runner.generate(request(temperature=0)).text
    assert runner.generate(request(nucleus_p=1e-6)).text == greedy
    assert runner.generate(request(temperature=5.0)).text != greedy


def test_callers_on_several_threads_get_what_each_gets_alone(runner):
    wanted = [
        request(f"{i} 5 {i + 1}", rng_seed=i, temperature=(0.0, 1.0, 2.0)[i % 3], max_len=4 + 3 * i) for i in range(7)
    ]
    alone = [runner.generate(r) for r in wanted]
    together: list[Completion | None] = [None] * len(wanted)
    start = threading.Barrier(len(wanted))

    def caller(index):
        reports = []
        server = runner.run(reports.append)
        start.wait(timeout=60)
        text = ask(server, wanted[index])
        (together[index],) = reports
        assert together[index].text == text

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert together == alone


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nucleus_p": 0.0}, InvalidRequestError, "top_p is 0.0"),
        ({"temperature": math.nan}, InvalidRequestError, "temperature is nan"),
        ({"max_len": 0}, InvalidRequestError, "max_tokens is 0"),
        ({"prompt": "3 40"}, InvalidRequestError, "40"),
        ({"prompt": " ".join(["3"] * 60)}, PromptTooLongError, "60"),
    ],
)
def test_an_error_ends_its_own_generator_and_no_other(runner, changes, error, message):
    other, failing = runner.run(), runner.run()
    next(other)
    next(failing)
    with pytest.raises(error, match=message):
        failing.send(request(**changes))
    with pytest.raises(StopIteration):
        next(failing)
    assert other.send(request()) == runner.generate(request()).text


def test_a_failing_step_reaches_its_caller_and_frees_the_slot(runner, monkeypatch):
    engine = runner._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        runner.generate(request())
    monkeypatch.setattr(engine, "step", step)
    expected = runner.generate(request(rng_seed=9)).text
    assert len(expected.split()) == 6
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_runner_that_is_not_initialized_says_so(tmp_path):
    path = write_grok1(tmp_path, {}, RANDOM)
    model = ModelRunner(str(path), make_mesh(1, 1), "float32", "float32")
    with pytest.raises(ConfigError, match=r"call initialize\(\) first"):
        InferenceRunner(model, NumberTokenizer(), ENGINE).generate(request())
    with pytest.raises(CheckpointError, match="missing"):
        model.initialize()


@pytest.mark.slow
def test_the_reference_models_continuations(reference_data):
    tiny = reference_data / "grok1" / "tiny"
    reference = np.load(tiny / "reference_f32.npz")
    runner = make_runner(tiny, (1, 8))
    heard: list[Completion] = []
    server = runner.run(heard.append)
    for j in range(3):
        prompt, greedy = (" ".join(map(str, reference[f"{name}{j}"])) for name in ["prompt", "greedy"])
        assert sample_from_model(server, prompt, max_len=24, temperature=0) == greedy
        logits = reference[f"continued_logits{j}"][:-1].astype(np.float64)
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        for output, expected in zip(heard[j].outputs, probs, strict=True):
            assert output.prob == pytest.approx(expected[output.token_id], abs=1e-4)
            np.testing.assert_allclose(output.top_k_probs, np.sort(expected)[::-1][:8], atol=1e-4)
