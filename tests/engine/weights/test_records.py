import dataclasses
import json
from pathlib import Path

import pytest

from engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, MoEConfig
from engine.errors import CheckpointError
from engine.weights.records import decode_record, encode_record

CONFIG = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=10,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    intermediate_size=16,
    max_position_embeddings=64,
    eos_token_ids=(2, 5),
    layer_windows=(None, 7, None),
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 128),
    moe=MoEConfig(8, 2, 16, renormalize=False),
)
FILE = Path("config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": LinearRopeScaling(4.0)},
        {"rope_scaling": None, "moe": None, "layer_windows": None, "eos_token_ids": ()},
        {"bos_token_id": 3, "attention_scale": 0.1, "norm_eps": 1e-6, "activation": "gelu_tanh", "post_norms": True},
    ],
)
def test_a_config_comes_back_from_json_as_it_was(changes):
    config = dataclasses.replace(CONFIG, **changes)
    assert decode_record(ModelConfig, json.loads(json.dumps(encode_record(config))), FILE) == config


def test_a_whole_number_counts_as_a_float():
    encoded = encode_record(CONFIG) | {"rope_theta": 10000}
    assert isinstance(decode_record(ModelConfig, encoded, FILE).rope_theta, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "40"}, r"config\.json: vocab_size is '40'; expected int"),
        ({"vocab_size": True}, "vocab_size is True; expected int"),
        ({"vocab_size": 40.0}, "vocab_size is 40.0; expected int"),
        ({"post_norms": 1}, "post_norms is 1; expected bool"),
        ({"activation": "relu"}, "activation is 'relu'; expected .*'silu'"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; expected float"),
        ({"rope_theta": None}, "rope_theta is None; expected float"),
        ({"layer_windows": [1, 2, "x"]}, r"layer_windows\[2\] is 'x'; expected int"),
        ({"eos_token_ids": 2}, "eos_token_ids is 2; expected tuple"),
        ({"moe": {"num_experts": 8}}, r"moe\.intermediate_size is missing"),
        ({"moe": 3}, "moe is 3; expected an object"),
        ({"rope_scaling": {"factor": "2"}}, r"rope_scaling\.factor is '2'; expected float"),
        ({"wings": 2}, "wings is unknown; expected activation, "),
    ],
)
def test_a_field_that_is_wrong_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        decode_record(ModelConfig, encode_record(CONFIG) | changes, FILE)


def test_a_missing_field_is_named():
    encoded = encode_record(CONFIG)
    del encoded["head_size"]
    with pytest.raises(CheckpointError, match=r"config\.json: head_size is missing"):
        decode_record(ModelConfig, encoded, FILE)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_no_object_is_no_record(value):
    with pytest.raises(CheckpointError, match=r"ModelConfig is .*; expected an object"):
        decode_record(ModelConfig, value, FILE)
