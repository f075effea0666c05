import argparse
import shutil
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import CheckpointError, ConfigError
from engine.references import PromptReference, check_references, load_references
from engine.verify import compare, engine_config, main, parse_window, with_window

from .oracle import full_logits
from .tiny_models import LLAMA, random_params

FAMILIES = ["llama-tiny", "llama3-rope-tiny", "mistral-window-tiny", "qwen2-tiny", "qwen3-tiny"]
QUICK = {("mistral-window-tiny", "1x1")}
"""The others compile for as long again each."""


CASES = [
    pytest.param(family, mesh, marks=() if (family, mesh) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for mesh in ("1x1", "1x8", "2x4")
]


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_reference_models_agree_on_every_mesh(reference_data, capsys, family, mesh):
    model = reference_data / "hf" / family
    status = main([str(model), str(model / "reference.npz"), "--mesh", mesh, "--tolerance", "1e-4"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.count("24 of 24 greedy tokens agree") == 3
    assert "prefilled in chunks of 32" in out


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (["--prefix", "window_"], "1x1"),
        pytest.param(["--prefix", "window_"], "2x4", marks=pytest.mark.slow),
        pytest.param(["--prefix", "window_"], "8x1", marks=pytest.mark.slow),
        (["--prefix", "full_", "--window", "full"], "1x1"),
        pytest.param(["--prefix", "full_", "--window", "full"], "2x4", marks=pytest.mark.slow),
    ],
)
def test_pi05_agrees_with_and_without_its_window(reference_data, capsys, options, mesh):
    model = reference_data / "hf" / "pi05-tiny"
    status = main([str(model), str(model / "reference.npz"), "--mesh", mesh, *options])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.count("64 of 64 greedy tokens agree") == 2


def test_a_window_replaces_that_of_every_layer():
    windowed = replace(LLAMA, layer_windows=(7, None))
    assert with_window(windowed, None) is windowed
    assert with_window(windowed, parse_window("full")).layer_windows is None
    assert with_window(windowed, parse_window("16")).layer_windows == (16, 16)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "none", "", "+4", "1234567890"])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number of positions of at least 1, or full"):
        parse_window(text)


def reference(length=21, num_greedy=5):
    """What the plain forward pass says of the model in the `engine` fixture."""
    params = random_params(LLAMA)
    tokens = list(np.random.default_rng(3).integers(0, 53, length).tolist())
    for _ in range(num_greedy):
        tokens.append(int(full_logits(LLAMA, params, tuple(tokens))[-1].argmax()))
    logits = full_logits(LLAMA, params, tuple(tokens))
    return PromptReference(tuple(tokens[:length]), logits[:length], tuple(tokens[length:]), logits[length - 1 :])


def save(path, **changes):
    """A reference file of one prompt; a change of None leaves the array out."""
    r = reference(4, 2)
    arrays = {
        "prompt0": np.array(r.prompt),
        "logits0": r.logits,
        "greedy0": np.array(r.greedy),
        "continued_logits0": r.continued_logits,
    } | changes
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})
    return path


def test_an_agreeing_reference_is_within_tolerance(engine):
    first, second = reference(), reference(40)
    comparisons = compare(engine, [first, second])
    assert [c.num_agreeing for c in comparisons] == [5, 5]
    assert all(c.ok(1e-3) for c in comparisons)
    assert not any(c.ok(0.0) for c in comparisons)


def test_a_changed_logit_is_seen_where_it_is(engine):
    plain = reference()
    logits, continued = plain.logits.copy(), plain.continued_logits.copy()
    logits[3, 5] += 0.5
    continued[-1, 7] -= 0.25
    (c,) = compare(engine, [PromptReference(plain.prompt, logits, plain.greedy, continued)])
    assert c.prefill_error == pytest.approx(0.5, abs=1e-3)
    assert c.decode_error == pytest.approx(0.25, abs=1e-3)
    assert c.num_agreeing == 5
    assert not c.ok(0.1)


def test_a_value_that_is_no_number_is_not_within_tolerance(engine):
    plain = reference()
    logits = plain.logits.copy()
    logits[3, 5] = np.nan
    (c,) = compare(engine, [PromptReference(plain.prompt, logits, plain.greedy, plain.continued_logits)])
    assert not c.ok(1e9)


def test_a_greedy_token_that_differs_is_reported_with_its_position_and_gap(engine):
    plain = reference()
    changed = (*plain.greedy[:2], (plain.greedy[2] + 1) % 53, *plain.greedy[3:])
    (c,) = compare(engine, [PromptReference(plain.prompt, plain.logits, changed, plain.continued_logits)])
    second, best = np.sort(plain.continued_logits[2])[-2:]
    assert c.num_agreeing == 2
    assert f"greedy token 2 is {plain.greedy[2]} instead of {changed[2]}" in c.difference
    assert f"{best - second:.2g} apart" in c.difference
    assert not c.ok(1e9)


