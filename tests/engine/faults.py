"""Faults that a conversion can have, put into a checkpoint of Pi05's family or into the engine that runs it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors, dict[str, Any]], None]
"""Of a checkpoint's tensors and config, in place."""


def with_change(source: Path, directory: Path, change: Change) -> Path:
    """A changed copy of a checkpoint."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    directory.mkdir()
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def transpose(projection: str, layer: int) -> Change:
    """One projection's matrix as [in, out] (it must be square, or loading would refuse it)."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        name = f"model.layers.{layer}.self_attn.{projection}_proj.weight"
        tensors[name] = tensors[name].T

    return change


def swap_q_and_k(layer: int) -> Change:
    """The projections of one layer, with their biases where it has them."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for kind in ("weight", "bias"):
            q, k = (f"model.layers.{layer}.self_attn.{p}_proj.{kind}" for p in "qk")
            if q in tensors:
                tensors[q], tensors[k] = tensors[k], tensors[q]

    return change


def epsilon(value: float) -> Change:
    """Another epsilon in every norm."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["layer_norm_eps"] = value

    return change


def interleaved_rope(tensors: Tensors, config: dict[str, Any]) -> None:
    """Each head's q and k in the order of the other RoPE convention, whose pairs stand side by side."""
    size = config["head_dim"]
    order = np.arange(size).reshape(2, -1).T.reshape(-1)
    for name in tensors:
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensors[name].reshape(-1, size, *tensors[name].shape[1:])
            tensors[name] = heads[:, order].reshape(tensors[name].shape)


def drop_bias(name: str) -> Change:
    """Zeros in place of a bias."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        assert np.abs(tensors[name]).max() > 0.1
        tensors[name] = np.zeros_like(tensors[name])

    return change


def attend_inverted(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, *_: object, scale: float, **__: object
) -> Any:
    """In place of `write_and_attend`: one sequence whose tokens see those that they must not, and themselves.

    q, k and v are [heads, head size, tokens] with as many heads each.
    """
    scores = jnp.einsum("hnt,hns->hts", q, k) * scale
    seen = jnp.triu(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,hns->hnt", weights, v), cache
