"""GGUF files written by the gguf package, for tests."""

from pathlib import Path

import gguf
import numpy as np

Quantised = tuple[np.ndarray, gguf.GGMLQuantizationType]


def write_gguf(
    path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray | Quantised], architecture: str = "llama"
) -> Path:
    """Metadata values may be int (uint32), float (float32), bool, str, or a list of str. A tensor given with a type is
    quantised to it."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            values, type_ = tensor
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata() -> dict[str, object]:
    """A llama of 2 layers, 4 query and 2 KV heads of 6."""
    return {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 24,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 0.5,
        "llama.rope.freq_base": 20000.0,
        "llama.rope.dimension_count": 6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def llama_tensors() -> dict[str, np.ndarray]:
    """Weights for `llama_metadata` with a tied head; q and k in the order of GGUF files."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"token_embd.weight": values(40, 24), "output_norm.weight": values(24)}
    for layer in range(2):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": values(24),
            f"{block}.attn_q.weight": values(24, 24),
            f"{block}.attn_k.weight": values(12, 24),
            f"{block}.attn_v.weight": values(12, 24),
            f"{block}.attn_output.weight": values(24, 24),
            f"{block}.ffn_norm.weight": values(24),
            f"{block}.ffn_gate.weight": values(16, 24),
            f"{block}.ffn_up.weight": values(16, 24),
            f"{block}.ffn_down.weight": values(24, 16),
        }
    return tensors
