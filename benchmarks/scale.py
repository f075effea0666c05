"""What it costs to scale out, in three parts (--parts): lockstep over several processes, HTTP and Ray Serve around the
engine, and many streams held open at once. See `lockstep_cost`, `serving_cost` and `clients` of this package.
"""

import argparse
import asyncio
import os
from typing import Any

from benchmarks.figures import emit, progress
from benchmarks.serving_cost import MODES, SERVED_NAME
from benchmarks.workload import DEFAULT_MODEL, Load

PARTS = ("lockstep", "serving", "clients")
_TINY_MODEL = "../shared/data/hf/llama-tiny"
_TINY_TOKENIZER = "configs/grok1-tiny.model"
_SPARE_FILES = 256
_SPARE_QUEUE = 16


def main() -> None:
    """The command."""
    options = _parser().parse_args()
    if "lockstep" in options.parts:
        _lockstep(options)
    if "serving" in options.parts:
        _serving(options)
    if "clients" in options.parts:
        _clients(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    add("--hosts", type=int, nargs="+", default=[2, 4], help="lockstep: processes of a replica (default: 2 4)")
    add("--devices", type=int, default=8, help="lockstep: virtual devices of all processes (default: 8)")
    add("--steps", type=int, default=200, help="lockstep: decode steps measured (default: 200)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="serving: ways to the ingress (default: all)")
    add("--models", nargs="+", default=[_TINY_MODEL, DEFAULT_MODEL], help="serving: model sources (default: two)")
    add("--repeats", type=int, default=15, help="serving: streams measured of each kind (default: 15)")
    add("--serving-tokens", type=int, default=192, help="serving: tokens of each answer (default: 192)")
    add("--clients", type=int, default=1000, help="clients: streams held open at once (default: 1000)")
    add("--max-tokens", type=int, default=64, help="clients: tokens of each answer (default: 64)")
    add("--rounds", type=int, default=2, help="clients: times on one server; memory grows in the first (default: 2)")
    add("--slots", type=int, default=64, help="clients: requests that the engine runs at once (default: 64)")
    add("--hold-s", type=float, default=30.0, help="clients: seconds that all are held (default: 30)")
    add("--timeout-s", type=float, default=900.0, help="clients: longest life of a stream (default: 900)")
    add("--tiny-model", default=_TINY_MODEL, help="the model of clients (default: %(default)s)")
    add("--tiny-tokenizer", default=_TINY_TOKENIZER, help="for models without one (default: %(default)s)")
    return parser


def server_args(model: str, tokenizer: str, num_slots: int, max_queue_len: int) -> dict[str, Any]:
    """The arguments of an application with this model; GGUF files and packages have a tokenizer of their own."""
    own = model.endswith(".gguf")
    return {
        "model": {"source": model, "served_name": SERVED_NAME, **({} if own else {"tokenizer": tokenizer})},
        "engine": {
            "num_slots": num_slots,
            "max_model_len": 256,
            "prefill_buckets": [32],
            "max_queue_len": max_queue_len,
            "prefix_caching": False,
            # One decode program instead of one for each number of rows: the start is short.
            "batch_invariant": num_slots > 1,
        },
        "mesh": {"platform": "cpu"},
    }


def _lockstep(options: argparse.Namespace) -> None:
    from benchmarks import lockstep_cost

    for figures in lockstep_cost.figures(options.hosts, options.devices, options.steps):
        emit("lockstep", figures)


def _serving(options: argparse.Namespace) -> None:
    from benchmarks import serving_cost

    load = Load(1, 32, options.serving_tokens)
    for model in options.models:
        progress(f"serving: {model} ...")
        args = server_args(model, options.tiny_tokenizer, 1, _SPARE_QUEUE)
        for figures in serving_cost.figures(args, options.modes, load, options.repeats):
            emit("serving", {"model": model, **figures})


def _clients(options: argparse.Namespace) -> None:
    from benchmarks.clients import hold_open
    from benchmarks.processes import ServerMemory, allow_files

    # A proxy has two connections for each client.
    allow_files(2 * options.clients + _SPARE_FILES)
    args = server_args(options.tiny_model, options.tiny_tokenizer, options.slots, options.clients + _SPARE_QUEUE)
    prompts = Load(options.clients, 16, options.max_tokens).prompts(vocab_size=256)
    for mode in options.modes:
        with MODES[mode].server(args) as url:
            memory = ServerMemory()
            for number in range(options.rounds):
                progress(f"clients: {options.clients} streams, {mode}, round {number + 1} ...")
                held = hold_open(
                    url,
                    SERVED_NAME,
                    prompts,
                    options.max_tokens,
                    memory,
                    hold_s=options.hold_s,
                    timeout_s=options.timeout_s,
                )
                figures = asyncio.run(held)
                emit("clients", {"mode": mode, "round": number + 1, **figures, "load_average": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
