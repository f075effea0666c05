import json

import pytest

from engine.config import LinearRopeScaling, Llama3RopeScaling
from engine.errors import CheckpointError
from engine.weights.families.hf_config import HFConfig, read_hf_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def config_of(tmp_path):
    def build(values: dict[str, object], generation: dict[str, object] | None = None) -> HFConfig:
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_hf_config(tmp_path)

    return build


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, (5e5, LinearRopeScaling(2.0))),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            (5e5, Llama3RopeScaling(8, 1, 4, 128)),
        ),
        ({"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}}, (3e4, None)),
        ({"rope_parameters": {"rope_theta": 3e4, "rope_type": "linear", "factor": 3}}, (3e4, LinearRopeScaling(3.0))),
        (
            {"rope_parameters": {"rope_theta": 3e4, "rope_type": "llama3", **LLAMA3}},
            (3e4, Llama3RopeScaling(8, 1, 4, 128)),
        ),
        ({"rope_theta": 3e4, "rope_parameters": {"rope_theta": 3e4}}, (3e4, None)),
    ],
)
def test_both_spellings_of_rope(config_of, values, expected):
    assert config_of(values).rope() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; expected a positive number"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "attention_factor": 2}}, "attention_factor is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supp"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_parameters says 20000"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_parameters"),
        ({"rope_parameters": "yarn"}, "expected an object"),
    ],
)
def test_a_rope_that_cannot_be_served_is_refused_by_name(config_of, values, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(values).rope()


def test_a_default_theta_stands_in_only_where_there_is_none(config_of):
    assert config_of({}).rope(10000.0) == (10000.0, None)
    assert config_of({"rope_theta": 5e5}).rope(10000.0) == (5e5, None)


@pytest.mark.parametrize(
    ("values", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [5, 2]}, None, (5, 2)),
        ({"eos_token_id": None}, None, ()),
        ({}, None, ()),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (2, 7)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_tokens_come_from_both_files(config_of, values, generation, expected):
    assert config_of(values, generation).eos_token_ids(10) == expected


@pytest.mark.parametrize("eos", [10, -1, "2", True, [2, None]])
def test_an_impossible_end_token_is_refused(config_of, eos):
    with pytest.raises(CheckpointError, match=r"eos_token_id is .* expected ids in"):
        config_of({"eos_token_id": eos}).eos_token_ids(10)


def test_an_unknown_activation_is_refused(config_of):
    with pytest.raises(CheckpointError, match="hidden_act is 'relu2'"):
        config_of({"hidden_act": "relu2"}).activation()


@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True])
def test_a_size_that_is_no_positive_integer_is_refused(config_of, value):
    with pytest.raises(CheckpointError, match=r"vocab_size is .*; expected a positive integer"):
        config_of({"vocab_size": value}).integer("vocab_size")


@pytest.mark.parametrize("value", ["true", 1])
def test_a_switch_that_is_no_boolean_is_refused(config_of, value):
    with pytest.raises(CheckpointError, match=r"attention_bias is .*expected true or false"):
        config_of({"attention_bias": value}).boolean("attention_bias", False)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_hf_config(tmp_path)
