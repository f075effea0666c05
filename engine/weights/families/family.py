"""What a model family is: how its config reads, and what its weights are called."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.weights.families.hf_config import HFConfig
from engine.weights.tensors import TensorSource

Transform = Callable[[np.ndarray, ModelConfig], np.ndarray]
"""From a tensor as the file has it to one as the model has it; the shape stays."""

ExtraCheck = Callable[[TensorSource, str, ModelConfig], None]
"""Raises `CheckpointError` where a tensor without a place in the model says something else than the model does."""


@dataclass(frozen=True)
class WeightMap:
    """Where each parameter is found in a checkpoint.

    "{layer}" stands for the number of the layer, in the parameter's path and in the tensor's name alike. "{expert}" in
    a name says that each tensor is one expert of the parameter, whose leading axis counts them.
    """

    names: Mapping[str, str]
    """Parameter path ("layer_{layer}/attention/q/w") to the pattern of its source names. Parameters that a config
    switches off (a bias, say) may stand here."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """By parameter path; absent: taken as it is."""
    extras: Mapping[str, ExtraCheck] = field(default_factory=dict)
    """Patterns of tensors that a checkpoint may hold beside the parameters, each with its check."""
    transposed: frozenset[str] = frozenset()
    """Paths of the parameters that the checkpoint has as [..., in, out]."""
    optional: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Paths of parameters that a checkpoint has tensors for in some layers only, and in which; they are zero in the
    others."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face's configs."""

    model_type: str
    architecture: str
    """The class that wrote the checkpoint, under `architectures` in config.json."""
    parse_config: Callable[[HFConfig], ModelConfig]
    weights: WeightMap
    """Of a config that says nothing else."""
    optional: Callable[[HFConfig], Mapping[str, frozenset[int]]] = lambda config: {}
    """`WeightMap.optional` as a config says it. Raises `CheckpointError`."""

    def weights_for(self, config: HFConfig) -> WeightMap:
        """The weights of a checkpoint with this config. Raises `CheckpointError`."""
        return replace(self.weights, optional=self.optional(config))


def check_tied_head(embedding_name: str) -> ExtraCheck:
    """The check of an output head that stands in the file though the config ties it to the embedding."""

    def check(source: TensorSource, name: str, config: ModelConfig) -> None:
        if not config.tie_embeddings:
            return
        head, embedding = source.tensors[name], source.tensors[embedding_name]
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or (
            _digest(source, name) != _digest(source, embedding_name)
        ):
            raise CheckpointError(
                f"{head.file}: the config ties the output head to the embedding, but tensor {name!r} differs from "
                f"{embedding_name!r}; if the head is meant, set tie_word_embeddings to false"
            )

    return check


def accept_extra(source: TensorSource, name: str, config: ModelConfig) -> None:
    """For tensors that repeat what the config says, and that nothing reads."""


def _digest(source: TensorSource, name: str) -> bytes:
    # Digests, so that the two largest tensors of the file are never in memory together.
    return hashlib.blake2b(np.ascontiguousarray(source.read(name)).view(np.uint8).data).digest()
