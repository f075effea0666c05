"""A checkpoint's config and weights: strict in both directions, streamed onto the mesh one tensor at a time."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.weights.families import FAMILIES, GGUF_FAMILIES, Family, GGUFFamily, WeightMap
from engine.weights.families.hf_config import HFConfig, read_hf_config
from engine.weights.gguf_file import GGUFSource
from engine.weights.hf import HFSource
from engine.weights.placement import allocate, place, write
from engine.weights.plan import AbstractParams, ParamPlan, plan_params
from engine.weights.tensors import TensorSource

Params = dict[str, dict[str, jax.Array]]
"""{module: {param: array}}, Haiku's parameter tree."""

ShardingFor = Callable[[str, tuple[int, ...]], NamedSharding]
"""The sharding of a parameter, by its flat path and shape."""

Progress = Callable[[int, int, str], None]
"""Called after each tensor with (bytes read, bytes in all, name); bytes as in the file."""

FINITE_CHECK_CHUNK = 1 << 18
"""Elements looked at together: few enough to stay in a core's cache."""


def load_config(path: Path) -> ModelConfig:
    """The model of a Hugging Face directory or a GGUF file.

    Raises `CheckpointError` naming the file and the key that is missing, contradictory or not supported.
    """
    try:
        if path.is_dir():
            config = read_hf_config(path)
            return _hf_family(config).parse_config(config)
        with closing(GGUFSource(path)) as source:
            return _gguf_family(source).parse_config(source)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_params(
    path: Path,
    config: ModelConfig,
    abstract: AbstractParams,
    sharding_for: ShardingFor,
    progress: Progress | None = None,
) -> Params:
    """Loads every parameter of `abstract` (shapes, dtypes) onto the devices that `sharding_for` says.

    The host holds one source tensor at a time, the devices the parameters and one such tensor.

    Raises `CheckpointError` where a tensor is missing, left over, of another shape, not floating-point, or holds a
    value that is not finite or that the declared dtype cannot hold.
    """
    if path.is_dir():
        if config.family not in FAMILIES:
            raise CheckpointError(f"{path}: family {config.family!r}; expected one of {sorted(FAMILIES)}")
        with closing(HFSource(path)) as source:
            return load_from_source(source, FAMILIES[config.family].weights, config, abstract, sharding_for, progress)
    with closing(GGUFSource(path)) as gguf_source:
        weights = _gguf_family(gguf_source).weights
        return load_from_source(gguf_source, weights, config, abstract, sharding_for, progress)


def load_from_source(
    source: TensorSource,
    weights: WeightMap,
    config: ModelConfig,
    abstract: AbstractParams,
    sharding_for: ShardingFor,
    progress: Progress | None = None,
) -> Params:
    """`load_params` on an opened source."""
    plans = plan_params(source, weights, config, abstract)
    total_bytes = sum(source.tensors[piece].num_bytes for plan in plans for piece in plan.pieces)
    done_bytes = 0

    def report(name: str) -> None:
        nonlocal done_bytes
        done_bytes += source.tensors[name].num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes, name)

    params: Params = {}
    for plan in plans:
        module, _, name = plan.path.rpartition("/")
        params.setdefault(module, {})[name] = _load_param(source, weights, config, plan, sharding_for, report)
    return params


def _load_param(
    source: TensorSource,
    weights: WeightMap,
    config: ModelConfig,
    plan: ParamPlan,
    sharding_for: ShardingFor,
    report: Callable[[str], None],
) -> jax.Array:
    sharding = sharding_for(plan.path, tuple(plan.target.shape))
    transform = weights.transforms.get(plan.rule)
    stacked = allocate(plan.target, sharding) if plan.per_expert or not plan.pieces else None
    for index, piece in enumerate(plan.pieces):
        host = source.read(piece)
        check_values(source.tensors[piece].file, piece, host, plan.target.dtype)
        if transform is not None:
            host = transform(host, config)
        if stacked is None:
            return _finished(place(_as_device_dtype(host), plan.target, sharding), piece, report)
        stacked = _finished(write(stacked, _as_device_dtype(host), index), piece, report)
    assert stacked is not None
    return stacked


def _finished(array: jax.Array, name: str, report: Callable[[str], None]) -> jax.Array:
    # Dispatch is asynchronous: without waiting, tensors that are still being copied would pile up on the host.
    array.block_until_ready()
    report(name)
    return array


def _as_device_dtype(host: np.ndarray) -> np.ndarray:
    # JAX has no float64 unless asked; all other casts are left to the device, which is faster at them.
    return host.astype(np.float32) if host.dtype == np.float64 else host


def check_values(file: Path, name: str, values: np.ndarray, target: np.dtype) -> None:
    """Raises `CheckpointError` where a value is not finite, or beyond the range of the target dtype."""
    largest = _largest_magnitude(values)
    if not np.isfinite(largest):
        raise CheckpointError(f"{file}: tensor {name!r} holds NaN or infinite values; the file is damaged")
    limit = float(ml_dtypes.finfo(target).max)
    if largest > limit:
        raise CheckpointError(
            f"{file}: tensor {name!r} holds a value of magnitude {largest:g}, above {limit:g}, the largest of "
            f"{np.dtype(target)}; load it with weight_dtype bfloat16 or float32"
        )


def _largest_magnitude(values: np.ndarray) -> float:
    """max |x|, infinite or NaN where a value is.

    The bit patterns of floats without their sign order as the magnitudes do, with infinities and NaNs above all finite
    ones: one pass over the bits, without a second array, tells both the range and whether all values are finite.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).reshape(-1).view(unsigned)
    without_sign = unsigned.type(np.iinfo(unsigned).max >> 1)
    starts = range(0, bits.size, FINITE_CHECK_CHUNK)
    chunks = (bits[start : start + FINITE_CHECK_CHUNK] for start in starts)
    largest = max((np.bitwise_and(chunk, without_sign).max() for chunk in chunks), default=unsigned.type(0))
    return float(np.asarray([largest], unsigned).view(values.dtype)[0])


def _hf_family(config: HFConfig) -> Family:
    model_type = config.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise config.refuse("model_type", f"expected one of {sorted(FAMILIES)}")
    architectures = config.values.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise config.refuse("architectures", f"expected [{family.architecture!r}]")
    if config.has("auto_map"):
        raise config.refuse("auto_map", "models with code of their own are not supported")
    return family


def _gguf_family(source: GGUFSource) -> GGUFFamily:
    architecture = source.header.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise CheckpointError(
            f"{source.path}: general.architecture is {architecture!r}; expected one of {sorted(GGUF_FAMILIES)}"
        )
    return family
