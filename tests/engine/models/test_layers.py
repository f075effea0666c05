import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import QuantizationConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.layers import Linear, ParamDTypes, widen
from engine.sharding import make_mesh

from ..tiny_models import LLAMA, flatten


def linear(dtypes, num_groups=1, bias=False):
    return hk.without_apply_rng(hk.transform(lambda x: Linear(5, bias, dtypes, "o", num_groups)(x)))


def test_each_scale_widens_its_group_of_inputs():
    w = jnp.asarray([[1, -2, 3, -4, 5, 6]], jnp.int8)
    got = widen(w, jnp.asarray([[0.5, 2.0, -1.0]], jnp.float32), jnp.dtype("float32"))
    np.testing.assert_array_equal(got, [[0.5, -1.0, 6.0, -8.0, -5.0, -6.0]])


@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_an_int8_linear_equals_its_widened_product(num_groups):
    rng = np.random.default_rng(0)
    w = rng.integers(-127, 128, (5, 6)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (5, num_groups)).astype(np.float32)
    b, x = rng.normal(size=5).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)
    got = jax.jit(linear(ParamDTypes.of("int8", "float32"), num_groups, bias=True).apply)(
        {"o": {"w": w, "scale": scale, "b": b}}, x
    )
    expected = (w * np.repeat(scale.astype(np.float64), 6 // num_groups, axis=1)) @ x + b[:, None]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_random_int8_weights_spread_like_float_ones():
    params = linear(ParamDTypes.of("int8", "float32")).init(jax.random.key(0), jnp.zeros((4000, 1)))["o"]
    assert params["w"].dtype == jnp.int8
    assert np.std(params["w"] * params["scale"]) == pytest.approx(0.02, rel=0.05)


def test_groups_that_do_not_divide_the_inputs_are_refused():
    with pytest.raises(ConfigError, match="int8 weights with 6 inputs cannot be scaled in 4 equal groups"):
        linear(ParamDTypes.of("int8", "float32"), num_groups=4).init(jax.random.key(0), jnp.zeros((6, 1)))


@pytest.mark.parametrize(
    ("activation_dtype", "scale_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_int8_is_for_the_layers_matrices_alone(activation_dtype, scale_dtype):
    """q has 22 inputs and one scale for each output; o has 60 and down 26, in groups of 10 and 13."""
    config = dataclasses.replace(LLAMA, qkv_bias=True, quantization=QuantizationConfig(output_groups=2))
    params = flatten(Decoder(config, make_mesh(1, 1), "int8", activation_dtype).abstract_params())
    matrices = {f"layer_0/{name}" for name in ["attention/q", "attention/k", "attention/v", "attention/o"]}
    matrices |= {f"layer_0/ffn/{name}" for name in ["gate", "up", "down"]}
    for path, value in params.items():
        module, _, name = path.rpartition("/")
        if module.replace("layer_1", "layer_0").replace("layer_2", "layer_0") in matrices and name != "b":
            assert value.dtype == (jnp.int8 if name == "w" else scale_dtype), path
        else:
            assert value.dtype == ("float32" if "norm/" in path else activation_dtype), path
    assert params["layer_0/attention/q/scale"].shape == (60, 1)
    assert params["layer_0/attention/o/scale"].shape == (22, 2)
    assert params["layer_0/ffn/down/scale"].shape == (22, 2)
