"""One prompt through the Grok-1 release's API, without a server:

    python -m serve_app.run_local --model SOURCE --tokenizer SOURCE --mesh 1x8 --prompt "The answer to life" \\
        --max-len 100 --temperature 0.01

SOURCE is a model's path, package:<package>/<file> or hf:<org>/<name>[@<revision>]. Prints the new text, and with --top
the most likely tokens at each step. Exits 0, or 2 where the input is unusable.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from cluster.mesh import MeshConfig, build_mesh
from cluster.platform import Platform, prepare_platform
from engine.config import DType, EngineConfig, ExpertSharding, WeightDType
from engine.errors import EngineError
from engine.inference import Completion, InferenceRunner, ModelRunner, sample_from_model
from engine.verify import parse_mesh
from engine.weights.source import resolve_source
from serve_app.builder import prepare_compilation_cache
from serve_app.config import AppConfig
from serve_app.console import StartUpLines, say
from serve_app.text.base import Tokenizer
from serve_app.text.tokenizer import load_tokenizer

_MEMORY_FRACTION = 0.9


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(resolve_source(args.tokenizer or args.model))
    shape = MeshConfig(local=args.mesh)
    prepare_platform(args.platform, shape.devices_per_host, _MEMORY_FRACTION)
    prepare_compilation_cache(args.compilation_cache_dir or None)
    model = ModelRunner(args.model, build_mesh(shape), args.weight_dtype, args.activation_dtype, args.expert_sharding)
    model.initialize(StartUpLines().weights)
    config = EngineConfig(
        num_slots=args.mesh[0],
        max_model_len=args.context,
        activation_dtype=args.activation_dtype,
        weight_dtype=args.weight_dtype,
        expert_sharding=args.expert_sharding,
    )
    runner = InferenceRunner(model, tokenizer, config)
    runner.initialize(StartUpLines().programs)
    completions: list[Completion] = []
    server = runner.run(completions.append)
    say(sample_from_model(server, args.prompt, args.max_len, args.temperature))
    if args.top:
        for line in report(completions[0], tokenizer):
            say(line)


def report(completion: Completion, tokenizer: Tokenizer) -> list[str]:
    """A line for each token: itself and the most likely ones, with the model's own probabilities."""

    def shown(token_id: int, prob: float) -> str:
        return f"{tokenizer.token_text(token_id)!r} {prob:.3f}"

    lines = []
    for position, output in enumerate(completion.outputs):
        top = ", ".join(shown(*pair) for pair in zip(output.top_k_token_ids, output.top_k_probs, strict=True))
        lines.append(f"{position:4} {shown(output.token_id, output.prob)} of {top}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.run_local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="SOURCE")
    add("--tokenizer", metavar="SOURCE", help="where the model has none with it")
    add("--prompt", required=True)
    add("--max-len", type=int, default=100, metavar="TOKENS", help="new tokens; default: 100")
    add("--temperature", type=float, default=0.01, help="0: greedy; default: 0.01")
    add("--top", action="store_true", help="report the most likely tokens at each step")
    add("--mesh", metavar="DATAxMODEL", type=parse_mesh, default=(1, 1), help="default: 1x1")
    add("--platform", choices=get_args(Platform), default="auto", help="cpu stands for as many devices as needed")
    add("--context", type=int, metavar="TOKENS", help="context length; default: the model's")
    add("--weight-dtype", choices=get_args(WeightDType), default="bfloat16")
    add("--activation-dtype", choices=get_args(DType), default="bfloat16")
    add("--expert-sharding", choices=get_args(ExpertSharding), default="width")
    add(
        "--compilation-cache-dir",
        metavar="DIR",
        default=AppConfig.model_fields["compilation_cache_dir"].default,
        help="where compiled programs are kept; '' for nowhere",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
