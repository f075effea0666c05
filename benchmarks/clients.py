"""Many streams held open at once by clients that read slowly or not at all, and what that costs the server.

All clients connect at once; most of them wait in the engine's queue. Once it has begun to answer a client, a slow one
reads a few bytes a second and an idle one reads nothing, until all of them have been answered and held for a while;
then all read to the end. Their sockets take in a few KiB, so that the rest of an answer has to wait at the server.
"""

import asyncio
import contextlib
import json
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median
from urllib.parse import urlsplit

import h11

from benchmarks.http import run_load
from benchmarks.workload import Prompt

_RECEIVE_BUFFER_BYTES = 4096
_PIECE_BYTES = 4096
_SAMPLE_PERIOD_S = 0.5
_STAGGER_S = 0.002
_PROBE_TOKENS = 8
_NUM_PROBES = 5

Memory = Mapping[str, int]
"""Resident bytes of the server's processes, by what they do."""


class Pace(StrEnum):
    """How a client reads after the first bytes of its answer, until it is released."""

    IDLE = "idle"
    """Not at all."""
    SLOW = "slow"
    """A few bytes a second."""


@dataclass
class Outcome:
    """What one client got."""

    pace: Pace
    ttft_s: float | None = None
    """Seconds from connecting to the first event; None where none came."""
    num_bytes: int = 0
    """Of the answer's body."""
    error: str | None = None
    """What went wrong, in a few words; None: the stream ended with all tokens asked for."""


class Gate:
    """Holds clients until someone opens it, and knows when all have come."""

    def __init__(self, num_clients: int) -> None:
        self.all_came = asyncio.Event()
        self.opened = asyncio.Event()
        self.num_holding = 0
        self._num_missing = num_clients

    def come(self) -> None:
        """One more client has its first event, or has failed."""
        self._num_missing -= 1
        if self._num_missing == 0:
            self.all_came.set()


class StreamError(Exception):
    """An answer that is not the stream asked for. The text is its kind, the same for all alike."""


