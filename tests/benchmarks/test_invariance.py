from benchmarks.invariance import compare, continue_in_batches, sample_prompts
from tests.fakes.engine import FakeEngine


def test_a_stream_is_identical_only_where_every_token_is() -> None:
    alone = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (7, 8, 9)]
    together = [(1, 2, 3), (4, 0, 6), (0, 8, 9), (7, 8, 9)]
    assert compare(alone, together) == {
        "num_prompts": 4,
        "identical_share": 0.5,
        "mean_tokens_before_difference": 0.5,
    }


def test_nothing_differs_where_all_agree() -> None:
    figures = compare([(1, 2)], [(1, 2)])
    assert figures["identical_share"] == 1.0
    assert figures["mean_tokens_before_difference"] is None


def test_continuations_come_in_the_order_of_the_prompts() -> None:
    prompts = [tuple(b"a"), tuple(b"k"), tuple(b"y")]
    expected = [tuple(b"bcd"), tuple(b"lmn"), tuple(b"zab")]
    for batch in (1, 2, 3):
        assert continue_in_batches(FakeEngine(), prompts, 3, batch) == expected


def test_sampled_prompts_begin_with_the_first_token_and_have_the_length() -> None:
    engine = FakeEngine()
    assert sample_prompts(engine, 2, 4, ord("a")) == [tuple(b"abcd")] * 2
    assert [request.params.seed for request in engine.requests] == [0, 1]
