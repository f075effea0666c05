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


def write(stacked: jax.Array, host: np.ndarray, index: int) -> jax.Array:
    """`stacked` with `host` at `stacked[index]`, in the same memory: `stacked` is donated.

    host.shape == stacked.shape[1:]. Compiled once per shape: the index is an argument of the program.
    """
    sharding = stacked.sharding
    assert isinstance(sharding, NamedSharding)
    piece_sharding = NamedSharding(sharding.mesh, PartitionSpec(*_axes(sharding, stacked.ndim)[1:]))
    return _write(stacked, _to_devices(host, piece_sharding), np.int32(index), sharding)


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
    first, *rest = _axes(sharding, stacked.ndim)

    def write_part(part: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        update = piece.astype(part.dtype)[None]
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
