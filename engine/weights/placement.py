"""Weights from host arrays onto a mesh, piece by piece, without a second copy of any parameter anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def allocate(target: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """Zeros of the target's shape and dtype, made on the devices that hold them."""
    make = jax.jit(_zeros, static_argnums=(0, 1), out_shardings=sharding)
    return make(tuple(target.shape), np.dtype(target.dtype))


def place(host: np.ndarray, target: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """A whole parameter: each device gets its part of `host`, and casts it to the target's dtype."""
    return _cast(_to_devices(host, sharding), target.dtype, sharding)


def write(stacked: jax.Array, host: np.ndarray, index: tuple[int, ...]) -> jax.Array:
    """`stacked` with `host` at `stacked[index]`, in the same memory: `stacked` is donated.

    `index` counts along the leading axes; host.shape == stacked.shape[len(index):]. Compiled once per shape: the index
    is an argument of the program.
    """
    sharding = stacked.sharding
    assert isinstance(sharding, NamedSharding)
    piece_sharding = NamedSharding(sharding.mesh, PartitionSpec(*_axes(sharding, stacked.ndim)[len(index) :]))
    piece = _to_devices(host, piece_sharding)
    return _write(stacked, piece, np.asarray(index, np.int32), sharding)


def _axes(sharding: NamedSharding, ndim: int) -> tuple[str | tuple[str, ...] | None, ...]:
    spec = tuple(sharding.spec)
    return spec + (None,) * (ndim - len(spec))


def _to_devices(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # Unlike device_put it needs no other process: each takes the parts of its own devices.
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


# At module level, because jit finds its compiled programs again by the function's identity.
def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _convert(whole: jax.Array, dtype: np.dtype) -> jax.Array:
    return whole.astype(dtype)


def _cast(whole: jax.Array, dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    if whole.dtype == dtype:
        return whole
    return jax.jit(_convert, static_argnums=1, out_shardings=sharding)(whole, np.dtype(dtype))


@partial(jax.jit, donate_argnums=0, static_argnames=("sharding",))
def _write(stacked: jax.Array, piece: jax.Array, index: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Written for each device by itself (shard_map), because the partitioner may gather an operand whose updated axis
    is sharded, as that of the experts is."""
    axes = _axes(sharding, stacked.ndim)
    num_leading = stacked.ndim - piece.ndim

    def write_part(part: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        start = [index[axis] for axis in range(num_leading)] + [jnp.int32(0)] * piece.ndim
        update = piece.astype(part.dtype)[(None,) * num_leading]
        here: jax.Array | None = None
        for axis in range(num_leading):
            if axes[axis] is None:
                continue
            size = part.shape[axis]
            local = start[axis] - lax.axis_index(axes[axis]) * size
            inside = (local >= 0) & (local < size)
            here = inside if here is None else here & inside
            start[axis] = jnp.clip(local, 0, size - 1)
        if here is not None:
            update = jnp.where(here, update, lax.dynamic_slice(part, start, update.shape))
        return lax.dynamic_update_slice(part, update, start)

    return jax.shard_map(
        write_part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec(*axes[num_leading:]), PartitionSpec()),
        out_specs=sharding.spec,
    )(stacked, piece, index)
