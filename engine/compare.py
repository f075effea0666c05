"""Compares a model layer by layer with hidden states that another implementation computed: where does it go wrong?

    python -m engine.compare MODEL REFERENCE.npz
    python -m engine.compare MODEL REFERENCE.npz --prefix full_ --window full --mesh 1x8

MODEL is a source as `engine.weights.source` reads it. The file holds, for prompt j, `prompt{j}` [T] and, each behind an
optional prefix, `hidden{j}_layer{l}` [T, D] (the residual stream after layer l, before the final norm) and `logits{j}`
[T, V].

For each layer, and last the logits, two figures over the tokens of all prompts: the smallest cosine similarity of a
token, and the largest difference of a value, as a share of the root mean square of the prompt's reference there. The
cosine is what shows a wrong layer at a glance. It is blind to small faults (an epsilon of 1e-6 for 1e-5 leaves it at
1.0000000), which the difference shows: in float32 a sound model is within a few hundred-thousandths.

Exits 0 where every layer holds both limits, 1 where not, naming the first that does not, 2 where the input is unusable.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from engine.config import DType
from engine.errors import EngineError
from engine.kv_cache import BLOCK_LEN, NO_WINDOW, BatchLayout, CacheShape, KVCache, allocate
from engine.models.decoder import Decoder, Params
from engine.models.moe import experts_apart
from engine.references import ActivationReference, load_activations
from engine.sharding import DATA
from engine.verify import add_model_arguments, load_decoder, parse_tolerance, with_window
from engine.weights.load import load_config
from engine.weights.source import resolve_source

THRESHOLDS = {"float32": 0.9999, "bfloat16": 0.999}
"""Smallest cosine similarity of a sound layer, by the type of weights and activations."""

TOLERANCES = {"float32": 5e-5, "bfloat16": 0.1}
"""Largest relative difference of a sound layer, likewise. In float32 the full-size Pi05 of 18 random layers is 1e-5
from a computation in float64; epsilon 1e-6 for 1e-5 makes 9e-5 in the tiny one, whose embedding is large."""

_PAGE_SIZE = 16


@dataclass(frozen=True)
class Activations:
    """What the model made of one prompt of T tokens."""

    hidden: Float[np.ndarray, "L T D"]
    """The residual stream after each layer."""
    logits: Float[np.ndarray, "T V"]


@dataclass(frozen=True)
class LayerComparison:
    """How one layer came out over all prompts."""

    name: str
    cosine: float
    """The smallest cosine similarity of a token; not a number where a value is not."""
    difference: float
    """The largest difference of a value."""
    relative: float
    """The same as a share of the root mean square of its prompt's reference."""

    def ok(self, threshold: float, tolerance: float) -> bool:
        """Whether both limits hold."""
        return self.cosine >= threshold and self.relative <= tolerance


