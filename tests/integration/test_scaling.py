"""More replicas, fewer, and others, while clients stream: nobody notices. A real cluster, a real model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.weights.grok1_checkpoints import CONFIG, make_tensors, write_grok1
from tests.integration.load import Load, Stream, stream
from tests.integration.ray_cluster import RayCluster, until
from tests.tiny_tokenizer import TINY_TOKENIZER

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODEL = CONFIG | {"layers": 1, "vocab": 512, "seq": 4096}
LONG = 4000
"""Tokens of a stream of forty seconds or more."""
AUTOSCALING = {
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
}


class Application:
    """The application on the cluster, as it was last deployed."""

    def __init__(self, cluster: RayCluster, model: Path, cache: Path) -> None:
        self.cluster = cluster
        self.url = cluster.url
        self.cache = cache
        self._model = model

    def deploy(self, default_max_tokens: int, **serving: object) -> None:
        """`serve deploy`; what requests without `max_tokens` get shows which version answers."""
        args: dict[str, Any] = {
            "model": {"source": str(self._model), "served_name": "tiny", "tokenizer": str(TINY_TOKENIZER)},
            "engine": {"num_slots": 4, "prefill_buckets": [16], "batch_invariant": True},
            "mesh": {"platform": "cpu"},
            "limits": {"default_max_tokens": default_max_tokens},
            "serving": {"health_check_period_s": 1.0, "graceful_shutdown_s": 120.0, **serving},
            "compilation_cache_dir": str(self.cache),
        }
        self.cluster.deploy({"name": "llm", "import_path": "tests.fakes.paced:build", "args": args})

    def counter(self, name: str) -> dict[str, float]:
        """A metric of the engines, by replica; of those that take requests."""
        text = httpx.get(self.url + "/metrics", timeout=30).text
        found = re.findall(rf'^llm_engine_{name}{{replica="(.+?)"}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def until_ready(self) -> None:
        """Returns once a replica is warm."""
        until(lambda: httpx.get(self.url + "/ready", timeout=30).status_code == 200, self.cluster.logs)

    def until_replicas(self, count: int) -> None:
        """Returns once so many take requests."""
        until(lambda: len(self.counter("num_slots")) == count, self.cluster.logs)

    def until_upgraded(self, default_max_tokens: int) -> None:
        """Returns once the last version deployed has replaced the one before."""

        def upgraded() -> bool:
            status = self.cluster.status()
            return status["status"] == "RUNNING" and set(self.cluster.replicas().values()) == {"RUNNING"}

        until(lambda: stream(self.url) == default_max_tokens, self.cluster.logs)
        until(upgraded, self.cluster.logs)


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Nothing is deployed yet, and nothing compiled."""
    tensors: dict[str, object] = dict(make_tensors(config=MODEL))
    model = write_grok1(tmp_path_factory.mktemp("model"), tensors, MODEL)
    with RayCluster(num_cpus=4) as cluster:
        yield Application(cluster, model, tmp_path_factory.mktemp("programs"))


def test_from_one_replica_to_two_and_back_under_load(application: Application) -> None:
    app = application
    app.deploy(16, autoscaling=AUTOSCALING)
    app.until_ready()
    (first,) = app.counter("num_cache_misses_total").items()
    assert first[1] > 0
    programs = sorted(path.name for path in app.cache.glob("*-cache"))
    assert len(programs) >= first[1]

    with Load(app.url, num_clients=6) as load:
        app.until_replicas(2)
        until(lambda: min(app.counter("num_generated_tokens_total").values()) > 0, app.cluster.logs)
    assert load.failures == []
    misses = app.counter("num_cache_misses_total")
    assert misses.pop(first[0]) == first[1]
    assert list(misses.values()) == [0]
    assert sorted(path.name for path in app.cache.glob("*-cache")) == programs

    streams = long_streams_on_both(app)
    with Load(app.url, num_clients=1) as load:
        app.until_replicas(1)
        # One of the two is on the replica that takes no more requests.
        assert [s.tokens_if_ended() for s in streams] == [None, None]
        assert sorted(app.cluster.replicas().values()) == ["RUNNING", "STOPPING"]
        until(lambda: list(app.cluster.replicas().values()) == ["RUNNING"], app.cluster.logs)
    assert [s.result() for s in streams] == [LONG, LONG]
    assert load.failures == []
    assert load.num_answers > 0


def long_streams_on_both(app: Application) -> list[Stream]:
    """A long stream on each of the two replicas."""
    until(lambda: list(app.counter("num_running").values()) == [0, 0], app.cluster.logs)
    streams: list[Stream] = []
    for count in (1, 2):
        streams.append(Stream(app.url, LONG))
        assert streams[-1].begun.wait(60)
        until(lambda: sum(app.counter("num_running").values()) == count, app.cluster.logs)  # noqa: B023
    assert list(app.counter("num_running").values()) == [1, 1]
    return streams


@pytest.mark.parametrize(("max_surge_percent", "default_max_tokens"), [(100, 7), (0, 5)])
def test_a_rolling_upgrade_fails_no_request(
    application: Application, max_surge_percent: int, default_max_tokens: int
) -> None:
    app = application
    app.deploy(3)
    app.until_ready()
    app.until_upgraded(3)
    running = Stream(app.url, LONG)
    assert running.begun.wait(60)
    with Load(app.url, num_clients=3) as load:
        before = set(app.cluster.replicas())
        app.deploy(default_max_tokens, max_surge_percent=max_surge_percent)
        app.until_upgraded(default_max_tokens)
    assert not before & set(app.cluster.replicas())
    assert load.failures == []
    assert load.num_answers > load.num_clients
    assert running.result() == LONG
