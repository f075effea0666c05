"""The drain at the end, whatever becomes of the processes that are to be drained."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from serve_app.config import ServeFile

# Ray Serve's own modules warn while they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FILE = {"applications": [{"import_path": "serve_app.app:build", "args": {"model": {"source": "nowhere/fake"}}}]}


def drain(monkeypatch: pytest.MonkeyPatch, results: Callable[[], list[object]]) -> None:
    """Drains a server of which each ingress process gives what is in `results`, or raises it."""
    from ray import serve

    from serve_app.server import Server

    def collect(*, timeout_s: float, return_exceptions: bool = False) -> list[object]:
        assert timeout_s == 600.0
        outcomes = results()
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not return_exceptions:
                raise outcome
        return outcomes

    handle: Any = SimpleNamespace(broadcast=lambda name: SimpleNamespace(results=collect))
    monkeypatch.setattr(serve, "get_app_handle", lambda name: handle)
    Server(ServeFile.model_validate(FILE)).drain()


def test_a_process_that_dies_does_not_end_the_drain_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    drain(monkeypatch, lambda: [KeyError("first"), None, TimeoutError(), KeyError("last")])
    assert [record.getMessage() for record in caplog.records] == [
        "an ingress process did not drain to its end: KeyError: 'first'",
        "an ingress process did not drain to its end: KeyError: 'last'",
    ]
    assert "requests still run after 600 s; they are cancelled" in capfd.readouterr().out


def test_an_application_that_is_gone_is_drained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from ray.serve.exceptions import RayServeException

    def gone() -> list[object]:
        raise RayServeException("no such application")

    drain(monkeypatch, gone)
    assert "RayServeException: no such application" in caplog.text
    assert "still run" not in capfd.readouterr().out


def test_a_second_signal_ends_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise InterruptedError("a signal")

    def results() -> list[object]:
        os.kill(os.getpid(), signal.SIGUSR1)
        ended.wait()
        return [None]

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with pytest.raises(InterruptedError, match="a signal"):
            drain(monkeypatch, results)
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, before)
