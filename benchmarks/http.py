"""The load of `benchmarks.engine` through Ray Serve: as many connections as streams, server-sent events over sockets.

It starts a server of its own (and a Ray cluster of its own) unless --url names one. The same load runs on an engine in
a process of its own first, so that `ratio_to_engine` compares figures of one machine at one time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.figures import Figures, Stream, emit, progress, share, summarize, wall_s
from benchmarks.workload import Load, Prompt, add_options, app_args

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_RATIOS = ("tokens_per_s", "decode_tokens_per_s", "ttft_p50_s", "ttft_max_s", "tpot_p50_s")


class ServerError(Exception):
    """The server did not start, or answered with something other than the tokens asked for."""


async def run_load(url: str, model: str, prompts: Sequence[Prompt], max_tokens: int) -> list[Stream]:
    """Sends all prompts at once, each on a connection of its own. Raises `ServerError`."""
    limits = httpx.Limits(max_connections=len(prompts), max_keepalive_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        return list(await asyncio.gather(*(_run_stream(client, model, prompt, max_tokens) for prompt in prompts)))


async def _run_stream(client: httpx.AsyncClient, model: str, prompt: Prompt, max_tokens: int) -> Stream:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times, usage = [], None
    sent_at = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise ServerError(f"the server answered {response.status_code}: {response.text}")
        async for event in _events(response.aiter_raw()):
            now = time.perf_counter()
            if event == b"[DONE]":
                break
            chunk = json.loads(event)
            if "error" in chunk:
                raise ServerError(f"the stream ended with an error: {chunk['error']}")
            usage = chunk.get("usage")
            if usage is None:
                times.append(now)
    generated = None if usage is None else usage["completion_tokens"]
    if generated != max_tokens or not times:
        raise ServerError(f"a stream of {len(times)} chunks reports {generated} tokens; expected {max_tokens}")
    # A chunk carries all tokens of an engine step, so all chunks of a request carry equally many.
    return Stream(sent_at, [(at, generated / len(times)) for at in times])


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for piece in body:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


@contextlib.contextmanager
def server(args: dict[str, Any], environment: Callable[[int], Mapping[str, str]] = lambda port: {}) -> Iterator[str]:
    """The URL of a server with this configuration, ready to answer, for as long as the block runs.

    `environment`: variables of the server's processes, by the port that it is to answer at.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    content = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "benchmark", "import_path": "serve_app.app:build", "args": args}],
    }
    progress("http: starting a server ...")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "app.yaml")
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", str(file)],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"} | dict(environment(port)),
            stdout=sys.stderr,
            start_new_session=True,
        )
        try:
            yield _wait_ready(process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> str:
    begin = time.monotonic()
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        while time.monotonic() - begin < _START_TIMEOUT_S:
            if process.poll() is not None:
                raise ServerError(f"the server ended with status {process.returncode} before it was ready")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/ready").status_code == 200:
                    return url
            time.sleep(0.5)
    raise ServerError(f"the server was not ready after {_START_TIMEOUT_S:g} s")


def measure(url: str, model: str, load: Load, vocab_size: int, repeats: int) -> Figures:
    """Figures of one load, of the fastest of `repeats` runs."""
    prompts = load.prompts(vocab_size)
    runs = [asyncio.run(run_load(url, model, prompts, load.max_tokens)) for _ in range(repeats)]
    sizes: Figures = {
        "num_streams": load.num_streams,
        "prompt_len": load.prompt_len,
        "max_tokens": load.max_tokens,
    }
    return sizes | summarize(min(runs, key=wall_s))


def _engine_figures(arguments: list[str]) -> dict[int, dict[str, Any]]:
    """What `benchmarks.engine` prints for the same load, by number of streams; its lines are printed here, too."""
    command = [sys.executable, "-m", "benchmarks.engine", "--no-startup", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sys.stdout.write(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["num_streams"]: line for line in lines if line["benchmark"] == "engine"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--url", help="a server that runs already; the options of the engine then change nothing")
    parser.add_argument("--served-name", default="benchmark", help="the model's name at --url (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=10_000, help="prompts hold ids below it (default: 10000)")
    parser.add_argument("--no-engine", action="store_true", help="leave out the engine, and with it ratio_to_engine")
    options = parser.parse_args()
    model = options.served_name if options.url else options.model
    engine = {} if options.no_engine or options.url else _engine_figures(_shared(sys.argv[1:]))
    with contextlib.nullcontext(options.url) if options.url else server(app_args(options)) as url:
        measure(url, options.served_name, Load(1, options.prompt_len, 8), options.vocab_size, 1)
        for num_streams in options.streams:
            progress(f"http: {num_streams} streams ...")
            load = Load(num_streams, options.prompt_len, options.max_tokens)
            figures = measure(url, options.served_name, load, options.vocab_size, options.repeats)
            inner = engine.get(num_streams, {})
            ratios = {name: share(figures[name], inner.get(name)) for name in _RATIOS}
            more = {"ratio_to_engine": ratios} if inner else {}
            emit("http", {"model": model, **figures, **more, "load_average": os.getloadavg()[0]})


def _shared(arguments: list[str]) -> list[str]:
    """The options that `benchmarks.engine` has, too."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--url", "--served-name", "--vocab-size"):
        parser.add_argument(name)
    parser.add_argument("--no-engine", action="store_true")
    return parser.parse_known_args(arguments)[1]


if __name__ == "__main__":
    main()
