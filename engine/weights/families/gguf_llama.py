"""GGUF files of architecture `llama`: llama 1 to 3, SmolLM2 and others that share llama's code."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from engine.errors import CheckpointError
from engine.weights.families.decoder import BLOCK
from engine.weights.families.family import Transform, WeightMap, check_tied_head
from engine.weights.families.gguf_metadata import GGUFMetadata
from engine.weights.gguf_file import GGUFSource
from engine.weights.tensors import TensorSource

ROPE_FREQS = "rope_freqs.weight"

LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS = 8192
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
"""Of llama 3.1, 3.2 and 3.3. GGUF files hold only the frequencies that follow from these and the factor."""

KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "expert_count",
        "expert_used_count",
    }
)
"""Keys under `llama.` that `parse_config` takes account of; others are refused."""


@dataclass(frozen=True)
class GGUFFamily:
    """One `general.architecture` of GGUF files."""

    architecture: str
    parse_config: Callable[[GGUFSource], ModelConfig]
    weights: WeightMap


def parse_config(source: GGUFSource) -> ModelConfig:
    """Reads the metadata, and from the tensors' names whether there are biases and an output head."""
    metadata = GGUFMetadata(source.path, source.header.metadata, "llama")
    metadata.refuse_unknown(KNOWN_KEYS)
    if metadata.integer("expert_count", 0):
        raise metadata.refuse("expert_count", "mixtures of experts are not supported in GGUF files")
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_size = metadata.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_size) != head_size:
            raise metadata.refuse(key, f"expected the head size, {head_size}")
    theta = metadata.number("rope.freq_base", 10000.0)
    vocab_size = _vocab_size(source, metadata)
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=metadata.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        intermediate_size=metadata.integer("feed_forward_length"),
        max_position_embeddings=metadata.integer("context_length"),
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(source, metadata, theta, head_size),
        qkv_bias="blk.0.attn_q.bias" in source.tensors,
        attention_output_bias="blk.0.attn_output.bias" in source.tensors,
        ffn_bias="blk.0.ffn_up.bias" in source.tensors,
        tie_embeddings="output.weight" not in source.tensors,
        bos_token_id=metadata.token_id("bos_token_id", vocab_size),
        eos_token_ids=metadata.end_token_ids(vocab_size),
    )


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the order in which GGUF llama files keep the rows of q and k.

    Within a head of size N, the model pairs rows i and i + N/2 in its rotary embedding; the files hold such pairs side
    by side (0, N/2, 1, N/2 + 1, ...). `rows` is [heads * N, ...], and so is the result.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _unpermute_q(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    return unpermute(rows, config.num_heads)


def _unpermute_k(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    return unpermute(rows, config.num_kv_heads)


def llama3_frequency_divisors(theta: float, head_size: int, scaling: Llama3RopeScaling) -> np.ndarray:
    """What each rotary frequency is divided by, [head_size / 2] ("The Llama 3 Herd of Models" and its code)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    context = scaling.original_max_position_embeddings
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _vocab_size(source: GGUFSource, metadata: GGUFMetadata) -> int:
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source.path}: tensor 'token_embd.weight' is missing or not a matrix")
    if metadata.integer("vocab_size", embedding.shape[0]) != embedding.shape[0]:
        raise metadata.refuse("vocab_size", f"token_embd.weight has {embedding.shape[0]} rows")
    return embedding.shape[0]


def _rope_scaling(
    source: GGUFSource, metadata: GGUFMetadata, theta: float, head_size: int
) -> Llama3RopeScaling | LinearRopeScaling | None:
    kind = metadata.string("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise metadata.refuse("rope.scaling.type", "expected none or linear")
    if ROPE_FREQS not in source.tensors:
        return LinearRopeScaling(metadata.number("rope.scaling.factor")) if kind == "linear" else None
    if kind == "linear":
        raise metadata.refuse("rope.scaling.type", f"the file holds {ROPE_FREQS} too; expected one of them")
    divisors = source.read(ROPE_FREQS)
    scaling = Llama3RopeScaling(
        factor=round(float(divisors.max()), 3),
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS,
    )
    expected = llama3_frequency_divisors(theta, head_size, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{source.path}: tensor {ROPE_FREQS!r} does not follow the scaling of llama 3 ("
            f"context {LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS}, factors {LLAMA3_LOW_FREQ_FACTOR} and "
            f"{LLAMA3_HIGH_FREQ_FACTOR}); use the Hugging Face checkpoint, whose config says what is meant"
        )
    return scaling


def _check_rope_freqs(source: TensorSource, name: str, config: ModelConfig) -> None:
    if not isinstance(config.rope_scaling, Llama3RopeScaling):
        raise CheckpointError(f"{source.path}: tensor {name!r} scales the rotary embedding, but the config does not")
    expected = llama3_frequency_divisors(config.rope_theta, config.head_size, config.rope_scaling)
    values = source.read(name)
    if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-3):
        raise CheckpointError(f"{source.path}: tensor {name!r} does not agree with the config's {config.rope_scaling}")


_PERMUTED: dict[str, Transform] = {
    f"{BLOCK}/attention/q/w": _unpermute_q,
    f"{BLOCK}/attention/q/b": _unpermute_q,
    f"{BLOCK}/attention/k/w": _unpermute_k,
    f"{BLOCK}/attention/k/b": _unpermute_k,
}

GGUF_LLAMA = GGUFFamily(
    architecture="llama",
    parse_config=parse_config,
    weights=WeightMap(
        names={
            "embed/w": "token_embd.weight",
            f"{BLOCK}/attention_norm/scale": "blk.{layer}.attn_norm.weight",
            f"{BLOCK}/attention/q/w": "blk.{layer}.attn_q.weight",
            f"{BLOCK}/attention/q/b": "blk.{layer}.attn_q.bias",
            f"{BLOCK}/attention/k/w": "blk.{layer}.attn_k.weight",
            f"{BLOCK}/attention/k/b": "blk.{layer}.attn_k.bias",
            f"{BLOCK}/attention/v/w": "blk.{layer}.attn_v.weight",
            f"{BLOCK}/attention/v/b": "blk.{layer}.attn_v.bias",
            f"{BLOCK}/attention/o/w": "blk.{layer}.attn_output.weight",
            f"{BLOCK}/attention/o/b": "blk.{layer}.attn_output.bias",
            f"{BLOCK}/ffn_norm/scale": "blk.{layer}.ffn_norm.weight",
            f"{BLOCK}/ffn/gate/w": "blk.{layer}.ffn_gate.weight",
            f"{BLOCK}/ffn/gate/b": "blk.{layer}.ffn_gate.bias",
            f"{BLOCK}/ffn/up/w": "blk.{layer}.ffn_up.weight",
            f"{BLOCK}/ffn/up/b": "blk.{layer}.ffn_up.bias",
            f"{BLOCK}/ffn/down/w": "blk.{layer}.ffn_down.weight",
            f"{BLOCK}/ffn/down/b": "blk.{layer}.ffn_down.bias",
            "final_norm/scale": "output_norm.weight",
            "lm_head/w": "output.weight",
        },
        transforms=_PERMUTED,
        extras={ROPE_FREQS: _check_rope_freqs, "output.weight": check_tied_head("token_embd.weight")},
    ),
)
