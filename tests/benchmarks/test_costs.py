import jax
import pytest

from benchmarks.costs import ModelCosts
from benchmarks.machine import Limits
from engine.config import ModelConfig
from engine.models.decoder import Decoder
from engine.sharding import make_mesh

# All sizes differ, so that none can stand for another: V 31, D 14, L 3, H 4, K 2, N 6, F 10.
_V, _D, _L, _H, _K, _N, _F = 31, 14, 3, 4, 2, 6, 10
_LAYERS = _L * (_D * _N * (2 * _H + 2 * _K) + 3 * _D * _F + 2 * _D) + _D


def _costs(*, tied: bool, weight_dtype: str = "float32") -> ModelCosts:
    model = ModelConfig(
        family="llama",
        vocab_size=_V,
        hidden_size=_D,
        num_layers=_L,
        num_heads=_H,
        num_kv_heads=_K,
        head_size=_N,
        intermediate_size=_F,
        max_position_embeddings=64,
        tie_embeddings=tied,
    )
    decoder = Decoder(model, make_mesh(1, 1, jax.devices()[:1]), weight_dtype, "float32")
    return ModelCosts.of(model, decoder.abstract_params(), cache_itemsize=2)


def _limits(bandwidth: float, peak: float) -> Limits:
    return Limits("cpu", "a machine", "float32", bandwidth, peak, 0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_and_head_are_counted_once_and_the_embedding_only_as_head(tied: bool) -> None:
    costs = _costs(tied=tied)
    assert costs.layer_params == _LAYERS
    assert costs.head_params == _V * _D
    assert costs.weight_bytes == 4 * (_LAYERS + _V * _D)


def test_bytes_follow_the_dtypes() -> None:
    costs = _costs(tied=True, weight_dtype="bfloat16")
    norms = _D * (2 * _L + 1)  # in float32
    assert costs.weight_bytes == 2 * (_LAYERS - norms + _V * _D) + 4 * norms
    assert costs.cache_bytes_per_token == 2 * _L * _K * _N * 2


def test_prefill_computes_the_head_once_and_attention_over_what_came_before() -> None:
    costs = _costs(tied=True)
    pairs = 1 + 2 + 3 + 4 + 5
    expected = 5 * 2 * _LAYERS + 2 * _V * _D + pairs * 4 * _L * _H * _N
    assert costs.prefill_flop(5) == expected
    assert costs.prefill_limit_tokens_per_s(5, _limits(1.0, 7.0 * expected)) == pytest.approx(35.0)


def test_decode_is_limited_by_the_slower_of_reading_and_computing() -> None:
    costs = _costs(tied=True)
    read = costs.weight_bytes + 3 * 11 * costs.cache_bytes_per_token
    flop = 3 * (2 * (_LAYERS + _V * _D) + 11 * costs.attention_flop_per_pair)
    assert costs.decode_limit_steps_per_s(3, 11, _limits(5.0 * read, 6.0 * flop)) == pytest.approx(5.0)
    assert costs.decode_limit_steps_per_s(3, 11, _limits(5.0 * read, 4.0 * flop)) == pytest.approx(4.0)
