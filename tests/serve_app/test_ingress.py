"""What an ingress does with a replica that gives no sign of life any more, or that is not there to be drained."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineDeadError
from serve_app.generation import Delta
from tests.serve_app.harness import call, run

# Ray Serve's own modules warn while they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DELTA = Delta(0, "a", 1)


class Response:
    """A call's response: the items given, then nothing for ever."""

    def __init__(self, items: list[list[Delta]]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._items:
            return self._items.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    def cancel(self) -> None:
        self.cancelled = True


def backend(response: Response) -> Any:
    from serve_app.ingress import HandleBackend

    streams = SimpleNamespace(remote=lambda call: response)
    return HandleBackend(SimpleNamespace(options=lambda **options: streams))  # type: ignore[arg-type]


def test_a_replica_that_falls_silent_is_an_error_and_its_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.ingress.SILENCE_LIMIT_S", 0.01)
    response = Response([[], [DELTA], []])

    async def test() -> None:
        batches = backend(response).generate(call("hx"))
        # Signs of life are no news.
        assert await anext(batches) == [DELTA]
        with pytest.raises(EngineDeadError, match="is silent"):
            await anext(batches)
        assert response.cancelled

    run(test)


class Broadcast:
    """A call of every replica: what comes of it at each, or an error of the call itself."""

    def __init__(self, outcomes: list[object], error: Exception | None = None) -> None:
        self._outcomes = outcomes
        self._error = error

    async def results_async(self, *, return_exceptions: bool = False) -> list[object]:
        """As Ray's."""
        if self._error is not None:
            raise self._error
        for outcome in self._outcomes:
            if isinstance(outcome, Exception) and not return_exceptions:
                raise outcome
        return self._outcomes


@pytest.mark.parametrize("how", ["died", "missing", "no cluster"])
def test_a_replica_that_cannot_be_drained_is_logged(how: str, caplog: pytest.LogCaptureFixture) -> None:
    from ray.exceptions import ActorDiedError, RaySystemError
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    from serve_app.ingress import HandleBackend

    broadcast = {
        "died": Broadcast([ActorDiedError(), None]),
        "missing": Broadcast([], DeploymentUnavailableError(DeploymentID("Replica", "llm"))),
        "no cluster": Broadcast([], RaySystemError("gone")),
    }[how]
    handle: Any = SimpleNamespace(options=lambda **options: None, broadcast=lambda name: broadcast)
    run(HandleBackend(handle).drain)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a replica did not drain to its end: " in record.getMessage()


def test_a_call_that_waits_for_a_replica_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.ingress.SILENCE_LIMIT_S", 0.01)

    async def test() -> None:
        waiting = asyncio.ensure_future(anext(backend(Response([])).generate(call("hx"))))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(test)
