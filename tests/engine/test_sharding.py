import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from engine.config import EngineConfig, MoEConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.sharding import check_model_fits_mesh, make_mesh, num_cache_heads, param_sharding, param_spec
from engine.sizes import derive_sizes

from .tiny_models import MODELS, WIDE, flatten


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_parameter_matches_exactly_one_rule(name):
    params = flatten(Decoder(MODELS[name], make_mesh(1, 1), "float32", "float32").abstract_params())
    assert "embed/w" in params
    for path, value in params.items():
        assert len(param_spec(path)) == value.ndim, path


@pytest.mark.parametrize("path", ["layer_0/attention/z/w", "embed/w/x", "layer_0/attention/q", "layers/block/ffn/up/w"])
def test_an_unknown_parameter_is_refused_by_name(path):
    with pytest.raises(ConfigError, match=f"parameter {path!r} must match exactly one .* matches none"):
        param_spec(path)


def test_a_parameter_of_two_rules_is_refused(monkeypatch):
    monkeypatch.setattr("engine.sharding.PARAM_RULES", ((r"a/.", P(None)), (r"./w", P(None))))
    with pytest.raises(ConfigError, match=r"matches a/\., \./w"):
        param_spec("a/w")


def test_a_mesh_larger_than_the_machine_says_both_numbers():
    with pytest.raises(ConfigError, match=r"mesh 3x4 .* needs 12 devices; 8 cpu"):
        make_mesh(3, 4)
    with pytest.raises(ConfigError, match="mesh 0x1"):
        make_mesh(0, 1)


def test_a_mesh_that_does_not_divide_the_heads_says_both_numbers_and_what_would_work():
    with pytest.raises(ConfigError, match=r"model axis of 3 does not divide 8 query heads and 40 .* can be 1, 2, 4, 8"):
        check_model_fits_mesh(WIDE, make_mesh(1, 3))


def test_a_decoder_refuses_a_mesh_that_cannot_split_it():
    with pytest.raises(ConfigError, match="model axis of 3 does not divide 8 query heads"):
        Decoder(WIDE, make_mesh(1, 3), "float32", "float32")


def test_a_vocabulary_that_cannot_be_divided_is_kept_whole():
    mesh = make_mesh(1, 8)
    assert param_sharding("embed/w", (53, 22), mesh).spec == P(None, None)
    assert param_sharding("embed/w", (56, 22), mesh).spec == P("model", None)
    with pytest.raises(ConfigError, match="an axis of 26 cannot be divided over 8 devices"):
        param_sharding("layer_0/ffn/up/w", (26, 22), mesh)


@pytest.mark.parametrize(("num_kv_heads", "model", "expected"), [(4, 1, 4), (4, 2, 4), (4, 8, 8), (1, 8, 8), (2, 4, 4)])
def test_kv_heads_are_repeated_until_the_model_axis_divides_them(num_kv_heads, model, expected):
    config = dataclasses.replace(WIDE, num_kv_heads=num_kv_heads)
    assert num_cache_heads(config, make_mesh(1, model)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 3}, "3 slots cannot be divided over a data axis of 2"),
        ({"max_model_len": 512}, "max_model_len is 512; the model was trained for 256"),
        ({"page_size": 24}, "page_size is 24; it must divide 128"),
        ({"prefill_buckets": (12, 16)}, r"prefill_buckets \[12\] are no multiples of the page size 16"),
        ({"prefill_buckets": (4, 8)}, r"prefill_buckets \[8\] are no multiples of the page size 16; smaller ones may"),
    ],
)
def test_an_engine_config_that_does_not_fit_is_refused(changes, message):
    decoder = Decoder(WIDE, make_mesh(2, 4), "float32", "float32")
    with pytest.raises(ConfigError, match=message):
        derive_sizes(EngineConfig(**changes), decoder)


def test_a_width_that_does_not_divide_is_no_obstacle_to_whole_experts():
    moe = MoEConfig(num_experts=4, num_experts_per_token=2, intermediate_size=9, renormalize=True)
    decoder = Decoder(dataclasses.replace(WIDE, moe=moe), make_mesh(1, 4), "float32", "float32", "expert")
    assert derive_sizes(EngineConfig(num_slots=1), decoder).num_slots == 1
    with pytest.raises(ConfigError, match="does not divide 9 width of an expert"):
        Decoder(dataclasses.replace(WIDE, moe=moe), make_mesh(1, 4), "float32", "float32", "width")
