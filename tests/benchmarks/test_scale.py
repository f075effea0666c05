import asyncio
import contextlib
import json
import re
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest

from benchmarks.clients import Gate, Outcome, Pace, complaint, hold_open, run_client, summary
from benchmarks.figures import Stream
from benchmarks.lockstep_cost import NullRunner, decode_plan, step_ms
from benchmarks.processes import allow_files, role
from benchmarks.scale import server_args
from benchmarks.serving_cost import MODES, compare
from cluster.messages import Step, decode, encode
from serve_app.config import parse_app_config

_DONE = b"data: [DONE]\n\n"


def _event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _usage(count: int) -> bytes:
    return _event({"choices": [], "usage": {"completion_tokens": count}})


def _tokens(count: int, width: int = 1) -> bytes:
    return b"".join(_event({"choices": [{"text": "a" * width}], "usage": None}) for _ in range(count))


class _Server:
    """Answers with as many events as tokens are asked for, or with what it is given, in one chunk each."""

    def __init__(self, body: bytes | None = None, status: str = "200 OK", width: int = 1, whole: bool = True) -> None:
        self.body, self.status, self.width, self.whole = body, status, width, whole
        self.all_sent = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        count = json.loads(await reader.readexactly(int(length[1])))["max_tokens"]
        body = _tokens(count, self.width) + _usage(count) + _DONE if self.body is None else self.body
        writer.write(f"HTTP/1.1 {self.status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for event in body.splitlines(keepends=True):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        if self.whole:
            writer.write(b"0\r\n\r\n")
        self.all_sent.set()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as listening:
            yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def _one_client(server: _Server, pace: Pace = Pace.IDLE, timeout_s: float = 60.0) -> Outcome:
    async def run() -> Outcome:
        gate = Gate(1)
        async with server.listen() as url:
            client = asyncio.create_task(run_client(url, {"max_tokens": 3}, pace, gate, timeout_s))
            await gate.all_came.wait()
            gate.opened.set()
            return await client

    return asyncio.run(run())


@pytest.mark.parametrize("pace", list(Pace))
def test_a_client_is_held_and_then_reads_its_whole_answer(pace: Pace) -> None:
    outcome = _one_client(_Server(), pace)
    assert outcome.error is None
    assert outcome.num_bytes == len(_tokens(3) + _usage(3) + _DONE)
    assert outcome.ttft_s is not None
    assert outcome.ttft_s > 0


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (lambda: _Server(b"busy", "503 Service Unavailable"), "status 503"),
        (lambda: _Server(b""), "no event"),
        (lambda: _Server(_tokens(3)), "no [DONE]"),
        (lambda: _Server(_tokens(2) + _usage(2) + _DONE), "other number of tokens"),
        (lambda: _Server(_tokens(1) + _event({"error": {"message": "died"}})), "error event"),
        (lambda: _Server(_tokens(3), whole=False), "RemoteProtocolError"),
    ],
)
def test_what_goes_wrong_is_told_by_kind(server: "type[_Server]", error: str) -> None:
    assert _one_client(server()).error == error


def test_a_client_that_is_held_too_long_has_timed_out() -> None:
    async def run() -> Outcome:
        async with _Server().listen() as url:
            return await run_client(url, {"max_tokens": 3}, Pace.IDLE, Gate(1), 0.05)

    assert asyncio.run(run()).error == "TimeoutError"


def test_a_client_that_reaches_nobody_says_so() -> None:
    async def run() -> Outcome:
        async with _Server().listen() as url:
            pass
        return await run_client(url, {"max_tokens": 3}, Pace.SLOW, Gate(1), 60.0)

    assert _without_number(asyncio.run(run()).error) == "ConnectionRefusedError"


def _without_number(error: str | None) -> str:
    assert error is not None
    return error


def test_the_rest_of_an_idle_client_s_answer_waits_at_the_server() -> None:
    async def run() -> tuple[bool, Outcome]:
        server, gate = _Server(width=1 << 23), Gate(1)  # longer than all buffers of both sockets together
        async with server.listen() as url:
            client = asyncio.create_task(run_client(url, {"max_tokens": 3}, Pace.IDLE, gate, 60.0))
            await gate.all_came.wait()
            sent_before = server.all_sent.is_set()
            gate.opened.set()
            return sent_before, await client

    sent_before, outcome = asyncio.run(run())
    assert not sent_before
    assert outcome.error is None
    assert outcome.num_bytes > 3 << 23


