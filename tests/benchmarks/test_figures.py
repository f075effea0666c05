import json

import pytest

from benchmarks.figures import Stream, emit, share, summarize, wall_s


def _streams() -> list[Stream]:
    # Sent at 10 and 11; the first decodes from 12 to 16, the second from 13 to 19.
    return [
        Stream(10.0, [(12.0, 1), (14.0, 2), (16.0, 2)]),
        Stream(11.0, [(13.0, 1), (15.0, 1), (19.0, 1)]),
    ]


def test_latencies_count_from_when_each_request_was_sent() -> None:
    figures = summarize(_streams())
    assert figures["ttft_p50_s"] == 2.0
    assert figures["ttft_max_s"] == 2.0
    assert figures["tpot_p50_s"] == 2.0  # the mean of 4 s / 4 tokens and 6 s / 2 tokens
    assert figures["tpot_max_s"] == 3.0


def test_rates_count_all_tokens_over_the_whole_time() -> None:
    figures = summarize(_streams())
    assert figures["num_tokens"] == 8
    assert figures["wall_s"] == wall_s(_streams()) == 9.0
    assert figures["tokens_per_s"] == 8 / 9


def test_decode_rate_counts_only_while_all_streams_decode() -> None:
    # From 13 to 16: two tokens at 14, one at 15, two at 16.
    assert summarize(_streams())["decode_tokens_per_s"] == 5 / 3


def test_decode_rate_is_unknown_where_streams_do_not_overlap() -> None:
    streams = [Stream(0.0, [(1.0, 1), (2.0, 1)]), Stream(0.0, [(3.0, 1), (4.0, 1)])]
    assert summarize(streams)["decode_tokens_per_s"] is None


def test_one_token_has_no_time_per_output_token() -> None:
    assert summarize([Stream(0.0, [(1.0, 1)])])["tpot_p50_s"] is None


@pytest.mark.parametrize("streams", [[], [Stream(0.0)]])
def test_a_stream_without_tokens_is_an_error(streams: list[Stream]) -> None:
    with pytest.raises(ValueError, match="no token"):
        summarize(streams)


def test_share_of_an_unknown_is_unknown() -> None:
    assert share(1.0, 4.0) == 0.25
    assert share(None, 4.0) is None
    assert share(1.0, None) is None


def test_a_line_is_json_with_rounded_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    emit("engine", {"rate": 123456.0, "count": 123456, "parts": {"a": 0.123456}, "all": [1.00001], "none": None})
    assert json.loads(capsys.readouterr().out) == {
        "benchmark": "engine",
        "rate": 123500.0,
        "count": 123456,
        "parts": {"a": 0.1235},
        "all": [1.0],
        "none": None,
    }
