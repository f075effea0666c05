"""A Ray cluster of one node for a test: its own ports and temporary directory, ended by its own handle."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests import server_process

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 180
"""Only ends a broken test."""
# Counts of requests reach the autoscaler at once, so that a test need not wait for them.
_PUSH_INTERVALS = {
    f"RAY_SERVE_{of}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5" for of in ("HANDLE", "REPLICA")
}  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def until(condition: Callable[[], bool], what: Callable[[], str], limit_s: float = LIMIT_S) -> None:
    """As `tests.server_process.until`, with a limit for whole clusters."""
    server_process.until(condition, what, limit_s)


class RayCluster:
    """`ray start --block`, with Serve's HTTP on a port of its own."""

    def __init__(self, num_cpus: int) -> None:
        gcs, dashboard, agent, agent_grpc, metrics, client, self.http_port = free_ports(7)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        # Ray puts sockets there, whose paths have to be short.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="ray"))
        self._log = self._temp_dir / "start.log"
        self._command = [
            str(BIN / "ray"),
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--port={gcs}",
            f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent}",
            f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--metrics-export-port={metrics}",
            f"--ray-client-server-port={client}",
            f"--num-cpus={num_cpus}",
            "--object-store-memory=100000000",
            f"--temp-dir={self._temp_dir}",
            "--disable-usage-stats",
        ]
        self._token = secrets.token_hex(32)
        self._environment = {
            **os.environ,
            **_PUSH_INTERVALS,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        }
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def __enter__(self) -> "RayCluster":
        try:
            until(self._is_up, self.logs, 2 * LIMIT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            # Ray gives its own start half a minute, which may be too little on a busy machine.
            self._end_all()
            self.process = self._start()
        return self._ask("/api/version").status_code == 200

    def _end_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every process of the cluster."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self._end_all()
            self.process.wait()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def deploy(self, application: dict[str, Any]) -> None:
        """`serve deploy` of a file with this application."""
        path = self._temp_dir / "app.yaml"
        path.write_text(yaml.safe_dump({"http_options": {"port": self.http_port}, "applications": [application]}))
        done = self._serve_deploy(path)
        if "ConnectionError" in done.stdout:
            # Ray's dashboard, while it starts on a busy machine, hangs up on those who ask; to deploy twice is as once.
            until(lambda: self._ask("/api/serve/applications/").status_code == 200, self.logs)
            done = self._serve_deploy(path)
        assert done.returncode == 0, done.stdout

    def _serve_deploy(self, path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "serve", "deploy", path, "--address", self._dashboard],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )

    def _ask(self, path: str) -> httpx.Response:
        return httpx.get(self._dashboard + path, headers={"authorization": f"Bearer {self._token}"}, timeout=30)

    def status(self) -> dict[str, Any]:
        """What `serve status` prints of the application."""
        answer = self._ask("/api/serve/applications/")
        answer.raise_for_status()
        return answer.json()["applications"].get("llm", {})

    def replicas(self) -> dict[str, str]:
        """{replica: state} of the engine replicas, those that end among them."""
        deployment = self.status().get("deployments", {}).get("Replica", {})
        return {replica["replica_id"]: replica["state"] for replica in deployment.get("replicas", [])}

    def logs(self) -> str:
        """For a broken test: the replicas' ends of the story."""
        parts = [self._log.read_text(errors="replace")]
        for path in sorted((self._temp_dir / "session_latest" / "logs" / "serve").glob("*.log")):
            parts.append(f"---- {path.name}\n" + path.read_text(errors="replace")[-3000:])
        return "\n".join(parts)
