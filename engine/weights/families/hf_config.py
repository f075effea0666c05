"""A Hugging Face config.json read with checks, in the old spelling and in that of transformers 5."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config import Activation, LinearRopeScaling, Llama3RopeScaling
from engine.errors import CheckpointError
from engine.weights.jsonfile import read_json_object

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


@dataclass(frozen=True)
class HFConfig:
    """The values of a config.json (and generation_config.json). Readers raise `CheckpointError` naming the key."""

    path: Path
    """Of config.json, for messages."""
    values: Mapping[str, object]
    generation: Mapping[str, object]
    """Of generation_config.json; empty where there is none."""

    def refuse(self, key: str, why: str) -> CheckpointError:
        """The error for a key whose value cannot be served (to be raised by the caller)."""
        return CheckpointError(f"{self.path}: {key} is {self.values.get(key)!r}: {why}")

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The positive integer under the first of `keys` that is there; `default` where none is."""
        for key in keys:
            if self.has(key):
                return _integer(self.path, key, self.values[key])
        if default is None:
            raise CheckpointError(f"{self.path}: {' or '.join(keys)} is missing; expected a positive integer")
        return default

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under `key`; `default` where it is absent."""
        if self.has(key):
            return _number(self.path, key, self.values[key])
        if default is None:
            raise CheckpointError(f"{self.path}: {key} is missing; expected a positive number")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        """The boolean under `key`; `default` where it is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "expected true or false")
        return value

    def activation(self) -> Activation:
        """`hidden_act`, silu where absent."""
        name = self.values.get("hidden_act", "silu")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise self.refuse("hidden_act", f"expected one of {sorted(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def rope(self, default_theta: float | None = None) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
        """Base and scaling of the rotary embedding, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
        if self.has("rope_parameters") and self.has("rope_scaling"):
            raise self.refuse("rope_scaling", "rope_parameters is there too; expected one of them")
        key = "rope_parameters" if self.has("rope_parameters") else "rope_scaling"
        rope = self.values.get(key) or {}
        if not isinstance(rope, dict):
            raise self.refuse(key, "expected an object")
        theta = self._rope_theta(key, rope, default_theta)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise self.refuse(key, f"rope type {kind!r} is not supported; expected one of {sorted(_ROPE_KEYS)}")
        given = {name for name, value in rope.items() if value is not None} - {"rope_theta", "rope_type", "type"}
        if rope.get("partial_rotary_factor") == 1:
            given.discard("partial_rotary_factor")
        if unknown := given - _ROPE_KEYS[kind]:
            raise self.refuse(key, f"{sorted(unknown)[0]} is not supported with rope type {kind!r}")
        if missing := _ROPE_KEYS[kind] - given:
            raise self.refuse(key, f"{sorted(missing)[0]} is missing, which rope type {kind!r} needs")
        return theta, self._rope_scaling(kind, key, rope)

    def _rope_theta(self, key: str, rope: Mapping[str, object], default: float | None) -> float:
        if rope.get("rope_theta") is None:
            return self.number("rope_theta", default)
        theta = _number(self.path, f"{key}.rope_theta", rope["rope_theta"])
        if self.has("rope_theta") and self.number("rope_theta") != theta:
            raise self.refuse("rope_theta", f"{key} says {theta}")
        return theta

    def _rope_scaling(
        self, kind: str, key: str, rope: Mapping[str, object]
    ) -> Llama3RopeScaling | LinearRopeScaling | None:
        def number(name: str) -> float:
            return _number(self.path, f"{key}.{name}", rope[name])

        if kind == "linear":
            return LinearRopeScaling(number("factor"))
        if kind == "llama3":
            return Llama3RopeScaling(
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_position_embeddings=_integer(
                    self.path, f"{key}.original_max_position_embeddings", rope["original_max_position_embeddings"]
                ),
            )
        return None

    def bos_token_id(self, vocab_size: int) -> int | None:
        """`bos_token_id`, None where it is null or absent."""
        ids = self._token_ids("bos_token_id", self.values.get("bos_token_id"), vocab_size)
        return ids[0] if ids else None

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The end-of-sequence tokens of config.json, then those that only generation_config.json names."""
        ids = self._token_ids("eos_token_id", self.values.get("eos_token_id"), vocab_size)
        ids += self._token_ids("eos_token_id (generation_config.json)", self.generation.get("eos_token_id"), vocab_size)
        return tuple(dict.fromkeys(ids))

    def _token_ids(self, key: str, value: object, vocab_size: int) -> list[int]:
        ids: list[int] = value if isinstance(value, list) else [] if value is None else [value]  # type: ignore[list-item]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise CheckpointError(f"{self.path}: {key} is {value!r}; expected ids in [0, {vocab_size}), or null")
        return ids


def read_hf_config(directory: Path) -> HFConfig:
    """Reads config.json and, where it is there, generation_config.json. Raises `CheckpointError`."""
    generation = directory / "generation_config.json"
    return HFConfig(
        path=directory / "config.json",
        values=read_json_object(directory / "config.json"),
        generation=read_json_object(generation) if generation.exists() else {},
    )


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{path}: {key} is {value!r}; expected a positive number")
    return float(value)


def _integer(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} is {value!r}; expected a positive integer")
    return value