class LayerRunner:
    """Runs the layers of a decoder over whole prompts, each in one chunk, with a cache of `dtype`."""

    def __init__(self, decoder: Decoder, params: Params, dtype: DType) -> None:
        self._decoder, self._dtype = decoder, dtype
        self._params = experts_apart(params, decoder.mesh)
        self._run = jax.jit(self._activations)

    def __call__(self, prompt: Sequence[int]) -> Activations:
        """Hidden states and logits in float32. Each number of pages compiles once."""
        length = len(prompt)
        num_shards, num_tokens = self._decoder.mesh.shape[DATA], -(-length // _PAGE_SIZE) * _PAGE_SIZE
        num_columns = -(-num_tokens // BLOCK_LEN) * (BLOCK_LEN // _PAGE_SIZE)
        shape = CacheShape.of(
            self._decoder.config, self._decoder.mesh, num_columns * num_shards, _PAGE_SIZE, self._dtype
        )
        # Every data shard computes the same prompt on pages of its own.
        rows = (num_shards, 1)
        layout = BatchLayout(
            jnp.tile(jnp.arange(num_columns, dtype=jnp.int32), rows),
            jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), rows),
            jnp.full(num_shards, length, jnp.int32),
            jnp.full((num_shards, num_tokens), NO_WINDOW, jnp.int32),
        )
        tokens = jnp.tile(jnp.pad(jnp.array(prompt, jnp.int32), (0, num_tokens - length)), rows)
        states, logits = self._run(self._params, allocate(shape, self._decoder.mesh), tokens, layout)
        return Activations(np.asarray(states)[:, :, :length].transpose(0, 2, 1), np.asarray(logits)[:, :length].T)

    def _activations(
        self, params: Params, cache: KVCache, tokens: jax.Array, layout: BatchLayout
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens = tokens.shape[1]
        # As on the serving path (`engine.forward.compile_step`).
        with jax.default_matmul_precision("float32"):
            states, normed = self._decoder.layer_states(params, cache, tokens, layout, -(-num_tokens // BLOCK_LEN))
            return states[:, :, :num_tokens].astype(jnp.float32), self._decoder.logits(params, normed[:, :num_tokens])


def compare(run: LayerRunner, references: Sequence[ActivationReference]) -> list[LayerComparison]:
    """Every layer, and last the logits, over all prompts."""
    by_prompt = [_compare_prompt(run(reference.prompt), reference) for reference in references]
    return [_worst(layers) for layers in zip(*by_prompt, strict=True)]


def _compare_prompt(got: Activations, reference: ActivationReference) -> list[LayerComparison]:
    pairs = zip(got.hidden, reference.hidden, strict=True)
    layers = [_compare(f"layer {i}", ours, theirs) for i, (ours, theirs) in enumerate(pairs)]
    return [*layers, _compare("logits", got.logits, reference.logits)]


def _compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> LayerComparison:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    # What is not finite makes the figures not a number, which no limit accepts.
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        # Two zeros point the same way; a zero and anything else do not.
        same = (np.abs(a).max(-1) == 0) & (np.abs(b).max(-1) == 0)
        cosine = np.where(same, 1.0, (a * b).sum(-1) / np.where(norms == 0, 1.0, norms))
        difference = float(np.abs(a - b).max())
        scale = float(np.sqrt(np.square(b).mean()))
    return LayerComparison(name, float(cosine.min()), difference, difference / scale if scale else difference)


def _worst(layers: Sequence[LayerComparison]) -> LayerComparison:
    # Through numpy, whose extremes are not a number where any value is not.
    return LayerComparison(
        layers[0].name,
        float(np.min([layer.cosine for layer in layers])),
        float(np.max([layer.difference for layer in layers])),
        float(np.max([layer.relative for layer in layers])),
    )


def first_fault(layers: Sequence[LayerComparison], threshold: float, tolerance: float) -> LayerComparison | None:
    """The first layer beyond a limit, None where all hold both."""
    return next((layer for layer in layers if not layer.ok(threshold, tolerance)), None)


def _parse_threshold(text: str) -> float:
    value = float(text)
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a cosine similarity in [-1, 1]")
    return value


def _defaults(limits: dict[str, float]) -> str:
    return ", ".join(f"{value:g} in {dtype}" for dtype, value in limits.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.compare", description=(__doc__ or "").partition("\n")[0])
    add_model_arguments(parser)
    parser.add_argument(
        "--threshold",
        type=_parse_threshold,
        help=f"smallest cosine similarity of a token; default: {_defaults(THRESHOLDS)}",
    )
    parser.add_argument(
        "--tolerance",
        type=parse_tolerance,
        help=f"largest relative difference of a value; default: {_defaults(TOLERANCES)}",
    )
    return parser


def report(args: argparse.Namespace) -> bool:
    """Loads, compares and reports on stdout. Raises `EngineError` where the input is unusable."""
    threshold = THRESHOLDS[args.dtype] if args.threshold is None else args.threshold
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    path = resolve_source(args.model)
    config = with_window(load_config(path), args.window)
    references = load_activations(args.reference, config, args.prefix)
    run = LayerRunner(*load_decoder(path, config, args.mesh, args.dtype), args.dtype)
    layers = compare(run, references)
    num_tokens = sum(len(reference.prompt) for reference in references)
    _say(f"{len(references)} prompts, {num_tokens} tokens on mesh {args.mesh[0]}x{args.mesh[1]} in {args.dtype}")
    _say("layer       smallest cosine  largest difference  relative")
    for layer in layers:
        mark = "" if layer.ok(threshold, tolerance) else "  <-"
        _say(f"{layer.name:<10}  {layer.cosine:>15.10f}  {layer.difference:>18.2e}  {layer.relative:>8.1e}{mark}")
    fault = first_fault(layers, threshold, tolerance)
    limits = f"cosine similarity of at least {threshold:g}, relative difference of at most {tolerance:g}"
    _say(f"every layer within the limits: {limits}" if fault is None else f"first wrong at {fault.name}: NOT {limits}")
    return fault is None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        return 0 if report(args) else 1
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
