"""Prometheus metrics of one ingress process, and the engines' counters at the time of a scrape."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serve_app.async_engine import AsyncEngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_GAUGES = {
    "num_running": "Requests that hold a slot.",
    "num_waiting": "Requests in the queue.",
    "num_slots": "Requests that can run at once.",
    "cache_usage": "Share of cache positions in use.",
    "page_utilization": "Share of the positions of held pages that hold a token.",
}
_COUNTERS = {
    "num_steps": "Steps of the engine.",
    "num_decode_rows": "Rows of decode steps. Generated tokens over rows: how many a step adds to a request (chunks).",
    "num_prompt_tokens": "Prompt tokens computed.",
    "num_padding_tokens": "Prefill positions computed for nothing.",
    "num_generated_tokens": "Tokens generated.",
    "num_cached_tokens": "Tokens found in the prefix cache instead of being computed.",
    "num_preemptions": "Times a running request gave up its pages, to be computed again later.",
    "num_draft_tokens": "Tokens guessed ahead and verified.",
    "num_accepted_tokens": "Of the tokens guessed ahead, those that were right.",
    "num_compilations_since_warm_up": "Programs compiled after the warm-up; anything but 0 is a fault.",
    "num_cache_misses": "Programs compiled because the compilation cache did not have them.",
}


class Metrics:
    """Counts what passes through one ingress process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "llm_http_requests", "HTTP requests answered.", ["path", "status"], registry=self._registry
        )
        self.disconnects = Counter(
            "llm_client_disconnects", "Clients that went away before their answer ended.", registry=self._registry
        )
        self.prompt_tokens = Counter(
            "llm_prompt_tokens", "Prompt tokens of answered requests.", registry=self._registry
        )
        self.completion_tokens = Counter("llm_completion_tokens", "Tokens answered.", registry=self._registry)
        self.ttft = Histogram(
            "llm_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tpot = Histogram(
            "llm_time_per_output_token_seconds",
            "Mean time of a token of a request, after those that came first.",
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self.latency = Histogram(
            "llm_request_seconds", "From arrival to the end of the answer.", buckets=_SECONDS, registry=self._registry
        )

    def render(self, engines: Mapping[str, AsyncEngineStats]) -> bytes:
        """Everything in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_EngineCollector(engines))
        return generate_latest(self._registry) + generate_latest(registry)


class _EngineCollector:
    """The engines' own counters, labelled by replica."""

    def __init__(self, engines: Mapping[str, AsyncEngineStats]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls."""
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"llm_engine_{name}", text, labels=["replica"])
            for replica, stats in self._engines.items():
                gauge.add_metric([replica], asdict(stats.engine)[name])
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"llm_engine_{name}", text, labels=["replica"])
            for replica, stats in self._engines.items():
                counter.add_metric([replica], asdict(stats.engine)[name])
            yield counter
        ended = CounterMetricFamily("llm_engine_requests_ended", "Requests ended.", labels=["replica", "reason"])
        in_flight = GaugeMetricFamily("llm_engine_requests_in_flight", "Admitted and not ended.", labels=["replica"])
        for replica, stats in self._engines.items():
            in_flight.add_metric([replica], stats.num_in_flight)
            for reason, count in stats.num_ended.items():
                ended.add_metric([replica, reason], count)
        yield ended
        yield in_flight
