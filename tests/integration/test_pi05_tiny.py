"""configs/pi05-tiny.yaml from its file to HTTP answers, in one process: a converted PyTorch model behind the API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sentencepiece

from engine.weights.convert import convert
from serve_app.api import Api
from serve_app.async_engine import AsyncEngine
from serve_app.backend import LocalBackend
from serve_app.builder import build_engine
from serve_app.config import AdaptiveWindowSection, AppConfig, load_file
from serve_app.text.base import Tokenizer
from serve_app.text_builder import build_text
from tests.tiny_tokenizer import PI05_OPTIONS, PI05_TOKENIZER, ROOT, train

TINY = ROOT / ".." / "shared" / "data" / "hf" / "pi05-tiny"
WINDOW = 16
"""Of the reference's `window_*`."""

RUNS: list[tuple[dict[str, Any], str]] = [
    ({}, "full"),
    ({"window": WINDOW}, "window"),
    ({"window": "adaptive"}, "window"),
    ({"window": WINDOW, "chunk_overlap": 5}, "window"),
]
"""Options, and the run of the reference that they should give."""

LIMIT_S = 300
"""Only ends a broken test."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> AppConfig:
    """The file's, started from the checkout's root; the suite's own compilation cache stays in use."""
    if not TINY.is_dir():
        pytest.skip("the reference data is not beside the checkout")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")
    config = load_file(Path("configs/pi05-tiny.yaml")).application.args
    assert (config.mesh.data, config.mesh.model, config.mesh.platform) == (1, 1, "cpu")
    return config.model_copy(update={"compilation_cache_dir": None})


@asynccontextmanager
async def served(config: AppConfig, *, warm: bool = False) -> AsyncIterator[tuple[httpx.AsyncClient, Tokenizer]]:
    """A client of the application, and its tokenizer."""
    engine, tokenizer = build_engine(config)
    serving = AsyncEngine(engine, tokenizer, max_in_flight=config.max_in_flight, step_timeout_s=LIMIT_S)
    api = Api(LocalBackend(serving), build_text(config), config)
    try:
        if warm:
            await asyncio.to_thread(serving.warm_up)
        transport = httpx.ASGITransport(api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=LIMIT_S) as client:
            yield client, tokenizer
    finally:
        serving.stop()


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    answer = await client.post("/v1/completions", json={"model": "pi05-tiny", "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as log-probabilities name it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_the_tokenizer_is_as_large_as_the_vocabulary_and_loses_nothing() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    made = sentencepiece.SentencePieceProcessor(model_proto=train(text, **PI05_OPTIONS))
    kept = sentencepiece.SentencePieceProcessor(model_file=str(PI05_TOKENIZER))
    assert kept.vocab_size() == made.vocab_size() == 320
    assert [kept.id_to_piece(i) for i in range(320)] == [made.id_to_piece(i) for i in range(320)]
    assert (kept.bos_id(), kept.eos_id()) == (1, 2)
    assert kept.decode(kept.encode("Zoë spells 42 Ω in bytes\n")) == "Zoë spells 42 Ω in bytes\n"


@pytest.mark.parametrize("mesh", ["1x1", pytest.param("2x4", marks=pytest.mark.slow)])
def test_a_converted_model_answers_as_pytorch_did(config: AppConfig, tmp_path: Path, mesh: str) -> None:
    reference = np.load(TINY / "reference.npz")
    convert(TINY / "pytorch_model.bin", tmp_path / "converted")
    data, model = map(int, mesh.split("x"))
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"source": str(tmp_path / "converted")}),
            "mesh": config.mesh.model_copy(update={"data": data, "model": model}),
        }
    )

    async def test() -> None:
        async with served(config) as (client, tokenizer):
            text = "Licensed under the Apache License\n"
            greedy = [
                complete(client, prompt=reference[f"prompt{j}"].tolist(), max_tokens=64, temperature=0, logprobs=0)
                for j in range(2)
            ]
            sampled = [complete(client, prompt=text, max_tokens=20, seed=seed) for seed in (1, 2, 1)]
            *answers, first, other, again = await asyncio.gather(*greedy, *sampled)
            for j, answer in enumerate(answers):
                tokens = reference[f"window_greedy{j}"].tolist()
                assert answer["logprobs"]["tokens"] == [shown(tokenizer, t) for t in tokens]
                assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
                assert answer["finish_reason"] == "length"
            assert first["text"] == again["text"] != other["text"]

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


