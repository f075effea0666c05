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
    """`attention_bias` says which layers have biases on all four projections (see `biased_layers`)."""
    has_bias = bool(biased_layers(config))
    return ModelConfig(
        **common_fields(config, "pi05", norm_eps_key="layer_norm_eps"),
        norm="layer",
        gated=False,
        qkv_bias=has_bias,
        attention_output_bias=has_bias,
        ffn_bias=True,
        layer_windows=uniform_windows(config),
    )


def biased_layers(config: HFConfig) -> frozenset[int]:
    """The layers whose attention has biases: `attention_bias` is true (all), false (none), "first layer only", or a
    list of layer numbers. Raises `CheckpointError`."""
    value, num_layers = config.values.get("attention_bias"), config.integer("num_hidden_layers")
    if isinstance(value, bool):
        return frozenset(range(num_layers)) if value else frozenset()
    if value == FIRST_LAYER_ONLY:
        return frozenset({0})
    if isinstance(value, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in value):
        return frozenset(value)
    raise config.refuse(
        "attention_bias",
        f"expected true, false, {FIRST_LAYER_ONLY!r} or a list of layer numbers in [0, {num_layers})",
    )


def _optional(config: HFConfig) -> dict[str, frozenset[int]]:
    layers = biased_layers(config)
    return {} if len(layers) == config.integer("num_hidden_layers") else dict.fromkeys(_ATTENTION_BIAS_NAMES, layers)


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
    ),
    optional=_optional,
)


def pi05_config(num_layers: int = 18, intermediate_size: int = 4096, vocab_size: int = 32000) -> ModelConfig:
    """The full-size model: for random weights, and to plan with. Width, heads, norms, window and positions are the
    design's own; it leaves depth, feed-forward width and vocabulary open. No layer has attention biases."""
    return ModelConfig(
        family="pi05",
        vocab_size=vocab_size,
        hidden_size=1024,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=16,
        head_size=64,
        intermediate_size=intermediate_size,
        max_position_embeddings=512,
        norm="layer",
        norm_eps=1e-5,
        activation="gelu",
        gated=False,
        ffn_bias=True,
        layer_windows=(256,) * num_layers,
    )
