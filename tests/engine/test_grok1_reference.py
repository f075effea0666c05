"""The tiny Grok-1 against the release's own code: every mesh, both ways to divide experts, and each kind of step."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.models.decoder import Decoder
from engine.runner import StepRunner
from engine.sharding import make_mesh, param_sharding
from engine.teacher_forcing import ForcedSequence, forced_logits
from engine.verify import load_references
from engine.weights.load import load_config, load_params

NUM_SLOTS = 8
CASES = [(mesh, sharding) for mesh in [(1, 8), (2, 4)] for sharding in ["width", "expert"]]
CASES += [(mesh, "width") for mesh in [(8, 1), (1, 1)]]
"""On a model axis of 1 both ways are the same."""


def make_runner(tiny, mesh, dtype, expert_sharding, **options):
    config = load_config(tiny)
    decoder = Decoder(config, make_mesh(*mesh), dtype, dtype, expert_sharding)
    params = load_params(
        tiny,
        config,
        decoder.abstract_params(),
        lambda path, shape: param_sharding(path, shape, decoder.mesh, expert_sharding),
    )
    engine = EngineConfig(
        num_slots=NUM_SLOTS,
        max_model_len=64,
        activation_dtype=dtype,
        weight_dtype=dtype,
        expert_sharding=expert_sharding,
        **options,
    )
    return StepRunner(decoder, params, engine)


def run(runner, references, num_rows):
    """(reference, its logits after each token) of as many rows, which take turns with the prompts."""
    chosen = [references[i % len(references)] for i in range(num_rows)]
    return list(zip(chosen, forced_logits(runner, [ForcedSequence(r.prompt, r.greedy) for r in chosen]), strict=True))


def assert_equal_to_the_reference(runner, references, num_rows):
    found = run(runner, references, num_rows)
    assert len(found) == num_rows
    for reference, logits in found:
        num_prompt = len(reference.prompt)
        np.testing.assert_allclose(logits[:num_prompt], reference.logits, atol=1e-3, rtol=0)
        np.testing.assert_allclose(logits[num_prompt - 1 :], reference.continued_logits, atol=1e-3, rtol=0)
        assert tuple(logits[num_prompt - 1 : -1].argmax(-1)) == reference.greedy


@pytest.fixture(scope="module")
def tiny(reference_data):
    return reference_data / "grok1" / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "expert_sharding"), CASES, ids=lambda value: str(value).replace(", ", "x"))
def test_chunked_prefill_and_decode_on_every_mesh(tiny, mesh, expert_sharding):
    """Chunks of 16 tokens for prompts of 7, 19 and 31; one program of each kind, in which 1, 3 and 8 rows are used."""
    references = load_references(tiny / "reference_f32.npz")
    runner = make_runner(tiny, mesh, "float32", expert_sharding, prefill_buckets=(16,), batch_invariant=True)
    for num_rows in [1, 3, 8]:
        assert_equal_to_the_reference(runner, references, num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("expert_sharding", ["width", "expert"])
def test_whole_prompts_and_a_decode_program_for_each_number_of_rows(tiny, expert_sharding):
    """Every prompt in one chunk of 32; decode programs of 1, 4 and 8 rows."""
    references = load_references(tiny / "reference_f32.npz")
    runner = make_runner(tiny, (1, 8), "float32", expert_sharding, prefill_buckets=(32,))
    assert runner.sizes.decode_row_buckets == (1, 2, 4, 8)
    for num_rows in [1, 3, 8]:
        assert_equal_to_the_reference(runner, references, num_rows)


def distances(a, b):
    """Root mean square over the vocabulary, for each token."""
    return np.sqrt(np.mean(np.square(a.astype(np.float64) - b), axis=-1))


@pytest.mark.slow
def test_bfloat16_is_as_close_as_the_releases_own_bfloat16_is_to_its_float32(tiny):
    """Of the median token. Where rounding makes the router choose another expert, the distance of one token is a matter
    of chance: few may be beyond the largest between the references."""
    exact, theirs = (load_references(tiny / f"reference_{name}.npz") for name in ["f32", "bf16"])
    runner = make_runner(tiny, (1, 8), "bfloat16", "width", prefill_buckets=(16,), batch_invariant=True)
    ours = [logits[: len(reference.prompt)] for reference, logits in run(runner, exact, 3)]
    spread = np.concatenate([distances(b.logits, a.logits) for a, b in zip(exact, theirs, strict=True)])
    assert len(spread) == 7 + 19 + 31
    for references in [exact, theirs]:
        found = np.concatenate([distances(o, r.logits) for o, r in zip(ours, references, strict=True)])
        assert np.median(found) <= 1.05 * np.median(spread)
        assert np.mean(found > spread.max()) <= 0.1
