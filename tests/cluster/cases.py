"""What a replica over several hosts must compute as one process does: models, meshes, and what is compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from cluster.mesh import MeshConfig, build_mesh
from engine.config import EngineConfig
from engine.devices import put
from engine.engine import Engine
from engine.models.decoder import Decoder, Params
from engine.request import Request, SamplingParams
from engine.runner import StepRunner
from engine.sharding import param_sharding
from engine.teacher_forcing import ForcedSequence, forced_logits
from engine.weights.load import load_config, load_params
from tests.engine.tiny_models import WIDE, random_params, run, tokens_of

GROK = Path(__file__).parents[2] / ".." / "shared" / "data" / "grok1" / "tiny"
ENGINE = EngineConfig(
    num_slots=8,
    max_model_len=160,
    prefill_buckets=(16,),
    max_queue_len=64,
    decode_chunk=4,
    batch_invariant=True,
)
"""Prompts in chunks of 16 tokens, decode in chunks of 4, two attention blocks; one program of each kind."""


@dataclass(frozen=True)
class Case:
    """A model on a mesh of several hosts."""

    model: str
    """dense or grok."""
    local: tuple[int, int]
    between_hosts: tuple[int, int]

    @property
    def name(self) -> str:
        """As files and results are called."""
        data, model = MeshConfig(self.local, self.between_hosts).shape
        return f"{self.model}-{data}x{model}"

    @property
    def in_one_process(self) -> "Case":
        """The same mesh of one host's devices."""
        return Case(self.model, MeshConfig(self.local, self.between_hosts).shape, (1, 1))


CASES = {
    2: [Case(model, *shapes) for model in ["dense", "grok"] for shapes in [((1, 4), (1, 2)), ((1, 4), (2, 1))]],
    4: [Case(model, *shapes) for model in ["dense", "grok"] for shapes in [((1, 2), (1, 4)), ((1, 2), (2, 2))]],
}
"""By the number of hosts: meshes (1, 8) and (2, 4), with hosts along the data axis, the model axis, and both."""


def make_runner(case: Case) -> StepRunner:
    """Of the devices of all processes; each process calls it."""
    mesh = build_mesh(MeshConfig(case.local, case.between_hosts))
    config = WIDE if case.model == "dense" else load_config(GROK)
    decoder = Decoder(config, mesh, "float32", "float32")
    return StepRunner(decoder, _params(case, decoder), ENGINE)


def _params(case: Case, decoder: Decoder) -> Params:
    if case.model == "grok":
        return load_params(
            GROK,
            decoder.config,
            decoder.abstract_params(),
            lambda path, shape: param_sharding(path, shape, decoder.mesh),
        )
    tree: Params = {}
    for path, value in random_params(WIDE).items():
        module, _, name = path.rpartition("/")
        sharding = param_sharding(path, value.shape, decoder.mesh)
        placed = put(value, sharding)
        assert isinstance(placed, jax.Array)
        tree.setdefault(module, {})[name] = placed
    return tree


def sequences(vocab_size: int) -> list[ForcedSequence]:
    """More than a chunk, exactly a chunk, and one that decodes beyond the first attention block."""
    rng = np.random.default_rng(7)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, number).tolist())

    return [ForcedSequence(tokens(length), tokens(3)) for length in [37, 16, 126]]


def requests(vocab_size: int) -> Iterator[Request]:
    """More of them than slots, greedy and sampled ones."""
    for index, sequence in enumerate(sequences(vocab_size) * 3):
        params = SamplingParams(
            max_tokens=3 + index % 4,
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=index,
            ignore_eos=True,
            logprobs=1,
        )
        yield Request(f"r{index}", sequence.prompt[index // 3 :], params)


def outcomes(runner: StepRunner) -> dict[str, np.ndarray]:
    """Logits of forced sequences, and the tokens of requests that the engine batches. `runner` may be in lockstep."""
    vocab_size = runner.decoder.config.vocab_size
    engine = Engine(runner, ENGINE)
    by_request = run(engine, list(requests(vocab_size)))
    assert engine.stats().num_compilations_since_warm_up == 0
    logits = forced_logits(runner, sequences(vocab_size))
    arrays = {f"logits{j}": array for j, array in enumerate(logits)}
    for request_id, outputs in by_request.items():
        arrays[f"tokens-{request_id}"] = np.asarray(tokens_of(outputs))
        arrays[f"logprobs-{request_id}"] = np.asarray([t.logprob for o in outputs for t in o.logprobs or ()])
    return arrays
