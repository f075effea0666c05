"""What HTTP and Ray Serve add to one stream: the same requests in turn to an engine in this process and to a server.

Both hold the same model, and only one of them works at a time, so that a busy machine slows both alike.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from benchmarks.figures import Stream, share
from benchmarks.http import ServerError, run_load, server
from benchmarks.workload import Load, build, greedy, run_streams
from engine.request import EngineProtocol
from serve_app.config import parse_app_config

SERVED_NAME = "benchmark"
_WARM_UP_RUNS = 3


def _direct(port: int) -> dict[str, str]:
    return {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        # Without a proxy it is these that say where the ingress listens.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _haproxy(port: int) -> dict[str, str]:
    return {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}


MODES: Mapping[str, Callable[[int], Mapping[str, str]]] = {
    "proxy": lambda port: {},
    "direct": _direct,
    "haproxy": _haproxy,
}
"""Ways from a client to the ingress, as variables of the server by its port: through Serve's proxy (the default),
without a proxy, and through HAProxy."""


def figures(args: dict[str, object], modes: list[str], load: Load, repeats: int) -> Iterator[dict[str, object]]:
    """Figures of each mode, for the model of these arguments; `load` has one stream.

    A mode whose server does not start gives a line with the reason.
    """
    engine = build(parse_app_config(args))
    engine.warm_up()
    for mode in modes:
        head = {"mode": mode, "prompt_len": load.prompt_len, "max_tokens": load.max_tokens, "repeats": repeats}
        try:
            with server(args, MODES[mode]) as url:
                inside, outside = _in_turn(engine, url, load, repeats)
        except ServerError as error:
            yield {**head, "skipped": str(error)}
            continue
        yield {**head, **compare(inside, outside), "load_average": os.getloadavg()[0]}


def _in_turn(engine: EngineProtocol, url: str, load: Load, repeats: int) -> tuple[list[Stream], list[Stream]]:
    inside, outside = [], []
    prompts = load.prompts(engine.vocab_size)
    for _ in range(_WARM_UP_RUNS + repeats):
        inside += run_streams(engine, prompts, greedy(load.max_tokens))
        outside += asyncio.run(run_load(url, SERVED_NAME, prompts, load.max_tokens))
    return inside[_WARM_UP_RUNS:], outside[_WARM_UP_RUNS:]


def compare(inside: list[Stream], outside: list[Stream]) -> dict[str, object]:
    """Medians of both, and the median of what a run through the server took longer than the one before it in process.

    Times in milliseconds; `_share` is the part that was added of the time in process.
    """
    ttft = [1e3 * (stream.first_at - stream.sent_at) for stream in inside]
    tpot = [_tpot_ms(stream) for stream in inside]
    served_ttft = [1e3 * (stream.first_at - stream.sent_at) for stream in outside]
    served_tpot = [_tpot_ms(stream) for stream in outside]
    added_ttft, added_tpot = _added(ttft, served_ttft), _added(tpot, served_tpot)
    return {
        "engine_ttft_ms": median(ttft),
        "served_ttft_ms": median(served_ttft),
        "added_ttft_ms": added_ttft,
        "added_ttft_share": share(added_ttft, median(ttft)),
        "engine_tpot_ms": median(tpot),
        "served_tpot_ms": median(served_tpot),
        "added_tpot_ms": added_tpot,
        "added_tpot_share": share(added_tpot, median(tpot)),
    }


def _added(before: list[float], after: list[float]) -> float:
    return median(b - a for a, b in zip(before, after, strict=True))


def _tpot_ms(stream: Stream) -> float:
    if stream.tpot_s is None:
        raise ValueError("a stream of one arrival has no time per token; expected max_tokens of at least 2")
    return 1e3 * stream.tpot_s