def test_chunks_windows_and_candidates_over_http(config: AppConfig) -> None:
    """One model without windows of its own: those of requests are what PyTorch was given, chunked or not."""
    reference = np.load(TINY / "reference.npz")
    adaptive = AdaptiveWindowSection(least=WINDOW, divisor=1000, most=WINDOW)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"window": "full", "adaptive_window": adaptive})}
    )

    async def test() -> None:
        async with served(config, warm=True) as (client, tokenizer):
            for j in range(2):
                greedy = {"prompt": reference[f"prompt{j}"].tolist(), "max_tokens": 64, "temperature": 0, "logprobs": 0}
                for options, name in RUNS:
                    tokens = reference[f"{name}_greedy{j}"].tolist()
                    answers = [await complete(client, **greedy, **options, decode_chunk=c) for c in (1, 7, 64, None)]
                    for answer in answers:
                        assert answer["logprobs"]["tokens"] == [shown(tokenizer, t) for t in tokens]
                        assert answer["finish_reason"] == "length"
                await check_stop_strings(client, greedy)
            await check_candidates(client, {"prompt": reference["prompt0"].tolist(), "max_tokens": 12, "seed": 5})
            metrics = (await client.get("/metrics")).text
            assert 'num_compilations_since_warm_up_total{replica="0"} 0.0' in metrics
            assert counter(metrics, "num_generated_tokens") > 2 * counter(metrics, "num_decode_rows")

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


async def check_stop_strings(client: httpx.AsyncClient, greedy: dict[str, Any]) -> None:
    """Three stop strings of an answer, early and late: it ends before each, in chunks of whatever length."""
    text = (await complete(client, **greedy))["text"]
    whole = [text[i : i + 3] for i in range(len(text) - 2) if "\ufffd" not in text[i : i + 3]]
    stops = whole[len(whole) // 4 :: len(whole) // 4]
    assert len(stops) >= 3
    for stop in stops:
        answers = [await complete(client, **greedy, stop=stop, decode_chunk=chunk) for chunk in (1, 5, 64)]
        assert answers[0]["text"] == text[: text.index(stop)]
        assert answers[0]["finish_reason"] == "stop"
        assert all(
            (a["text"], a["finish_reason"], a["logprobs"]) == (answers[0]["text"], "stop", answers[0]["logprobs"])
            for a in answers
        )


async def check_candidates(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """The model is its own judge, so log-probabilities tell which candidate it prefers."""
    request = {"model": "pi05-tiny", "ignore_eos": True, "logprobs": 0, **body}
    choices = (await client.post("/v1/completions", json={**request, "n": 4})).json()["choices"]
    likeliest = max(choices, key=lambda c: sum(c["logprobs"]["token_logprobs"]))
    assert len({c["text"] for c in choices}) == 4
    answer = (await client.post("/v1/completions", json={**request, "rerank": 4, "decode_chunk": 3})).json()
    (choice,) = answer["choices"]
    assert choice["logprobs"]["tokens"] == likeliest["logprobs"]["tokens"]
    assert answer["usage"]["completion_tokens"] == 4 * len(choice["logprobs"]["tokens"])


def counter(metrics: str, name: str) -> float:
    """An engine's counter."""
    return float(metrics.split(f'llm_engine_{name}_total{{replica="0"}} ')[1].split()[0])
