"""Compares a model with logits and greedy tokens that another implementation computed: for anyone who converts weights.

    python -m engine.verify MODEL REFERENCE.npz --mesh 1x8
    python -m engine.verify MODEL REFERENCE.npz --prefix full_ --window full

MODEL is a source as `engine.weights.source` reads it. The file holds, for prompt j, `prompt{j}` [T] and, each behind an
optional prefix, `logits{j}` [T, V] (one full forward pass), `greedy{j}` [N] (end-of-sequence ignored) and
`continued_logits{j}` [N + 1, V] (after the prompt and after each greedy token). --window replaces the model's own
sliding windows: N positions in every layer, or full, none in any.

Everything runs on the serving path: prompts prefilled in chunks, all sequences decoded together from the paged cache.
Exits 0 where every logit is within the tolerance and every greedy token agrees, 1 where not, 2 where the input is
unusable.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from engine.config import EngineConfig, ModelConfig
from engine.devices import provide_cpu_devices
from engine.engine import Engine, build_engine
from engine.errors import EngineError
from engine.models.decoder import Decoder, Params
from engine.references import PromptReference, check_references, load_references
from engine.request import Request, SamplingParams
from engine.sharding import DATA, make_mesh, param_sharding
from engine.teacher_forcing import ForcedSequence, forced_logits
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source

_PAGE_SIZE, _LARGEST_BUCKET = 16, 128


@dataclass(frozen=True)
class Comparison:
    """How one prompt came out."""

    prefill_error: float
    """Largest absolute difference of a logit over all prompt positions; not a number where one is not."""
    decode_error: float
    """The same after the prompt and after each greedy token of the reference."""
    num_greedy: int
    num_agreeing: int
    """Greedy tokens before the first that differs."""
    difference: str | None
    """The first greedy token that differs, in words."""

    def ok(self, tolerance: float) -> bool:
        """Whether all logits are within the tolerance and all greedy tokens agree."""
        within = self.prefill_error <= tolerance and self.decode_error <= tolerance
        return within and self.num_agreeing == self.num_greedy


def engine_config(references: Sequence[PromptReference], num_shards: int, dtype: str) -> EngineConfig:
    """A slot for each prompt, and a prefill bucket shorter than the longest prompt. One program of each kind: compiling
    takes longer than all that is computed."""
    longest = max(len(reference.prompt) for reference in references)
    # The largest power of two below the longest prompt, so that this prompt takes at least two chunks.
    bucket = min(_LARGEST_BUCKET, max(1 << (longest - 1).bit_length() - 1, 2) if longest > 1 else 2)
    return EngineConfig(
        num_slots=-(-len(references) // num_shards) * num_shards,
        max_model_len=max(len(reference.prompt) + len(reference.greedy) for reference in references),
        prefill_buckets=(bucket,),
        page_size=min(_PAGE_SIZE, bucket),
        max_queue_len=len(references),
        activation_dtype=dtype,  # type: ignore[arg-type]
        weight_dtype=dtype,  # type: ignore[arg-type]
        batch_invariant=True,
    )


def compare(engine: Engine, references: Sequence[PromptReference]) -> list[Comparison]:
    """Runs all prompts on an idle engine, first by greedy generation, then with the reference's tokens forced."""
    generated = _generate(engine, references)
    sequences = [ForcedSequence(reference.prompt, reference.greedy) for reference in references]
    logits = forced_logits(engine.runner, sequences)
    return [_compare(*each) for each in zip(references, generated, logits, strict=True)]


def _generate(engine: Engine, references: Sequence[PromptReference]) -> list[list[int]]:
    for j, reference in enumerate(references):
        params = SamplingParams(max_tokens=len(reference.greedy), temperature=0, ignore_eos=True)
        engine.add_request(Request(str(j), reference.prompt, params))
    generated: list[list[int]] = [[] for _ in references]
    while engine.has_work():
        for output in engine.step():
            generated[int(output.request_id)].extend(output.token_ids)
    return generated


