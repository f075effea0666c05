"""What the scheduler is worth: shared prefixes, guessed tokens, and running streams beside a long prompt.

Each figure is a ratio of two runs on the same compiled programs, one with and one without.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from benchmarks.figures import Figures, emit, progress, share
from benchmarks.invariance import sample_prompts
from benchmarks.workload import DEFAULT_MODEL, Prompt, build, greedy, run_streams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from serve_app.config import parse_app_config

SYSTEM_LEN, QUESTION_LEN, NUM_QUESTIONS = 512, 24, 32


def shared_prefix(engine: Engine, config: EngineConfig, at_once: bool) -> Figures:
    """Time to first token of questions behind one system prompt, with and without the prefix cache."""
    draw = random.Random(0)

    def tokens(count: int) -> Prompt:
        return tuple(draw.randrange(engine.vocab_size) for _ in range(count))

    system = tokens(SYSTEM_LEN)
    prompts = [system + tokens(QUESTION_LEN) for _ in range(NUM_QUESTIONS)]
    ttft = {}
    for caching in (False, True):
        fresh = Engine(engine.runner, replace(config, prefix_caching=caching))
        batches = [prompts] if at_once else [[prompt] for prompt in prompts]
        streams = [stream for batch in batches for stream in run_streams(fresh, batch, greedy(4))]
        ttft[caching] = sum(stream.first_at - stream.sent_at for stream in streams) / len(streams)
    return {
        "at_once": int(at_once),
        "ttft_without_s": ttft[False],
        "ttft_with_s": ttft[True],
        "speedup": ttft[False] / ttft[True],
    }


def lookup(engine: Engine, config: EngineConfig, prompt: Prompt, max_tokens: int) -> Figures:
    """Tokens per second of one stream that copies from its prompt, with and without guesses."""
    rates, figures = {}, {}
    for num_draft_tokens in (0, config.num_draft_tokens):
        fresh = Engine(engine.runner, replace(config, num_draft_tokens=num_draft_tokens, prefix_caching=False))
        (stream,) = run_streams(fresh, [prompt], greedy(max_tokens))
        assert stream.tpot_s is not None
        rates[num_draft_tokens > 0] = 1 / stream.tpot_s
        stats = fresh.stats()
        figures = {"acceptance_rate": share(stats.num_accepted_tokens, stats.num_draft_tokens)}
    return {
        "max_tokens": max_tokens,
        "tokens_per_s_without": rates[False],
        "tokens_per_s_with": rates[True],
        "speedup": rates[True] / rates[False],
        **figures,
    }


def beside_a_long_prompt(engine: Engine, config: EngineConfig, num_streams: int) -> Figures:
    """Gaps between tokens of running streams, quiet and while a prompt that fills the context is computed."""
    fresh = Engine(engine.runner, replace(config, num_draft_tokens=0, prefix_caching=False))
    draw = random.Random(1)

    def tokens(count: int) -> Prompt:
        return tuple(draw.randrange(engine.vocab_size) for _ in range(count))

    streams: dict[str, list[float]] = {}
    for index in range(num_streams):
        fresh.add_request(Request(str(index), tokens(128), greedy(engine.max_model_len - 128)))
        streams[str(index)] = []

    def step() -> list[str]:
        outputs = fresh.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in streams and output.token_ids:
                streams[output.request_id].append(now)
        return [output.request_id for output in outputs if output.token_ids]

    def gaps_until(ended: Callable[[list[str]], bool]) -> list[float]:
        for times in streams.values():
            del times[:-1]
        while not ended(step()):
            pass
        return [b - a for times in streams.values() for a, b in itertools.pairwise(times)]

    while min(map(len, streams.values())) < 2:
        step()
    quiet = gaps_until(lambda _: min(map(len, streams.values())) > 40)
    sent_at = time.perf_counter()
    fresh.add_request(Request("long", tokens(engine.max_model_len - 1), greedy(1)))
    beside = gaps_until(lambda answered: "long" in answered)
    ttft_s = time.perf_counter() - sent_at
    for request_id in streams:
        fresh.abort(request_id)
    while fresh.has_work():
        fresh.step()
    return {
        "num_streams": num_streams,
        "long_prompt_len": engine.max_model_len - 1,
        "quiet_gap_p50_s": median(quiet),
        "gap_p50_s": median(beside),
        "gap_p95_s": sorted(beside)[int(0.95 * len(beside))],
        "gap_ratio_p50": median(beside) / median(quiet),
        "gap_ratio_p95": sorted(beside)[int(0.95 * len(beside))] / sorted(quiet)[int(0.95 * len(quiet))],
        "long_prompt_ttft_s": ttft_s,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model source (default: %(default)s)")
    parser.add_argument("--platform", default="auto", choices=["auto", "cpu", "gpu", "tpu"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-model-len", type=int, default=2048, help="context length (default: %(default)s)")
    parser.add_argument("--prefill-buckets", default="16,64,256", help="prompt chunk lengths (default: %(default)s)")
    parser.add_argument("--step-token-budget", type=int, help="default: the engine's own")
    parser.add_argument("--streams", type=int, default=8, help="running streams (default: %(default)s)")
    options = parser.parse_args()
    section = {
        "num_slots": options.streams + 1,
        "max_model_len": options.max_model_len,
        "prefill_buckets": [int(b) for b in options.prefill_buckets.split(",")],
        "weight_dtype": options.dtype,
        "activation_dtype": options.dtype,
        "num_draft_tokens": 7,
        "step_token_budget": options.step_token_budget,
    }
    config = parse_app_config(
        {"model": {"source": options.model}, "engine": section, "mesh": {"platform": options.platform}}
    )
    engine = build(config)
    assert isinstance(engine, Engine)
    progress("scheduling: compiling ...")
    engine.warm_up()
    engine_config = config.engine.to_engine_config()
    for at_once in (False, True):
        progress(f"scheduling: {NUM_QUESTIONS} questions behind one system prompt ...")
        emit("shared_prefix", {"model": options.model, **shared_prefix(engine, engine_config, at_once)})
    progress("scheduling: one stream that copies its prompt ...")
    # A passage several times over: the model goes on with it.
    passage = sample_prompts(engine, 1, 96, 1)[0]
    emit("lookup", {"model": options.model, **lookup(engine, engine_config, passage * 4, 192)})
    progress("scheduling: a long prompt beside running streams ...")
    emit("long_prompt", {"model": options.model, **beside_a_long_prompt(engine, engine_config, options.streams)})


if __name__ == "__main__":
    main()
