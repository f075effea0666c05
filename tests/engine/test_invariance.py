"""With `batch_invariant` tokens do not depend on batch mates, chunks, cached prefixes, preemption or guesses."""

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder
from engine.request import Request, SamplingParams
from engine.sharding import make_mesh

from .tiny_models import LLAMA, WIDE, make_engine, place, random_params, run, tokens_of

NUM_REQUESTS = 200
CONFIG = EngineConfig(
    num_slots=6,
    prefill_buckets=(32,),
    max_model_len=160,
    num_pages=24,
    num_draft_tokens=9,
    ngram_min_len=1,
    max_queue_len=NUM_REQUESTS,
    batch_invariant=True,
)
KINDS: tuple[dict, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5},
)


def mixed_requests(count: int) -> list[Request]:
    """Prompts that share beginnings, repeat themselves or neither; all kinds of sampling, tenants and priorities."""
    draw = random.Random(5)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(LLAMA.vocab_size) for _ in range(length))

    shared = [tokens(n) for n in (33, 64, 96)]
    requests = []
    for index in range(count):
        prompt = tokens(draw.randint(1, 50))
        match index % 4:
            case 0:
                prompt = shared[draw.randrange(3)] + prompt[:20]
            case 1:
                prompt = (prompt[:7] * 9)[: draw.randint(1, 60)]
            case 2 if index % 8 == 2:
                prompt = shared[draw.randrange(3)]
        params = SamplingParams(draw.randint(1, 40), seed=index, ignore_eos=True, **KINDS[index % len(KINDS)])
        requests.append(
            Request(
                f"r{index}",
                prompt,
                params,
                priority=draw.randint(-1, 1),
                tenant=draw.choice([None, "a", "b"]),
                cache_salt=draw.choice([None, None, "salt"]),
            )
        )
    return requests


def alone(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """Each by itself on the same programs, with no cached prefix, no guess and room for everything."""
    plain = Engine(engine.runner, replace(CONFIG, num_draft_tokens=0, prefix_caching=False))
    answers = {r.request_id: tokens_of(run(plain, [r])[r.request_id]) for r in requests}
    stats = plain.stats()
    assert (stats.num_cached_tokens, stats.num_preemptions, stats.num_draft_tokens) == (0, 0, 0)
    return answers


def assert_all_happened(engine: Engine) -> None:
    """The run had cached prefixes, preemptions, and guesses both right and wrong."""
    stats = engine.stats()
    assert stats.num_cached_tokens > 0
    assert stats.num_preemptions > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.fixture(scope="module")
def loaded() -> Engine:
    engine = make_engine(LLAMA, random_params(LLAMA), CONFIG)
    engine.warm_up()
    return engine


def test_200_mixed_requests_answer_alone_as_under_load(loaded):
    requests = mixed_requests(NUM_REQUESTS)
    together = {name: tokens_of(outputs) for name, outputs in run(loaded, requests).items()}
    assert_all_happened(loaded)
    expected = alone(loaded, requests)
    assert len({tuple(tokens) for tokens in expected.values()}) > 0.8 * NUM_REQUESTS
    assert together == expected


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)], ids=["1x1", "2x4"])
def test_guesses_of_a_draft_model_change_no_token(mesh):
    config = replace(CONFIG, num_pages=48)
    model, draft = (WIDE, replace(WIDE, num_layers=1)) if mesh == (2, 4) else (LLAMA, replace(LLAMA, num_layers=1))
    decoders = [Decoder(c, make_mesh(*mesh), "float32", "float32") for c in (model, draft)]
    weights = random_params(model)
    # The first layer alone agrees with the whole often enough to be right now and then.
    params = [
        place({k: v for k, v in weights.items() if k in random_params(c)}, d.mesh)
        for c, d in zip((model, draft), decoders, strict=True)
    ]
    engine = build_engine(decoders[0], params[0], config, (decoders[1], params[1]))
    engine.warm_up()
    requests = mixed_requests(40)
    together = {name: tokens_of(outputs) for name, outputs in run(engine, requests).items()}
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert together == alone(engine, requests)
