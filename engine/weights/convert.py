"""Writes a model's weights as this engine has them in memory, in safetensors files that load faster.

    python -m engine.weights.convert SOURCE DESTINATION
    python -m engine.weights.convert SOURCE DESTINATION --dtype int8 --verify
    python -m engine.weights.convert SOURCE --table

SOURCE is anything that can be served, or a PyTorch state dict (.safetensors, .bin, .pt or .pth) beside its config.json.
Nothing in it is executed, and PyTorch is not needed. --table prints which tensor goes where, and writes nothing.

Weights keep the type they have in the source (quantised GGUF tensors: float32) unless --dtype says otherwise; int8 goes
for the matrices of the layers, and the error of each is reported.

A conversion that was interrupted goes on where it stopped, after checking what is there. A destination that holds
anything else is never written to. With --verify every file is compared with its checksum in the end, also where the
conversion had been finished before.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from engine.config import ModelConfig
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.sharding import make_mesh, param_sharding
from engine.weights.destination import Destination
from engine.weights.families import WeightMap
from engine.weights.load import folder_of, load_config, open_source
from engine.weights.loader import Loader
from engine.weights.native import verify_checksums
from engine.weights.plan import ParamPlan, plan_params
from engine.weights.quantize import QuantizationError, describe_errors
from engine.weights.source import resolve_source
from engine.weights.table import describe_table, mapping_table
from engine.weights.tensors import TensorSource

KEEP = "keep"
DTYPES = (KEEP, "float32", "bfloat16", "float16", "int8")

SHARD_BYTES = 2 << 30
"""The host holds one file's tensors, and what safetensors makes of them."""

Say = Callable[[str], None]


def convert(
    source: Path,
    destination: Path,
    dtype: str = KEEP,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    say: Say = lambda line: None,
) -> None:
    """Converts the model at `source` into the folder `destination`; `say` hears how far it is.

    Raises `CheckpointError` where the source is not sound, or the destination holds anything but an unfinished
    conversion of the same source with the same options (with `verify`, a finished one is only checked).
    """
    config = load_config(source)
    opened, weights = open_source(source, config)
    with closing(opened):
        plans = _plans(opened, weights, config, dtype)
        target = Destination(destination, opened, config, [dtype, str(shard_bytes)])
        if target.is_finished():
            if not verify:
                raise target.refuse_finished()
            say(f"{destination} was converted before")
        else:
            target.prepare(sum(_num_bytes(plan) for plan in plans))
            _write(opened, weights, config, list(_shards(plans, shard_bytes)), target, say)
            target.finish(folder_of(source))
    if verify:
        verify_checksums(destination, lambda name: say(f"checking {name}"))
    say(f"{destination} is complete")


def table(source: Path, dtype: str = KEEP) -> str:
    """Which tensor of the model at `source` becomes which parameter. Raises `CheckpointError` where one is missing,
    left over, or not what it must be."""
    config = load_config(source)
    opened, weights = open_source(source, config)
    with closing(opened):
        return describe_table(mapping_table(opened, weights, _plans(opened, weights, config, dtype)))


def _write(
    source: TensorSource,
    weights: WeightMap,
    config: ModelConfig,
    shards: Sequence[Sequence[ParamPlan]],
    target: Destination,
    say: Say,
) -> None:
    mesh = make_mesh()
    loader = Loader(source, weights, config, lambda path, shape: param_sharding(path, shape, mesh))
    errors: list[QuantizationError] = []
    total_bytes, done_bytes = sum(_num_bytes(plan) for shard in shards for plan in shard), 0
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        names = [path for plan in shard for path in _paths(plan)]
        done_bytes += sum(_num_bytes(plan) for plan in shard)
        if target.has(name, names):
            say(f"{name} is there already ({done_bytes} of {total_bytes} bytes)")
            continue
        params = loader.load(shard, report=errors.append)
        flat = {path: np.asarray(params[path.rpartition("/")[0]][path.rpartition("/")[2]]) for path in names}
        target.add(name, flat)
        say(f"{name} written ({done_bytes} of {total_bytes} bytes)")
    if errors:
        say(describe_errors(errors))


def _plans(source: TensorSource, weights: WeightMap, config: ModelConfig, dtype: str) -> list[ParamPlan]:
    is_quantized = any(info.scales is not None for info in source.tensors.values())
    as_int8 = dtype == "int8" or (dtype == KEEP and is_quantized)
    declared = "int8" if as_int8 else "float32" if dtype == KEEP else dtype
    decoder = Decoder(config, make_mesh(), declared, "float32")
    plans = plan_params(source, weights, config, decoder.abstract_params())
    return [_as_stored(plan, source) for plan in plans] if dtype in (KEEP, "int8") else list(plans)


def _as_stored(plan: ParamPlan, source: TensorSource) -> ParamPlan:
    """The plan with the types that the source has; int8 stays, with its scales' type where the source has scales."""
    infos = [source.tensors[piece] for piece in plan.pieces]
    if plan.scale is None:
        dtypes = {info.dtype for info in infos}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        # The devices that cast have no float64.
        return replace(plan, target=_retyped(plan.target, np.dtype(np.float32) if dtype == np.float64 else dtype))
    scales = {source.tensors[info.scales].dtype for info in infos if info.scales is not None}
    return replace(plan, scale=_retyped(plan.scale, scales.pop() if len(scales) == 1 else np.dtype(np.float32)))


def _retyped(target: jax.ShapeDtypeStruct, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(target.shape, dtype)


def _paths(plan: ParamPlan) -> list[str]:
    return [plan.path] if plan.scale is None else [plan.path, f"{plan.path.rpartition('/')[0]}/scale"]


def _num_bytes(plan: ParamPlan) -> int:
    targets = [plan.target] if plan.scale is None else [plan.target, plan.scale]
    return sum(target.size * np.dtype(target.dtype).itemsize for target in targets)


def _shards(plans: Sequence[ParamPlan], shard_bytes: int) -> Iterator[list[ParamPlan]]:
    """Parameters in their order, together as long as they fit."""
    shard: list[ParamPlan] = []
    for plan in plans:
        if shard and sum(_num_bytes(p) for p in [*shard, plan]) > shard_bytes:
            yield shard
            shard = []
        shard.append(plan)
    yield shard


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.weights.convert", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("source", metavar="SOURCE", help="path, package:<package>/<file> or hf:<org>/<name>[@<rev>]")
    parser.add_argument(
        "destination", metavar="DESTINATION", type=Path, nargs="?", help="a folder that is empty or not there yet"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=KEEP, help="type of the weights; default: as they are")
    parser.add_argument("--verify", action="store_true", help="compare every file with its checksum in the end")
    parser.add_argument("--table", action="store_true", help="print which tensor goes where, and convert nothing")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.table == (args.destination is not None) or (args.table and args.verify):
        parser.error("expected a DESTINATION, or --table without one and without --verify")
    # Converting is copying: an accelerator would not make it faster, and its memory may be in use.
    jax.config.update("jax_platforms", "cpu")
    try:
        source = resolve_source(args.source)
        if args.table:
            _say(table(source, args.dtype))
        else:
            convert(source, args.destination, args.dtype, verify=args.verify, say=_say)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
