"""Clients that stream completions without a pause, and keep what went wrong."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import httpx


def _server_sent_events(answer: httpx.Response) -> Iterator[str]:
    """The data of each. Not by lines, which for httpx end at characters, too, that a random model may well say."""
    rest = b""
    for piece in answer.iter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        yield from (event.removeprefix(b"data: ").decode() for event in events)
    if rest:
        yield rest.decode()


def stream(url: str, on_event: Callable[[], None] | None = None, **body: object) -> int:
    """Streams one completion to its end; how many tokens it says it had.

    Raises `AssertionError` where the answer is an error, breaks off, or ends for another reason than its length.
    """
    request = {"model": "tiny", "prompt": "a", "ignore_eos": True, "stream": True, **body}
    request["stream_options"] = {"include_usage": True}
    events: list[str] = []
    with httpx.stream("POST", url + "/v1/completions", json=request, timeout=300) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
        for event in _server_sent_events(answer):
            events.append(event)
            if on_event is not None:
                on_event()
    assert events[-1:] == ["[DONE]"], f"broken off after {events[-1:]}"
    parsed = [json.loads(event) for event in events[:-1]]
    assert not any("error" in event for event in parsed), parsed[-1]
    (reason,) = (c["finish_reason"] for event in parsed for c in event["choices"] if c["finish_reason"])
    assert reason == "length", reason
    return parsed[-1]["usage"]["completion_tokens"]


class Stream:
    """One long stream on a thread of its own."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.begun = threading.Event()
        self.num_tokens: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(url, num_tokens), daemon=True)
        self._thread.start()

    def _run(self, url: str, num_tokens: int) -> None:
        try:
            self.num_tokens = stream(url, self.begun.set, max_tokens=num_tokens)
        except BaseException as error:
            self._error = error
            self.begun.set()

    def tokens_if_ended(self) -> int | None:
        """Its tokens, or None while it runs. Raises what went wrong."""
        return None if self._thread.is_alive() else self.result()

    def result(self) -> int:
        """Its tokens, once it has ended. Raises what went wrong."""
        self._thread.join(300)
        if self._error is not None:
            raise self._error
        assert self.num_tokens is not None, "the stream has not ended"
        return self.num_tokens


@dataclass
class Load:
    """As many clients as given, each with one request after the other, inside a `with` block."""

    url: str
    num_clients: int
    num_tokens: int = 50
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.num_clients)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                problem = None
                num_tokens = stream(self.url, max_tokens=self.num_tokens)
                if num_tokens != self.num_tokens:
                    problem = f"{num_tokens} tokens instead of {self.num_tokens}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self.num_answers += 1
                if problem is not None:
                    self.failures.append(problem)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The requests under way come to their end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
