"""Replicas of real processes, for tests: started, listened to, and ended by their own handles."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
"""Only ends a broken test."""
SHARED_CONFIG = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class HostProcess:
    """One process of a replica, see `tests.cluster.replica_host`."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.replica_host"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task).encode() + b"\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):  # gloo writes lines of its own
                self._lines.put(line)
        self._lines.put(b"")

    def next_line(self) -> dict[str, Any]:
        """What the process says next."""
        line = self._lines.get(timeout=LIMIT_S)
        assert line, f"the process has ended: {self.errors}"
        return json.loads(line)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(LIMIT_S)

    @property
    def errors(self) -> str:
        """All that it wrote on stderr."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """Ends it where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            assert pipe is not None
            pipe.close()


class Replica:
    """The leader and its followers."""

    def __init__(
        self, num_hosts: int, mode: str, cases: Sequence[str] = (), absent: Sequence[int] = (), **task: Any
    ) -> None:
        """`absent`: ranks that are not started."""
        common = {
            "num_hosts": num_hosts,
            "mode": mode,
            "cases": list(cases),
            "timeouts": task.pop("timeouts", {}),
            "jax_config": {name: getattr(jax.config, name) for name in SHARED_CONFIG},
            **task,
        }
        self.hosts = [HostProcess(common)]
        try:
            for invitation in self.leader.next_line()["invitations"]:
                if invitation["rank"] not in absent:
                    self.hosts.append(HostProcess({**common, "invitation": invitation}))
        except BaseException:
            self.close()
            raise

    @property
    def leader(self) -> HostProcess:
        """Host 0."""
        return self.hosts[0]

    @property
    def errors(self) -> str:
        """What all have written on stderr."""
        return "\n".join(f"host {rank}: {host.errors}" for rank, host in enumerate(self.hosts))

    def __enter__(self) -> "Replica":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that still run."""
        for host in self.hosts:
            host.close()
