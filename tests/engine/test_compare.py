from dataclasses import replace

import numpy as np
import pytest

from engine.compare import LayerRunner, compare, first_fault, main
from engine.errors import CheckpointError, ConfigError
from engine.models import decoder as decoder_module
from engine.models.decoder import Decoder
from engine.references import ActivationReference, load_activations
from engine.sharding import make_mesh

from .faults import (
    attend_inverted,
    drop_bias,
    epsilon,
    interleaved_rope,
    swap_q_and_k,
    transpose,
    with_change,
)
from .oracle import full_logits
from .tiny_models import LLAMA, MODELS, place, random_params

PROMPT = tuple(np.random.default_rng(5).integers(0, 53, 21).tolist())


@pytest.fixture(scope="module")
def pi05(request):
    return request.getfixturevalue("reference_data") / "hf" / "pi05-tiny"


def arguments(model, reference, *more):
    return [str(model), str(reference / "reference.npz"), *more]


def fault_of(out):
    """The layer that the report's last line names."""
    assert out.splitlines()[-1].startswith("first wrong at ")
    return out.splitlines()[-1].removeprefix("first wrong at ").partition(":")[0]


@pytest.mark.parametrize(
    "options",
    [
        ["--prefix", "window_"],
        ["--prefix", "full_", "--window", "full"],
        ["--prefix", "window_", "--mesh", "2x4"],
        pytest.param(["--prefix", "full_", "--window", "full", "--mesh", "2x4"], marks=pytest.mark.slow),
        pytest.param(["--prefix", "window_", "--dtype", "bfloat16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_sound_model_is_within_the_limits(pi05, capsys, options):
    status = main(arguments(pi05, pi05, *options))
    out = capsys.readouterr().out
    assert status == 0, out
    assert [line.split("  ")[0] for line in out.splitlines()[2:6]] == ["layer 0", "layer 1", "layer 2", "logits"]
    assert "<-" not in out
    assert out.splitlines()[-1].startswith("every layer within the limits")


FAULTS = {
    "a missing transpose of q": (transpose("q", 1), "layer 1"),
    "a missing transpose of o": (transpose("o", 2), "layer 2"),
    "swapped q and k": (swap_q_and_k(0), "layer 0"),
    "swapped q and k in a layer without biases": (swap_q_and_k(1), "layer 1"),
    "epsilon 1e-6 for 1e-5": (epsilon(1e-6), "layer 0"),
    "a wrong RoPE convention": (interleaved_rope, "layer 0"),
    "a dropped bias of q": (drop_bias("model.layers.0.self_attn.q_proj.bias"), "layer 0"),
    "a dropped bias of k": (drop_bias("model.layers.0.self_attn.k_proj.bias"), "layer 0"),
    "a dropped bias of a norm": (drop_bias("model.layers.1.input_layernorm.bias"), "layer 1"),
    "a dropped bias of the feed-forward": (drop_bias("model.layers.2.mlp.fc2.bias"), "layer 2"),
    "a dropped bias of the last norm": (drop_bias("model.norm.bias"), "logits"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_layer(pi05, capsys, tmp_path, name):
    change, layer = FAULTS[name]
    model = with_change(pi05, tmp_path / "model", change)
    assert main(arguments(model, pi05, "--prefix", "window_")) == 1
    assert fault_of(capsys.readouterr().out) == layer


def test_an_unchanged_copy_has_no_fault(pi05, capsys, tmp_path):
    """The test above would prove nothing with copies that are damaged by copying."""
    model = with_change(pi05, tmp_path / "model", lambda tensors, config: None)
    assert main(arguments(model, pi05, "--prefix", "window_")) == 0


def test_an_inverted_mask_is_found(pi05, capsys, monkeypatch):
    monkeypatch.setattr(decoder_module, "write_and_attend", attend_inverted)
    assert main(arguments(pi05, pi05, "--prefix", "full_", "--window", "full")) == 1
    assert fault_of(capsys.readouterr().out) == "layer 0"


@pytest.mark.parametrize("options", [["--prefix", "full_"], ["--prefix", "window_", "--window", "full"]])
def test_another_window_is_found(pi05, capsys, options):
    assert main(arguments(pi05, pi05, *options)) == 1
    assert fault_of(capsys.readouterr().out) == "layer 0"


def test_cosine_alone_would_not_see_an_epsilon(pi05, capsys, tmp_path):
    """Why there are two limits."""
    model = with_change(pi05, tmp_path / "model", epsilon(1e-6))
    assert main(arguments(model, pi05, "--prefix", "window_", "--tolerance", "1")) == 0
    assert main(arguments(model, pi05, "--prefix", "window_", "--tolerance", "1", "--threshold", "1")) == 1


def activations(config, params, prompt=PROMPT):
    decoder = Decoder(config, make_mesh(), "float32", "float32")
    return LayerRunner(decoder, place(params, decoder.mesh), "float32")(prompt)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_a_full_forward_pass(name):
    params = random_params(MODELS[name])
    got = activations(MODELS[name], params)
    assert got.hidden.shape == (2, len(PROMPT), 22)
    np.testing.assert_allclose(got.logits, full_logits(MODELS[name], params, PROMPT), atol=2e-3)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_hidden_state_is_what_a_model_of_so_many_layers_ends_with(num_layers):
    """Its final norm only scales, and its output layer is the identity."""
    params = random_params(LLAMA)
    head = np.eye(53, 22, dtype=np.float32)
    cut = replace(LLAMA, num_layers=num_layers)
    ends = full_logits(cut, params | {"final_norm/scale": np.ones(22), "lm_head/w": head}, PROMPT)[:, :22]
    x = activations(LLAMA, params).hidden[num_layers - 1].astype(np.float64)
    np.testing.assert_allclose(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + LLAMA.norm_eps), ends, atol=1e-4)


def test_layers_that_are_not_scanned_give_the_same(monkeypatch):
    params = random_params(LLAMA)
    scanned = activations(LLAMA, params)
    monkeypatch.setattr(Decoder, "_scans_layers", False)
    unrolled = activations(LLAMA, params)
    np.testing.assert_allclose(unrolled.hidden, scanned.hidden, rtol=0, atol=1e-4)
    assert np.abs(scanned.hidden[0] - scanned.hidden[1]).max() > 0.1


@pytest.fixture(scope="module")
def runner():
    decoder = Decoder(LLAMA, make_mesh(), "float32", "float32")
    return LayerRunner(decoder, place(random_params(LLAMA), decoder.mesh), "float32")


@pytest.fixture
def reference(runner):
    """What the model makes of two prompts, with changes to the second's arrays."""

    def make(**changes):
        got = [runner(PROMPT[:length]) for length in (21, 17)]
        first, second = (ActivationReference(PROMPT[: len(a.logits)], tuple(a.hidden), a.logits) for a in got)
        return [first, replace(second, **changes)]

    return make


def test_each_figure_is_that_of_the_worst_token_of_all_prompts(runner, reference):
    plain = reference()
    hidden = [h.copy() for h in plain[1].hidden]
    hidden[1][3] = -2 * hidden[1][3]
    layers = compare(runner, reference(hidden=tuple(hidden)))
    assert [layer.name for layer in layers] == ["layer 0", "layer 1", "logits"]
    assert layers[0].difference == layers[2].difference == 0
    assert layers[1].cosine == pytest.approx(-1)
    assert layers[1].difference == pytest.approx(3 * np.abs(plain[1].hidden[1][3]).max(), rel=1e-5)
    assert layers[1].relative == pytest.approx(layers[1].difference / np.sqrt(np.square(hidden[1]).mean()), rel=1e-5)
    assert first_fault(layers, -1, 1e9) is None
    assert first_fault(layers, 0, 1e9).name == first_fault(layers, -1, 0.1).name == "layer 1"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_a_fault(runner, reference, value):
    logits = reference()[1].logits.copy()
    logits[2, 7] = value
    fault = first_fault(compare(runner, reference(logits=logits)), -1, 1e9)
    assert fault is not None
    assert fault.name == "logits"


def test_zeros_are_like_zeros_and_nothing_else(runner, reference):
    hidden = tuple(np.zeros_like(h) for h in reference()[1].hidden)
    assert compare(runner, reference(hidden=hidden))[0].cosine == 0
    zero = {path: np.zeros_like(a) for path, a in random_params(LLAMA).items()}
    decoder = Decoder(LLAMA, make_mesh(), "float32", "float32")
    nothing = ActivationReference(PROMPT, (np.zeros((21, 22)),) * 2, np.zeros((21, 53)))
    layers = compare(LayerRunner(decoder, place(zero, decoder.mesh), "float32"), [nothing])
    assert [(layer.cosine, layer.relative) for layer in layers] == [(1, 0)] * 3


def save(path, **changes):
    """A file of one prompt; a change of None leaves the array out."""
    arrays = {
        "prompt0": np.array([1, 2, 3]),
        "hidden0_layer0": np.zeros((3, 22), np.float32),
        "hidden0_layer1": np.zeros((3, 22), np.float32),
        "logits0": np.zeros((3, 53), np.float32),
    } | changes
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt0": None}, CheckpointError, "no array prompt0"),
        ({"hidden0_layer1": None}, CheckpointError, "no array hidden0_layer1"),
        ({"logits0": None}, CheckpointError, "no array logits0"),
        ({"hidden0_layer0": np.zeros((3, 21))}, CheckpointError, r"\[3, 21\]; expected floating \[3, 22\]"),
        ({"logits0": np.zeros((3, 60))}, CheckpointError, r"\[3, 60\]; expected floating \[3, 53\]"),
        ({"hidden0_layer2": np.zeros((3, 22))}, CheckpointError, "holds hidden0_layer2; the model has 2 layers"),
        ({"prompt0": np.array([1, 2, 53])}, ConfigError, "holds token 53"),
    ],
)
def test_a_reference_of_another_model_is_refused(tmp_path, changes, error, message):
    load_activations(save(tmp_path / "sound.npz"), LLAMA)
    with pytest.raises(error, match=message):
        load_activations(save(tmp_path / "changed.npz", **changes), LLAMA)


def test_unusable_input_exits_with_2_and_says_why(pi05, capsys, tmp_path):
    assert main([str(pi05), str(save(tmp_path / "other.npz"))]) == 2
    assert "hidden0_layer0 is float32 of shape [3, 22]; expected floating [3, 64]" in capsys.readouterr().err
    assert main(arguments(pi05, pi05, "--prefix", "window_", "--mesh", "1x3")) == 2
    assert "model axis of 3 does not divide 4 query heads" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--threshold", "1.1"], ["--tolerance", "inf"], ["--window", "0"], ["--mesh", "8"]])
def test_a_bad_argument_exits_with_2(wrong):
    with pytest.raises(SystemExit) as caught:
        main(["model", "reference.npz", *wrong])
    assert caught.value.code == 2
