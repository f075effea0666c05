"""Weights from host arrays onto a mesh, piece by piece, without a second copy of any parameter anywhere.

Everything here is done for each device by itself (`shard_map`): no device waits for another, so that several threads
may load at once, and nothing is gathered. Letters: O out, I in, G groups of inputs with a scale of their own.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from engine.weights.quantize import dequantize, group_scales, host_scales, quantize

Axis = str | tuple[str, ...] | None


def allocate(target: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """Zeros of the target's shape and dtype, made on the devices that hold them."""
    return _zeros(tuple(target.shape), np.dtype(target.dtype), sharding)


def place(host: np.ndarray, dtype: np.dtype, sharding: NamedSharding, transposed: bool = False) -> jax.Array:
    """Each device gets its part of `host`, and casts it; with `transposed` the host's last two axes are swapped."""
    arrived = _to_devices(host, sharding, transposed)
    if arrived.dtype == dtype and not transposed:
        return arrived
    return _arrange(arrived, np.dtype(dtype), transposed, sharding)


def place_quantized(
    host: np.ndarray,
    scale: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    scale_sharding: NamedSharding,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`place`, and quantised there.

    Returns int8 values [..., O, I] in `sharding`, scales [..., O, G] (shape and dtype of `scale`) in `scale_sharding`,
    and for each device one row of (sum of squared errors, sum of squares, largest error).
    """
    arrived = _to_devices(host, sharding, transposed)
    num_groups, num_parts = scale.shape[-1], num_input_parts(sharding, host.ndim)
    if num_groups % num_parts == 0 and scale_sharding.is_equivalent_to(sharding, host.ndim):
        return _quantize(arrived, num_groups // num_parts, np.dtype(scale.dtype), transposed, sharding)
    # A group lies on several devices, whose maxima would have to be exchanged; the host sees all of it.
    scales = host_scales(np.swapaxes(host, -1, -2) if transposed else host, num_groups, np.dtype(scale.dtype))
    by_part = _to_devices(_with_whole_groups(scales, sharding), sharding)
    values, figures = _quantize_by(arrived, by_part, transposed, sharding)
    return values, place(scales, scale.dtype, scale_sharding), figures


def place_dequantized(
    host: np.ndarray, scales: np.ndarray, dtype: np.dtype, sharding: NamedSharding, transposed: bool = False
) -> jax.Array:
    """`place` of int8 `host`, each value times its scale; `scales` is [..., O, G] whichever way `host` is turned."""
    arrived = _to_devices(host, sharding, transposed)
    by_part = _to_devices(_with_whole_groups(scales, sharding), sharding)
    return _dequantize(arrived, by_part, np.dtype(dtype), transposed, sharding)


def write(stacked: jax.Array, piece: jax.Array, index: int) -> jax.Array:
    """`stacked` with `piece` at `stacked[index]`, in the same memory: `stacked` is donated.

    The piece has the shape, dtype and sharding (`piece_sharding`) of `stacked[0]`. Compiled once per shape: the index
    is an argument of the program.
    """
    sharding = stacked.sharding
    assert isinstance(sharding, NamedSharding)
    return _write(stacked, piece, np.int32(index), sharding)


def piece_sharding(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The sharding of one index of the leading axis of an array of `ndim` axes."""
    return NamedSharding(sharding.mesh, PartitionSpec(*_axes(sharding, ndim)[1:]))


def parts_held_here(host: np.ndarray, sharding: NamedSharding, transposed: bool = False) -> list[np.ndarray]:
    """Views of what this process's devices hold of `host`, each part once; of a mesh of one process that is all of it.

    The rest of a mapped file is not read.
    """
    if sharding.is_fully_addressable:
        return [host]
    file_sharding = NamedSharding(sharding.mesh, _spec(sharding, host.ndim, transposed))
    indices = file_sharding.addressable_devices_indices_map(host.shape).values()
    different = {tuple((part.start, part.stop) for part in index): index for index in indices if index is not None}
    return [host[index] for index in different.values()]


def num_input_parts(sharding: NamedSharding, ndim: int) -> int:
    """Into how many parts the last axis of an array of `ndim` axes is cut."""
    axis = _axes(sharding, ndim)[-1]
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    return math.prod(sharding.mesh.shape[name] for name in names)


def _with_whole_groups(scales: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """The scales repeated so that no group lies on several devices."""
    num_groups = scales.shape[-1]
    needed = math.lcm(num_groups, num_input_parts(sharding, scales.ndim))
    return np.repeat(scales, needed // num_groups, axis=-1)


def _axes(sharding: NamedSharding, ndim: int) -> tuple[Axis, ...]:
    spec = tuple(sharding.spec)
    return spec + (None,) * (ndim - len(spec))


def _spec(sharding: NamedSharding, ndim: int, transposed: bool = False) -> PartitionSpec:
    axes = _axes(sharding, ndim)
    return PartitionSpec(*axes[:-2], axes[-1], axes[-2]) if transposed else PartitionSpec(*axes)


def _to_devices(host: np.ndarray, sharding: NamedSharding, transposed: bool = False) -> jax.Array:
    # On the CPU a device array may share the memory of the host's; that of a file would change with the file. Devices
    # that hold the same part share one copy.
    copies: dict[tuple[tuple[int | None, int | None], ...], np.ndarray] = {}

    def part_of(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        if not isinstance(host, np.memmap):
            return host[index]
        key = tuple((part.start, part.stop) for part in index)
        if key not in copies:
            copies[key] = np.array(host[index])
        return copies[key]

    file_sharding = NamedSharding(sharding.mesh, _spec(sharding, host.ndim, transposed))
    # Unlike device_put it needs no other process: each takes the parts of its own devices.
    return jax.make_array_from_callback(host.shape, file_sharding, part_of)


# At module level, because jit finds its compiled programs again by the function's identity.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _arrange(arrived: jax.Array, dtype: np.dtype, transposed: bool, sharding: NamedSharding) -> jax.Array:
    return jax.shard_map(
        lambda part: _turn(part, transposed).astype(dtype),
        mesh=sharding.mesh,
        in_specs=_spec(sharding, arrived.ndim, transposed),
        out_specs=_spec(sharding, arrived.ndim),
    )(arrived)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize(
    arrived: jax.Array, groups_per_part: int, scale_dtype: np.dtype, transposed: bool, sharding: NamedSharding
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def quantize_part(part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        exact = _turn(part, transposed).astype(jnp.float32)
        scales = group_scales(exact, groups_per_part, scale_dtype)
        values = quantize(exact, scales)
        return values, scales, _error_figures(exact, values, scales)

    spec = _spec(sharding, arrived.ndim)
    return jax.shard_map(
        quantize_part,
        mesh=sharding.mesh,
        in_specs=_spec(sharding, arrived.ndim, transposed),
        out_specs=(spec, spec, PartitionSpec(sharding.mesh.axis_names)),
    )(arrived)


@partial(jax.jit, static_argnums=(2, 3))
def _quantize_by(
    arrived: jax.Array, scales: jax.Array, transposed: bool, sharding: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    def quantize_part(part: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        exact = _turn(part, transposed).astype(jnp.float32)
        values = quantize(exact, scales)
        return values, _error_figures(exact, values, scales)

    spec = _spec(sharding, arrived.ndim)
    return jax.shard_map(
        quantize_part,
        mesh=sharding.mesh,
        in_specs=(_spec(sharding, arrived.ndim, transposed), spec),
        out_specs=(spec, PartitionSpec(sharding.mesh.axis_names)),
    )(arrived, scales)


def _error_figures(exact: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    error = dequantize(values, scales) - exact
    return jnp.stack([jnp.sum(jnp.square(error)), jnp.sum(jnp.square(exact)), jnp.max(jnp.abs(error))])[None]


@partial(jax.jit, static_argnums=(2, 3, 4))
def _dequantize(
    arrived: jax.Array, scales: jax.Array, dtype: np.dtype, transposed: bool, sharding: NamedSharding
) -> jax.Array:
    spec = _spec(sharding, arrived.ndim)
    return jax.shard_map(
        lambda part, scales: dequantize(_turn(part, transposed), scales).astype(dtype),
        mesh=sharding.mesh,
        in_specs=(_spec(sharding, arrived.ndim, transposed), spec),
        out_specs=spec,
    )(arrived, scales)


def _turn(part: jax.Array, transposed: bool) -> jax.Array:
    return jnp.swapaxes(part, -1, -2) if transposed else part


@partial(jax.jit, donate_argnums=0, static_argnames=("sharding",))
def _write(stacked: jax.Array, piece: jax.Array, index: jax.Array, sharding: NamedSharding) -> jax.Array:
    first, *rest = _axes(sharding, stacked.ndim)

    def write_part(part: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        update = piece[None]
        if first is not None:
            num_here = part.shape[0]
            index = index - lax.axis_index(first) * num_here
            inside = (index >= 0) & (index < num_here)
            index = jnp.clip(index, 0, num_here - 1)
            update = jnp.where(inside, update, lax.dynamic_slice_in_dim(part, index, 1))
        return lax.dynamic_update_slice_in_dim(part, update, index, axis=0)

    return jax.shard_map(
        write_part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec(*rest), PartitionSpec()),
        out_specs=sharding.spec,
    )(stacked, piece, index)
