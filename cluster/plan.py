"""What a model needs on a mesh of given devices, without weights and without an accelerator:

    python -m cluster.plan grok-1 --mesh 1x8 --weight-dtype int8 --device-memory-gb 80 --bandwidth-gbs 3350 --tflops 989

MODEL is `grok-1` (the release, of which no file is needed) or a source as `engine.weights.source` reads it. Prints the
bytes of each device for weights and cache, how many slots and which context fit, and the least time of a token by
reading and computing alone; beside that, what the compiler says of the same programs, compiled for as many virtual
devices. GB and TFLOP are powers of ten.

Exits 0 where the slots asked for fit, 1 where not, 2 where the input is unusable.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import get_args

import jax

from cluster.plan_report import render
from cluster.planner import PlanInput, make_plan
from cluster.roofline import Accelerator
from engine.config import CacheDType, DType, EngineConfig, ExpertSharding, WeightDType
from engine.devices import provide_cpu_devices
from engine.errors import EngineError
from engine.verify import parse_mesh
from engine.weights.grok1 import release_config
from engine.weights.load import load_config
from engine.weights.source import resolve_source

GROK_1 = "grok-1"
"""The MODEL that needs no file."""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number in (0, 1]")
    return value


def _depth(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; expected at least 2 layers, since half as many are compiled, too")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="grok-1, a path, package:<package>/<file> or hf:<org>/<name>[@<revision>]")
    add("--mesh", metavar="DATAxMODEL", type=parse_mesh, default=(1, 8), help="default: 1x8")
    add("--device-memory-gb", type=_positive, default=80.0, help="of one device, 10^9 bytes; default: 80")
    add("--bandwidth-gbs", type=_positive, default=3350.0, help="10^9 bytes a second; default: 3350, an H100 SXM")
    add("--tflops", type=_positive, default=989.0, help="10^12 dense operations a second; default: 989, the same")
    add("--memory-fraction", type=_fraction, default=0.9, help="share of the memory that is taken; default: 0.9")
    add("--weight-dtype", choices=get_args(WeightDType), default="bfloat16")
    add("--activation-dtype", choices=get_args(DType), default="bfloat16")
    add("--cache-dtype", choices=get_args(CacheDType), help="default: that of the activations")
    add("--expert-sharding", choices=get_args(ExpertSharding), default="width")
    add("--context", type=int, metavar="TOKENS", help="positions of a slot; default: the model's")
    add("--slots", type=int, default=8, help="requests at once; default: 8")
    add("--prefill-chunk", type=int, metavar="TOKENS", default=512, help="default: 512")
    add("--page-size", type=int, metavar="TOKENS", default=16, help="default: 16")
    add("--no-compile", action="store_true", help="arithmetic only")
    add(
        "--layers-compiled",
        type=_depth,
        metavar="N",
        help="compile N layers and half of that, and extrapolate; default: all layers, and nothing is extrapolated",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _question(args: argparse.Namespace) -> PlanInput:
    model = release_config() if args.model == GROK_1 else load_config(resolve_source(args.model))
    return PlanInput(
        name=args.model,
        model=model,
        mesh=args.mesh,
        device=Accelerator(args.device_memory_gb * 1e9, args.bandwidth_gbs * 1e9, args.tflops * 1e12),
        memory_fraction=args.memory_fraction,
        engine=EngineConfig(
            num_slots=args.slots,
            max_model_len=args.context,
            prefill_buckets=(args.prefill_chunk,),
            page_size=args.page_size,
            weight_dtype=args.weight_dtype,
            activation_dtype=args.activation_dtype,
            cache_dtype=args.cache_dtype,
            expert_sharding=args.expert_sharding,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        question = _question(args)
        jax.config.update("jax_platforms", "cpu")
        provide_cpu_devices(args.mesh[0] * args.mesh[1])
        num_layers = args.layers_compiled or question.model.num_layers
        plan = make_plan(question, None if args.no_compile else num_layers)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(plan.as_json(), indent=2) if args.json else render(plan.as_json())) + "\n")
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