class Answer:
    """A streamed answer, of which no more is taken in than is asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_bytes = 0
        self.tail = b""
        """The last of what was read."""
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)

    async def ask(self, host: str, body: bytes) -> None:
        """Sends a request for a completion."""
        headers = [("host", host), ("content-type", "application/json"), ("content-length", str(len(body)))]
        for event in (
            h11.Request(method="POST", target="/v1/completions", headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()

    async def read(self, num_bytes: int) -> bool:
        """Takes in at most so many bytes and returns whether they ended the answer.

        Raises `StreamError` for an answer that is no success, or that is cut off.
        """
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(num_bytes))
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise StreamError(f"status {event.status_code}")
        if isinstance(event, h11.Data):
            self.num_bytes += len(event.data)
            self.tail = (self.tail + bytes(event.data))[-_PIECE_BYTES:]
        return isinstance(event, h11.EndOfMessage | h11.ConnectionClosed)


@contextlib.asynccontextmanager
async def _connect(url: str) -> AsyncIterator[Answer]:
    address = urlsplit(url)
    connection = socket.socket()
    connection.setblocking(False)
    # Set before the connection is made: the window that the server is told of follows from it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=_RECEIVE_BUFFER_BYTES)
    except BaseException:
        connection.close()
        raise
    try:
        yield Answer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def run_client(url: str, body: Mapping[str, object], pace: Pace, gate: Gate, timeout_s: float) -> Outcome:
    """One client from its connection to the end of its stream. What goes wrong stands in the outcome."""
    outcome, came = Outcome(pace), False
    try:
        async with asyncio.timeout(timeout_s):
            sent_at = time.perf_counter()
            async with _connect(url) as answer:
                await answer.ask(urlsplit(url).netloc, json.dumps(body).encode())
                while not answer.num_bytes and not await answer.read(256):
                    pass
                if not answer.num_bytes:
                    raise StreamError("no event")
                outcome.ttft_s = time.perf_counter() - sent_at
                came = True
                await _hold(answer, pace, gate)
                while not await answer.read(_PIECE_BYTES):
                    pass
                outcome.num_bytes = answer.num_bytes
                outcome.error = complaint(answer.tail, body["max_tokens"])
    except StreamError as error:
        outcome.error = str(error)
    except (OSError, h11.RemoteProtocolError) as error:  # a TimeoutError is an OSError
        outcome.error = type(error).__name__
    finally:
        if not came:
            gate.come()
    return outcome


async def _hold(answer: Answer, pace: Pace, gate: Gate) -> None:
    gate.num_holding += 1
    gate.come()
    try:
        ended = False
        while not gate.opened.is_set():
            if pace is Pace.SLOW and not ended:
                ended = await answer.read(16)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gate.opened.wait(), 1.0 if pace is Pace.SLOW else None)
        if ended:
            raise StreamError("ended before it was released")
    finally:
        gate.num_holding -= 1


def complaint(tail: bytes, max_tokens: object) -> str | None:
    """What is wrong with the end of a stream: None where it has ended right, with `max_tokens` tokens."""
    *_, usage, done = [b"", b"", *tail.rstrip().split(b"\n\n")]
    if done != b"data: [DONE]":
        return "error event" if b'"error"' in done else "no [DONE]"
    count = (json.loads(usage.removeprefix(b"data: ")).get("usage") or {}).get("completion_tokens")
    return None if count == max_tokens else "other number of tokens"


async def hold_open(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    memory: Callable[[], Memory],
    *,
    hold_s: float,
    timeout_s: float,
) -> dict[str, object]:
    """Figures of one client for each prompt, of which every other one is slow and the rest idle.

    They are held for `hold_s` after all have their first event; whatever takes longer than `timeout_s` is an error.
    """
    gate = Gate(len(prompts))
    # In a process of its own: beside the others it would wait for their turn in this one, not for the server.
    prober = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    probe = partial(asyncio.get_running_loop().run_in_executor, prober, _probe_s, url, model, prompts[0])
    alone_s = await probe()
    before, peak = memory(), Counter[str]()
    watcher = asyncio.create_task(_watch(memory, peak))
    began_at = time.perf_counter()
    clients = []
    for index, prompt in enumerate(prompts):
        pace = Pace.SLOW if index % 2 else Pace.IDLE
        clients.append(asyncio.create_task(run_client(url, _body(model, prompt, max_tokens), pace, gate, timeout_s)))
        # A backlog of connections is a few hundred long; this is about what the server does with them afterwards.
        await asyncio.sleep(_STAGGER_S)
    await gate.all_came.wait()
    answered_s = time.perf_counter() - began_at
    await asyncio.sleep(hold_s)
    meanwhile_s = await probe()
    num_held, held = gate.num_holding, memory()
    gate.opened.set()
    outcomes = await asyncio.gather(*clients)
    watcher.cancel()
    prober.shutdown()
    return {
        "num_clients": len(prompts),
        "max_tokens": max_tokens,
        **summary(outcomes),
        "num_held_at_once": num_held,
        "all_answered_s": answered_s,
        "normal_ttft_alone_s": alone_s,
        "normal_ttft_meanwhile_s": meanwhile_s,
        "resident_bytes": {"before": before, "held": held, "peak": peak, "after": memory()},
        "added_bytes_per_client": {name: (peak[name] - size) / len(prompts) for name, size in before.items()},
    }


def _body(model: str, prompt: Prompt, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Room for a queue of all of them; the server's default is ten minutes.
        "timeout_s": 3600.0,
        # Alternatives make an answer many times longer, as a client that asks for them would.
        "logprobs": 5,
    }


def _probe_s(url: str, model: str, prompt: Prompt) -> float:
    """The time to first token of a client that reads as fast as it can: the median of a few in turn."""
    streams = [asyncio.run(run_load(url, model, [prompt], _PROBE_TOKENS))[0] for _ in range(_NUM_PROBES)]
    return median(stream.first_at - stream.sent_at for stream in streams)


async def _watch(memory: Callable[[], Memory], peak: Counter[str]) -> None:
    while True:
        for name, size in memory().items():
            peak[name] = max(peak[name], size)
        await asyncio.sleep(_SAMPLE_PERIOD_S)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """How many clients were answered, ended right and failed (by kind), and how long their answers were."""
    answered = sorted(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None)
    right = [outcome.num_bytes for outcome in outcomes if outcome.error is None]
    return {
        "num_answered": len(answered),
        "num_ended_right": len(right),
        "errors": dict(Counter(f"{o.pace}: {o.error}" for o in outcomes if o.error is not None)),
        "ttft_p50_s": answered[len(answered) // 2] if answered else None,
        "ttft_max_s": answered[-1] if answered else None,
        "answer_bytes": max(right, default=None),
    }
