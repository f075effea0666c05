from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

from cluster.mesh import MeshConfig, build_mesh
from engine.errors import ConfigError


def hosts(*numbers):
    """Devices of several processes, as many for each as the numbers say."""
    return [
        SimpleNamespace(process_index=host, id=100 * host + i, platform="cpu", device_kind="cpu")
        for host, number in enumerate(numbers)
        for i in range(number)
    ]


def ids(mesh):
    return [[device.id for device in row] for row in mesh.devices]


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 1), (1, 1)])
def test_one_host(shape):
    mesh = build_mesh(MeshConfig(local=shape))
    assert dict(mesh.shape) == {"data": shape[0], "model": shape[1]}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    chosen = jax.devices()[: shape[0] * shape[1]]
    assert sorted(d.id for d in mesh.devices.flat) == [d.id for d in chosen]


@pytest.mark.parametrize(
    ("local", "between", "expected"),
    [
        ((1, 2), (2, 1), [[0, 1], [100, 101]]),
        ((2, 1), (1, 2), [[0, 100], [1, 101]]),
        ((1, 2), (1, 2), [[0, 1, 100, 101]]),
    ],
)
def test_several_hosts(monkeypatch, local, between, expected):
    """The devices of a host stand together along the axes of its own shape."""
    monkeypatch.setattr("cluster.mesh.Mesh", lambda grid, axes, axis_types: SimpleNamespace(devices=grid))
    assert ids(build_mesh(MeshConfig(local, between), hosts(2, 2))) == expected


def test_a_host_may_have_more_devices_than_are_taken(monkeypatch):
    monkeypatch.setattr("cluster.mesh.Mesh", lambda grid, axes, axis_types: SimpleNamespace(devices=grid))
    assert ids(build_mesh(MeshConfig((1, 2), (2, 1)), hosts(3, 5))) == [[0, 1], [100, 101]]


def test_shapes_that_follow():
    config = MeshConfig(local=(2, 4), between_hosts=(3, 5))
    assert (config.shape, config.num_hosts, config.devices_per_host) == ((6, 20), 15, 8)


def test_too_few_devices_are_refused_with_shapes_that_work():
    with pytest.raises(
        ConfigError,
        match=r"1 x 7 = 7 devices of each host; a host has 6 \(cpu\).*use all of them are 1 x 6, 2 x 3, 3 x 2, 6 x 1",
    ):
        build_mesh(MeshConfig(local=(1, 7)), hosts(6))


def test_another_number_of_processes_is_refused():
    with pytest.raises(ConfigError, match=r"spans 1 x 2 hosts; 3 process\(es\) have joined"):
        build_mesh(MeshConfig((1, 1), (1, 2)), hosts(1, 1, 1))


@pytest.mark.parametrize("shape", [(0, 1), (1, -2), (3,)])
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(ConfigError, match="mesh local is"):
        MeshConfig(local=shape)
    with pytest.raises(ConfigError, match="mesh between_hosts is"):
        MeshConfig(between_hosts=shape)
