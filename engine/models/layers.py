"""Haiku modules on feature-major activations: `[features, tokens]`, weights `[out, in]` as the left operand.

On the CPU this order is 2 to 3 times faster for few tokens than `x @ w`; on a GPU it makes no difference.

Letters: T tokens, D model, I in, O out, F feed-forward width, H query heads, N head size (half: N / 2), G scale groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from engine.config import Activation, Llama3RopeScaling, ModelConfig
from engine.errors import ConfigError

_init = hk.initializers.RandomNormal(0.02)
_INT8_STD = 127 / 3**0.5


@dataclass(frozen=True)
class ParamDTypes:
    """What parameters are stored as."""

    matrices: jnp.dtype
    """Weights of the layers' linear maps; where int8, each has scales beside it."""
    others: jnp.dtype
    """Embedding, output layer and biases."""

    @classmethod
    def of(cls, weight_dtype: str, activation_dtype: str) -> "ParamDTypes":
        """Everything in the weights' type, but beside int8 matrices in that of the activations."""
        matrices = jnp.dtype(weight_dtype)
        return cls(matrices, jnp.dtype(activation_dtype) if matrices == jnp.int8 else matrices)

    @property
    def exact(self) -> jnp.dtype:
        """Of norms and routers: few values, whose rounding would shift every token alike."""
        return jnp.dtype(jnp.float32)

    @property
    def scales(self) -> jnp.dtype:
        """Of the scales of int8 matrices."""
        return jnp.dtype(jnp.bfloat16 if self.others == jnp.bfloat16 else jnp.float32)


class OfLayer:
    """One parameter of a layer whose number is known only at run time; it stands in for the array in Haiku's tree.

    The arrays of all layers stay where they are: a product chooses among products, so that nothing is copied.
    """

    def __init__(self, arrays: tuple[Array, ...], layer: Int[Array, ""]) -> None:
        self._arrays, self._layer = arrays, layer
        self.shape, self.dtype = arrays[0].shape, arrays[0].dtype

    def dot(self, x: Float[Array, "I T"]) -> Float[Array, "O T"]:
        """w·x in float32, `w` being the parameter."""
        return jax.lax.switch(self._layer, [partial(dot, w) for w in self._arrays], x)

    def value(self) -> Array:
        """The parameter itself: for small ones, since all layers' are put into one array first."""
        return jnp.stack(self._arrays)[self._layer]


def vector_param(name: str, size: int, dtype: jnp.dtype, init: hk.initializers.Initializer) -> Float[Array, " O"]:
    """A small parameter of the current module."""
    param = hk.get_parameter(name, (size,), dtype, init)
    return param.value() if isinstance(param, OfLayer) else param


def matrix_params(
    shape: tuple[int, ...], dtypes: ParamDTypes, num_groups: int
) -> tuple[Num[Array, "*E O I"] | OfLayer, Float[Array, "*E O G"] | None]:
    """The current module's `w` of this shape and, where it is int8, its `scale`. Raises `ConfigError` where G does not
    divide I."""
    if dtypes.matrices != jnp.int8:
        return hk.get_parameter("w", shape, dtypes.matrices, _init), None
    if shape[-1] % num_groups:
        raise ConfigError(f"int8 weights with {shape[-1]} inputs cannot be scaled in {num_groups} equal groups")
    w = hk.get_parameter("w", shape, dtypes.matrices, _init_int8)
    scale = hk.get_parameter(
        "scale", (*shape[:-1], num_groups), dtypes.scales, hk.initializers.Constant(0.02 / _INT8_STD)
    )
    return w, scale


def stacked_params(
    shape: tuple[int, ...], dtypes: ParamDTypes, num_groups: int
) -> tuple[Num[Array, "*E O I"], Float[Array, "*E O G"] | None]:
    """`matrix_params` of a module that only ever runs with its own layer's arrays."""
    w, scale = matrix_params(shape, dtypes, num_groups)
    assert not isinstance(w, OfLayer)
    return w, scale


