import re

import pytest

from engine.inference import Completion, SampleOutput
from serve_app import run_local
from tests.engine.weights.grok1_checkpoints import CONFIG, make_tensors, write_grok1
from tests.fakes.engine import ByteTokenizer
from tests.tiny_tokenizer import TINY_TOKENIZER

RANDOM = CONFIG | {"layers": 1, "vocab": 512, "seq": 64}


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A random model of one layer with the tiny tokenizer."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")
    monkeypatch.setattr(run_local, "prepare_compilation_cache", lambda directory: None)
    model = write_grok1(tmp_path, make_tensors(config=RANDOM), RANDOM)
    options = ["--platform", "cpu", "--weight-dtype", "float32", "--activation-dtype", "float32", "--mesh", "1x2"]
    return ["--model", str(model), "--tokenizer", str(TINY_TOKENIZER), "--prompt", "License", *options]


def test_the_text_of_a_prompt_and_the_report_of_each_token(arguments, capfd):
    assert run_local.main([*arguments, "--max-len", "5", "--temperature", "0", "--top"]) == 0
    lines = [line for line in capfd.readouterr().out.split("\n") if re.match(r"   \d ['\"]", line)]
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2, 3, 4]
    for line in lines:
        chosen, _, top = line[5:].partition(" of ")
        assert top.startswith(chosen)  # greedy


def test_the_report_names_tokens_and_probabilities():
    output = SampleOutput(ord("b"), 0.25, (ord("a"), ord("b")), (0.5, 0.25))
    lines = run_local.report(Completion("b", [output]), ByteTokenizer())
    assert lines == ["   0 'b' 0.250 of 'a' 0.500, 'b' 0.250"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--mesh", "1x3"], "a model axis of 3 does not divide 4 query heads"),
        (["--mesh", "1x64"], "cannot stand for 64 devices any more"),
        (["--tokenizer", "no/such/file"], "no such file"),
        (["--max-len", "65", "--context", "32"], "the context"),
    ],
)
def test_unusable_input_exits_with_2_and_says_why(arguments, capfd, changes, message):
    assert run_local.main([*arguments, *changes]) == 2
    assert message in capfd.readouterr().err
