"""The metadata of a GGUF file read with checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.weights.gguf_header import GGUFValue

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of sequence, of turn, of message: all end a generation."""


@dataclass(frozen=True)
class GGUFMetadata:
    """Values under one architecture's prefix. Every reader raises `CheckpointError` naming the key."""

    path: Path
    values: Mapping[str, GGUFValue]
    architecture: str

    def refuse(self, key: str, why: str) -> CheckpointError:
        """The error for a key whose value cannot be served (to be raised by the caller)."""
        full = f"{self.architecture}.{key}"
        return CheckpointError(f"{self.path}: {full} is {self.values.get(full)!r}: {why}")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuses keys of this architecture outside `known`: they may change what the model computes."""
        prefix = f"{self.architecture}."
        unknown = sorted(key for key in self.values if key.startswith(prefix) and key.removeprefix(prefix) not in known)
        if unknown:
            raise self.refuse(unknown[0].removeprefix(prefix), "this option is not supported")
        if self.values.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: split.count is {self.values['split.count']!r}: one file of several; merge them first "
                "(llama-gguf-split --merge)"
            )

    def integer(self, key: str, default: int | None = None) -> int:
        """The non-negative integer under `key`; `default` where it is absent."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, "expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under `key`; `default` where it is absent."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(key, "expected a positive number")
        return float(value)

    def string(self, key: str, default: str) -> str:
        """The string under `key`; `default` where it is absent."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise self.refuse(key, "expected a string")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The token id under `tokenizer.ggml.<key>`, None where it is absent."""
        value = self.values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.{key} is {value!r}; expected an id in [0, {vocab_size})"
            )
        return value

    def end_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Every token that ends a generation, each once."""
        ids = (self.token_id(key, vocab_size) for key in END_TOKEN_KEYS)
        return tuple(dict.fromkeys(token for token in ids if token is not None))
