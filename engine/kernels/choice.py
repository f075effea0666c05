"""Which kernel computes the attention of decode rows.

The Pallas kernel is taken where it gives what the reference gives on the device at hand, and not on trust: what
compiles it differs from GPU to GPU and from release to release.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from engine.config import AttentionChoice, AttentionKernel, CacheDType, EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.kernels.blockwise_attention import blockwise_attention, compute_dtype
from engine.kv_cache import BLOCK_LEN, NO_WINDOW, BatchLayout, CacheShape, KVCache, number_dtype, storage_dtype
from engine.sharding import num_cache_heads

_log = logging.getLogger(__name__)

_NUM_BLOCKS = 5
"""Of the longest row checked: more than one stretch of the kernel."""
_TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest difference that rounding explains, as a share of the largest number, by the type of the products' factors."""


def choose_attention(
    requested: AttentionChoice, mesh: Mesh, model: ModelConfig, config: EngineConfig
) -> AttentionKernel:
    """The kernel for `model` on `mesh`; all processes of a mesh choose the same.

    Raises `ConfigError` where `requested` is "pallas" and the devices are no NVIDIA GPUs, or its check fails there.
    """
    if requested == "reference":
        return "reference"
    device = mesh.local_devices[0]
    if not is_nvidia(device):
        if requested == "pallas":
            raise ConfigError(
                f"attention_kernel is pallas, which needs an NVIDIA GPU; this mesh is of {device.device_kind} "
                f"({device.platform}): choose auto or reference"
            )
        return "reference"
    group = model.num_heads // num_cache_heads(model, mesh)
    cache_dtype = config.cache_dtype or config.activation_dtype
    with jax.default_device(device):
        problem = check_pallas(model, group, config.page_size, cache_dtype, config.activation_dtype)
    if mesh.is_multi_process and not np.all(multihost_utils.process_allgather(np.array(problem is None))):
        problem = problem or "the check failed in another process of the mesh"
    if problem is None:
        return "pallas"
    if requested == "pallas":
        raise ConfigError(
            f"attention_kernel is pallas, whose check failed on {device.device_kind}: {problem}; choose auto or "
            "reference"
        )
    _log.warning(
        "decode attention: the reference, since the kernel's check failed on %s: %s", device.device_kind, problem
    )
    return "reference"


def is_nvidia(device: jax.Device) -> bool:
    """Whether CUDA drives the device."""
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


def check_pallas(
    model: ModelConfig,
    group: int,
    page_size: int,
    cache_dtype: CacheDType,
    activation_dtype: str,
    interpret: bool = False,
) -> str | None:
    """Runs kernel and reference once on small random data of the model's sizes: what is wrong, or None.

    `group`: query heads of a stored KV head. `interpret`: without a GPU.
    """
    try:
        # Not before it is needed: much of Pallas is loaded with it.
        from engine.kernels.paged_attention import paged_attention

        q, cache, layout = random_case(model.head_size, group, page_size, cache_dtype, activation_dtype)
        max_len, softcap = _NUM_BLOCKS * BLOCK_LEN, model.attention_softcap

        def kernel(q: jax.Array, cache: KVCache, layout: BatchLayout) -> jax.Array:
            return paged_attention(q, cache, jnp.int32(1), layout.windows[:, 0], layout, max_len, softcap, interpret)

        def reference(q: jax.Array, cache: KVCache, layout: BatchLayout) -> jax.Array:
            return blockwise_attention(q, cache, jnp.int32(1), layout.windows, layout, (0, _NUM_BLOCKS), softcap)

        used = np.asarray(layout.num_tokens) > 0
        got, expected = (_run(f, q, cache, layout)[used] for f in (kernel, reference))
    except Exception as error:  # Whatever it is, the reference works.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    largest = float(np.abs(expected).max())
    difference = float(np.abs(got - expected).max())
    factors = compute_dtype(np.dtype(jnp.dtype(activation_dtype)), number_dtype(storage_dtype(cache_dtype)))
    tolerance = _TOLERANCES[factors.name] * largest
    # Not a number is no difference that is small enough.
    if not difference <= tolerance:
        return f"it differs from the reference by {difference:.2g} where numbers reach {largest:.2g}"
    return None


def _run(f: Callable[..., jax.Array], *args: Any) -> np.ndarray:
    with jax.default_matmul_precision("float32"):
        return np.asarray(jax.jit(f)(*args).astype(jnp.float32))


def random_case(
    head_size: int, group: int, page_size: int, cache_dtype: CacheDType, activation_dtype: str, num_heads: int = 2
) -> tuple[jax.Array, KVCache, BatchLayout]:
    """Queries [B, K, G, 1, N], a cache of two layers, and rows of many lengths and windows, one of them unused."""
    rng = np.random.default_rng(0)
    longest = _NUM_BLOCKS * BLOCK_LEN
    positions = np.array([longest - 1, 0, page_size, longest - 41, longest - 70, 3])
    windows = np.array([NO_WINDOW, NO_WINDOW, 1, longest - 80, 65, NO_WINDOW])
    batch, columns = len(positions), longest // page_size
    shape = CacheShape(2, 1 + batch * columns, num_heads, head_size, page_size, cache_dtype)
    table = 1 + rng.permutation(batch * columns).reshape(batch, columns)
    num_tokens = np.where(np.arange(batch) == batch - 1, 0, 1)
    layout = BatchLayout(
        *(jnp.asarray(a, jnp.int32) for a in (table, positions[:, None], num_tokens, windows[:, None]))
    )
    q = jnp.asarray(rng.normal(size=(batch, num_heads, group, 1, head_size)) * 2 / head_size**0.5, activation_dtype)
    return q, _random_cache(shape, rng), layout


def _random_cache(shape: CacheShape, rng: np.random.Generator) -> KVCache:
    s = shape
    lead, dtype = (s.num_layers, s.num_pages, s.num_heads), storage_dtype(s.dtype)
    arrays = [rng.normal(size=(*lead, *end)) for end in [(s.head_size, s.page_size), (s.page_size, s.head_size)]]
    if dtype == np.int8:
        scales = [jnp.asarray(rng.uniform(0.01, 0.02, (*lead, s.page_size)), jnp.float32) for _ in arrays]
        return KVCache(*(jnp.asarray(np.clip(a * 50, -127, 127), jnp.int8) for a in arrays), *scales)
    return KVCache(*(jnp.asarray(a.astype(number_dtype(dtype)).view(dtype)) for a in arrays))
