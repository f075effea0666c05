"""The "Pi05" decoder: LayerNorm, multi-head attention with a sliding window, an ungated GELU feed-forward, biases."""

from engine.config import ModelConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    BLOCK,
    EXTRAS,
    OUTPUT_BIAS_NAMES,
    QKV_BIAS_NAMES,
    common_fields,
    uniform_windows,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig

FIRST_LAYER_ONLY = "first layer only"

_LAYER = "model.layers.{layer}"
_ATTENTION_BIAS_NAMES = {**QKV_BIAS_NAMES, **OUTPUT_BIAS_NAMES}


def parse_config(config: HFConfig) -> ModelConfig:
    """`attention_bias` is "first layer only" (all four projections of that layer); nothing else is known to exist."""
    if config.values.get("attention_bias") != FIRST_LAYER_ONLY:
        raise config.refuse("attention_bias", f"expected {FIRST_LAYER_ONLY!r}")
    return ModelConfig(
        **common_fields(config, "pi05", norm_eps_key="layer_norm_eps"),
        norm="layer",
        gated=False,
        qkv_bias=True,
        attention_output_bias=True,
        ffn_bias=True,
        layer_windows=uniform_windows(config),
    )


PI05 = Family(
    model_type="pi05",
    architecture="Pi05ForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(
        names={
            **BASE_NAMES,
            **_ATTENTION_BIAS_NAMES,
            f"{BLOCK}/attention_norm/bias": f"{_LAYER}.input_layernorm.bias",
            f"{BLOCK}/ffn_norm/bias": f"{_LAYER}.post_attention_layernorm.bias",
            f"{BLOCK}/ffn/up/w": f"{_LAYER}.mlp.fc1.weight",
            f"{BLOCK}/ffn/up/b": f"{_LAYER}.mlp.fc1.bias",
            f"{BLOCK}/ffn/down/w": f"{_LAYER}.mlp.fc2.weight",
            f"{BLOCK}/ffn/down/b": f"{_LAYER}.mlp.fc2.bias",
            "final_norm/bias": "model.norm.bias",
        },
        extras=EXTRAS,
        first_layer_only=frozenset(_ATTENTION_BIAS_NAMES),
    ),
)
