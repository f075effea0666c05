"""Tiny checkpoints for the loader's tests, and where the reference data lies."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"

Tensors = dict[str, np.ndarray]

LLAMA_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 10,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MIXTRAL_CONFIG: dict[str, object] = LLAMA_CONFIG | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def reference_dir(name: str) -> Path:
    """A folder of the reference data; skips the test where it is absent."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"reference data {name} is not beside the checkout")
    return path


def llama_tensors() -> Tensors:
    """Float32 weights for `LLAMA_CONFIG`, all different."""
    tensors = _attention_tensors()
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        tensors |= {
            f"{mlp}.gate_proj.weight": _values(16, 10),
            f"{mlp}.up_proj.weight": _values(16, 10),
            f"{mlp}.down_proj.weight": _values(10, 16),
        }
    return _distinct(tensors)


def mixtral_tensors() -> Tensors:
    """Float32 weights for `MIXTRAL_CONFIG`, all different."""
    tensors = _attention_tensors()
    for layer in range(3):
        moe = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = _values(8, 10)
        for expert in range(8):
            tensors |= {
                f"{moe}.experts.{expert}.w1.weight": _values(16, 10),
                f"{moe}.experts.{expert}.w2.weight": _values(10, 16),
                f"{moe}.experts.{expert}.w3.weight": _values(16, 10),
            }
    return _distinct(tensors)


def write_checkpoint(directory: Path, config: dict[str, object], tensors: Tensors) -> Path:
    """A checkpoint of one file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, config: dict[str, object], tensors: Tensors, num_shards: int = 3) -> Path:
    """A checkpoint of several files with an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(num_shards):
        names = sorted(tensors)[shard::num_shards]
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """The index of a checkpoint of several files."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _attention_tensors() -> Tensors:
    tensors = {
        "model.embed_tokens.weight": _values(40, 10),
        "model.norm.weight": _values(10),
        "lm_head.weight": _values(40, 10),
    }
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": _values(10),
            f"{prefix}.post_attention_layernorm.weight": _values(10),
            f"{prefix}.self_attn.q_proj.weight": _values(24, 10),
            f"{prefix}.self_attn.k_proj.weight": _values(12, 10),
            f"{prefix}.self_attn.v_proj.weight": _values(12, 10),
            f"{prefix}.self_attn.o_proj.weight": _values(10, 24),
        }
    return tensors


def _values(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def _distinct(tensors: Tensors) -> Tensors:
    # An offset of its own for each, so that no tensor can pass for another.
    return {name: values + np.float32(2 * i) for i, (name, values) in enumerate(tensors.items())}
