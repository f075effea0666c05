import pytest

from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.sequence import SchedulerLimits, Sequence
from engine.shard_cache import ShardCache
from engine.step_builder import StepBuilder

from .fake_device import VOCAB_SIZE, make_limits


class Bench:
    """Sequences on shards, and steps built from them with no scheduler. Nobody is ever preempted."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.shards = [ShardCache(shard, limits) for shard in range(limits.num_shards)]
        self.running: list[Sequence] = []

    def add(self, num_tokens: int, shard: int = 0, max_tokens: int = 16) -> Sequence:
        """A sequence that has just got its slot; no two have the same prompt."""
        number = len(self.running)
        prompt = (number, *(i % VOCAB_SIZE for i in range(num_tokens - 1)))
        s = Sequence(number, Request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens)), list(prompt))
        s.slot = self.shards[shard].free_slots.pop()
        self.running.append(s)
        return s

    def decoding(self, num_known: int = 1, shard: int = 0, **more: int) -> Sequence:
        """A sequence whose prompt is computed, with so many generated tokens that have not been."""
        s = self.add(3, shard, **more)
        cache = self.shards[shard]
        cache.start(s)
        cache.provide(s, 0, 3)
        s.num_computed_tokens = s.num_prefill_tokens = 3
        s.token_ids += [7] * num_known
        return s

    def build(self, drafts: dict[int, tuple[int, ...]] | None = None, chunk: int = 1) -> StepPlan | None:
        builder = StepBuilder(self.limits, self.shards, self.running, drafts or {}, chunk, 0, lambda s: False)
        for s in self.running:
            builder.plan(s)
        return builder.build()


def test_nothing_to_compute_is_no_step():
    assert Bench(make_limits()).build() is None


@pytest.mark.parametrize(
    ("num_left", "bucket"), [(1, 4), (4, 4), (5, 4), (6, 8), (8, 8), (9, 8), (13, 16), (11, 8), (12, 16), (99, 16)]
)
def test_a_bucket_is_at_most_a_quarter_padding_or_the_next_smaller_one(num_left, bucket):
    bench = Bench(make_limits(max_model_len=128, prefill_buckets=(4, 8, 16)))
    bench.add(num_left)
    plan = bench.build()
    assert plan.prefill_bucket == bucket
    assert plan.prefill[0].num_tokens == min(num_left, bucket)
    assert plan.prefill[0].samples == (num_left <= bucket)


def test_exact_has_one_bucket():
    bench = Bench(make_limits(prefill_buckets=(4, 8), exact=True))
    bench.add(1)
    assert bench.build().prefill_bucket == 8


def test_one_chunk_for_each_shard_of_one_bucket_that_the_first_chooses():
    bench = Bench(make_limits(num_slots=4, num_shards=2))
    for num_tokens, shard in [(4, 0), (4, 0), (8, 1), (8, 1)]:
        bench.add(num_tokens, shard)
    plan = bench.build()
    assert [(row.sequence_id, row.num_tokens, row.samples) for row in plan.prefill] == [(0, 4, True), (2, 4, False)]


@pytest.mark.parametrize(("budget", "bucket"), [(None, 16), (18, 16), (17, 8), (10, 8), (9, 4), (1, 4)])
def test_the_budget_bounds_a_chunk_beside_decode_rows(budget, bucket):
    bench = Bench(make_limits(prefill_buckets=(4, 8, 16), step_token_budget=budget))
    for _ in range(2):
        bench.decoding()
    bench.add(16)
    plan = bench.build()
    assert (plan.prefill_bucket, len(plan.decode)) == (bucket, 2)


def test_the_budget_does_not_bound_a_chunk_alone():
    bench = Bench(make_limits(prefill_buckets=(4, 8, 16), step_token_budget=5))
    bench.add(16)
    assert bench.build().prefill_bucket == 16


@pytest.mark.parametrize("chunk_first", [True, False])
def test_the_budget_counts_rows_that_catch_up(chunk_first):
    bench = Bench(make_limits(prefill_buckets=(4, 8), decode_row_buckets=(4, 12), step_token_budget=12))
    if chunk_first:
        bench.add(8)
    bench.decoding(num_known=10)
    if not chunk_first:
        bench.add(8)
    plan = bench.build()
    # Whoever comes first takes what it can; the other is left the rest.
    assert (plan.prefill_bucket, len(plan.decode)) == ((8, 4) if chunk_first else (4, 10))


def test_every_decoding_sequence_has_a_row_before_any_catches_up():
    bench = Bench(make_limits(decode_row_buckets=(1, 4, 6)))
    bench.decoding(num_known=9)
    bench.decoding(num_known=1)
    bench.decoding(num_known=2)
    plan = bench.build()
    assert [(row.sequence_id, row.position, row.samples) for row in plan.decode] == [
        *[(0, p, False) for p in range(3, 7)],
        (1, 3, True),
        (2, 3, False),
    ]
    assert plan.decode_rows == 6


def test_rows_are_padded_to_the_smallest_count_that_holds_the_fullest_shard():
    bench = Bench(make_limits(num_slots=8, num_shards=2, decode_row_buckets=(1, 2, 4)))
    for shard in (0, 1, 1):
        bench.decoding(shard=shard)
    assert bench.build().decode_rows == 2


def test_guesses_follow_the_known_token_and_sample():
    bench = Bench(make_limits(decode_row_buckets=(4, 8)))
    s = bench.decoding()
    bench.shards[0].provide(s, 4, 7)
    plan = bench.build({s.sequence_id: (1, 2, 3)})
    assert [(row.position, row.token_ids, row.samples) for row in plan.decode] == [
        (3, (7,), True),
        (4, (1,), True),
        (5, (2,), True),
        (6, (3,), True),
    ]
    assert (s.num_drafted, s.num_pending, s.num_computed_tokens) == (3, 1, 4)


def test_guesses_take_no_pages():
    bench = Bench(make_limits(decode_row_buckets=(8,)))
    s = bench.decoding(num_known=2)
    # Its tokens end inside the second page, at position 4 of 0 to 7.
    assert len(bench.build({s.sequence_id: (1,) * 5}).decode) == 2 + 3
    assert len(s.pages) == 2


@pytest.mark.parametrize(("max_tokens", "num_guesses"), [(2, 0), (3, 1), (9, 2)])
def test_no_guess_goes_beyond_max_tokens_or_the_rows_that_are_left(max_tokens, num_guesses):
    bench = Bench(make_limits(decode_row_buckets=(4,)))
    s = bench.decoding(max_tokens=max_tokens)
    bench.decoding()
    bench.shards[0].provide(s, 4, 12)
    bench.build({s.sequence_id: (1, 2, 3)})
    assert s.num_drafted == num_guesses


def test_nothing_is_guessed_behind_a_token_that_has_not_been_seen():
    bench = Bench(make_limits(decode_row_buckets=(8,)))
    s = bench.decoding(num_known=0)
    s.num_pending = 1
    plan = bench.build({s.sequence_id: (1, 2)})
    assert [(row.position, row.token_ids) for row in plan.decode] == [(3, ())]


def test_a_sequence_with_guesses_under_way_waits():
    bench = Bench(make_limits())
    bench.decoding().num_drafted = 1
    assert bench.build() is None


def test_a_sequence_that_cannot_get_pages_is_left_out():
    bench = Bench(make_limits(num_slots=2, num_pages=2))
    bench.add(4)
    second = bench.add(8)
    bench.build()
    plan = bench.build()
    assert [row.sequence_id for row in plan.prefill + plan.decode] == [0]
    assert (second.started, second.num_computed_tokens, second.pages) == (True, 0, [])


def test_a_decode_chunk_ends_at_max_tokens_and_has_its_pages():
    bench = Bench(make_limits())
    short, long = bench.decoding(max_tokens=4), bench.decoding(max_tokens=16)
    plan = bench.build(chunk=6)
    assert [row.max_new_tokens for row in plan.decode] == [3, 6]
    assert [len(row.page_ids) for row in plan.decode] == [2, 3]
    assert (short.num_pending, short.num_computed_tokens, short.num_tokens) == (3, 6, 7)
    assert (long.num_pending, long.num_computed_tokens, long.num_tokens) == (6, 9, 10)


def test_a_sequence_that_catches_up_samples_nothing_before_it_has():
    bench = Bench(make_limits(decode_row_buckets=(4,)))
    bench.decoding(num_known=6)
    assert [(row.samples, row.max_new_tokens) for row in bench.build(chunk=5).decode] == [(False, 1)] * 4
    assert [(row.samples, row.max_new_tokens) for row in bench.build(chunk=5).decode] == [(False, 1), (True, 5)]
