"""Replays the arrivals of a production service: padding, page utilisation, and what each request waited.

Traces are CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens (the Azure LLM inference traces of
Patel et al., "Splitwise", ISCA 2024, have them). Lengths and arrivals are scaled to the machine; prompts are made up.
"""

import argparse
import csv
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean, median

from benchmarks.figures import Figures, emit, progress, share
from benchmarks.workload import DEFAULT_MODEL, build, greedy
from engine.engine import Engine
from engine.request import FinishReason, Request
from serve_app.config import parse_app_config


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Seconds after the first one."""
    prompt_len: int
    num_generated: int


def read_trace(path: Path, count: int, length_scale: float, max_model_len: int) -> list[Arrival]:
    """The first `count` requests with lengths times `length_scale`, at least 1, cut to fit the context."""
    with path.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    if not rows:
        raise SystemExit(f"{path} holds no request; expected lines TIMESTAMP,ContextTokens,GeneratedTokens")
    # The traces have seven decimals; Python reads six.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    arrivals = []
    for row, at in zip(rows, times, strict=True):
        generated = max(1, round(int(row["GeneratedTokens"]) * length_scale))
        generated = min(generated, max_model_len // 2)
        prompt = max(1, round(int(row["ContextTokens"]) * length_scale))
        arrivals.append(Arrival((at - times[0]).total_seconds(), min(prompt, max_model_len - generated), generated))
    return arrivals


@dataclass
class Replay:
    """What came of a replay."""

    num_requests: int
    num_ended: int = 0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    utilization: list[tuple[float, float]] = field(default_factory=list)
    """(share of pages held, share of their positions that hold a token) after each step with a page held."""

    @property
    def page_utilization(self) -> float | None:
        """Mean over the steps, weighted by the pages held."""
        return share(sum(held * used for held, used in self.utilization), sum(held for held, _ in self.utilization))


def replay(
    engine: Engine,
    arrivals: Sequence[Arrival],
    clock: Callable[[], float],
    idle: Callable[[float], None],
) -> Replay:
    """Sends each request at its time by `clock` (seconds), whatever the engine is doing, and waits for all to end.

    `idle(s)` is called with the seconds until the next arrival when there is nothing to do.
    """
    draw = random.Random(0)
    result, start = Replay(len(arrivals)), clock()
    pending, sent_at = list(enumerate(arrivals)), {}
    while pending or engine.has_work():
        while pending and arrivals_due(pending[0][1], clock() - start):
            index, arrival = pending.pop(0)
            prompt = tuple(draw.randrange(engine.vocab_size) for _ in range(arrival.prompt_len))
            engine.add_request(Request(str(index), prompt, greedy(arrival.num_generated)))
            sent_at[str(index)] = start + arrival.at_s
        if not engine.has_work():
            idle(pending[0][1].at_s - (clock() - start))
            continue
        for output in engine.step():
            result.num_tokens += len(output.token_ids)
            if output.token_ids and output.request_id in sent_at:
                result.ttft_s.append(clock() - sent_at.pop(output.request_id))
            result.num_ended += output.finish_reason is FinishReason.LENGTH
        stats = engine.stats()
        if stats.cache_usage:
            result.utilization.append((stats.cache_usage, stats.page_utilization))
        engine.scheduler.check_integrity()
    return result


def arrivals_due(arrival: Arrival, elapsed_s: float) -> bool:
    """Whether the request has been sent by now."""
    return arrival.at_s <= elapsed_s


def figures_of(engine: Engine, result: Replay, arrivals: Sequence[Arrival]) -> Figures:
    """What is reported of a replay on an engine that did nothing else."""
    stats = engine.stats()
    lengths = [a.prompt_len + a.num_generated for a in arrivals]
    return {
        "num_requests": result.num_requests,
        "num_lost": result.num_requests - result.num_ended,
        "mean_prompt_len": mean(a.prompt_len for a in arrivals),
        "num_generated_tokens": result.num_tokens,
        "padding_share": share(stats.num_padding_tokens, stats.num_padding_tokens + stats.num_prompt_tokens),
        "page_utilization": result.page_utilization,
        # What a cache of one whole context for each slot would use, for comparison.
        "contiguous_utilization": mean(lengths) / engine.max_model_len,
        "num_preemptions": stats.num_preemptions,
        "ttft_p50_s": median(result.ttft_s),
        "num_compilations_since_warm_up": stats.num_compilations_since_warm_up,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="the CSV file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model source (default: %(default)s)")
    parser.add_argument("--platform", default="auto", choices=["auto", "cpu", "gpu", "tpu"])
    parser.add_argument("--requests", type=int, default=64, help="how many of its requests (default: %(default)s)")
    parser.add_argument("--length-scale", type=float, default=0.25, help="of all lengths (default: %(default)s)")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals this many times as fast (default: 1)")
    parser.add_argument("--num-slots", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--num-pages", type=int, help="pages of the cache; default: enough for every slot")
    parser.add_argument("--max-model-len", type=int, default=2048, help="context length (default: %(default)s)")
    options = parser.parse_args()
    section = {
        "num_slots": options.num_slots,
        "max_model_len": options.max_model_len,
        "num_pages": options.num_pages,
        "max_queue_len": options.requests,
        "prefill_buckets": [16, 64, 256],
    }
    config = parse_app_config(
        {"model": {"source": options.model}, "engine": section, "mesh": {"platform": options.platform}}
    )
    arrivals = read_trace(options.trace, options.requests, options.length_scale, options.max_model_len)
    arrivals = [Arrival(a.at_s / options.speed, a.prompt_len, a.num_generated) for a in arrivals]
    engine = build(config)
    assert isinstance(engine, Engine)
    progress("trace: compiling ...")
    engine.warm_up()
    progress(f"trace: {len(arrivals)} requests over {arrivals[-1].at_s:.0f} s ...")
    result = replay(engine, arrivals, time.perf_counter, time.sleep)
    emit("trace", {"trace": options.trace.name, "model": options.model, **figures_of(engine, result, arrivals)})


if __name__ == "__main__":
    main()
