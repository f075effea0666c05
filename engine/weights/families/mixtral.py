"""Mixtral: mistral with a mixture of experts in place of the feed-forward."""

from engine.config import ModelConfig, MoEConfig
from engine.weights.families.decoder import (
    BASE_NAMES,
    BLOCK,
    EXTRAS,
    common_fields,
    refuse_if_set,
    uniform_windows,
)
from engine.weights.families.family import Family, WeightMap
from engine.weights.families.hf_config import HFConfig

_MOE = "model.layers.{layer}.block_sparse_moe"


def parse_config(config: HFConfig) -> ModelConfig:
    """`intermediate_size` is the width of one expert; gates are rescaled to sum to 1."""
    refuse_if_set(config, "attention_bias", "mlp_bias")
    common = common_fields(config, "mixtral")
    return ModelConfig(
        **common,
        layer_windows=uniform_windows(config),
        moe=MoEConfig(
            num_experts=config.integer("num_local_experts", "num_experts"),
            num_experts_per_token=config.integer("num_experts_per_tok"),
            intermediate_size=common["intermediate_size"],
            renormalize=True,
        ),
    )


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parse_config=parse_config,
    weights=WeightMap(
        names={
            **BASE_NAMES,
            f"{BLOCK}/moe/router/w": f"{_MOE}.gate.weight",
            f"{BLOCK}/moe/gate/w": f"{_MOE}.experts.{{expert}}.w1.weight",
            f"{BLOCK}/moe/up/w": f"{_MOE}.experts.{{expert}}.w3.weight",
            f"{BLOCK}/moe/down/w": f"{_MOE}.experts.{{expert}}.w2.weight",
        },
        extras=EXTRAS,
    ),
)
