"""Qwen2 and Qwen2.5: llama with biases on q, k and v, and a window in the upper layers where it is switched on."""

from engine.config import ModelConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    EXTRAS,
    GATED_FFN_NAMES,
    QKV_BIAS_NAMES,
    common_fields,
    refuse_if_set,
    switched_windows,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig


def parse_config(config: HFConfig) -> ModelConfig:
    """The biases are part of the family, not an option of the file."""
    refuse_if_set(config, "attention_bias", "mlp_bias")
    return ModelConfig(**common_fields(config, "qwen2"), qkv_bias=True, layer_windows=switched_windows(config))


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(names={**BASE_NAMES, **QKV_BIAS_NAMES, **GATED_FFN_NAMES}, extras=EXTRAS),
)
