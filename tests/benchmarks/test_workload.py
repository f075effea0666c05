import argparse
import itertools

import pytest

from benchmarks.workload import Load, add_options, app_config, greedy, run_streams
from tests.fakes.engine import FakeEngine


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_prompts_are_the_same_each_time_and_none_like_another() -> None:
    prompts = Load(num_streams=7, prompt_len=11, max_tokens=3).prompts(vocab_size=97)
    assert prompts == Load(num_streams=7, prompt_len=11, max_tokens=5).prompts(vocab_size=97)
    assert len({prompt[0:5] for prompt in prompts}) == 7
    assert {len(prompt) for prompt in prompts} == {11}
    assert all(0 <= token < 97 for prompt in prompts for token in prompt)


def test_streams_hold_every_token_at_its_time() -> None:
    clock = itertools.count()
    engine = FakeEngine(num_slots=2)
    streams = run_streams(engine, [(97,), (98,), (99,)], greedy(2), lambda: float(next(clock)))
    assert [stream.sent_at for stream in streams] == [0.0, 1.0, 2.0]
    # Two slots: the third request waits until the first two have ended.
    assert [stream.arrivals for stream in streams] == [
        [(3.0, 1), (4.0, 1)],
        [(3.0, 1), (4.0, 1)],
        [(5.0, 1), (6.0, 1)],
    ]


def test_options_become_the_config_of_the_engine() -> None:
    config = app_config(
        _options("--streams", "3,5", "--prefill-buckets", "16,64", "--dtype", "bfloat16", "--batch-invariant")
    )
    assert config.engine.num_slots == 5
    assert config.engine.prefill_buckets == (16, 64)
    assert (config.engine.weight_dtype, config.engine.activation_dtype) == ("bfloat16", "bfloat16")
    assert config.engine.batch_invariant


def test_a_number_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options("--streams", "1,0")
    assert "expected at least 1" in capsys.readouterr().err
