import dataclasses

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError

MODEL = ModelConfig("llama", 53, 22, 3, 6, 3, 10, 26, 256)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "intermediate_size",
        "max_position_embeddings",
    ],
)
def test_a_size_below_one_is_refused_by_name(field):
    with pytest.raises(ConfigError, match=f"{field} is 0; expected a positive integer"):
        dataclasses.replace(MODEL, **{field: 0})


def test_query_heads_that_cannot_share_kv_heads_say_both_numbers():
    with pytest.raises(ConfigError, match="6 query heads cannot share 4 KV heads"):
        dataclasses.replace(MODEL, num_kv_heads=4)


def test_an_odd_head_size_is_refused():
    with pytest.raises(ConfigError, match="head_size is 7"):
        dataclasses.replace(MODEL, head_size=7)


def test_windows_must_be_one_for_each_layer():
    with pytest.raises(ConfigError, match="layer_windows has 2 entries for 3 layers"):
        dataclasses.replace(MODEL, layer_windows=(4, None))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("prefill_buckets", ()),
        ("prefill_buckets", (32, 16)),
        ("prefill_buckets", (16, 16)),
        ("prefill_buckets", (0, 16)),
        ("prefill_buckets", (1, 16)),
        ("context_bucket_min", 0),
        ("max_model_len", 1),
        ("max_queue_len", 0),
        ("max_queued_tokens", 0),
    ],
)
def test_an_engine_field_that_cannot_work_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("config", [MODEL, EngineConfig()])
def test_configs_are_frozen(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)
