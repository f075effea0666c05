"""Options one at a time: the same prompts with each option on and off, side by side as a table and a plot.

    python -m benchmarks.ab --prompts FILE.json --plot report.png

Quality is judged by the model with no option on: the perplexity that it gives to each answer, and how much of its own
greedy answer it finds there. The prompts file holds a list of token-id lists, or an object with a list `completions`
of objects with `prompt_ids`; without one, the model samples prompts itself.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import jax

from benchmarks.figures import emit, progress
from benchmarks.invariance import sample_prompts
from benchmarks.rtc import Model
from benchmarks.workload import DEFAULT_MODEL, Prompt
from engine.config import CacheDType, EngineConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder
from engine.request import AdaptiveWindow, Request, SamplingParams
from engine.scoring import Scorer
from engine.sharding import make_mesh, param_sharding
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source


@dataclass(frozen=True)
class Option:
    """One thing that differs from plain decoding."""

    name: str
    request: Callable[[Request], Request] = lambda request: request
    decode_chunk: int = 1
    cache_dtype: CacheDType | None = None
    num: int = 1
    """Candidates for each answer, of which the one with the least perplexity is taken."""


def _sampled(request: Request) -> Request:
    return replace(request, params=replace(request.params, temperature=0.8))


@dataclass(frozen=True)
class Outcome:
    """What one option came to."""

    option: str
    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    peak_cache_bytes: int
    """Of the pages held at once at most."""
    perplexity: float
    """Mean over the prompts, under the model without the option."""
    agreement: float
    """Share of positions with the token that the model answers without the option."""
    same_share: float
    """Share of answers that are the same to the last token."""


def options_of(
    chunks: Sequence[int], windows: Sequence[int], overlap: int, cache_dtypes: Sequence[str], candidates: int
) -> list[Option]:
    """Plain decoding, then each option by itself."""
    options = [Option("plain")]
    options += [Option(f"chunk {c}", decode_chunk=c) for c in chunks if c > 1]
    if overlap and max(chunks) > 1:
        chunk = max(chunks)
        name = f"chunk {chunk}, overlap {overlap}"
        options.append(Option(name, lambda r: replace(r, chunk_overlap=overlap), decode_chunk=chunk))
    options += [Option(f"window {w}", lambda r, w=w: replace(r, window=w)) for w in windows]  # type: ignore[misc]
    adaptive = AdaptiveWindow()
    options.append(Option("window adaptive", lambda r: replace(r, window=256, adaptive_window=adaptive)))
    options += [Option(f"cache {d}", cache_dtype=d) for d in cache_dtypes]  # type: ignore[arg-type]
    if candidates > 1:
        # Reranking chooses among samples, so it is to be held against one sample.
        options += [Option("one sample", _sampled), Option(f"best of {candidates} samples", _sampled, num=candidates)]
    return options


def run(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], dict[str, float]]:
    """The answers, one request after the other, with their figures."""
    answers, ttft, tpot, peak = [], [], [], 0.0
    start = time.perf_counter()
    for request in requests:
        sent_at, times, tokens = time.perf_counter(), [], list[int]()
        engine.add_request(request)
        while engine.has_work():
            for output in engine.step():
                times.append(time.perf_counter())
                tokens += output.token_ids
            peak = max(peak, engine.stats().cache_usage)
        answers.append(tokens)
        ttft.append(times[0] - sent_at)
        tpot.append((times[-1] - times[0]) / max(1, len(tokens) - 1))
    seconds = time.perf_counter() - start
    rate = sum(map(len, answers)) / seconds
    return answers, {"tokens_per_s": rate, "ttft_s": median(ttft), "tpot_s": median(tpot), "cache_usage": peak}


def compare(model: Model, options: Sequence[Option], prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Outcome]:
    """Every option over the same prompts, as it is done."""
    longest = max(map(len, prompts)) + max_tokens
    scorer = Scorer(model.decoder, model.params, longest)
    scorer.warm_up()
    config = EngineConfig(
        num_slots=1,
        max_model_len=longest,
        prefill_buckets=(128,),
        prefix_caching=False,
        decode_chunk=max(option.decode_chunk for option in options),
    )
    params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    runners: dict[CacheDType | None, Engine] = {}
    plain: list[list[int]] = []
    for option in options:
        progress(f"ab: {option.name} ...")
        if option.cache_dtype not in runners:
            # With the others' programs where only requests differ, so that those have one program to differ by.
            built = build_engine(model.decoder, model.params, replace(config, cache_dtype=option.cache_dtype))
            built.warm_up()
            runners[option.cache_dtype] = built
        chunk = option.decode_chunk
        runner = runners[option.cache_dtype].runner
        engine = Engine(runner, replace(config, decode_chunk=chunk, decode_chunk_min=chunk))
        requests = [option.request(Request(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
        answers, figures = run(engine, requests)
        if option.num > 1:
            answers, figures = _best_of(option.num, engine, requests, answers, figures, scorer)
        plain = plain or answers
        pairs = list(zip(answers, plain, strict=True))
        yield Outcome(
            option.name,
            figures["tokens_per_s"],
            figures["ttft_s"],
            figures["tpot_s"],
            round(figures["cache_usage"] * runner.memory_bytes()["cache"]),
            mean(scorer.perplexity(p, a) for p, a in zip(prompts, answers, strict=True)),
            mean(sum(x == y for x, y in zip(a, b, strict=True)) / len(b) for a, b in pairs),
            mean(a == b for a, b in pairs),
        )


def _best_of(
    count: int,
    engine: Engine,
    requests: Sequence[Request],
    first: list[list[int]],
    figures: dict[str, float],
    scorer: Scorer,
) -> tuple[list[list[int]], dict[str, float]]:
    """The best of `count` candidates for each request, the first of which are there already. Times are of all of them
    together: nobody hears of an answer before it is chosen."""
    candidates = [first]
    start = time.perf_counter()
    for index in range(1, count):
        others = [replace(r, params=replace(r.params, seed=r.params.seed + index)) for r in requests]
        candidates.append(run(engine, others)[0])
    best = [
        min(answers, key=lambda a: scorer.perplexity(r.prompt_token_ids, a))
        for r, answers in zip(requests, zip(*candidates, strict=True), strict=True)
    ]
    num_tokens = sum(map(len, best))
    seconds = time.perf_counter() - start + num_tokens / figures["tokens_per_s"]
    whole = seconds / len(requests)
    rate = num_tokens / seconds
    return best, {**figures, "tokens_per_s": rate, "ttft_s": whole, "tpot_s": seconds / num_tokens}


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as lines of a Markdown table; speed and memory also against the first."""
    base = outcomes[0]
    head = (
        "| option | tokens/s | speed | first token | per token | cache held | perplexity | agreement | same answers |"
    )
    lines = [head, "|" + " --- |" * 9]
    for o in outcomes:
        lines.append(
            f"| {o.option} | {o.tokens_per_s:.1f} | {o.tokens_per_s / base.tokens_per_s:.2f} | {o.ttft_s * 1e3:.0f} ms "
            f"| {o.tpot_s * 1e3:.1f} ms | {o.peak_cache_bytes / 2**20:.1f} MiB "
            f"({o.peak_cache_bytes / base.peak_cache_bytes:.2f}) | {o.perplexity:.3f} | {o.agreement:.1%} "
            f"| {o.same_share:.0%} |"
        )
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Speed, memory and quality as bars, into a PNG file."""
    # Only a plot needs it.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = outcomes[0]
    panels = [
        ("speed (plain = 1)", [o.tokens_per_s / base.tokens_per_s for o in outcomes]),
        ("cache held (plain = 1)", [o.peak_cache_bytes / base.peak_cache_bytes for o in outcomes]),
        ("perplexity under the plain model", [o.perplexity for o in outcomes]),
        ("tokens equal to plain", [o.agreement for o in outcomes]),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 0.4 * len(outcomes) + 1.6), sharey=True)
    names = [o.option for o in outcomes]
    for axis, (label, values) in zip(axes, panels, strict=True):
        axis.barh(names, values, color=["#888888"] + ["#3572b0"] * (len(outcomes) - 1))
        axis.axvline(values[0], color="#888888", linewidth=1)
        axis.set_title(label, fontsize=10)
        for row, value in enumerate(values):
            axis.text(value, row, f" {value:.3g}", va="center", fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_prompts(path: Path, count: int | None) -> list[Prompt]:
    """Raises `SystemExit` where the file holds no prompts."""
    data = json.loads(path.read_text())
    lists = [c["prompt_ids"] for c in data.get("completions", [])] if isinstance(data, dict) else data
    prompts = [tuple(int(t) for t in ids) for ids in lists][:count]
    if not prompts or not all(prompts):
        raise SystemExit(f"{path}: expected lists of token ids, or completions with prompt_ids; found {len(prompts)}")
    return prompts


def load_model(source: str) -> Model:
    """A model on the first device, with float32 weights and without windows of its own."""
    path, mesh = resolve_source(source), make_mesh()
    config = load_config(path)
    decoder = Decoder(config, mesh, "float32", "float32")
    params = load_params(path, config, decoder.abstract_params(), lambda p, s: param_sharding(p, s, mesh))
    return Model(decoder, params)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model source (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="JSON file; default: texts that the model samples")
    parser.add_argument("--count", type=int, help="how many prompts; default: all of the file, or 4")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens generated for each (default: %(default)s)")
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--windows", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--overlap", type=int, default=4, help="positions of chunk overlap; 0: leave it out")
    parser.add_argument("--cache-dtypes", nargs="*", default=["bfloat16", "float16", "float8_e4m3", "int8"])
    parser.add_argument("--candidates", type=int, default=4, help="samples to choose from; 1: leave it out")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    options = parser.parse_args()
    model = load_model(options.model)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, options.count)
    else:
        sampler = build_engine(model.decoder, model.params, EngineConfig(num_slots=4, max_model_len=256))
        prompts = sample_prompts(sampler, options.count or 4, 128, 1)
    chunks = options.chunks or [1]
    choices = options_of(chunks, options.windows, options.overlap, options.cache_dtypes, options.candidates)
    where = {"model": options.model, "platform": jax.devices()[0].platform, "num_prompts": len(prompts)}
    outcomes = []
    for outcome in compare(model, choices, prompts, options.max_tokens):
        emit("ab", {**where, "max_tokens": options.max_tokens, **vars(outcome), "load_average": os.getloadavg()[0]})
        outcomes.append(outcome)
    progress(table(outcomes))
    if options.plot is not None:
        title = f"{options.model}: {len(prompts)} prompts, {options.max_tokens} tokens each, one stream"
        plot(outcomes, options.plot, title)
        progress(f"ab: wrote {options.plot}")


if __name__ == "__main__":
    main()