def test_a_mismatch_exits_with_1(reference_data, capsys, tmp_path):
    model = reference_data / "hf" / "mistral-window-tiny"
    arrays = dict(np.load(model / "reference.npz"))
    arrays["logits2"] = arrays["logits2"] + np.float32(0.01)
    np.savez(tmp_path / "changed.npz", **arrays)
    assert main([str(model), str(tmp_path / "changed.npz")]) == 1
    assert "NOT within tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt0": None}, "no array prompt0"),
        ({"greedy0": None}, "no array greedy0"),
        ({"logits0": np.zeros((3, 53))}, r"logits0 is float64 of shape \[3, 53\]; expected floating \[4, any\]"),
        ({"continued_logits0": np.zeros((2, 53))}, r"continued_logits0 .* expected floating \[3, 53\]"),
        ({"prompt0": np.zeros(4)}, "prompt0 is float64"),
        ({"prompt0": np.zeros(0, int)}, "prompt0 is empty"),
        ({"greedy0": np.zeros(0, int)}, "greedy0 is empty"),
        ({"prompt0": np.array([object()], dtype=object)}, "not an .npz file of plain arrays"),
    ],
)
def test_an_unusable_file_is_refused_with_the_array(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_references(save(tmp_path / "reference.npz", **changes))


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    path = save(tmp_path / "reference.npz")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="damaged"):
        load_references(path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_references(tmp_path / "nothing.npz")


def test_a_prefix_chooses_among_several_references(tmp_path):
    r = reference(4, 2)
    extra = {"x_logits0": r.logits + 1, "x_greedy0": np.array(r.greedy), "x_continued_logits0": r.continued_logits}
    path = save(tmp_path / "reference.npz", **extra)
    np.testing.assert_array_equal(load_references(path, "x_")[0].logits, r.logits + 1)
    with pytest.raises(CheckpointError, match=r"no array y_logits0; .*--prefix"):
        load_references(path, "y_")


def test_a_reference_of_another_model_is_refused():
    wide = PromptReference((1,), np.zeros((1, 60)), (2,), np.zeros((2, 60)))
    with pytest.raises(ConfigError, match="60 logits a position; the vocabulary has 53"):
        check_references([wide], LLAMA)
    outside = PromptReference((1, 53), np.zeros((2, 53)), (2,), np.zeros((2, 53)))
    with pytest.raises(ConfigError, match="holds token 53"):
        check_references([outside], LLAMA)
    long = PromptReference((1,) * 256, np.zeros((256, 53)), (2,), np.zeros((2, 53)))
    with pytest.raises(ConfigError, match=r"257 tokens .* trained for 256"):
        check_references([long], LLAMA)


@pytest.mark.parametrize(
    ("longest", "bucket", "page"), [(41, 32, 16), (33, 32, 16), (32, 16, 16), (9, 8, 8), (900, 128, 16)]
)
def test_the_longest_prompt_takes_several_chunks(longest, bucket, page):
    references = [PromptReference((1,) * n, np.zeros((n, 5)), (2,), np.zeros((2, 5))) for n in (3, longest, 1)]
    config = engine_config(references, 2, "float32")
    assert config.prefill_buckets[-1] == bucket < longest
    assert (config.page_size, config.num_slots, config.max_model_len) == (page, 4, longest + 1)


@pytest.mark.parametrize("arguments", [["--mesh", "8"], ["--mesh", "0x8"], ["--tolerance", "nan"], ["--dtype", "int8"]])
def test_a_bad_argument_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(["model", "reference.npz", *arguments])
    assert caught.value.code == 2


def test_unusable_input_exits_with_2_and_says_why(reference_data, capsys, tmp_path):
    model = reference_data / "hf" / "llama-tiny"
    assert main([str(model), str(save(tmp_path / "other.npz"))]) == 2
    assert "53 logits a position; the vocabulary has 320 tokens" in capsys.readouterr().err
    assert main([str(model), str(model / "reference.npz"), "--mesh", "1x3"]) == 2
    assert "model axis of 3 does not divide 8 query heads" in capsys.readouterr().err
    shutil.copy(model / "reference.npz", tmp_path / "reference.npz")
    assert main([str(tmp_path / "nothing"), str(tmp_path / "reference.npz")]) == 2
    assert "no such file" in capsys.readouterr().err
