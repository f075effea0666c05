"""A test's server: a program of its own on a free port, in its own temporary directory."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]


def until(condition: Callable[[], bool], what: Callable[[], str], limit_s: float) -> None:
    """Returns once `condition` holds; a failed connection is a no. `what`: the report if it never does."""
    give_up_at = time.monotonic() + limit_s
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < give_up_at, what()
        time.sleep(0.1)


class ServerProcess:
    """`python -m MODULE PORT TEMP_DIR` from the root of the checkout."""

    def __init__(self, module: str, start_limit_s: float) -> None:
        """`start_limit_s` only ends a broken test."""
        self._limit_s = start_limit_s
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # Ray puts sockets there, whose paths have to be short.
        self._temp_dir = tempfile.mkdtemp(prefix="ray")
        self._log = Path(self._temp_dir) / "stdout"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(port), self._temp_dir],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What the server has said."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """GETs a path."""
        return httpx.get(self.url + path, timeout=30)

    def is_ready(self) -> bool:
        """Whether a replica is warm."""
        return self.get("/ready").status_code == 200

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition` holds; a failed connection is a no."""

        def holds() -> bool:
            assert self.process.poll() is None, self.output
            return condition()

        until(holds, lambda: self.output, self._limit_s)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once the process has ended."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(self.output) from None

    def end(self) -> None:
        """Ends the server if it still runs, and removes its files. Ray's last processes may still write a line."""
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
