"""What HTTP and Ray Serve add to one stream: the same requests in turn to an engine in this process and to a server.

Both hold the same model, and only one of them works at a time, so that a busy machine slows both alike.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.figures import Stream, share, wall_s
from benchmarks.http import ServerError, run_load, server
from benchmarks.workload import Load, build, greedy, run_streams
from engine.request import EngineProtocol
from serve_app.config import parse_app_config

SERVED_NAME = "benchmark"
_WARM_UP_RUNS = 3


@dataclass(frozen=True)
class Mode:
    """A way from a client to the ingress."""

    switches: Mapping[str, str] = field(default_factory=dict)
    """Variables of the server."""
    ports_beyond: int = 0
    """How far the port that clients use lies beyond the one that the server is given."""

    @contextlib.contextmanager
    def server(self, args: dict[str, Any]) -> Iterator[str]:
        """The URL at which clients reach such a server, as `benchmarks.http.server`. Raises `ServerError`."""
        with server(args, self._environment) as url:
            address, port = url.rsplit(":", 1)
            yield f"{address}:{int(port) + self.ports_beyond}"

    def _environment(self, port: int) -> Mapping[str, str]:
        if not self.ports_beyond:
            return self.switches
        own = port + self.ports_beyond
        # The range is half open, and leaves the ingress no choice.
        ports = {"MIN": own, "MAX": own + 1}
        return {
            **self.switches,
            **{f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT": str(number) for end, number in ports.items()},
        }


_SHORT_END = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
MODES: Mapping[str, Mode] = {
    "proxy": Mode(),
    # A proxy listens at the server's own port in this mode, too.
    "direct": Mode({"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1", **_SHORT_END}, ports_beyond=1),
    "haproxy": Mode({"RAY_SERVE_ENABLE_HA_PROXY": "1", **_SHORT_END}),
}
"""Through Serve's proxy (the default), to the ingress itself, and through HAProxy."""


def figures(args: dict[str, Any], modes: list[str], load: Load, repeats: int) -> Iterator[dict[str, object]]:
    """Figures of each mode, for the model of these arguments; `load` has one stream.

    A mode whose server does not start gives a line with the reason.
    """
    engine = build(parse_app_config(args))
    engine.warm_up()
    for mode in modes:
        head = {"mode": mode, "prompt_len": load.prompt_len, "max_tokens": load.max_tokens, "repeats": repeats}
        try:
            with MODES[mode].server(args) as url:
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

    Times in milliseconds; `_share` is the part that was added of the time in process. `_best` is the difference of the
    fastest runs of both, which a busy machine distorts least. `wall` is the time to the last token: where the first one
    comes so late that others have caught up with it, the time per token alone looks too good.
    """
    ttft = [1e3 * (stream.first_at - stream.sent_at) for stream in inside]
    tpot = [_tpot_ms(stream) for stream in inside]
    served_ttft = [1e3 * (stream.first_at - stream.sent_at) for stream in outside]
    served_tpot = [_tpot_ms(stream) for stream in outside]
    wall, served_wall = [1e3 * wall_s([stream]) for stream in inside], [1e3 * wall_s([stream]) for stream in outside]
    added_ttft, added_tpot = _added(ttft, served_ttft), _added(tpot, served_tpot)
    return {
        "engine_ttft_ms": median(ttft),
        "served_ttft_ms": median(served_ttft),
        "added_ttft_ms": added_ttft,
        "added_ttft_best_ms": min(served_ttft) - min(ttft),
        "added_ttft_share": share(added_ttft, median(ttft)),
        "engine_tpot_ms": median(tpot),
        "served_tpot_ms": median(served_tpot),
        "added_tpot_ms": added_tpot,
        "added_tpot_best_ms": min(served_tpot) - min(tpot),
        "added_tpot_share": share(added_tpot, median(tpot)),
        "added_wall_ms": _added(wall, served_wall),
        "added_wall_share": share(_added(wall, served_wall), median(wall)),
    }


def _added(before: list[float], after: list[float]) -> float:
    return median(b - a for a, b in zip(before, after, strict=True))


def _tpot_ms(stream: Stream) -> float:
    if stream.tpot_s is None:
        raise ValueError("a stream of one arrival has no time per token; expected max_tokens of at least 2")
    return 1e3 * stream.tpot_s
