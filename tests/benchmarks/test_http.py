import asyncio
import json
import re
from collections.abc import Callable

import pytest

from benchmarks.figures import Stream
from benchmarks.http import ServerError, run_load

_MODEL = "a model"


def _chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": None}).encode() + b"\n\n"


def _usage(count: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode() + b"\n\n"


_DONE = b"data: [DONE]\n\n"


class _Server:
    """Answers every request with the same pieces, each in a write of its own, over a real socket."""

    def __init__(self, pieces: list[bytes], status: str = "200 OK") -> None:
        self.pieces = pieces
        self.status = status
        self.bodies: list[dict[str, object]] = []
        self.connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        self.bodies.append(json.loads(await reader.readexactly(int(length[1]))))
        writer.write(f"HTTP/1.1 {self.status}\r\nconnection: close\r\n\r\n".encode())
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


def _run(server: _Server, max_tokens: int, num_streams: int = 1) -> list[Stream]:
    async def run() -> list[Stream]:
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            prompts = [(index, 7) for index in range(num_streams)]
            return await run_load(f"http://127.0.0.1:{port}", _MODEL, prompts, max_tokens)

    return asyncio.run(run())


def test_chunks_share_the_tokens_evenly_however_the_bytes_arrive() -> None:
    whole = _chunk("a") + _chunk("b") + _usage(6) + _DONE
    server = _Server([whole[:5], whole[5:40], whole[40:]])
    (stream,) = _run(server, 6)
    assert [count for _, count in stream.arrivals] == [3.0, 3.0]
    times = [stream.sent_at, *(at for at, _ in stream.arrivals)]
    assert times == sorted(times)


def test_each_stream_has_a_connection_and_asks_for_exactly_its_tokens() -> None:
    server = _Server([_chunk("a") + _usage(1) + _DONE])
    assert len(_run(server, 1, num_streams=3)) == 3
    assert server.connections == 3
    assert sorted(str(body["prompt"]) for body in server.bodies) == ["[0, 7]", "[1, 7]", "[2, 7]"]
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (_MODEL, 1, True, True)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (lambda: _Server([b"busy"], "503 Service Unavailable"), "answered 503: busy"),
        (lambda: _Server([_chunk("a"), b'data: {"error": {"message": "died"}}\n\n']), "ended with an error.*died"),
        (lambda: _Server([_chunk("a"), _usage(2), _DONE]), "reports 2 tokens; expected 3"),
        (lambda: _Server([_chunk("a")]), "reports None tokens; expected 3"),
    ],
)
def test_anything_but_the_tokens_asked_for_is_an_error(server: Callable[[], _Server], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        _run(server(), 3)