def test_all_clients_are_held_at_once_beside_a_normal_one() -> None:
    sizes: Iterator[int] = iter(range(1000, 10**9, 100))

    async def run() -> dict[str, object]:
        async with _Server().listen() as url:
            prompts = [(index,) for index in range(6)]
            memory = lambda: {"proxy": next(sizes)}  # noqa: E731
            return await hold_open(url, "a model", prompts, 5, memory, hold_s=0.0, timeout_s=60.0)

    figures = asyncio.run(run())
    assert (figures["num_clients"], figures["num_answered"], figures["num_ended_right"]) == (6, 6, 6)
    assert figures["num_held_at_once"] == 6
    assert figures["errors"] == {}
    resident = figures["resident_bytes"]
    assert isinstance(resident, dict)
    assert resident["before"] == {"proxy": 1000}
    assert resident["before"]["proxy"] < resident["peak"]["proxy"] < resident["after"]["proxy"]
    assert figures["added_bytes_per_client"] == {"proxy": (resident["peak"]["proxy"] - 1000) / 6}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (_tokens(1) + _usage(1) + _DONE, None),
        (_tokens(2) + _usage(2) + _DONE, "other number of tokens"),
        (_tokens(2) + _DONE, "other number of tokens"),
        (_DONE, "other number of tokens"),
        (_usage(1), "no [DONE]"),
        (b"", "no [DONE]"),
    ],
)
def test_the_end_of_a_stream_is_checked(tail: bytes, expected: str | None) -> None:
    if tail == _DONE:
        tail = b"data: {}\n\n" + tail
    assert complaint(tail, 1) == expected


def test_the_summary_counts_errors_by_kind() -> None:
    outcomes = [
        Outcome(Pace.IDLE, 2.0, 100),
        Outcome(Pace.SLOW, 1.0, 90),
        Outcome(Pace.SLOW, 4.0, 10, "ConnectionResetError"),
        Outcome(Pace.IDLE, error="status 503"),
        Outcome(Pace.IDLE, error="status 503"),
    ]
    assert summary(outcomes) == {
        "num_answered": 3,
        "num_ended_right": 2,
        "errors": {"slow: ConnectionResetError": 1, "idle: status 503": 2},
        "ttft_p50_s": 2.0,
        "ttft_max_s": 4.0,
        "answer_bytes": 100,
    }
    assert summary([Outcome(Pace.IDLE, error="status 503")])["ttft_p50_s"] is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["ray::ProxyActor"], "proxy"),
        (["ray::ServeReplica:benchmark:Ingress.handle_request_streaming"], "ingress"),
        (["ray::ServeReplica:benchmark:Replica"], "replica"),
        (["ray::ServeController.listen_for_change"], None),
        (["/usr/bin/haproxy", "-db"], "haproxy"),
        (["python", "ProxyActor"], None),
        ([], None),
    ],
)
def test_processes_are_known_by_their_titles(command: list[str], expected: str | None) -> None:
    assert role(command) == expected


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted - 1, hard))
        allow_files(wanted)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(OSError, match=f"{hard + 1} open files are needed"):
                allow_files(hard + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _stream(sent_at: float, ttft_s: float, tpot_s: float) -> Stream:
    return Stream(sent_at, [(sent_at + ttft_s, 1), (sent_at + ttft_s + 2 * tpot_s, 2)])


def test_what_is_added_is_the_median_over_pairs() -> None:
    inside = [_stream(0, 0.010, 0.002), _stream(10, 0.100, 0.020), _stream(20, 0.020, 0.004)]
    outside = [_stream(1, 0.015, 0.003), _stream(11, 0.106, 0.021), _stream(21, 0.060, 0.024)]
    figures = compare(inside, outside)
    expected = {
        "engine_ttft_ms": 20,
        "served_ttft_ms": 60,
        "added_ttft_ms": 6,
        "added_ttft_best_ms": 5,
        "added_ttft_share": 0.3,
        "engine_tpot_ms": 4,
        "served_tpot_ms": 21,
        "added_tpot_ms": 1,
        "added_tpot_best_ms": 1,
        "added_tpot_share": 0.25,
        "added_wall_ms": 8,
        "added_wall_share": 8 / 28,
    }
    assert figures == pytest.approx(expected)


def test_a_stream_of_one_arrival_has_no_time_per_token() -> None:
    one = [Stream(0, [(1, 4)])]
    with pytest.raises(ValueError, match="expected max_tokens of at least 2"):
        compare(one, one)


@pytest.mark.parametrize("mode", MODES)
def test_clients_use_the_port_that_the_ingress_is_told_of(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = []

    @contextlib.contextmanager
    def server(args: object, environment: Callable[[int], Mapping[str, str]]) -> Iterator[str]:
        environments.append(environment(4321))
        yield "http://127.0.0.1:4321"

    monkeypatch.setattr("benchmarks.serving_cost.server", server)
    with MODES[mode].server({}) as url:
        told = environments[0].get("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "4321")
        assert url == f"http://127.0.0.1:{told}"
    assert (told == "4322") == (mode == "direct")
    assert int(environments[0].get("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", "4322")) == int(told) + 1


def test_the_server_has_room_for_all_clients() -> None:
    config = parse_app_config(server_args("a/model", "a/tokenizer", 64, 1016))
    assert config.max_in_flight == 64 + 1016
    assert config.max_ongoing_requests >= config.max_in_flight
    assert config.model.tokenizer == "a/tokenizer"
    assert parse_app_config(server_args("a.gguf", "a/tokenizer", 1, 1)).model.tokenizer is None


def test_the_protocol_alone_is_measured_with_a_runner_that_computes_nothing() -> None:
    runner = NullRunner()
    seen = []

    def execute(plan: object) -> object:
        seen.append(plan)
        return runner.fetch(runner.dispatch(decode_plan(1)))

    assert step_ms(execute, 3) >= 0
    assert len(seen) == 23
    assert decode(encode(Step(1, decode_plan(5)))) == Step(1, decode_plan(5))
