"""Qwen3, dense: llama with norms on each head of q and k."""

from engine.config import ModelConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    EXTRAS,
    GATED_FFN_NAMES,
    OUTPUT_BIAS_NAMES,
    QK_NORM_NAMES,
    QKV_BIAS_NAMES,
    common_fields,
    refuse_if_set,
    switched_windows,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig


def parse_config(config: HFConfig) -> ModelConfig:
    """`attention_bias` covers all four projections."""
    refuse_if_set(config, "mlp_bias")
    attention_bias = config.boolean("attention_bias", False)
    return ModelConfig(
        **common_fields(config, "qwen3"),
        qk_norm=True,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        layer_windows=switched_windows(config),
    )


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(
        names={**BASE_NAMES, **QKV_BIAS_NAMES, **OUTPUT_BIAS_NAMES, **QK_NORM_NAMES, **GATED_FFN_NAMES},
        extras=EXTRAS,
    ),
)
