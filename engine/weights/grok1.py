"""Grok-1 as xAI released it: `ckpt-0/tensorNNNNN_000`, one pickle for each parameter of its Haiku tree, in order.

The release has no config file: its sizes stand in its `run.py`, and here in `RELEASE`. A folder with other sizes says
so in a `config.json` with the same keys. Letters: D model, I in, O out, E experts, G groups of inputs with one scale.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engine.config import ModelConfig, MoEConfig
from engine.errors import CheckpointError
from engine.weights.families.family import WeightMap
from engine.weights.families.hf_config import HFConfig
from engine.weights.jsonfile import read_json_object
from engine.weights.pickled import StoredArray, locate_tensor
from engine.weights.tensors import TensorInfo

FAMILY = "grok-1"
FOLDER = "ckpt-0"

RELEASE: Mapping[str, int | float] = {
    "vocab": 131072,
    "emb": 6144,
    "widen": 8,
    "key": 128,
    "q": 48,
    "kv": 8,
    "layers": 64,
    "seq": 8192,
    "emb_mult": 78.38367176906169,
    "attn_mult": 0.08838834764831845,
}
"""Vocabulary, model width, widening factor, head size, query and KV heads, layers, positions, embedding multiplier,
multiplier of the attention logits."""

REFERENCE_KEYS = frozenset({"pad", "steps", "lens"})
"""Of a config.json: how reference outputs beside it were made. They say nothing about the model."""

NUM_EXPERTS = 8
NUM_EXPERTS_PER_TOKEN = 2
EOS_TOKEN_ID = 2
OUTPUT_MULTIPLIER = 0.5773502691896257
ATTENTION_SOFTCAP = 30.0
NORM_EPS = 1e-5
ROPE_THETA = 10000.0

_LAYER = "layer_{layer}"
_THEIR_LAYER = "transformer/decoder_layer_{layer}"
_THEIR_ATTENTION = f"{_THEIR_LAYER}/multi_head_attention"

_MATRICES: Mapping[str, str] = {
    f"{_LAYER}/attention/q/w": f"{_THEIR_ATTENTION}/query/w",
    f"{_LAYER}/attention/k/w": f"{_THEIR_ATTENTION}/key/w",
    f"{_LAYER}/attention/v/w": f"{_THEIR_ATTENTION}/value/w",
    f"{_LAYER}/attention/o/w": f"{_THEIR_ATTENTION}/linear/w",
    f"{_LAYER}/moe/router/w": f"{_THEIR_LAYER}/router/w",
    f"{_LAYER}/moe/gate/w": f"{_THEIR_LAYER}/moe/linear/w",
    f"{_LAYER}/moe/up/w": f"{_THEIR_LAYER}/moe/linear_v/w",
    f"{_LAYER}/moe/down/w": f"{_THEIR_LAYER}/moe/linear_1/w",
}
"""[I, O], or [E, I, O] for the experts, where this decoder has [O, I]."""

GROK1_WEIGHTS = WeightMap(
    names={
        "embed/w": "language_model/in_out_embed/embeddings",
        "final_norm/scale": "language_model/rms_norm/scale",
        f"{_LAYER}/attention_norm/scale": f"{_THEIR_LAYER}/rms_norm/scale",
        f"{_LAYER}/attention_post_norm/scale": f"{_THEIR_LAYER}/rms_norm_1/scale",
        f"{_LAYER}/ffn_norm/scale": f"{_THEIR_LAYER}/rms_norm_2/scale",
        f"{_LAYER}/ffn_post_norm/scale": f"{_THEIR_LAYER}/rms_norm_3/scale",
        **_MATRICES,
    },
    transposed=frozenset(_MATRICES),
)
"""Where each parameter is found in the release."""


def is_grok1(path: Path) -> bool:
    """Whether `path` is a folder laid out as the release is."""
    return (path / FOLDER).is_dir()


def read_grok1_config(directory: Path) -> ModelConfig:
    """The model of a release folder: of its config.json, or without one, where all the files of the release are there,
    the release's own.

    Raises `CheckpointError` naming the key or what is missing.
    """
    file = directory / "config.json"
    if file.exists():
        values = read_json_object(file)
    else:
        values = dict(RELEASE)
        num_files, expected = len(_tensor_files(directory)), len(_file_order(int(RELEASE["layers"])))
        if num_files != expected:
            raise CheckpointError(
                f"{directory}: no config.json, and {FOLDER} holds {num_files} tensor files, not the {expected} of the "
                f"Grok-1 release. Complete the download, or write a config.json with {', '.join(RELEASE)}"
            )
    unknown = sorted(values.keys() - RELEASE.keys() - REFERENCE_KEYS)
    if unknown:
        raise CheckpointError(f"{file}: {unknown[0]!r} is not a key of a Grok-1 config; it has {', '.join(RELEASE)}")
    return _model_config(HFConfig(file, values, {}))


def release_config() -> ModelConfig:
    """The full model as it was released, without any file of it."""
    return _model_config(HFConfig(Path("Grok-1 release"), dict(RELEASE), {}))


def _model_config(config: HFConfig) -> ModelConfig:
    width = _feed_forward_width(config.integer("emb"), config.number("widen"))
    return ModelConfig(
        family=FAMILY,
        vocab_size=config.integer("vocab"),
        hidden_size=config.integer("emb"),
        num_layers=config.integer("layers"),
        num_heads=config.integer("q"),
        num_kv_heads=config.integer("kv"),
        head_size=config.integer("key"),
        intermediate_size=width,
        max_position_embeddings=config.integer("seq"),
        norm_eps=NORM_EPS,
        activation="gelu_tanh",
        rope_theta=ROPE_THETA,
        post_norms=True,
        tie_embeddings=True,
        attention_scale=config.number("attn_mult"),
        attention_softcap=ATTENTION_SOFTCAP,
        embedding_multiplier=config.number("emb_mult"),
        output_multiplier=OUTPUT_MULTIPLIER,
        moe=MoEConfig(NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, width, renormalize=False),
        eos_token_ids=(EOS_TOKEN_ID,),
    )


def _feed_forward_width(hidden_size: int, widening_factor: float) -> int:
    """Two thirds of the widened width, because the gate adds a third matrix, rounded up to a multiple of 8."""
    width = int(widening_factor * hidden_size) * 2 // 3
    return -(-width // 8) * 8


class Grok1Source:
    """A release folder (a `TensorSource`). Files are mapped, and read only where a device needs their values.

    Raises `CheckpointError` naming the parameter whose file is missing, truncated or foreign, or a file too many.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._path = directory
        self._stored: dict[str, tuple[Path, StoredArray]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        order = _file_order(config.num_layers)
        files = {_file_name(index): (path, name) for index, (path, name) in enumerate(order)}
        present = _tensor_files(directory)
        surplus = sorted(present - files.keys())
        if surplus:
            raise CheckpointError(
                f"{directory / FOLDER / surplus[0]}: left over ({len(surplus)} such files): a model of "
                f"{config.num_layers} layers has {len(files)} parameters, the last of them {order[-1][0]}"
            )
        for file, (path, name) in files.items():
            if file not in present:
                raise CheckpointError(f"{directory / FOLDER / file}: missing; it holds {path} ({name})")
            self._open(directory / FOLDER / file, path, name)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every parameter by its name in the release's tree; scales as the parameter's name and ".scales"."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """The mapped array."""
        file, stored = self._stored[name]
        try:
            return stored.map(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {name!r} cannot be read ({error})") from error

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _open(self, file: Path, path: str, name: str) -> None:
        try:
            tensor = locate_tensor(file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (it should hold {path}, {name})") from error
        scales = None if tensor.scales is None else f"{name}.scales"
        self._add(file, name, tensor.values, scales)
        if scales is not None and tensor.scales is not None:
            self._add(file, scales, tensor.scales, None)

    def _add(self, file: Path, name: str, stored: StoredArray, scales: str | None) -> None:
        self._stored[name] = file, stored
        self._tensors[name] = TensorInfo(stored.shape, stored.dtype, stored.num_bytes, file, scales)


def _file_order(num_layers: int) -> list[tuple[str, str]]:
    """(parameter here, name there) of every file: Haiku's tree is a dict of modules, and JAX sorts dicts by key as
    strings, so that layer 10 comes before layer 2."""
    pairs = []
    for path, name in GROK1_WEIGHTS.names.items():
        if "{layer}" not in path:
            pairs.append((path, name))
            continue
        pairs += [(path.format(layer=layer), name.format(layer=layer)) for layer in range(num_layers)]
    return sorted(pairs, key=lambda pair: pair[1].rpartition("/")[::2])


def _file_name(index: int) -> str:
    return f"tensor{index:05}_000"


def _tensor_files(directory: Path) -> set[str]:
    """Names in the tensors' folder; hidden files, which downloads leave behind, are none of them."""
    try:
        return {entry.name for entry in (directory / FOLDER).iterdir() if not entry.name.startswith(".")}
    except OSError as error:
        raise CheckpointError(f"{directory / FOLDER}: cannot be read ({error.strerror})") from error