def widen(w: Num[Array, "*E O I"], scale: Float[Array, "*E O G"] | None, dtype: jnp.dtype) -> Float[Array, "*E O I"]:
    """w·scale in `dtype`, each scale over its I / G inputs; `w` itself where it has no scale.

    Written next to a product, so that a GPU's compiler makes it part of that and no widened copy is stored.
    """
    if scale is None:
        return w
    groups = w.reshape(*scale.shape, w.shape[-1] // scale.shape[-1]).astype(dtype)
    return (groups * scale[..., None].astype(dtype)).reshape(w.shape)


def _init_int8(shape: Sequence[int], dtype: jnp.dtype) -> Array:
    return jax.random.randint(hk.next_rng_key(), shape, -127, 128, jnp.int32).astype(dtype)


def dot(w: Float[Array, "O I"], x: Float[Array, "I T"]) -> Float[Array, "O T"]:
    """w·x in float32; the factors in the dtype of `w`."""
    return jax.lax.dot_general(w, x.astype(w.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def matmul(w: Float[Array, "O I"], x: Float[Array, "I T"]) -> Float[Array, "O T"]:
    """w·x, accumulated in float32, in the dtype of `x`."""
    return dot(w, x).astype(x.dtype)


class Linear(hk.Module):
    """An affine map: parameters `w` [O, I], where that is int8 `scale` [O, G], and, with `bias`, `b` [O]."""

    def __init__(self, out_size: int, bias: bool, dtypes: ParamDTypes, name: str, num_groups: int = 1) -> None:
        super().__init__(name)
        self._out_size, self._bias, self._dtypes, self._num_groups = out_size, bias, dtypes, num_groups

    def __call__(self, x: Float[Array, "I T"]) -> Float[Array, "O T"]:
        w, scale = matrix_params((self._out_size, x.shape[0]), self._dtypes, self._num_groups)
        y = w.dot(x).astype(x.dtype) if isinstance(w, OfLayer) else matmul(widen(w, scale, x.dtype), x)
        if self._bias:
            b = vector_param("b", self._out_size, self._dtypes.others, jnp.zeros)
            y = y + b.astype(x.dtype)[:, None]
        return y


class Norm(hk.Module):
    """RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016) over `axis`, computed in float32.

    Parameters: `scale`, and `bias` for LayerNorm, of the size of that axis.
    """

    def __init__(self, kind: str, eps: float, dtype: jnp.dtype, name: str, axis: int = 0) -> None:
        super().__init__(name)
        self._kind, self._eps, self._dtype, self._axis = kind, eps, dtype, axis

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        shape = [1] * x.ndim
        shape[self._axis] = x.shape[self._axis]
        scale = vector_param("scale", x.shape[self._axis], self._dtype, jnp.ones)
        y = x.astype(jnp.float32)
        if self._kind == "layer":
            y = y - jnp.mean(y, axis=self._axis, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=self._axis, keepdims=True) + self._eps)
        y = y * scale.astype(jnp.float32).reshape(shape)
        if self._kind == "layer":
            bias = vector_param("bias", x.shape[self._axis], self._dtype, jnp.zeros)
            y = y + bias.astype(jnp.float32).reshape(shape)
        return y.astype(x.dtype)


def activate(x: Array, kind: Activation) -> Array:
    """The feed-forward's non-linearity; `gelu` is exact (erf), `gelu_tanh` its approximation."""
    if kind == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=kind == "gelu_tanh")


class FeedForward(hk.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the config has no gate."""

    def __init__(self, config: ModelConfig, dtypes: ParamDTypes, name: str) -> None:
        super().__init__(name)
        self._config, self._dtypes = config, dtypes

    def __call__(self, x: Float[Array, "D T"]) -> Float[Array, "D T"]:
        c, groups = self._config, self._config.quantization
        up = Linear(c.intermediate_size, c.ffn_bias, self._dtypes, "up", groups.input_groups)(x)
        if c.gated:
            gate = Linear(c.intermediate_size, c.ffn_bias, self._dtypes, "gate", groups.input_groups)(x)
            hidden = activate(gate, c.activation) * up
        else:
            hidden = activate(up, c.activation)
        return Linear(c.hidden_size, c.ffn_bias, self._dtypes, "down", groups.output_groups)(hidden)


def rope_frequencies(config: ModelConfig) -> Float[Array, " half"]:
    """Angle per position of each rotated pair: theta^(-2i/N) (Su et al., 2021), scaled as the config says."""
    exponent = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if not isinstance(scaling, Llama3RopeScaling):
        return frequencies / scaling.factor
    # Long wavelengths are stretched, short ones kept, those between interpolated.
    context = scaling.original_max_position_embeddings
    wavelength = 2 * jnp.pi / frequencies
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)


class Rotation(NamedTuple):
    """Cosines and sines of each token's angles: the same in every layer, so computed once a step."""

    cos: Float[Array, "half T"]
    sin: Float[Array, "half T"]


def rotation(config: ModelConfig, positions: Int[Array, " T"]) -> Rotation:
    """The rotation of tokens at these positions."""
    angles = rope_frequencies(config)[:, None] * positions[None, :].astype(jnp.float32)
    # Behind the barrier, so that the compiler does not compute them again in each layer.
    return jax.lax.optimization_barrier(Rotation(jnp.cos(angles), jnp.sin(angles)))


def rotate(x: Float[Array, "H N T"], by: Rotation) -> Float[Array, "H N T"]:
    """RoPE with the halves convention: element i is paired with element i + N/2. Computed in float32."""
    cos, sin = by.cos[None], by.sin[None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(x.dtype)
