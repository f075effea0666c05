"""Virtual CPU devices, so that every mesh can be tried without the machine it is meant for; arrays onto devices."""

import os
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from engine.errors import ConfigError


def provide_cpu_devices(num_devices: int) -> None:
    """Lets the CPU stand for at least `num_devices` devices; nothing where it does already, or where XLA_FLAGS decides.

    Raises `ConfigError` where jax has been used with fewer before.
    """
    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if forced or max(1, jax.config.jax_num_cpu_devices) >= num_devices:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ConfigError(f"the CPU cannot stand for {num_devices} devices any more: {error}") from None


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """What XLA must be told for programs of this mesh.

    On CPUs of several processes collectives find each other by their order alone. The scheduler that lets independent
    ones run side by side may start them in another order in each process, which gloo ends the process for.
    """
    devices = mesh.devices.flat
    if devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1:
        return {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    return {}


T = TypeVar("T")


def put(tree: T, sharding: NamedSharding) -> T:
    """The host arrays of `tree` on the devices of a mesh, which may be those of several processes.

    Every process must have the same arrays. Unlike `jax.device_put`, which compares them first, none waits for another.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put_one(host: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put_one, tree)
