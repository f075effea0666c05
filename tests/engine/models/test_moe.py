"""Only the chosen experts, for any balance between them, equals every expert weighted by its gate."""

from dataclasses import replace
from functools import cache, partial

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from engine.config import ModelConfig, MoEConfig, QuantizationConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.experts import Experts, Matrices, Routing, all_experts, chosen_experts
from engine.models.layers import ParamDTypes
from engine.models.moe import MixtureOfExperts, block_len, experts_apart, route
from engine.sharding import check_model_fits_mesh, make_mesh, param_sharding, param_spec
from engine.verify import main

from ..tiny_models import flatten

NUM_EXPERTS, SIZE, WIDTH, CHOSEN = 5, 11, 14, 2
SMALL_TILES = 3 * SIZE * 4
"""Bytes of three rows of `gate`: several tiles, of which the last overlaps."""


def make_experts(kind="float32", num_groups=2, seed=0):
    rng = np.random.default_rng(seed)

    def matrices(num_outputs, num_inputs, groups):
        shape = (NUM_EXPERTS, num_outputs, num_inputs)
        if kind == "int8":
            scale = rng.uniform(0.002, 0.02, (*shape[:2], groups)).astype(np.float32)
            return Matrices(jnp.asarray(rng.integers(-127, 128, shape), jnp.int8), jnp.asarray(scale))
        return Matrices(jnp.asarray(rng.normal(size=shape) * 0.4, jnp.float32), None)

    return Experts(matrices(WIDTH, SIZE, 1), matrices(WIDTH, SIZE, 1), matrices(SIZE, WIDTH, num_groups))


def make_tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(SIZE, count)), jnp.float32)


def routing_of(experts, seed=0):
    gates = np.random.default_rng(seed).uniform(0.1, 1.0, np.shape(experts))
    return Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(gates, jnp.float32))


compiled_chosen = jax.jit(chosen_experts, static_argnums=(4, 5, 6))
every = jax.jit(all_experts, static_argnums=4)


def chosen(x, is_real, routing, experts, activation, storage):
    """`storage`: "whole" or "tiles" of one array, or an array for each expert: "apart"."""
    if storage == "apart":
        experts = Experts(*(Matrices(tuple(m.w[e : e + 1] for e in range(NUM_EXPERTS)), None) for m in experts))
    length = block_len(x.shape[1], MoEConfig(NUM_EXPERTS, CHOSEN, WIDTH, False))
    tile_bytes = None if storage == "whole" else SMALL_TILES
    return compiled_chosen(x, is_real, routing, experts, activation, length, tile_bytes)


def assert_equal_to_all_experts(x, is_real, routing, experts, storage):
    got = chosen(x, is_real, routing, experts, "gelu_tanh", storage)
    expected = every(x, is_real, routing, experts, "gelu_tanh")
    assert np.abs(expected).max() > 0.05 or not is_real.any()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


assignments = st.lists(st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:CHOSEN]), min_size=29, max_size=29)


@pytest.mark.parametrize(
    ("kind", "storage"),
    [("float32", "whole"), ("float32", "tiles"), ("float32", "apart"), ("int8", "whole"), ("int8", "tiles")],
)
@settings(max_examples=25, deadline=None)
@given(experts=assignments, is_real=st.lists(st.booleans(), min_size=29, max_size=29))
def test_any_balance_equals_all_experts(kind, storage, experts, is_real):
    assert_equal_to_all_experts(make_tokens(29), jnp.asarray(is_real), routing_of(experts), make_experts(kind), storage)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 300])
@pytest.mark.parametrize("pattern", ["one pair", "spread", "lopsided"])
@pytest.mark.parametrize("storage", ["whole", "tiles", "apart"])
def test_any_number_of_tokens_equals_all_experts(num_tokens, pattern, storage):
    experts = {
        "one pair": [(3, 1)] * num_tokens,
        "spread": [(t % NUM_EXPERTS, (t + 2) % NUM_EXPERTS) for t in range(num_tokens)],
        "lopsided": [(0, 4) if t % 97 else (2, 3) for t in range(num_tokens)],
    }[pattern]
    is_real = jnp.ones(num_tokens, bool)
    assert_equal_to_all_experts(make_tokens(num_tokens), is_real, routing_of(experts), make_experts(), storage)


