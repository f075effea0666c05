import numpy as np
import pytest

from benchmarks.cache_dtypes import compare

EXACT = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]))


def test_what_is_equal_has_no_error() -> None:
    assert compare([EXACT], [EXACT], [(0, 1, 1)]) == {
        "num_positions": 2,
        "largest_logit_error": 0.0,
        "mean_logit_error": 0.0,
        "greedy_equal_share": 1.0,
        "mean_logprob_loss": 0.0,
    }


def test_errors_are_those_after_each_token_but_the_first() -> None:
    got = EXACT.copy()
    got[0] = 100.0
    # After the second token the third, which had a half, has a quarter; after the third all is higher by 3.
    got[1] = np.log([0.5, 0.25, 0.25])
    got[2] += 3.0
    figures = compare([got], [EXACT], [(0, 1, 1)])
    assert figures["largest_logit_error"] == pytest.approx(3.0)
    assert figures["mean_logit_error"] == pytest.approx((2 * np.log(2) / 3 + 3) / 2)
    assert figures["greedy_equal_share"] == 0.5
    assert figures["mean_logprob_loss"] == pytest.approx(np.log(2))
