"""The Grok-1 release's API in its three layers, on the engine that serves everything else.

    runner = InferenceRunner(ModelRunner("./checkpoints", make_mesh(1, 8)), tokenizer, EngineConfig())
    runner.initialize()
    server = runner.run()
    print(sample_from_model(server, "The answer to life", max_len=100, temperature=0.01))

As in the release, `max_len` counts new tokens, generation goes on past an end-of-sequence token, and the text comes
when the last token does. Unlike there, several requests may be under way: every `run()` is a caller of its own, from
any thread, and they share the slots of one engine. A prompt that does not fit the context is an error, not cut.
"""

import itertools
import math
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

from jax.sharding import Mesh

from engine import request as engine_request
from engine.config import DType, EngineConfig, ExpertSharding, ModelConfig, WeightDType
from engine.engine import Engine, build_engine
from engine.errors import ConfigError
from engine.models.decoder import Decoder, Params
from engine.request import RequestOutput, SamplingParams
from engine.runner import Progress
from engine.sharding import param_sharding
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source

TOP_K = 8
"""Alternatives in the report on each token."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; with the model's own first token where asked and where it has one."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""


@dataclass(frozen=True)
class Request:
    """One prompt, as the release's generator takes it."""

    prompt: str
    temperature: float
    """0 is greedy."""
    nucleus_p: float
    """Top-p, in (0, 1]."""
    rng_seed: int
    max_len: int
    """New tokens."""


@dataclass(frozen=True)
class SampleOutput:
    """The report on one sampled token. Probabilities are the model's own, before temperature and nucleus."""

    token_id: int
    prob: float
    top_k_token_ids: tuple[int, ...]
    """The `TOP_K` most likely tokens, best first."""
    top_k_probs: tuple[float, ...]


@dataclass
class Completion:
    """What one request became."""

    text: str = ""
    outputs: list[SampleOutput] = field(default_factory=list)
    """One for each token."""


class ModelRunner:
    """A model and its weights on a mesh."""

    def __init__(
        self,
        source: str,
        mesh: Mesh,
        weight_dtype: WeightDType = "bfloat16",
        activation_dtype: DType = "bfloat16",
        expert_sharding: ExpertSharding = "width",
    ) -> None:
        """`source`: as `engine.weights.source.resolve_source` reads it. Raises `CheckpointError` or `ConfigError`."""
        self._path = resolve_source(source)
        self.config: ModelConfig = load_config(self._path)
        self.decoder = Decoder(self.config, mesh, weight_dtype, activation_dtype, expert_sharding)
        self.params: Params | None = None

    def initialize(self, progress: Progress | None = None) -> Params:
        """Loads the weights; `progress` hears of bytes. Raises `CheckpointError`."""
        mesh, experts = self.decoder.mesh, self.decoder.expert_sharding
        self.params = load_params(
            self._path,
            self.config,
            self.decoder.abstract_params(),
            lambda name, shape: param_sharding(name, shape, mesh, experts),
            progress,
        )
        return self.params


class InferenceRunner:
    """A model runner, a tokenizer and an engine between them."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, config: EngineConfig) -> None:
        """`config`: its dtypes and expert sharding are the model runner's business and not read."""
        self.runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._collected: dict[str, _Collected] = {}

    def initialize(self, progress: Progress | None = None) -> None:
        """Loads the weights where that has not been done, and compiles every program."""
        params = self.runner.params if self.runner.params is not None else self.runner.initialize(progress)
        self._engine = build_engine(self.runner.decoder, params, self._config)
        self._engine.warm_up(progress)

    def run(
        self, on_completion: Callable[[Completion], None] | None = None
    ) -> Generator[str | None, Request | None, None]:
        """A generator that takes a `Request` by `send` and gives its text; advance it with `next` before each `send`.

        `on_completion` also hears of every token's report. Errors of a request are raised by `send`; they end this
        generator and no other.
        """
        while True:
            request = yield None
            if request is None:
                continue
            completion = self.generate(request)
            if on_completion is not None:
                on_completion(completion)
            yield completion.text

    def generate(self, request: Request) -> Completion:
        """Runs one request to its end. Threads may call it together; whoever waits drives the engine for all.

        Raises `InvalidRequestError` or `QueueFullError`.
        """
        engine = self._engine
        if engine is None:
            raise ConfigError("the runner is not initialized; call initialize() first")
        request_id = f"generate-{next(self._ids)}"
        params = SamplingParams(
            max_tokens=request.max_len,
            temperature=request.temperature,
            top_p=request.nucleus_p,
            seed=request.rng_seed,
            ignore_eos=True,
            logprobs=TOP_K,
        )
        tokens = tuple(self._tokenizer.encode(request.prompt, add_special_tokens=True))
        mine = _Collected()
        with self._lock:
            engine.add_request(engine_request.Request(request_id, tokens, params))
            self._collected[request_id] = mine
        try:
            while not mine.finished:
                with self._lock:
                    if not mine.finished:
                        self._collect(engine.step())
        finally:
            with self._lock:
                if not mine.finished:
                    engine.abort(request_id)
                del self._collected[request_id]
        return Completion(self._tokenizer.decode([o.token_id for o in mine.outputs]), mine.outputs)

    def _collect(self, outputs: list[RequestOutput]) -> None:
        """Hands each output to its own request."""
        for output in outputs:
            collected = self._collected.get(output.request_id)
            if collected is not None:
                collected.take(output)


@dataclass
class _Collected:
    """What has come for one request."""

    outputs: list[SampleOutput] = field(default_factory=list)
    finished: bool = False

    def take(self, output: RequestOutput) -> None:
        for token_id, report in zip(output.token_ids, output.logprobs or (), strict=True):
            ids, logprobs = zip(*report.top, strict=True)
            probs = tuple(math.exp(x) for x in logprobs)
            self.outputs.append(SampleOutput(token_id, math.exp(report.logprob), ids, probs))
        self.finished = output.finish_reason is not None


def sample_from_model(
    server: Generator[str | None, Request | None, None], prompt: str, max_len: int, temperature: float
) -> str:
    """One prompt through a running generator, with the release's settings: the whole nucleus, seed 42."""
    next(server)
    text = server.send(Request(prompt=prompt, temperature=temperature, nucleus_p=1.0, rng_seed=42, max_len=max_len))
    assert text is not None
    return text
