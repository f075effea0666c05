"""Real-time chunking: what sampling several tokens in one call is worth, and what it costs.

Two models with random weights: one of Pi05's size, and one so small that a step is mostly dispatch. Each chunk length
gets an engine of its own, whose chunks grow up to it once nothing waits. Its tokens must be those of single steps, so
perplexity is there to show that nothing moved.
"""

import argparse
import os
import time
from dataclasses import dataclass

import jax

from benchmarks.figures import Figures, emit, progress, summarize
from benchmarks.workload import Load, greedy, run_streams
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder, Params
from engine.request import Request
from engine.scoring import Scorer
from engine.sharding import make_mesh, param_sharding
from engine.weights.families.pi05 import pi05_config

PROMPT_LEN = 32


def dispatch_bound() -> ModelConfig:
    """A model whose step takes about as long as starting one."""
    return ModelConfig(
        family="pi05",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_size=16,
        intermediate_size=192,
        max_position_embeddings=512,
        norm="layer",
        activation="gelu",
        gated=False,
        ffn_bias=True,
        layer_windows=(256, 256),
    )


@dataclass(frozen=True)
class Model:
    """A decoder with random float32 weights."""

    decoder: Decoder
    params: Params

    @classmethod
    def random(cls, config: ModelConfig) -> "Model":
        """On the first device."""
        mesh = make_mesh()
        decoder = Decoder(config, mesh, "float32", "float32")
        shardings = {
            module: {name: param_sharding(f"{module}/{name}", a.shape, mesh) for name, a in arrays.items()}
            for module, arrays in decoder.abstract_params().items()
        }
        return cls(decoder, jax.jit(decoder.init_params, out_shardings=shardings)(jax.random.key(0)))


def build(model: Model, chunk: int, num_streams: int) -> tuple[Engine, float]:
    """An engine that samples `chunk` tokens a step, and the seconds it took to compile and try its programs."""
    config = EngineConfig(
        num_slots=num_streams,
        max_model_len=512,
        prefill_buckets=(PROMPT_LEN,),
        decode_chunk=chunk,
        prefix_caching=False,
    )
    engine = build_engine(model.decoder, model.params, config)
    return engine, sum(engine.warm_up().values())


def peak_bytes(engine: Engine) -> int:
    """Weights, cache, and what the largest program needs beside them."""
    temporary = 0
    for program in engine.runner.compiled_programs.values():
        analysis = program.memory_analysis()
        temporary = max(temporary, 0 if analysis is None else analysis.temp_size_in_bytes)
    return sum(engine.runner.memory_bytes().values()) + temporary


def tokens_of(engine: Engine, load: Load) -> list[list[int]]:
    """What each stream answers."""
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(load.prompts(engine.vocab_size)):
        engine.add_request(Request(str(index), prompt, greedy(load.max_tokens)))
        answers[str(index)] = []
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def measure(engine: Engine, load: Load, repeats: int) -> Figures:
    """Speed of the fastest of `repeats` runs."""
    runs = (run_streams(engine, load.prompts(engine.vocab_size), greedy(load.max_tokens)) for _ in range(repeats))
    figures = min((summarize(streams) for streams in runs), key=lambda f: f["wall_s"] or 0.0)
    return {name: figures[name] for name in ("tokens_per_s", "ttft_p50_s", "tpot_p50_s")}


def compare(name: str, model: Model, chunks: list[int], load: Load, repeats: int) -> None:
    """Measures every chunk length in turn, and prints a line for each."""
    scorer = Scorer(model.decoder, model.params, 512)
    scorer.warm_up()
    engines = {chunk: build(model, chunk, load.num_streams) for chunk in chunks}
    prompts, single = load.prompts(model.decoder.config.vocab_size), None
    # In turns, so that what else the machine does falls on all alike.
    speeds: dict[int, list[Figures]] = {chunk: [] for chunk in chunks}
    for _ in range(repeats):
        for chunk, (engine, _) in engines.items():
            speeds[chunk].append(measure(engine, load, 1))
    for chunk, (engine, warm_up_s) in engines.items():
        answers = tokens_of(engine, load)
        single = answers if single is None else single
        best = max(speeds[chunk], key=lambda f: f["tokens_per_s"] or 0.0)
        base = max(speeds[chunks[0]], key=lambda f: f["tokens_per_s"] or 0.0)
        perplexities = [scorer.perplexity(p, a) for p, a in zip(prompts, answers, strict=True)]
        emit(
            "rtc",
            {
                "model": name,
                "num_streams": load.num_streams,
                "decode_chunk": chunk,
                **best,
                "speedup": (best["tokens_per_s"] or 0.0) / (base["tokens_per_s"] or 1.0),
                "same_tokens": answers == single,
                "perplexity": sum(perplexities) / len(perplexities),
                "peak_bytes": peak_bytes(engine),
                "warm_up_s": warm_up_s,
                "load_average": os.getloadavg()[0],
            },
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 32, 64, 128], help="the first is compared with")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens generated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest is reported (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=["dispatch-bound", "pi05"], choices=["dispatch-bound", "pi05"])
    parser.add_argument("--layers", type=int, default=18, help="layers of Pi05's size (default: %(default)s)")
    options = parser.parse_args()
    configs = {"dispatch-bound": dispatch_bound(), "pi05": pi05_config(num_layers=options.layers)}
    for name in options.models:
        model = Model.random(configs[name])
        for num_streams in options.streams:
            start = time.perf_counter()
            progress(f"rtc: {name}, {num_streams} streams ...")
            compare(name, model, options.chunks, Load(num_streams, PROMPT_LEN, options.max_tokens), options.repeats)
            progress(f"rtc: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