@pytest.mark.parametrize("storage", ["whole", "tiles", "apart"])
def test_an_expert_that_no_real_token_chose_is_not_used(storage):
    """Not even multiplied by zero: values that are not finite stay where they are."""
    experts = jax.tree.map(lambda a: a.at[2].set(jnp.nan), make_experts())
    routing = routing_of([(0, 1), (3, 4), (1, 3), (2, 0)])
    x = make_tokens(4).at[:, 3].set(jnp.inf)
    out = chosen(x, jnp.asarray([True, True, True, False]), routing, experts, "silu", storage)
    assert np.isfinite(out).all()
    assert not out[:, 3].any()


def test_experts_of_other_devices_add_nothing():
    x, is_real, experts = make_tokens(3), jnp.ones(3, bool), make_experts()
    there = chosen(x, is_real, routing_of([(-1, 2), (5, 9), (0, -7)]), experts, "silu", "whole")
    here = routing_of([(0, 2), (0, 0), (0, 0)])
    gates = here.gates.at[0, 0].set(0).at[1].set(0).at[2, 1].set(0)
    expected = every(x, is_real, Routing(here.experts, gates), experts, "silu")
    np.testing.assert_allclose(there, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("storage", ["whole", "tiles", "apart"])
def test_a_token_does_not_depend_on_the_others(storage):
    """To the last bit, wherever it stands and however the other tokens are distributed."""
    rng = np.random.default_rng(3)
    experts, token, results = make_experts(), make_tokens(1, seed=5), []
    for place in (0, 6, 12):
        x = jnp.asarray(rng.normal(size=(SIZE, 13)), jnp.float32).at[:, place].set(token[:, 0])
        choice = np.array([rng.permutation(NUM_EXPERTS)[:CHOSEN] for _ in range(13)])
        choice[place] = (4, 1)
        routing = routing_of(choice, seed=place)
        routing = routing._replace(gates=routing.gates.at[place].set(jnp.asarray([0.7, 0.2])))
        results.append(chosen(x, jnp.ones(13, bool), routing, experts, "silu", storage)[:, place])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_gates_are_a_softmax_over_all_experts_rescaled_only_on_request():
    router = jnp.eye(4, 4)
    x = jnp.log(jnp.asarray([[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]]))
    plain = route(router, x, MoEConfig(4, 2, 8, renormalize=False))
    np.testing.assert_array_equal(plain.experts, [[3, 2], [0, 1]])
    np.testing.assert_allclose(plain.gates, [[0.4, 0.3]] * 2, rtol=1e-6)
    rescaled = route(router, x, MoEConfig(4, 2, 8, renormalize=True))
    np.testing.assert_allclose(rescaled.gates, [[4 / 7, 3 / 7]] * 2, rtol=1e-6)


def test_the_router_decides_in_float32_and_ties_go_to_the_lower_index():
    router = jnp.zeros((4, 4), jnp.bfloat16)
    routing = route(router, jnp.ones((4, 1), jnp.bfloat16), MoEConfig(4, 2, 8, renormalize=False))
    assert routing.gates.dtype == jnp.float32
    np.testing.assert_array_equal(routing.experts, [[0, 1]])


MODEL = ModelConfig(
    family="mixtral",
    vocab_size=53,
    hidden_size=24,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_size=4,
    intermediate_size=16,
    max_position_embeddings=64,
    activation="gelu_tanh",
    moe=MoEConfig(num_experts=8, num_experts_per_token=3, intermediate_size=16, renormalize=False),
)


class Layer(hk.Module):
    """Gives the experts the path that the sharding rules know."""

    def __init__(self, *arguments):
        super().__init__("layer_0")
        self._arguments = arguments

    def __call__(self, x, is_real):
        return MixtureOfExperts(*self._arguments, "moe")(x, is_real)


def module(config, mesh, expert_sharding, weight_dtype):
    arguments = config, ParamDTypes.of(weight_dtype, "float32"), mesh, expert_sharding
    return hk.without_apply_rng(hk.transform(lambda x, is_real: Layer(*arguments)(x, is_real)))


@cache
def module_params(config, weight_dtype):
    """{module: {name: array}} on the host, and what it stands for in float64 by matrix name."""
    inputs = jnp.zeros((config.hidden_size, 1)), jnp.ones(1, bool)
    shapes = jax.eval_shape(module(config, make_mesh(1, 1), "width", weight_dtype).init, jax.random.key(0), *inputs)
    rng, params, wide = np.random.default_rng(1), {}, {}
    for path, arrays in shapes.items():
        drawn = {"w": rng.integers(-127, 128, arrays["w"].shape).astype(np.int8)}
        if "scale" in arrays:
            drawn["scale"] = rng.uniform(0.002, 0.01, arrays["scale"].shape).astype(np.float32)
            repeat = drawn["w"].shape[-1] // drawn["scale"].shape[-1]
            value = drawn["w"] * np.repeat(drawn["scale"].astype(np.float64), repeat, axis=-1)
        else:
            drawn["w"] = (drawn["w"] * 0.004).astype(np.float32)
            value = drawn["w"].astype(np.float64)
        params[path], wide[path.rpartition("/")[2]] = drawn, value
    return params, wide


def oracle(config, wide, x, is_real):
    """Token by token in float64."""
    out = np.zeros(x.shape)
    for t in np.flatnonzero(is_real):
        logits = wide["router"] @ x[:, t]
        gates = np.exp(logits) / np.exp(logits).sum()
        for expert in np.argsort(-gates)[: config.moe.num_experts_per_token]:
            gate, up = wide["gate"][expert] @ x[:, t], wide["up"][expert] @ x[:, t]
            hidden = gate / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            out[:, t] += gates[expert] * (wide["down"][expert] @ hidden)
    return out


def run_on_mesh(config, shape, expert_sharding, weight_dtype, x, is_real, apart=False):
    mesh = make_mesh(*shape)
    host, _ = module_params(config, weight_dtype)
    params = {
        path: {
            name: jax.device_put(a, param_sharding(f"{path}/{name}", a.shape, mesh, expert_sharding))
            for name, a in arrays.items()
        }
        for path, arrays in host.items()
    }
    if apart:
        params = experts_apart(params, mesh)
        assert len(params["layer_0/moe/down"]) == (8 // shape[1] if expert_sharding == "expert" else 8)
    put = partial(jax.device_put, device=NamedSharding(mesh, P()))
    return jax.jit(module(config, mesh, expert_sharding, weight_dtype).apply)(params, put(x), put(is_real))


@pytest.mark.parametrize("mesh", [(1, 1), (1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("expert_sharding", ["width", "expert"])
@pytest.mark.parametrize(("weight_dtype", "apart"), [("float32", False), ("float32", True), ("int8", False)])
def test_every_mesh_and_sharding_equals_a_token_by_token_sum(mesh, expert_sharding, weight_dtype, apart):
    x = np.random.default_rng(2).normal(size=(24, 40)).astype(np.float32)
    is_real = np.arange(40) % 5 != 1
    got = run_on_mesh(MODEL, mesh, expert_sharding, weight_dtype, x, is_real, apart)
    expected = oracle(MODEL, module_params(MODEL, weight_dtype)[1], x, is_real)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_experts_apart_share_the_memory_of_the_loaded_ones():
    mesh = make_mesh(1, 2)
    w = jax.device_put(np.ones((4, 32, 16), np.float32), param_sharding("layer_0/moe/up/w", (4, 32, 16), mesh))
    params = {"layer_0/moe/up": {"w": w}, "layer_0/ffn/up": {"w": w[0]}}
    apart = experts_apart(params, mesh)
    assert apart["layer_0/ffn/up"] is params["layer_0/ffn/up"]
    assert list(apart["layer_0/moe/up"]) == ["w_0", "w_1", "w_2", "w_3"]
    for shard, part in zip(w.addressable_shards, apart["layer_0/moe/up"]["w_3"].addressable_shards, strict=True):
        expected = shard.data.unsafe_buffer_pointer() + 3 * 16 * 16 * 4
        assert part.data.unsafe_buffer_pointer() == expected
    assert experts_apart(apart, mesh) == apart


def test_many_experts_and_int8_ones_stay_together():
    many = jnp.zeros((17, 4, 4))
    few = {"w": jnp.zeros((2, 4, 4), jnp.int8), "scale": jnp.ones((2, 4, 1))}
    params = {"layer_0/moe/up": {"w": many}, "layer_0/moe/down": few}
    assert experts_apart(params, make_mesh(1, 1)) == params


@pytest.mark.parametrize("num_groups", [1, 2, 4, 16])
def test_scales_follow_the_inputs_however_many_groups_there_are(num_groups):
    """On 8 devices: one scale for all, groups wider than a device's part, and several on each device."""
    config = replace(MODEL, quantization=QuantizationConfig(input_groups=3, output_groups=num_groups))
    x, is_real = np.random.default_rng(2).normal(size=(24, 8)).astype(np.float32), np.ones(8, bool)
    got = run_on_mesh(config, (1, 8), "width", "int8", x, is_real)
    expected = oracle(config, module_params(config, "int8")[1], x, is_real)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_scale_groups_that_straddle_devices_are_refused():
    moe = replace(MODEL.moe, intermediate_size=48)
    config = replace(MODEL, moe=moe, quantization=QuantizationConfig(output_groups=3))
    x = np.zeros((24, 1), np.float32)
    with pytest.raises(ConfigError, match="model axis of 8 splits int8 experts within their 3 scale groups"):
        run_on_mesh(config, (1, 8), "width", "int8", x, np.ones(1, bool))


def test_a_mesh_that_cannot_divide_the_experts_says_both_numbers_and_what_would_work():
    odd = replace(MODEL, moe=replace(MODEL.moe, num_experts=6, intermediate_size=20))
    with pytest.raises(ConfigError, match=r"model axis of 8 does not divide 20 width of an expert; it can be 1, 2, 4$"):
        check_model_fits_mesh(odd, make_mesh(1, 8), "width")
    with pytest.raises(ConfigError, match=r"model axis of 4 does not divide 6 experts; it can be 1, 2$"):
        Decoder(odd, make_mesh(1, 4), "float32", "float32", "expert")


@pytest.mark.parametrize("expert_sharding", ["width", "expert"])
def test_every_parameter_of_a_mixture_matches_exactly_one_rule(expert_sharding):
    params = flatten(Decoder(MODEL, make_mesh(1, 1), "int8", "float32", expert_sharding).abstract_params())
    assert params["layer_0/moe/down/scale"].shape == (8, 24, 8)
    assert params["layer_0/moe/router/w"].dtype == jnp.float32
    divided = "layer_0/moe/gate/w"
    assert param_spec(divided, expert_sharding).index("model") == (0 if expert_sharding == "expert" else 1)
    for path, value in params.items():
        assert len(param_spec(path, expert_sharding)) == value.ndim, path


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=() if (family, mesh) == ("mixtral-tiny", "1x1") else pytest.mark.slow)
        for family in ("mixtral-tiny", "qwen3-moe-tiny")
        for mesh in ("1x1", "1x8", "2x4")
    ],
)
def test_reference_models_agree_on_every_mesh(reference_data, capsys, family, mesh):
    model = reference_data / "hf" / family
    status = main([str(model), str(model / "reference.npz"), "--mesh", mesh, "--tolerance", "1e-3"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.count("24 of 24 greedy tokens agree") == 3
