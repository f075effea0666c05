"""Grok-1 checkpoints of any size in the release's layout, for tests."""

import json
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np

CONFIG: dict[str, object] = {
    "vocab": 40,
    "emb": 24,
    "widen": 2,
    "key": 6,
    "q": 4,
    "kv": 2,
    "layers": 11,
    "seq": 64,
    "emb_mult": 3.0,
    "attn_mult": 0.5,
}
"""Feed-forward width 32; eleven layers, so that their order as strings is not that of their numbers."""


class QuantizedWeight8bit:
    """Pickles as the release's class of that name does."""

    def __init__(self, weight, *scales, **extra):
        self.__dict__.update({"weight": weight, **({"scales": scales[0]} if scales else {}), **extra})


QuantizedWeight8bit.__module__ = "__main__"


class _Pickler(pickle._Pickler):  # type: ignore[misc,name-defined]
    """Writes the class's name without looking it up, since tests are not the main module."""

    def save_global(self, obj, name=None):
        if obj is not QuantizedWeight8bit:
            return super().save_global(obj, name)
        self.save("__main__")
        self.save("QuantizedWeight8bit")
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)
        return None

    dispatch = pickle._Pickler.dispatch | {type: save_global}  # type: ignore[attr-defined]


def pickle_tensor(tensor: object) -> bytes:
    """A tensor file's contents."""
    file = _Bytes()
    _Pickler(file, protocol=4).dump(tensor)
    return bytes(file.data)


class _Bytes:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data) -> int:
        self.data += data
        return len(data)


def make_tensors(seed: int = 0, config: dict[str, object] = CONFIG) -> dict[str, np.ndarray | QuantizedWeight8bit]:
    """Random tensors for a config, by their name in the release's tree, in the order of its files."""
    rng = np.random.default_rng(seed)
    d, vocab, size = config["emb"], config["vocab"], config["key"]
    width = -(-(int(config["widen"] * d) * 2 // 3) // 8) * 8

    def floats(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def quantized(groups, *shape):
        scales = rng.uniform(0.5, 1.5, size=(*shape[:-2], groups, shape[-1])).astype(ml_dtypes.bfloat16)
        return QuantizedWeight8bit(rng.integers(-127, 128, size=shape, dtype=np.int8), scales)

    tensors = {
        "language_model/in_out_embed/embeddings": floats(vocab, d),
        "language_model/rms_norm/scale": floats(d),
    }
    # The order of the files, by hand: layers as strings sort.
    for layer in sorted(str(layer) for layer in range(config["layers"])):
        prefix = f"transformer/decoder_layer_{layer}"
        tensors |= {
            f"{prefix}/moe/linear/w": quantized(1, 8, d, width),
            f"{prefix}/moe/linear_1/w": quantized(4, 8, width, d),
            f"{prefix}/moe/linear_v/w": quantized(1, 8, d, width),
            f"{prefix}/multi_head_attention/key/w": quantized(1, d, config["kv"] * size),
            f"{prefix}/multi_head_attention/linear/w": quantized(4, config["q"] * size, d),
            f"{prefix}/multi_head_attention/query/w": quantized(1, d, config["q"] * size),
            f"{prefix}/multi_head_attention/value/w": quantized(1, d, config["kv"] * size),
            f"{prefix}/rms_norm/scale": floats(d),
            f"{prefix}/rms_norm_1/scale": floats(d),
            f"{prefix}/rms_norm_2/scale": floats(d),
            f"{prefix}/rms_norm_3/scale": floats(d),
            f"{prefix}/router/w": floats(d, 8),
        }
    return tensors


def write_grok1(directory: Path, tensors: dict[str, object], config: dict[str, object] | None = CONFIG) -> Path:
    """A checkpoint folder."""
    folder = directory / "ckpt-0"
    folder.mkdir(parents=True, exist_ok=True)
    for index, tensor in enumerate(tensors.values()):
        (folder / f"tensor{index:05}_000").write_bytes(pickle_tensor(tensor))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def exact_values(tensor: np.ndarray | QuantizedWeight8bit) -> np.ndarray:
    """What a tensor stands for, in float32."""
    if isinstance(tensor, np.ndarray):
        return tensor
    repeats = tensor.weight.shape[-2] // tensor.scales.shape[-2]
    return tensor.weight.astype(np.float32) * np.repeat(tensor.scales.astype(np.float32), repeats, axis=-2)
