"""configs/grok1-tiny.yaml from its file to HTTP answers, in one process: several requests at once on eight devices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import sentencepiece

from serve_app.api import Api
from serve_app.async_engine import AsyncEngine
from serve_app.backend import LocalBackend
from serve_app.builder import build_engine
from serve_app.config import AppConfig, load_file
from serve_app.text.base import Tokenizer
from serve_app.text_builder import build_text
from tests.tiny_tokenizer import ROOT, TINY_TOKENIZER, train

TINY = ROOT / ".." / "shared" / "data" / "grok1" / "tiny"
LIMIT_S = 300
"""Only ends a broken test."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> AppConfig:
    """The file's, started from the checkout's root; the suite's own compilation cache stays in use."""
    if not TINY.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")
    config = load_file(Path("configs/grok1-tiny.yaml")).application.args
    assert (config.mesh.data, config.mesh.model, config.mesh.platform) == (1, 8, "cpu")
    return config.model_copy(update={"compilation_cache_dir": None})


@asynccontextmanager
async def served(config: AppConfig) -> AsyncIterator[tuple[httpx.AsyncClient, Tokenizer]]:
    """A client of the application, and its tokenizer."""
    engine, tokenizer = build_engine(config)
    serving = AsyncEngine(engine, tokenizer, max_in_flight=config.max_in_flight, step_timeout_s=LIMIT_S)
    api = Api(LocalBackend(serving), build_text(config), config)
    try:
        transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=LIMIT_S) as client:
            yield client, tokenizer
            assert engine.stats().num_slots == config.engine.num_slots == 8
    finally:
        serving.stop()


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    answer = await client.post("/v1/completions", json={"model": "grok-1-tiny", "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as log-probabilities name it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_the_tokenizer_is_as_large_as_the_vocabulary_and_has_the_special_tokens_of_grok_1() -> None:
    made = sentencepiece.SentencePieceProcessor(model_proto=train((ROOT / "LICENSE").read_text(encoding="utf-8")))
    kept = sentencepiece.SentencePieceProcessor(model_file=str(TINY_TOKENIZER))
    assert [kept.id_to_piece(i) for i in range(512)] == [made.id_to_piece(i) for i in range(512)]
    assert kept.vocab_size() == 512
    assert [kept.id_to_piece(i) for i in range(4)] == ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    assert TINY_TOKENIZER.stat().st_size < 20_000


@pytest.mark.slow
def test_several_requests_at_once_over_http(config: AppConfig) -> None:
    reference = np.load(TINY / "reference_f32.npz")
    prompts = [reference[f"prompt{j}"].tolist() for j in range(3)]
    continuations = [reference[f"greedy{j}"].tolist() for j in range(3)]

    async def test() -> None:
        async with served(config) as (client, tokenizer):
            assert jax.device_count() == 8
            greedy = [
                complete(client, prompt=prompt, max_tokens=len(tokens), temperature=0, logprobs=0)
                for prompt, tokens in zip(prompts, continuations, strict=True)
            ]
            text = "Licensed under the Apache License\n"
            sampled = [complete(client, prompt=text, max_tokens=20, seed=seed) for seed in (1, 2, 1)]
            answers = await asyncio.gather(*greedy, *sampled)
            for answer, tokens in zip(answers, continuations, strict=False):
                assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
                assert answer["logprobs"]["tokens"] == [shown(tokenizer, t) for t in tokens]
                assert answer["finish_reason"] == "length"
            first, other, again = (answer["text"] for answer in answers[3:])
            assert first == again
            assert first != other
            # Alone, each request gets what it got among the others.
            alone = await complete(client, prompt=text, max_tokens=20, seed=2)
            assert alone["text"] == other

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))
