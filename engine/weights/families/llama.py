"""Llama 1 to 3, and the many models that share its code (SmolLM2, Yi, ...)."""

from engine.config import ModelConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    EXTRAS,
    GATED_FFN_BIAS_NAMES,
    GATED_FFN_NAMES,
    OUTPUT_BIAS_NAMES,
    QKV_BIAS_NAMES,
    common_fields,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig

LLAMA_ROPE_THETA = 10000.0
"""Of the files of llama 1 and 2, which do not say."""


def parse_config(config: HFConfig) -> ModelConfig:
    """`attention_bias` covers all four projections, `mlp_bias` all three."""
    attention_bias = config.boolean("attention_bias", False)
    return ModelConfig(
        **common_fields(config, "llama", default_rope_theta=LLAMA_ROPE_THETA),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        ffn_bias=config.boolean("mlp_bias", False),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(
        names={
            **BASE_NAMES,
            **QKV_BIAS_NAMES,
            **OUTPUT_BIAS_NAMES,
            **GATED_FFN_NAMES,
            **GATED_FFN_BIAS_NAMES,
        },
        extras=EXTRAS,
    ),
)
