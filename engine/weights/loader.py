"""Loads the parameters of an opened checkpoint, several at a time."""

import gc
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from engine.config import ModelConfig
from engine.weights.families import WeightMap
from engine.weights.placement import (
    allocate,
    parts_held_here,
    piece_sharding,
    place,
    place_dequantized,
    place_quantized,
    write,
)
from engine.weights.plan import ParamPlan, tensor_names
from engine.weights.quantize import QuantizationReport, measured_error
from engine.weights.tensors import TensorSource
from engine.weights.values import check_values

Params = dict[str, dict[str, jax.Array]]
"""{module: {param: array}}, Haiku's parameter tree."""

ShardingFor = Callable[[str, tuple[int, ...]], NamedSharding]
"""The sharding of a parameter, by its flat path and shape."""

Progress = Callable[[int, int, str], None]
"""Called after each tensor with (bytes read, bytes in all, name); bytes as in the file. By one thread at a time."""

NUM_THREADS = 4
"""Parameters loaded at once. More would read no faster from a disk, and the host holds one tensor for each."""


@dataclass(frozen=True)
class Loader:
    """An opened checkpoint and where its parameters go."""

    source: TensorSource
    weights: WeightMap
    config: ModelConfig
    sharding_for: ShardingFor

    def load(
        self,
        plans: Iterable[ParamPlan],
        progress: Progress | None = None,
        report: QuantizationReport | None = None,
        num_threads: int = NUM_THREADS,
    ) -> Params:
        """The parameters of `plans`. Raises `CheckpointError`; no further parameter is begun then."""
        plans = tuple(plans)
        done = _Done(self.source, plans, progress)
        params: Params = {}
        with ThreadPoolExecutor(num_threads, "load-weights") as pool:
            futures = [pool.submit(self._load_param, plan, done, report) for plan in plans]
            try:
                for plan, future in zip(plans, futures, strict=True):
                    module, _, name = plan.path.rpartition("/")
                    values, scale = future.result()
                    params.setdefault(module, {})[name] = values
                    if scale is not None:
                        params[module]["scale"] = scale
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return params

    def _load_param(
        self, plan: ParamPlan, done: "_Done", report: QuantizationReport | None
    ) -> tuple[jax.Array, jax.Array | None]:
        place_piece = _Placement(self, plan)
        values: jax.Array | None = None
        scale: jax.Array | None = None
        if plan.per_expert or not plan.pieces:
            values = allocate(plan.target, place_piece.sharding)
            scale = None if plan.scale is None else allocate(plan.scale, place_piece.scale_sharding)
        for index, piece in enumerate(plan.pieces):
            new_values, new_scale = place_piece(piece)
            values = new_values if values is None else write(values, new_values, index)
            if new_scale is not None:
                scale = new_scale if scale is None else write(scale, new_scale, index)
            # Dispatch is asynchronous: without waiting, tensors that are still being copied would pile up on the host.
            jax.block_until_ready((values, scale))
            # They may be the host's own memory, and would stay beside the next piece; jax lets go of host arrays when
            # Python collects garbage.
            del new_values, new_scale
            gc.collect(0)
            done(piece)
        assert values is not None
        if place_piece.figures and report is not None:
            error = measured_error(plan.path, place_piece.figures)
            with done.lock:
                report(error)
        return values, scale


class _Placement:
    """Puts the source tensors of one parameter on the devices, in the parameter's form."""

    def __init__(self, loader: Loader, plan: ParamPlan) -> None:
        self._loader, self._plan = loader, plan
        self.sharding = loader.sharding_for(plan.path, tuple(plan.target.shape))
        self.scale_sharding = self.sharding
        if plan.scale is not None:
            scale_path = f"{plan.path.rpartition('/')[0]}/scale"
            self.scale_sharding = loader.sharding_for(scale_path, tuple(plan.scale.shape))
        self.figures: list[jax.Array] = []
        """What `place_quantized` measured of each piece."""

    def __call__(self, piece: str) -> tuple[jax.Array, jax.Array | None]:
        plan, source = self._plan, self._loader.source
        sharding, scale_sharding = self.sharding, self.scale_sharding
        if plan.per_expert:
            sharding = piece_sharding(sharding, len(plan.target.shape))
            scale_sharding = piece_sharding(scale_sharding, len(plan.target.shape))
        info, host = source.tensors[piece], source.read(piece)
        if info.scales is not None:
            scales = self._scales(info.scales)
            if plan.scale is None:
                return place_dequantized(host, scales, plan.target.dtype, sharding, plan.transposed), None
            repeated = np.repeat(scales, plan.scale.shape[-1] // scales.shape[-1], axis=-1)
            return (
                place(host, plan.target.dtype, sharding, plan.transposed),
                place(repeated, plan.scale.dtype, scale_sharding),
            )
        dtype = plan.target.dtype if plan.scale is None else np.dtype(np.float32)
        for part in parts_held_here(host, sharding, plan.transposed):
            check_values(info.file, piece, part, dtype)
        transform = self._loader.weights.transforms.get(plan.rule)
        if transform is not None:
            host = transform(host, self._loader.config)
        host = _as_device_dtype(host)
        if plan.scale is None:
            return place(host, dtype, sharding, plan.transposed), None
        values, scale, figures = place_quantized(host, plan.scale, sharding, scale_sharding, plan.transposed)
        self.figures.append(figures)
        return values, scale

    def _scales(self, name: str) -> np.ndarray:
        """Scales of int8 values in the parameter's order of axes, [..., O, G]."""
        source, plan = self._loader.source, self._plan
        scales = _as_device_dtype(source.read(name))
        if plan.scale is None:
            check_values(source.tensors[name].file, name, scales, plan.target.dtype, factor=128)
        else:
            check_values(source.tensors[name].file, name, scales, plan.scale.dtype)
        return np.ascontiguousarray(np.swapaxes(scales, -1, -2) if plan.transposed else scales)


class _Done:
    """Adds up the bytes of the tensors that are done."""

    def __init__(self, source: TensorSource, plans: tuple[ParamPlan, ...], progress: Progress | None) -> None:
        self.lock = threading.Lock()
        self._source, self._progress = source, progress
        self._total_bytes = sum(source.tensors[name].num_bytes for name in tensor_names(source, plans))
        self._done_bytes = 0

    def __call__(self, piece: str) -> None:
        info = self._source.tensors[piece]
        with self.lock:
            self._done_bytes += info.num_bytes
            if info.scales is not None:
                self._done_bytes += self._source.tensors[info.scales].num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes, piece)


def _as_device_dtype(host: np.ndarray) -> np.ndarray:
    # JAX has no float64 unless asked; all other casts are left to the device, which is faster at them.
    return host.astype(np.float32) if host.dtype == np.float64 else host
