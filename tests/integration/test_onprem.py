"""cluster/launch/onprem.yaml, for real: two machines, `ray up`, `serve deploy`, one machine cut off, `ray down`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray._private.utils import get_num_cpus

from tests.engine.weights.grok1_checkpoints import CONFIG, make_tensors, write_grok1
from tests.integration.load import stream
from tests.integration.machines import Machine, Room, what_is_missing
from tests.integration.ray_cluster import BIN, ROOT, until
from tests.tiny_tokenizer import TINY_TOKENIZER

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LAUNCH = ROOT / "cluster" / "launch" / "onprem.yaml"
MODEL = CONFIG | {"layers": 1, "vocab": 512, "seq": 256}
NUM_TOKENS = 20
ANSWER_LIMIT_S = 120
IN_A_ROW = 10


class Cluster:
    """Two machines, and the operator's own with the launcher's file."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.head, self.worker = room.hosts
        self.file = room.operator.home / "onprem.yaml"
        self.file.write_text(
            re.sub(
                r"\b(HEAD_ADDRESS|WORKER_ADDRESS|SSH_USER|SSH_KEY)\b",
                lambda match: {
                    "HEAD_ADDRESS": self.head.address,
                    "WORKER_ADDRESS": self.worker.address,
                    "SSH_USER": "root",
                    "SSH_KEY": str(room.key),
                }[match[0]],
                LAUNCH.read_text(encoding="utf-8"),
            ),
            encoding="utf-8",
        )
        for machine in (room.operator, *room.hosts):
            # The checkout where the file's first lines want it.
            (machine.home / "jax-serve").mkdir()
            (machine.home / "jax-serve" / ".venv").symlink_to(sys.prefix)

    def ray(self, command: str, *arguments: str | Path, check: bool = True) -> str:
        """A command of Ray's launcher on the operator's machine, with the file."""
        options = {"up": ["-y", "--no-config-cache"], "down": ["-y"]}.get(command, [])
        environment = {"RAY_UP_enable_autoscaler_v2": "0"}
        return self.room.operator.run(
            BIN / "ray", command, *options, self.file, *arguments, check=check, environment=environment
        )

    def up(self) -> None:
        """`ray up`, again where this machine is too busy for the half minute that Ray gives its own start."""
        for _ in range(2):
            if "timed out during startup" not in self.ray("up", check=False):
                return
        self.ray("up")

    def deploy(self, application: dict[str, Any]) -> None:
        """`serve deploy` on the head, as the file's first lines say."""
        path = self.room.operator.home / "app.yaml"
        path.write_text(yaml.safe_dump({"applications": [application]}))
        self.ray("rsync-up", path, "~/app.yaml")
        self.ray("exec", "serve deploy ~/app.yaml")

    def get(self, machine: Machine, path: str) -> httpx.Response:
        """GETs a path of Serve on that machine."""
        url = f"http://{machine.address}:8000{path}"
        return self.room.from_operator(lambda: httpx.get(url, timeout=30), 60)

    def replicas_seen_by(self, machine: Machine) -> set[str]:
        """The engine replicas that take requests."""
        text = self.get(machine, "/metrics").text
        return set(re.findall(r'^llm_engine_num_slots{replica="(.+?)"}', text, re.MULTILINE))

    def complete(self, machine: Machine) -> int:
        """Streams a completion from there; its tokens."""
        url = f"http://{machine.address}:8000"
        return self.room.from_operator(lambda: stream(url, max_tokens=NUM_TOKENS), ANSWER_LIMIT_S)

    def answers(self, machine: Machine) -> bool:
        """Whether that many requests in a row are answered."""
        try:
            return [self.complete(machine) for _ in range(IN_A_ROW)] == [NUM_TOKENS] * IN_A_ROW
        except AssertionError:
            return False

    def report(self) -> str:
        """For a broken test."""
        status = self.ray(
            "exec", "ray status; serve status; tail -n 40 /tmp/ray/session_latest/logs/monitor*", check=False
        )
        return status[-8000:]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The machines, on which nothing runs yet."""
    reason = what_is_missing()
    if reason is not None:
        pytest.skip(reason)
    room = Room(num_hosts=2)
    try:
        yield Cluster(room)
    finally:
        room.close()


def application(directory: Path) -> dict[str, Any]:
    """Two replicas, neither of which leaves room for the other on its machine."""
    tensors: dict[str, object] = dict(make_tensors(config=MODEL))
    args = {
        "model": {
            "source": str(write_grok1(directory / "model", tensors, MODEL)),
            "served_name": "tiny",
            "tokenizer": str(TINY_TOKENIZER),
        },
        "engine": {"num_slots": 4, "prefill_buckets": [16], "batch_invariant": True},
        "mesh": {"platform": "cpu"},
        "serving": {
            "num_replicas": 2,
            "replica_num_cpus": 0.6 * get_num_cpus(),
            "num_ingress_replicas": 2,
            "health_check_period_s": 1.0,
            "health_check_timeout_s": 10.0,
        },
        "compilation_cache_dir": str(directory / "programs"),
    }
    return {"name": "llm", "import_path": "serve_app.app:build", "args": args}


def test_the_cluster_serves_and_goes_on_without_one_of_its_machines(cluster: Cluster) -> None:
    head, worker = cluster.head, cluster.worker
    (cluster.room.directory / "model").mkdir()
    cluster.room.operator.run(BIN / "ray", "get-auth-token", "--generate")
    cluster.up()
    cluster.deploy(application(cluster.room.directory))
    until(lambda: len(cluster.replicas_seen_by(head)) == 2, cluster.report)
    assert cluster.complete(head) == NUM_TOKENS
    assert cluster.complete(worker) == NUM_TOKENS
    assert "raylet" in worker.command_lines()

    cluster.room.cut_off(worker)
    until(lambda: cluster.answers(head), cluster.report)
    until(lambda: len(cluster.replicas_seen_by(head)) == 1, cluster.report)
    assert cluster.answers(head)

    cluster.ray("down")
    until(lambda: "raylet" not in head.command_lines(), head.command_lines)
    with pytest.raises(httpx.ConnectError):
        cluster.get(head, "/health")
