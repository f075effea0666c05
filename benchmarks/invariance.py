"""How many requests get other tokens when other requests run beside them.

Without `batch_invariant` a program with more rows may round differently, and a greedy choice between two near-equal
candidates may fall the other way. Each prompt (text that the model itself sampled) is continued greedily alone, then in
batches; a stream counts as identical where every token is.
"""

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.figures import emit, progress
from benchmarks.workload import Prompt, add_options, app_config, build, greedy
from engine.request import EngineProtocol, Request, SamplingParams


def run_tokens(engine: EngineProtocol, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """The tokens of each request; all are sent at once."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return [tuple(tokens[request.request_id]) for request in requests]


def sample_prompts(engine: EngineProtocol, count: int, length: int, first_token: int) -> list[Prompt]:
    """Texts that the model samples (temperature 0.8) after `first_token`: as decided as real prompts."""

    def request(index: int) -> Request:
        params = SamplingParams(max_tokens=length - 1, temperature=0.8, seed=index, ignore_eos=True)
        return Request(str(index), (first_token,), params)

    generated = run_tokens(engine, [request(index) for index in range(count)])
    return [(first_token, *tokens) for tokens in generated]


def continue_in_batches(
    engine: EngineProtocol, prompts: Sequence[Prompt], max_tokens: int, batch: int
) -> list[tuple[int, ...]]:
    """Greedy continuations, `batch` prompts at a time."""
    return [
        tokens
        for start in range(0, len(prompts), batch)
        for tokens in run_tokens(engine, list(_requests(prompts[start : start + batch], max_tokens)))
    ]


def _requests(prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Request]:
    return (Request(str(index), prompt, greedy(max_tokens)) for index, prompt in enumerate(prompts))


def compare(alone: Sequence[tuple[int, ...]], together: Sequence[tuple[int, ...]]) -> dict[str, float | int | None]:
    """Share of identical streams, and how far the others agree."""
    agreed = [_common_prefix(a, b) for a, b in zip(alone, together, strict=True)]
    others = [common for common, a in zip(agreed, alone, strict=True) if common < len(a)]
    return {
        "num_prompts": len(alone),
        "identical_share": 1 - len(others) / len(alone),
        "mean_tokens_before_difference": sum(others) / len(others) if others else None,
    }


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, streams="8,32", max_tokens=64)
    parser.add_argument("--prompts", type=int, default=32, help="how many prompts (default: %(default)s)")
    parser.add_argument("--first-token", type=int, default=1, help="id that every prompt begins with (default: 1)")
    options = parser.parse_args()
    engine = build(app_config(options))
    progress("invariance: compiling ...")
    engine.warm_up()
    progress(f"invariance: sampling {options.prompts} prompts ...")
    prompts = sample_prompts(engine, options.prompts, options.prompt_len, options.first_token)
    progress("invariance: each alone ...")
    alone = continue_in_batches(engine, prompts, options.max_tokens, 1)
    for batch in options.streams:
        progress(f"invariance: {batch} at a time ...")
        together = continue_in_batches(engine, prompts, options.max_tokens, batch)
        how = {"batch": batch, "batch_invariant": options.batch_invariant, "max_tokens": options.max_tokens}
        emit("invariance", {"model": options.model, **how, **compare(alone, together)})


if __name__ == "__main__":
    main()
