"""The whole thing on Ray Serve with the fake engine: a process of its own, real sockets, signals."""

import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

START_LIMIT_S = 120


class FakeServer(ServerProcess):
    """Serve with the fake engine."""

    def __init__(self) -> None:
        super().__init__("tests.fakes.serve_main", START_LIMIT_S)

    def post(self, **body: object) -> httpx.Response:
        """POSTs a completion request."""
        return httpx.post(self.url + "/v1/completions", json={"model": "fake", **body}, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server for all tests here; the last one ends it."""
    server = FakeServer()
    try:
        server.until(server.is_ready)
        yield server
    finally:
        server.end()


def num_in_flight(server: FakeServer) -> float:
    """Requests that the engine holds."""
    metrics = server.get("/metrics").text
    values = [line.split()[-1] for line in metrics.splitlines() if line.startswith("llm_engine_requests_in_flight{")]
    assert values, metrics
    return sum(map(float, values))


def test_start_up_says_where_the_server_answers(server: FakeServer) -> None:
    server.until(lambda: "ready: fake" in server.output)
    assert "programs compiled" in server.output
    assert f"curl {server.url}/v1/completions" in server.output


def test_the_official_client_whole_and_streamed(server: FakeServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        completion = client.completions.create(model="fake", prompt="hx", max_tokens=5)
        assert completion.choices[0].text == "yzabc"
        with client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
        ) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == "abcd"
        assert len(pieces) > 2
        with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens"):
            client.completions.create(model="fake", prompt=[97] * 5000, max_tokens=5)


def test_the_request_id_is_kept_and_returned_once(server: FakeServer) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 1}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "mine"}, timeout=30)
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert "mine" in answer.json()["id"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(server: FakeServer, streamed: bool) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 4000, "stream": streamed}
    with httpx.Client(timeout=30) as client:
        if streamed:
            with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # what closes the generator closes the connection
                next(lines)
                assert num_in_flight(server) == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.url + "/v1/completions", json=body, timeout=1)
    # The answer would take 40 s.
    started_at = time.monotonic()
    server.until(lambda: num_in_flight(server) == 0)
    assert time.monotonic() - started_at < 20


def test_a_replica_that_dies_is_an_error_to_its_clients_and_is_replaced(server: FakeServer) -> None:
    body = {"model": "fake", "prompt": "%", "max_tokens": 50}
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert '"code":"engine_dead"' in lines[-1]
    server.until(lambda: server.post(prompt="hx", max_tokens=3).status_code == 200)
    assert server.post(prompt="hx", max_tokens=3).json()["choices"][0]["text"] == "yza"


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_ends_with_status_0(server: FakeServer) -> None:
    server.until(server.is_ready)
    body = {"model": "fake", "prompt": "a", "max_tokens": 300, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.post(prompt="a", max_tokens=1).status_code == 503)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert server.wait() == 0
    assert "SIGTERM: finishing the requests that run" in server.output
