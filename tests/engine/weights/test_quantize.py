import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from engine.errors import CheckpointError
from engine.sharding import make_mesh, param_sharding
from engine.weights.load import load_config, load_params
from engine.weights.placement import place_dequantized, place_quantized
from engine.weights.quantize import (
    QuantizationError,
    dequantize,
    describe_errors,
    group_scales,
    host_scales,
    measured_error,
    quantize,
)

from .checkpoints import LLAMA_CONFIG, MIXTRAL_CONFIG, llama_tensors, mixtral_tensors, write_checkpoint
from .trees import abstract_tree, int8_tree, mesh_of, sharding_on

RANDOM = np.random.default_rng(5).normal(size=(16, 24)).astype(np.float32)


def by_hand(w, num_groups, dtype=np.float32):
    """Values and scales, one number at a time."""
    values, scales = np.zeros(w.shape, np.int8), np.zeros((*w.shape[:-1], num_groups), dtype)
    size = w.shape[-1] // num_groups
    for row in np.ndindex(w.shape[:-1]):
        for group in range(num_groups):
            part = slice(group * size, (group + 1) * size)
            scale = dtype(np.float32(max(abs(w[row][part])) * np.float32(1 / 127)))
            scales[row][group] = scale
            for i in range(part.start, part.stop):
                values[row][i] = 0 if scale == 0 else max(-127, min(127, round(float(w[row][i] / np.float32(scale)))))
    return values, scales


def test_a_row_by_hand():
    w = jnp.array([[127.0, -63.5, 1.0, 0.4], [0, 0, 0, 0]])
    scales = group_scales(w, 2, np.float32)
    np.testing.assert_allclose(scales, [[1.0, 1 / 127], [0, 0]])
    values = quantize(w, scales)
    np.testing.assert_array_equal(values, [[127, -64, 127, 51], [0, 0, 0, 0]])
    np.testing.assert_allclose(dequantize(values, scales), [[127, -64, 1, 51 / 127], [0, 0, 0, 0]])


@pytest.mark.parametrize("num_groups", [1, 3, 8, 24])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_are_the_nearest_under_the_rounded_scale(num_groups, dtype):
    values, scales = by_hand(RANDOM, num_groups, dtype)
    found = group_scales(jnp.asarray(RANDOM), num_groups, dtype)
    np.testing.assert_array_equal(found, scales)
    np.testing.assert_array_equal(quantize(jnp.asarray(RANDOM), found), values)
    np.testing.assert_array_equal(host_scales(RANDOM, num_groups, dtype), scales)


def test_no_value_is_off_by_more_than_half_a_step():
    scales = group_scales(jnp.asarray(RANDOM), 4, np.float32)
    error = np.abs(dequantize(quantize(jnp.asarray(RANDOM), scales), scales) - RANDOM)
    assert (error.reshape(16, 4, 6) <= np.asarray(scales)[..., None] * 0.5001).all()


@pytest.mark.parametrize("shape", [(300, 8), (2, 513, 8)])
def test_the_host_computes_scales_in_pieces(shape):
    w = np.random.default_rng(0).normal(size=shape).astype(ml_dtypes.bfloat16)
    expected = group_scales(jnp.asarray(w).astype(jnp.float32), 2, np.float32)
    np.testing.assert_array_equal(host_scales(w, 2, np.dtype(np.float32)), expected)


# (model axis, spec of the values, spec of the scales): with 8 groups, the last three have groups on several devices.
SHARDINGS = [
    (1, P(), P()),
    (4, P("model", None), P("model", None)),
    (8, P(None, "model"), P(None, "model")),
    (4, P(None, "model"), P(None, None)),
    (3, P(None, "model"), P(None, None)),
    (6, P(None, "model"), P(None, None)),
]


@pytest.mark.parametrize(("model", "spec", "scale_spec"), SHARDINGS)
@pytest.mark.parametrize("transposed", [False, True])
def test_sharded_equals_unsharded(model, spec, scale_spec, transposed):
    mesh = make_mesh(1, model)
    values, scales = by_hand(RANDOM, 8)
    target = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    host = np.ascontiguousarray(RANDOM.T) if transposed else RANDOM
    placed, placed_scales, figures = place_quantized(
        host, target, NamedSharding(mesh, spec), NamedSharding(mesh, scale_spec), transposed
    )
    np.testing.assert_array_equal(placed, values)
    np.testing.assert_array_equal(placed_scales, scales)
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert placed_scales.sharding.is_equivalent_to(NamedSharding(mesh, scale_spec), 2)
    error = measured_error("p", [figures])
    exact = np.repeat(scales, 3, axis=-1) * values - RANDOM
    assert error.relative_rms == pytest.approx(np.sqrt((exact**2).sum() / (RANDOM**2).sum()), rel=1e-4)
    assert error.max_abs == pytest.approx(np.abs(exact).max(), rel=1e-4)


@pytest.mark.parametrize(("model", "spec", "scale_spec"), SHARDINGS)
@pytest.mark.parametrize("transposed", [False, True])
def test_widening_sharded_equals_unsharded(model, spec, scale_spec, transposed):
    values, scales = by_hand(RANDOM, 8)
    host = np.ascontiguousarray(values.T) if transposed else values
    placed = place_dequantized(host, scales, jnp.float32, NamedSharding(make_mesh(1, model), spec), transposed)
    np.testing.assert_array_equal(placed, np.repeat(scales, 3, axis=-1) * values)


