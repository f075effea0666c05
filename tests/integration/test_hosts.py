"""A Serve replica over two hosts, each a Ray node: its answers over HTTP, and what happens when a host is lost."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from serve_app.config import load_file
from serve_app.text.base import Tokenizer
from serve_app.text_builder import load_model_tokenizer
from tests.server_process import ROOT, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TINY = ROOT / ".." / "shared" / "data" / "grok1" / "tiny"
LIMIT_S = 300
"""Only ends a broken test."""


class ServerOverHosts(ServerProcess):
    """A Ray cluster of two nodes, with one replica over both."""

    def __init__(self) -> None:
        super().__init__("tests.integration.serve_over_hosts", LIMIT_S)

    def follower_pids(self) -> list[int]:
        """Of every replica that has started so far."""
        said = r"hosts of the replica: this one, host 1 of 2 .*?process (\d+)"
        return [int(pid) for pid in re.findall(said, self.output)]

    def leader_pids(self) -> list[int]:
        """Of every replica that has started so far."""
        return [int(pid) for pid in re.findall(r"pid=(\d+).*?\).*?hosts of the replica: this one", self.output)]

    def greedy_tokens(self, prompt: list[int], number: int) -> list[str]:
        """The answer's tokens as log-probabilities name them."""
        body = {"model": "grok-1-tiny", "prompt": prompt, "max_tokens": number, "temperature": 0, "logprobs": 0}
        answer = httpx.post(self.url + "/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
        return tokens


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerOverHosts]:
    """Started from the checkout's root."""
    monkeypatch.chdir(ROOT)
    if not TINY.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    server = ServerOverHosts()
    try:
        yield server
    finally:
        server.end()


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_replica_over_hosts_answers_and_is_replaced_whole_when_one_is_lost(server: ServerOverHosts) -> None:
    reference = np.load(TINY / "reference_f32.npz")
    prompt, expected = reference["prompt1"].tolist(), reference["greedy1"].tolist()[:12]
    server.until(server.is_ready)
    answer = server.greedy_tokens(prompt, len(expected))
    tokenizer = load_model_tokenizer(load_file(Path("configs/grok1-tiny.yaml")).application.args)
    assert answer == [shown(tokenizer, token) for token in expected]
    (follower,), (leader,) = server.follower_pids(), server.leader_pids()
    assert runs(follower)
    assert runs(leader)
    os.kill(follower, signal.SIGKILL)
    server.until(lambda: len(server.follower_pids()) > 1 and server.is_ready())
    assert f"host 1 of 2 ({socket.gethostname()}, process {follower}, " in server.output
    assert "has gone" in server.output
    server.until(lambda: not runs(leader))
    assert server.greedy_tokens(prompt, len(expected)) == answer
    pids = server.follower_pids() + server.leader_pids()
    assert server.stop() == 0
    assert [pid for pid in pids if runs(pid)] == []


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as log-probabilities name it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
