"""Mistral 7B and its kin: llama with a sliding window in every layer, and without biases."""

from engine.config import ModelConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    EXTRAS,
    GATED_FFN_NAMES,
    common_fields,
    refuse_if_set,
    uniform_windows,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig


def parse_config(config: HFConfig) -> ModelConfig:
    """`sliding_window` must be there; null is none."""
    refuse_if_set(config, "attention_bias", "mlp_bias")
    return ModelConfig(**common_fields(config, "mistral"), layer_windows=uniform_windows(config))


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(names={**BASE_NAMES, **GATED_FFN_NAMES}, extras=EXTRAS),
)