def test_errors_of_pieces_are_put_together():
    mesh = make_mesh(2, 1)
    pieces = [np.array([[0.5, 0.0], [0.0, 3.0]], np.float32), np.array([[1.0, 127.4], [0.0, 0.0]], np.float32)]
    target, sharding = jax.ShapeDtypeStruct((2, 1), jnp.float32), NamedSharding(mesh, P())
    figures = [place_quantized(piece, target, sharding, sharding)[2] for piece in pieces]
    # Only 1.0 is off: its row's step is 127.4 / 127.
    off = 1.0 - 127.4 / 127
    error = measured_error("p", figures)
    assert error.relative_rms == pytest.approx(abs(off) / np.sqrt(0.25 + 9 + 1 + 127.4**2), rel=1e-3)
    assert error.max_abs == pytest.approx(abs(off), rel=1e-3)


def test_zeros_have_no_error():
    sharding = NamedSharding(make_mesh(), P())
    zeros = place_quantized(np.zeros((2, 4), np.float32), jax.ShapeDtypeStruct((2, 1), jnp.float32), sharding, sharding)
    assert measured_error("p", [zeros[2]]) == QuantizationError("p", 0.0, 0.0)


def test_the_line_for_the_log():
    errors = [QuantizationError("a/w", 0.004, 0.5), QuantizationError("b/w", 0.006, 0.25)]
    assert describe_errors(errors) == (
        "2 parameters quantised to int8: relative RMS error 0.500% on average, at most 0.600% (b/w, largest error 0.25)"
    )
    assert describe_errors([]) == "no parameter was quantised while loading"


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("file_dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_a_llama_is_quantised_while_loading(tmp_path, num_devices, file_dtype):
    tensors = {name: tensor.astype(file_dtype) for name, tensor in llama_tensors().items()}
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, tensors)
    config, errors = load_config(path), []
    params = load_params(path, config, int8_tree(config, 2, 4), sharding_on(mesh_of(num_devices)), report=errors.append)
    w = tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    values, scales = by_hand(w, 4)
    np.testing.assert_array_equal(params["layer_1/ffn/down"]["w"], values)
    np.testing.assert_array_equal(params["layer_1/ffn/down"]["scale"], scales)
    np.testing.assert_array_equal(params["embed"]["w"], tensors["model.embed_tokens.weight"].astype(np.float32))
    by_path = {error.path: error for error in errors}
    assert len(errors) == len(by_path) == 3 * 7
    exact = np.repeat(scales, 4, axis=-1) * values - w
    error = by_path["layer_1/ffn/down/w"]
    assert error.relative_rms == pytest.approx(np.sqrt((exact**2).sum() / (w**2).sum()), rel=1e-3)
    assert error.max_abs == pytest.approx(np.abs(exact).max(), rel=1e-3)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_experts_are_quantised_one_by_one(tmp_path, num_devices):
    tensors = mixtral_tensors()
    path = write_checkpoint(tmp_path, MIXTRAL_CONFIG, tensors)
    config, errors = load_config(path), []
    params = load_params(path, config, int8_tree(config, 1, 4), sharding_on(mesh_of(num_devices)), report=errors.append)
    stacked = np.stack([tensors[f"model.layers.2.block_sparse_moe.experts.{e}.w2.weight"] for e in range(8)])
    values, scales = by_hand(stacked, 4)
    np.testing.assert_array_equal(params["layer_2/moe/down"]["w"], values)
    np.testing.assert_array_equal(params["layer_2/moe/down"]["scale"], scales)
    assert sum("/moe/" in error.path for error in errors) == 3 * 3
    # The router is left as it is.
    np.testing.assert_array_equal(
        params["layer_2/moe/router"]["w"], tensors["model.layers.2.block_sparse_moe.gate.weight"]
    )


@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 4)])
def test_the_engines_own_shardings(tmp_path, data, model):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, llama_tensors())
    config, mesh = load_config(path), make_mesh(data, model)
    # The default of 8 groups where a model axis of 4 divides the inputs, 1 group where it cannot be.
    for groups in (8, 1):
        params = load_params(path, config, int8_tree(config, 1, groups), lambda p, s: param_sharding(p, s, mesh))
        values, scales = by_hand(llama_tensors()["model.layers.0.self_attn.o_proj.weight"], groups)
        np.testing.assert_array_equal(params["layer_0/attention/o"]["w"], values)
        np.testing.assert_array_equal(params["layer_0/attention/o"]["scale"], scales)


def test_int8_without_scales_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, llama_tensors())
    config = load_config(path)
    tree = abstract_tree(config)
    tree["layer_0/attention/q"]["w"] = jax.ShapeDtypeStruct((24, 10), jnp.int8)
    with pytest.raises(CheckpointError, match=r"layer_0/attention/q/w is declared as int8 without a scale beside it"):
        load_params(path, config, tree, sharding_on(mesh_of(1)))
