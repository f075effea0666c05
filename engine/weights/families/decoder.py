"""What the Hugging Face decoder families have in common. A family takes from here only what its own code has too."""

from collections.abc import Mapping
from typing import TypedDict

from engine.config import Activation, LinearRopeScaling, Llama3RopeScaling
from engine.errors import CheckpointError
from engine.weights.families.family import ExtraCheck, accept_extra, check_tied_head
from engine.weights.families.hf_config import HFConfig

BLOCK = "layer_{layer}"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYER = "model.layers.{layer}"

BASE_NAMES: Mapping[str, str] = {
    "embed/w": EMBEDDING,
    f"{BLOCK}/attention_norm/scale": f"{_LAYER}.input_layernorm.weight",
    f"{BLOCK}/attention/q/w": f"{_LAYER}.self_attn.q_proj.weight",
    f"{BLOCK}/attention/k/w": f"{_LAYER}.self_attn.k_proj.weight",
    f"{BLOCK}/attention/v/w": f"{_LAYER}.self_attn.v_proj.weight",
    f"{BLOCK}/attention/o/w": f"{_LAYER}.self_attn.o_proj.weight",
    f"{BLOCK}/ffn_norm/scale": f"{_LAYER}.post_attention_layernorm.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/w": HEAD,
}
"""Embedding, attention, norms and head."""

QKV_BIAS_NAMES: Mapping[str, str] = {
    f"{BLOCK}/attention/q/b": f"{_LAYER}.self_attn.q_proj.bias",
    f"{BLOCK}/attention/k/b": f"{_LAYER}.self_attn.k_proj.bias",
    f"{BLOCK}/attention/v/b": f"{_LAYER}.self_attn.v_proj.bias",
}

OUTPUT_BIAS_NAMES: Mapping[str, str] = {f"{BLOCK}/attention/o/b": f"{_LAYER}.self_attn.o_proj.bias"}

QK_NORM_NAMES: Mapping[str, str] = {
    f"{BLOCK}/attention/q_norm/scale": f"{_LAYER}.self_attn.q_norm.weight",
    f"{BLOCK}/attention/k_norm/scale": f"{_LAYER}.self_attn.k_norm.weight",
}

GATED_FFN_NAMES: Mapping[str, str] = {
    f"{BLOCK}/ffn/gate/w": f"{_LAYER}.mlp.gate_proj.weight",
    f"{BLOCK}/ffn/up/w": f"{_LAYER}.mlp.up_proj.weight",
    f"{BLOCK}/ffn/down/w": f"{_LAYER}.mlp.down_proj.weight",
}

GATED_FFN_BIAS_NAMES: Mapping[str, str] = {
    f"{BLOCK}/ffn/gate/b": f"{_LAYER}.mlp.gate_proj.bias",
    f"{BLOCK}/ffn/up/b": f"{_LAYER}.mlp.up_proj.bias",
    f"{BLOCK}/ffn/down/b": f"{_LAYER}.mlp.down_proj.bias",
}

EXTRAS: Mapping[str, ExtraCheck] = {
    HEAD: check_tied_head(EMBEDDING),
    # transformers before 4.32 saved the rotary frequencies, which follow from the config.
    _LAYER + ".self_attn.rotary_emb.inv_freq": accept_extra,
}
"""Tensors that these families' checkpoints may hold beside the parameters."""


class CommonFields(TypedDict):
    """Fields of `ModelConfig` that every family reads alike."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def common_fields(
    config: HFConfig,
    family: str,
    intermediate_key: str = "intermediate_size",
    norm_eps_key: str = "rms_norm_eps",
    default_rope_theta: float | None = None,
) -> CommonFields:
    """Reads what every family has. Raises `CheckpointError` naming the key."""
    if config.has("quantization_config"):
        raise config.refuse("quantization_config", "quantised Hugging Face checkpoints are not supported")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.refuse("partial_rotary_factor", "rotating a part of each head is not supported; expected 1")
    vocab_size = config.integer("vocab_size")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise CheckpointError(
            f"{config.path}: head_dim is missing, and hidden_size {hidden_size} is no multiple of num_attention_heads "
            f"{num_heads}"
        )
    theta, scaling = config.rope(default_rope_theta)
    return CommonFields(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default=num_heads),
        head_size=config.integer("head_dim", default=max(hidden_size // num_heads, 1)),
        intermediate_size=config.integer(intermediate_key),
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_eps=config.number(norm_eps_key),
        activation=config.activation(),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        bos_token_id=config.bos_token_id(vocab_size),
        eos_token_ids=config.eos_token_ids(vocab_size),
    )


def refuse_if_set(config: HFConfig, *keys: str) -> None:
    """Refuses switches that would change the model, and that the family's code does not have."""
    for key in keys:
        if config.has(key) and config.values[key] is not False:
            raise config.refuse(key, f"not supported for model_type {config.values.get('model_type')!r}")


def uniform_windows(config: HFConfig) -> tuple[int | None, ...] | None:
    """Mistral's rule: `sliding_window`, which must be there, holds in every layer; null is none.

    Its code has a default of 4096 for files without the key; which model is meant then is anyone's guess.
    """
    if "sliding_window" not in config.values:
        raise CheckpointError(
            f"{config.path}: sliding_window is missing; expected a positive integer, or null for none"
        )
    refuse_if_set(config, "layer_types")
    if not config.has("sliding_window"):
        return None
    return (config.integer("sliding_window"),) * config.integer("num_hidden_layers")


def switched_windows(config: HFConfig) -> tuple[int | None, ...] | None:
    """Qwen's rule: with `use_sliding_window`, `layer_types` says which layers have a window, or, without that, all
    layers from `max_window_layers` on have it."""
    num_layers = config.integer("num_hidden_layers")
    types = config.values.get("layer_types")
    if types is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(types, list) or len(types) != num_layers or not all(t in known for t in types):
            raise config.refuse("layer_types", f"expected {num_layers} entries out of {sorted(known)}")
    if not config.boolean("use_sliding_window", False):
        if types is not None and "sliding_attention" in types:
            raise config.refuse("layer_types", "it names sliding layers, but use_sliding_window is not true")
        return None
    window = config.integer("sliding_window")
    if types is not None:
        return tuple(window if t == "sliding_attention" else None for t in types)
    first = config.values.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.refuse("max_window_layers", "expected the number of layers without a window")
    return tuple(window if layer >= first else None for layer in range(num_layers))