def _compare(reference: PromptReference, generated: list[int], logits: Float[np.ndarray, "T+N V"]) -> Comparison:
    num_prompt = len(reference.prompt)
    pairs = list(zip(reference.greedy, generated, strict=True))
    first = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), None)
    difference = None
    if first is not None:
        second, best = np.sort(reference.continued_logits[first])[-2:]
        difference = (
            f"greedy token {first} is {pairs[first][1]} instead of {pairs[first][0]}; the two largest logits of the "
            f"reference are {best - second:.2g} apart there"
        )
    return Comparison(
        _largest_difference(logits[:num_prompt], reference.logits),
        _largest_difference(logits[num_prompt - 1 :], reference.continued_logits),
        len(reference.greedy),
        len(pairs) if first is None else first,
        difference,
    )


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def parse_mesh(text: str) -> tuple[int, int]:
    """(data, model) of "DATAxMODEL". Raises `argparse.ArgumentTypeError`."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected DATAxMODEL, such as 1x8")
    return int(match[1]), int(match[2])


def parse_tolerance(text: str) -> float:
    """A finite number of at least 0. Raises `argparse.ArgumentTypeError`."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a finite number of at least 0")
    return value


def parse_window(text: str) -> tuple[int | None]:
    """The window of "N" or "full", as a tuple of one, so that None can stand for "not given". Raises
    `argparse.ArgumentTypeError`."""
    if text == "full":
        return (None,)
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of positions of at least 1, or full")
    return (int(text),)


def with_window(config: ModelConfig, window: tuple[int | None] | None) -> ModelConfig:
    """The model with this window in every layer; None: as it is."""
    if window is None:
        return config
    return replace(config, layer_windows=None if window[0] is None else window * config.num_layers)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `load_decoder` and the reading of references need."""
    parser.add_argument("model", metavar="MODEL", help="path, package:<package>/<file> or hf:<org>/<name>[@<revision>]")
    parser.add_argument("reference", metavar="REFERENCE.npz", type=Path)
    parser.add_argument("--mesh", metavar="DATAxMODEL", type=parse_mesh, default=(1, 1))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="weights and activations")
    parser.add_argument("--prefix", default="", help="stands before the names of all arrays but the prompts")
    parser.add_argument(
        "--window", metavar="N|full", type=parse_window, help="instead of the model's own; full: no window in any layer"
    )


def load_decoder(path: Path, config: ModelConfig, mesh_shape: tuple[int, int], dtype: str) -> tuple[Decoder, Params]:
    """A model on a (data, model) mesh. Raises `EngineError`."""
    provide_cpu_devices(mesh_shape[0] * mesh_shape[1])
    mesh = make_mesh(*mesh_shape)
    decoder = Decoder(config, mesh, dtype, dtype)
    return decoder, load_params(path, config, decoder.abstract_params(), lambda p, s: param_sharding(p, s, mesh))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.verify", description=(__doc__ or "").partition("\n")[0])
    add_model_arguments(parser)
    parser.add_argument("--tolerance", type=parse_tolerance, default=1e-3, help="largest difference of a logit")
    return parser


def verify(args: argparse.Namespace) -> bool:
    """Loads, compares and reports on stdout. Raises `EngineError` where the input is unusable."""
    references = load_references(args.reference, args.prefix)
    path = resolve_source(args.model)
    model = with_window(load_config(path), args.window)
    check_references(references, model)
    decoder, params = load_decoder(path, model, args.mesh, args.dtype)
    config = engine_config(references, decoder.mesh.shape[DATA], args.dtype)
    comparisons = compare(build_engine(decoder, params, config), references)
    chunks = ", ".join(map(str, config.prefill_buckets))
    _report(f"{len(references)} prompts on mesh {args.mesh[0]}x{args.mesh[1]}, prefilled in chunks of {chunks}")
    for j, (reference, c) in enumerate(zip(references, comparisons, strict=True)):
        _report(
            f"prompt {j} ({len(reference.prompt)} tokens): largest logit difference {c.prefill_error:.2e} in prefill, "
            f"{c.decode_error:.2e} in decode; {c.num_agreeing} of {c.num_greedy} greedy tokens agree"
        )
        if c.difference is not None:
            _report(f"  {c.difference}")
    ok = all(c.ok(args.tolerance) for c in comparisons)
    _report(f"{'within' if ok else 'NOT within'} tolerance {args.tolerance:g} with all greedy tokens agreeing")
    return ok


def _report(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        return 0 if verify(args) else 1
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
