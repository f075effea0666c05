"""From arrival times of tokens to the figures that are reported."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Figures = dict[str, float | int | None]


@dataclass
class Stream:
    """One request as its client saw it. Times in seconds on one clock, ascending."""

    sent_at: float
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    """(time, tokens that came then), for each arrival with at least one token."""

    @property
    def num_tokens(self) -> float:
        """Tokens that came in all."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_at(self) -> float:
        """When the first tokens came."""
        return self.arrivals[0][0]

    @property
    def last_at(self) -> float:
        """When the last tokens came."""
        return self.arrivals[-1][0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first arrival; None where nothing came after it."""
        later = self.num_tokens - self.arrivals[0][1]
        return (self.last_at - self.first_at) / later if later > 0 else None


def summarize(streams: Sequence[Stream]) -> Figures:
    """Latencies and rates of streams that ran side by side. Every stream has got at least one token.

    `decode_tokens_per_s` counts from when the last stream has begun to answer until the first one has ended: only then
    do all of them decode and none prefill. It is None where there is no such time.
    """
    if not streams or not all(stream.arrivals for stream in streams):
        raise ValueError("a stream got no token")
    ttft = [stream.first_at - stream.sent_at for stream in streams]
    tpot = [stream.tpot_s for stream in streams if stream.tpot_s is not None]
    return {
        "num_tokens": round(sum(stream.num_tokens for stream in streams)),
        "wall_s": wall_s(streams),
        "ttft_p50_s": median(ttft),
        "ttft_max_s": max(ttft),
        "tpot_p50_s": median(tpot) if tpot else None,
        "tpot_max_s": max(tpot) if tpot else None,
        "decode_tokens_per_s": _decode_rate(streams),
        "tokens_per_s": sum(stream.num_tokens for stream in streams) / wall_s(streams),
    }


def wall_s(streams: Sequence[Stream]) -> float:
    """Seconds from the first request to the last token."""
    return max(stream.last_at for stream in streams) - min(stream.sent_at for stream in streams)


def _decode_rate(streams: Sequence[Stream]) -> float | None:
    begin = max(stream.first_at for stream in streams)
    end = min(stream.last_at for stream in streams)
    if end <= begin:
        return None
    arrivals = [arrival for stream in streams for arrival in stream.arrivals]
    return sum(count for at, count in arrivals if begin < at <= end) / (end - begin)


def share(part: float | None, whole: float | None) -> float | None:
    """`part / whole`, or None where one of them is not known."""
    return None if part is None or not whole else part / whole


def emit(benchmark: str, figures: Mapping[str, object]) -> None:
    """One JSON line on stdout; numbers to four significant digits."""
    line = {"benchmark": benchmark} | {name: _rounded(value) for name, value in figures.items()}
    print(json.dumps(line), flush=True)


def progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def _rounded(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
