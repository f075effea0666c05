"""Every counter and gauge of an engine comes out under its own name."""

from dataclasses import asdict

from prometheus_client.parser import text_string_to_metric_families

from engine.request import EngineStats
from serve_app.async_engine import AsyncEngineStats
from serve_app.metrics import Metrics

STATS = EngineStats(
    num_running=2,
    num_waiting=3,
    num_slots=5,
    cache_usage=0.25,
    num_steps=7,
    num_prompt_tokens=11,
    num_padding_tokens=13,
    num_generated_tokens=17,
    num_cached_tokens=19,
    num_preemptions=23,
    num_draft_tokens=29,
    num_accepted_tokens=31,
    page_utilization=0.75,
    num_compilations_since_warm_up=37,
    num_cache_misses=47,
    num_decode_rows=53,
)
GAUGES = {"num_running", "num_waiting", "num_slots", "cache_usage", "page_utilization"}


def test_every_field_of_the_engine_is_a_metric_of_its_replica() -> None:
    text = Metrics().render({"r1": AsyncEngineStats(STATS, 41, {"stop": 43})}).decode()
    samples = {
        sample.name: (family.type, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = asdict(STATS)
    assert len(set(expected.values())) == len(expected)
    for name, value in expected.items():
        gauge = name in GAUGES
        found = samples[f"llm_engine_{name}" + ("" if gauge else "_total")]
        assert found == ("gauge" if gauge else "counter", {"replica": "r1"}, value)
    assert samples["llm_engine_requests_in_flight"][2] == 41
    assert samples["llm_engine_requests_ended_total"] == ("counter", {"replica": "r1", "reason": "stop"}, 43)
