"""A replica's device mesh from its config: a shape within each host times a shape between hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from engine.errors import ConfigError
from engine.sharding import DATA, MODEL


@dataclass(frozen=True)
class MeshConfig:
    """Shapes are (data, model). The mesh has the product of both: (2, 4) in each of (1, 2) hosts is (2, 8)."""

    local: tuple[int, int] = (1, 1)
    """Devices of one host along each axis."""
    between_hosts: tuple[int, int] = (1, 1)
    """Hosts along each axis."""

    def __post_init__(self) -> None:
        for name in ["local", "between_hosts"]:
            shape = getattr(self, name)
            if len(shape) != 2 or min(shape) < 1:
                raise ConfigError(f"mesh {name} is {list(shape)}; expected two positive numbers, (data, model)")

    @property
    def shape(self) -> tuple[int, int]:
        """Devices along (data, model) of the whole mesh."""
        return (self.local[0] * self.between_hosts[0], self.local[1] * self.between_hosts[1])

    @property
    def num_hosts(self) -> int:
        """Processes that the mesh spans."""
        return self.between_hosts[0] * self.between_hosts[1]

    @property
    def devices_per_host(self) -> int:
        """Devices that each process brings."""
        return self.local[0] * self.local[1]


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over the devices of all processes (`jax.devices()` by default).

    A host may have more devices than the mesh takes: the first are used. Raises `ConfigError` where there are too few
    processes or devices, with the shapes that would work.
    """
    available = list(jax.devices() if devices is None else devices)
    by_host: dict[int, list[jax.Device]] = {}
    for device in available:
        by_host.setdefault(device.process_index, []).append(device)
    if len(by_host) != config.num_hosts:
        raise ConfigError(
            f"the mesh spans {config.between_hosts[0]} x {config.between_hosts[1]} hosts; {len(by_host)} process(es) "
            "have joined"
        )
    fewest = min(len(of_host) for of_host in by_host.values())
    if fewest < config.devices_per_host:
        shapes = ", ".join(f"{d} x {fewest // d}" for d in range(1, fewest + 1) if fewest % d == 0)
        raise ConfigError(
            f"the mesh takes {config.local[0]} x {config.local[1]} = {config.devices_per_host} devices of each host; "
            f"a host has {fewest} ({available[0].platform}): shapes that use all of them are {shapes}"
        )
    chosen = [device for host in sorted(by_host) for device in by_host[host][: config.devices_per_host]]
    grid = mesh_utils.create_hybrid_device_mesh(
        config.local, config.between_hosts, devices=chosen, process_is_granule=True
    )
    # The partitioner, not the program's types, places the intermediates.
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
