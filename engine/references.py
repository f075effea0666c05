"""Reference files: what another implementation computed, as arrays of an .npz file.

Letters: T prompt tokens, N greedy tokens, V vocabulary, D model, L layers.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class PromptReference:
    """Logits and greedy tokens of one prompt."""

    prompt: tuple[int, ...]
    logits: Float[np.ndarray, "T V"]
    greedy: tuple[int, ...]
    continued_logits: Float[np.ndarray, "N+1 V"]


@dataclass(frozen=True)
class ActivationReference:
    """What each layer made of one prompt."""

    prompt: tuple[int, ...]
    hidden: tuple[Float[np.ndarray, "T D"], ...]
    """The residual stream after each layer, before the final norm."""
    logits: Float[np.ndarray, "T V"]


@dataclass(frozen=True)
class ReferenceFile:
    """The arrays of a reference file, looked up with checks."""

    path: Path
    prefix: str
    """Stands before the names of all arrays but the prompts."""
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, path: Path, prefix: str = "") -> "ReferenceFile":
        """Raises `CheckpointError` where the file is missing, damaged, or holds anything but plain arrays."""
        try:
            # Opened here: numpy leaves the file open where it is damaged.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                return cls(path, prefix, {name: file[name] for name in file.files})
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path}: damaged, or not an .npz file of plain arrays") from error

    def prompts(self) -> dict[int, tuple[int, ...]]:
        """Every prompt by its number. Raises `CheckpointError` where there is none, or one is empty."""
        numbers = sorted(int(match[1]) for name in self.arrays if (match := re.fullmatch(r"prompt(\d+)", name)))
        if not numbers:
            raise CheckpointError(f"{self.path}: no array prompt0; expected prompt<j> for each prompt")
        return {j: self.tokens(f"prompt{j}", j) for j in numbers}

    def tokens(self, name: str, j: int) -> tuple[int, ...]:
        """An array of at least one token. Raises `CheckpointError`."""
        found = self.array(name, j, np.integer, None)
        if not found.size:
            raise CheckpointError(f"{self.path}: {name} is empty")
        return tuple(found.tolist())

    def array(self, name: str, j: int, kind: type, *shape: int | None) -> np.ndarray:
        """The array of this name, of this kind and shape (None: any size). Raises `CheckpointError`."""
        if name not in self.arrays:
            raise CheckpointError(f"{self.path}: no array {name}; expected it beside prompt{j} (see --prefix)")
        found = self.arrays[name]
        fits = found.ndim == len(shape) and all(s in (None, n) for s, n in zip(shape, found.shape, strict=True))
        if not fits or not np.issubdtype(found.dtype, kind):
            expected = ", ".join("any" if s is None else str(s) for s in shape)
            raise CheckpointError(
                f"{self.path}: {name} is {found.dtype} of shape {list(found.shape)}; expected {kind.__name__} "
                f"[{expected}]"
            )
        return found


def load_references(path: Path, prefix: str = "") -> list[PromptReference]:
    """Logits and greedy tokens of every prompt of a file. Raises `CheckpointError` naming an array that is missing or
    mis-shaped."""
    file = ReferenceFile.read(path, prefix)
    references = []
    for j, prompt in file.prompts().items():
        logits = file.array(f"{prefix}logits{j}", j, np.floating, len(prompt), None)
        greedy = file.tokens(f"{prefix}greedy{j}", j)
        continued = file.array(f"{prefix}continued_logits{j}", j, np.floating, len(greedy) + 1, logits.shape[1])
        references.append(PromptReference(prompt, logits, greedy, continued))
    return references


def load_activations(path: Path, config: ModelConfig, prefix: str = "") -> list[ActivationReference]:
    """Hidden states of all layers and logits of every prompt of a file.

    Raises `CheckpointError` naming an array that is missing or not of this model's size, `ConfigError` where a prompt
    is none that this model could see.
    """
    file = ReferenceFile.read(path, prefix)
    references = []
    for j, prompt in file.prompts().items():
        hidden = tuple(
            file.array(f"{prefix}hidden{j}_layer{layer}", j, np.floating, len(prompt), config.hidden_size)
            for layer in range(config.num_layers)
        )
        surplus = f"{prefix}hidden{j}_layer{config.num_layers}"
        if surplus in file.arrays:
            raise CheckpointError(f"{path}: holds {surplus}; the model has {config.num_layers} layers")
        logits = file.array(f"{prefix}logits{j}", j, np.floating, len(prompt), config.vocab_size)
        check_tokens(j, prompt, config)
        references.append(ActivationReference(prompt, hidden, logits))
    return references


def check_references(references: Sequence[PromptReference], config: ModelConfig) -> None:
    """Raises `ConfigError` where the file is of another model: another vocabulary, or contexts it was not made for."""
    for j, reference in enumerate(references):
        size = reference.logits.shape[1]
        if size != config.vocab_size:
            raise ConfigError(
                f"the reference has {size} logits a position; the vocabulary has {config.vocab_size} tokens"
            )
        check_tokens(j, reference.prompt + reference.greedy, config)


def check_tokens(j: int, tokens: Sequence[int], config: ModelConfig) -> None:
    """Raises `ConfigError` where a token is outside the vocabulary, or they are more than the model's positions."""
    outside = [token for token in tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise ConfigError(
            f"prompt {j} or its continuation holds token {outside[0]}, outside the vocabulary [0, {config.vocab_size})"
        )
    if len(tokens) > config.max_position_embeddings:
        raise ConfigError(
            f"prompt {j} of the reference is {len(tokens)} tokens with its continuation; the model was trained for "
            f"{config.max_position_embeddings} positions"
        )
