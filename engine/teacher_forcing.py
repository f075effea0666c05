"""Logits of given sequences on the serving path: prompts prefilled in chunks, continuations decoded together.

For verification. It drives a runner with plans of its own, so no request may be under way on that runner.

Letters: T prompt tokens, N continuation tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from engine.plan import PlanRow
from engine.request import SamplingParams
from engine.runner import Runner


@dataclass(frozen=True)
class ForcedSequence:
    """Tokens whose logits are wanted: at least one of the prompt, computed by prefill, the others by decode."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass
class _Running:
    """A sequence in its slot, with what has been computed of it."""

    sequence: ForcedSequence
    slot: int
    shard: int
    page_ids: tuple[int, ...]
    num_computed: int = 0
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def num_prompt_tokens_left(self) -> int:
        return max(0, len(self.sequence.prompt) - self.num_computed)

    @property
    def num_tokens_left(self) -> int:
        return len(self.sequence.prompt) + len(self.sequence.continuation) - self.num_computed

    def row(self, num_tokens: int, page_size: int) -> PlanRow:
        """The plan row of the next `num_tokens` tokens, which count as computed from here on."""
        start, end = self.num_computed, self.num_computed + num_tokens
        self.num_computed = end
        tokens = (self.sequence.prompt + self.sequence.continuation)[start:end]
        pages = self.page_ids[: -(-end // page_size)]
        return PlanRow(self.slot, self.slot, start, num_tokens, tokens, pages, SamplingParams(temperature=0), False)


def forced_logits(runner: Runner, sequences: Sequence[ForcedSequence]) -> list[Float[np.ndarray, "T+N V"]]:
    """The float32 logits after each token of each sequence, which may be as many as the runner has slots."""
    assert len(sequences) <= runner.sizes.num_slots, f"{len(sequences)} sequences, {runner.sizes.num_slots} slots"
    running = [_place(runner, index, sequence) for index, sequence in enumerate(sequences)]
    num_shards = runner.sizes.num_shards
    for start in range(0, len(running), num_shards):
        _prefill(runner, running[start : start + num_shards])
    while left := [s for s in running if s.num_tokens_left]:
        per_shard = max(sum(s.shard == shard for s in left) for shard in range(num_shards))
        _compute(runner, left, next(b for b in runner.sizes.decode_row_buckets if b >= per_shard), 1)
    return [np.concatenate(s.logits) for s in running]


def _place(runner: Runner, index: int, sequence: ForcedSequence) -> _Running:
    """Sequences go round the data shards. The pages of a shard's slots are interleaved, so that no sequence's pages lie
    together."""
    sizes = runner.sizes
    per_shard = sizes.num_slots // sizes.num_shards
    shard, local = index % sizes.num_shards, index // sizes.num_shards
    pages = tuple(range(local, per_shard * sizes.num_columns, per_shard))
    return _Running(sequence, shard * per_shard + local, shard, pages)


def _prefill(runner: Runner, sequences: Sequence[_Running]) -> None:
    """Computes the prompts of at most one sequence of each data shard."""
    buckets = runner.sizes.prefill_buckets
    while left := [s for s in sequences if s.num_prompt_tokens_left]:
        longest = max(s.num_prompt_tokens_left for s in left)
        _compute(runner, left, 1, next((b for b in buckets if b >= longest), buckets[-1]))


def _compute(runner: Runner, sequences: Sequence[_Running], rows_per_shard: int, num_tokens: int) -> None:
    counts = [min(num_tokens, s.num_prompt_tokens_left or 1) for s in sequences]
    rows = [s.row(count, runner.sizes.page_size) for s, count in zip(sequences, counts, strict=True)]
    logits = runner.all_logits(rows, rows_per_shard, num_tokens)
    used = [0] * runner.sizes.num_shards
    for s, count in zip(sequences, counts, strict=True):
        index = s.shard * rows_per_shard + used[s.shard]
        used[s.shard] += 1
        s.logits.append(np.ascontiguousarray(logits[:, index, :count].T))
