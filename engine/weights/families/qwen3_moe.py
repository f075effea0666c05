"""Qwen3 with a mixture of experts in every layer."""

from engine.config import ModelConfig, MoEConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    BLOCK,
    EXTRAS,
    OUTPUT_BIAS_NAMES,
    QK_NORM_NAMES,
    QKV_BIAS_NAMES,
    common_fields,
    refuse_if_set,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig

_MLP = "model.layers.{layer}.mlp"


def parse_config(config: HFConfig) -> ModelConfig:
    """`moe_intermediate_size` is the width of one expert. Layers without experts are refused."""
    # Which layers a window would hold in differs between versions of the family's code; no released model has one.
    refuse_if_set(config, "mlp_bias", "use_sliding_window")
    if config.integer("decoder_sparse_step", default=1) != 1:
        raise config.refuse("decoder_sparse_step", "layers without experts are not supported; expected 1")
    if config.values.get("mlp_only_layers"):
        raise config.refuse("mlp_only_layers", "layers without experts are not supported; expected an empty list")
    attention_bias = config.boolean("attention_bias", False)
    common = common_fields(config, "qwen3_moe", intermediate_key="moe_intermediate_size")
    return ModelConfig(
        **common,
        qk_norm=True,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        moe=MoEConfig(
            num_experts=config.integer("num_experts", "num_local_experts"),
            num_experts_per_token=config.integer("num_experts_per_tok"),
            intermediate_size=common["intermediate_size"],
            renormalize=config.boolean("norm_topk_prob", False),
        ),
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(
        names={
            **BASE_NAMES,
            **QKV_BIAS_NAMES,
            **OUTPUT_BIAS_NAMES,
            **QK_NORM_NAMES,
            f"{BLOCK}/moe/router/w": f"{_MLP}.gate.weight",
            f"{BLOCK}/moe/gate/w": f"{_MLP}.experts.{{expert}}.gate_proj.weight",
            f"{BLOCK}/moe/up/w": f"{_MLP}.experts.{{expert}}.up_proj.weight",
            f"{BLOCK}/moe/down/w": f"{_MLP}.experts.{{expert}}.down_proj.weight",
        },
        extras=EXTRAS,
    ),
)
