"""Compares a model with logits and greedy tokens that another implementation computed: for anyone who converts weights.

    python -m engine.verify MODEL REFERENCE.npz --mesh 1x8

MODEL is a source as `engine.weights.source` reads it. The file holds, for prompt j, `prompt{j}` [T] and, each behind an
optional prefix, `logits{j}` [T, V] (one full forward pass), `greedy{j}` [N] (end-of-sequence ignored) and
`continued_logits{j}` [N + 1, V] (after the prompt and after each greedy token).

Everything runs on the serving path: prompts prefilled in chunks, all sequences decoded together from the paged cache.
Exits 0 where every logit is within the tolerance and every greedy token agrees, 1 where not, 2 where the input is
unusable.
"""

import argparse
import math
import re
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from engine.config import EngineConfig, ModelConfig
from engine.devices import provide_cpu_devices
from engine.engine import Engine, build_engine
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.models.decoder import Decoder
from engine.request import Request, SamplingParams
from engine.sharding import DATA, make_mesh, param_sharding
from engine.teacher_forcing import ForcedSequence, forced_logits
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source

_PAGE_SIZE, _LARGEST_BUCKET = 16, 128


@dataclass(frozen=True)
class PromptReference:
    """What another implementation computed for one prompt."""

    prompt: tuple[int, ...]
    logits: Float[np.ndarray, "T V"]
    greedy: tuple[int, ...]
    continued_logits: Float[np.ndarray, "N+1 V"]


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


def load_references(path: Path, prefix: str = "") -> list[PromptReference]:
    """Every prompt of a reference file. Raises `CheckpointError` naming an array that is missing or mis-shaped."""
    try:
        # Opened here: numpy leaves the file open where it is damaged.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: damaged, or not an .npz file of plain arrays") from error
    prompts = sorted(int(match[1]) for name in arrays if (match := re.fullmatch(r"prompt(\d+)", name)))
    if not prompts:
        raise CheckpointError(f"{path}: no array prompt0; expected prompt<j> for each prompt")
    return [_reference(path, prefix, j, arrays) for j in prompts]


def _reference(path: Path, prefix: str, j: int, arrays: dict[str, np.ndarray]) -> PromptReference:
    def array(name: str, kind: type, *shape: int | None) -> np.ndarray:
        if name not in arrays:
            raise CheckpointError(f"{path}: no array {name}; expected it beside prompt{j} (see --prefix)")
        found = arrays[name]
        fits = found.ndim == len(shape) and all(s in (None, n) for s, n in zip(shape, found.shape, strict=True))
        if not fits or not np.issubdtype(found.dtype, kind):
            expected = ", ".join("any" if s is None else str(s) for s in shape)
            raise CheckpointError(
                f"{path}: {name} is {found.dtype} of shape {list(found.shape)}; expected {kind.__name__} [{expected}]"
            )
        return found

    prompt = array(f"prompt{j}", np.integer, None)
    if not prompt.size:
        raise CheckpointError(f"{path}: prompt{j} is empty")
    logits = array(f"{prefix}logits{j}", np.floating, len(prompt), None)
    greedy = array(f"{prefix}greedy{j}", np.integer, None)
    if not greedy.size:
        raise CheckpointError(f"{path}: {prefix}greedy{j} is empty")
    continued = array(f"{prefix}continued_logits{j}", np.floating, len(greedy) + 1, logits.shape[1])
    return PromptReference(tuple(prompt.tolist()), logits, tuple(greedy.tolist()), continued)


def check_references(references: Sequence[PromptReference], config: ModelConfig) -> None:
    """Raises `ConfigError` where the file is of another model: another vocabulary, or contexts it was not made for."""
    for j, reference in enumerate(references):
        size = reference.logits.shape[1]
        if size != config.vocab_size:
            raise ConfigError(
                f"the reference has {size} logits a position; the vocabulary has {config.vocab_size} tokens"
            )
        outside = [t for t in reference.prompt + reference.greedy if not 0 <= t < size]
        if outside:
            raise ConfigError(
                f"prompt {j} or its continuation holds token {outside[0]}, outside the vocabulary [0, {size})"
            )
        length = len(reference.prompt) + len(reference.greedy)
        if length > config.max_position_embeddings:
            raise ConfigError(
                f"prompt {j} of the reference is {length} tokens with its continuation; the model was trained for "
                f"{config.max_position_embeddings} positions"
            )


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


def _parse_tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a finite number of at least 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.verify", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="path, package:<package>/<file> or hf:<org>/<name>[@<revision>]")
    parser.add_argument("reference", metavar="REFERENCE.npz", type=Path)
    parser.add_argument("--mesh", metavar="DATAxMODEL", type=parse_mesh, default=(1, 1))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="weights and activations")
    parser.add_argument("--tolerance", type=_parse_tolerance, default=1e-3, help="largest difference of a logit")
    parser.add_argument("--prefix", default="", help="stands before the names of all arrays but the prompts")
    return parser


def verify(args: argparse.Namespace) -> bool:
    """Loads, compares and reports on stdout. Raises `EngineError` where the input is unusable."""
    references = load_references(args.reference, args.prefix)
    path = resolve_source(args.model)
    model = load_config(path)
    check_references(references, model)
    provide_cpu_devices(args.mesh[0] * args.mesh[1])
    mesh = make_mesh(*args.mesh)
    decoder = Decoder(model, mesh, args.dtype, args.dtype)
    config = engine_config(references, mesh.shape[DATA], args.dtype)
    params = load_params(path, model, decoder.abstract_params(), lambda p, s: param_sharding(p, s, mesh))
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
