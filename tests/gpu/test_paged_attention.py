"""The kernel as Triton compiles it, on an NVIDIA GPU. Run alone, without the virtual CPU devices of other tests:
python -m pytest tests/gpu
"""

from typing import get_args

import jax
import numpy as np
import pytest

from engine.config import CacheDType, EngineConfig
from engine.kernels.choice import check_pallas, choose_attention, is_nvidia, random_case
from engine.sharding import make_mesh

from ..engine.kernels.test_paged_attention import both
from ..engine.tiny_models import LLAMA

TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_nvidia(jax.devices()[0]), reason="there is no NVIDIA GPU"),
]


@pytest.mark.parametrize("activation_dtype", TOLERANCES)
@pytest.mark.parametrize("cache_dtype", get_args(CacheDType))
@pytest.mark.parametrize(
    ("head_size", "group", "page_size", "softcap"), [(64, 3, 16, None), (128, 8, 16, 30.0), (80, 1, 32, None)]
)
def test_kernel_equals_reference(head_size, group, page_size, softcap, cache_dtype, activation_dtype):
    case = random_case(head_size, group, page_size, cache_dtype, activation_dtype)
    got, expected = both(case, softcap, interpret=False)
    tolerance = TOLERANCES[activation_dtype] * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_the_kernel_is_chosen():
    assert check_pallas(LLAMA, 3, 16, "bfloat16", "bfloat16") is None
    assert choose_attention("auto", make_mesh(1, 1), LLAMA, EngineConfig()) == "pallas"
