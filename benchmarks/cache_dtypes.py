"""What each type of KV cache costs in exactness, and what it saves in memory.

Texts that the model itself sampled are run through prefill and decode, with a float32 cache and with each other type;
everything else stays float32. Compared is the distribution after every token but the first of each text.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import jax
import numpy as np
from jaxtyping import Float

from benchmarks.figures import emit, progress
from benchmarks.invariance import sample_prompts
from benchmarks.workload import DEFAULT_MODEL
from engine.config import CacheDType, EngineConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder
from engine.sharding import make_mesh, param_sharding
from engine.teacher_forcing import ForcedSequence, forced_logits
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source

Logits = Float[np.ndarray, "T V"]


def compare(got: Sequence[Logits], exact: Sequence[Logits], texts: Sequence[Sequence[int]]) -> dict[str, float | int]:
    """Errors of the logits after each token of `texts`; the loss is that of the token that follows, in nats."""
    errors, largest, same, losses = [], [], [], []
    for a, b, text in zip(got, exact, texts, strict=True):
        # The first token sees nothing but itself.
        for after in range(1, len(text)):
            difference = np.abs(a[after] - b[after])
            largest.append(difference.max())
            errors.append(difference.mean())
            same.append(a[after].argmax() == b[after].argmax())
            if after + 1 < len(text):
                losses.append(_logprob(b[after], text[after + 1]) - _logprob(a[after], text[after + 1]))
    return {
        "num_positions": len(errors),
        "largest_logit_error": float(np.max(largest)),
        "mean_logit_error": float(np.mean(errors, dtype=np.float64)),
        "greedy_equal_share": float(np.mean(same)),
        "mean_logprob_loss": float(np.mean(losses)),
    }


def _logprob(logits: Float[np.ndarray, " V"], token: int) -> float:
    wide = logits.astype(np.float64)
    highest = wide.max()
    return float(wide[token] - highest - np.log(np.exp(wide - highest).sum()))


def build(model: str, config: EngineConfig) -> Engine:
    """An engine on the first device, with float32 weights and a float32 cache."""
    path = resolve_source(model)
    mesh = make_mesh()
    model_config = load_config(path)
    decoder = Decoder(model_config, mesh, "float32", "float32")
    params = load_params(path, model_config, decoder.abstract_params(), lambda p, s: param_sharding(p, s, mesh))
    return build_engine(decoder, params, config)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="model source (default: %(default)s)")
    add("--texts", type=int, default=8, help="how many texts (default: %(default)s)")
    add("--prompt-len", type=int, default=128, help="tokens of each computed by prefill (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="tokens of each computed by decode (default: %(default)s)")
    add("--first-token", type=int, default=1, help="id that every text begins with (default: %(default)s)")
    options = parser.parse_args()
    length = options.prompt_len + options.max_tokens
    config = EngineConfig(num_slots=options.texts, max_model_len=length + 1, batch_invariant=True)
    engine = build(options.model, config)
    progress(f"cache_dtypes: sampling {options.texts} texts of {length} tokens ...")
    texts = sample_prompts(engine, options.texts, length, options.first_token)
    forced = [ForcedSequence(text[: options.prompt_len], text[options.prompt_len :]) for text in texts]
    exact: list[np.ndarray] | None = None
    for dtype in get_args(CacheDType):
        progress(f"cache_dtypes: {dtype} ...")
        runner = build_engine(engine.runner.decoder, engine.runner.params, replace(config, cache_dtype=dtype)).runner
        got = forced_logits(runner, forced)
        exact = got if exact is None else exact
        figures = compare(got, exact, texts) | {"cache_bytes": runner.memory_bytes()["cache"]}
        emit("cache_dtypes", {"model": options.model, "platform": jax.devices()[0].platform, "dtype": dtype, **figures})


if __name__ == "__main__":
    main()
