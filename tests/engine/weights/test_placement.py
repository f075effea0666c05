import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.weights import placement
from engine.weights.placement import allocate, parts_held_here, piece_sharding, place, write

SHAPE = (8, 4, 6)


def mesh(data: int, model: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def write_ones(stacked: jax.Array, index: int) -> jax.Array:
    return write(stacked, place(np.ones((4, 6), np.float32), stacked.dtype, piece_sharding(stacked.sharding, 3)), index)


SHARDINGS = [
    ((1, 1), P()),
    ((1, 8), P("model", None, None)),
    ((2, 4), P("model")),
    ((2, 2), P(None, "model", "data")),
    ((2, 4), P(("data", "model"), None, None)),
    ((2, 2), P("data", "model", None)),
]


@pytest.mark.parametrize(("axes", "spec"), SHARDINGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pieces_written_in_any_order_make_the_whole(axes, spec, dtype):
    whole = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    sharding = NamedSharding(mesh(*axes), spec)
    stacked = allocate(jax.ShapeDtypeStruct(SHAPE, dtype), sharding)
    for index in (5, 0, 7, 2, 1, 6, 4, 3):
        stacked = write(stacked, place(whole[index], dtype, piece_sharding(sharding, 3)), index)
    assert stacked.sharding.is_equivalent_to(sharding, len(SHAPE))
    assert stacked.dtype == dtype
    np.testing.assert_array_equal(stacked, whole.astype(dtype))


def test_what_is_not_written_stays_as_it_was():
    sharding = NamedSharding(mesh(1, 8), P("model"))
    stacked = write_ones(allocate(jax.ShapeDtypeStruct(SHAPE, jnp.float32), sharding), 5)
    expected = np.zeros(SHAPE)
    expected[5] = 1
    np.testing.assert_array_equal(stacked, expected)


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()])
def test_writing_reuses_the_memory(spec):
    stacked = allocate(jax.ShapeDtypeStruct(SHAPE, jnp.float32), NamedSharding(mesh(1, 2), spec))
    before = [shard.data.unsafe_buffer_pointer() for shard in stacked.addressable_shards]
    after = write_ones(stacked, 2)
    assert stacked.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == before


def test_one_program_serves_every_index():
    stacked = allocate(jax.ShapeDtypeStruct((5, 7), jnp.float32), NamedSharding(mesh(1, 1), P()))
    before = placement._write._cache_size()
    for expert in range(5):
        stacked = write(stacked, jnp.full(7, expert, jnp.float32), expert)
    assert placement._write._cache_size() == before + 1


@pytest.mark.parametrize("spec", [P("model", None), P(None, "model"), P()])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_a_whole_parameter_is_placed_and_cast(spec, source, target):
    values = (np.arange(32, dtype=np.float32).reshape(8, 4) / 3).astype(source)
    sharding = NamedSharding(mesh(1, 4), spec)
    placed = place(values, np.dtype(target), sharding)
    assert placed.sharding.is_equivalent_to(sharding, 2)
    assert placed.dtype == target
    np.testing.assert_array_equal(placed, values.astype(np.float32).astype(target))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_placed_parameter_does_not_change_with_its_file(tmp_path, transposed):
    # 64 floats at an offset of 64 bytes: aligned as the CPU backend likes it, which then takes arrays without a copy.
    file = tmp_path / "values"
    file.write_bytes(bytes(64) + np.arange(64, dtype=np.float32).tobytes())
    host = np.memmap(file, np.float32, mode="r", offset=64, shape=(8, 8))
    placed = place(host, np.dtype(np.float32), NamedSharding(mesh(1, 1), P()), transposed)
    with file.open("r+b") as opened:
        opened.write(bytes(64 + 256))
    np.testing.assert_array_equal(host, np.zeros((8, 8)))
    expected = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(placed, expected.T if transposed else expected)


@pytest.mark.parametrize(("axes", "spec"), [((1, 8), P("model", None)), ((2, 4), P(None, "model")), ((2, 3), P())])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_a_transposed_parameter_is_turned_on_its_devices(axes, spec, target):
    values = np.arange(64 * 8, dtype=np.float32).reshape(8, 64)
    sharding = NamedSharding(mesh(*axes), spec)
    placed = place(values, np.dtype(target), sharding, transposed=True)
    assert placed.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(placed, values.T.astype(target))


def test_a_mesh_of_one_process_holds_everything():
    host = np.arange(48.0).reshape(6, 8)
    (part,) = parts_held_here(host, NamedSharding(mesh(2, 4), P(None, "model")))
    assert part is host


@pytest.mark.parametrize(
    ("spec", "transposed", "expected"),
    [
        (P("model", None), False, [np.s_[0:2, :], np.s_[2:4, :]]),
        (P(None, "model"), False, [np.s_[:, 0:2], np.s_[:, 2:4]]),
        (P("model", None), True, [np.s_[:, 0:2], np.s_[:, 2:4]]),
        (P(), False, [np.s_[:, :]]),
    ],
)
def test_of_a_mesh_over_processes_only_the_parts_of_this_one_are_seen(monkeypatch, spec, transposed, expected):
    """Half of the devices along the model axis are another process's; copies along the data axis count once."""
    axes = mesh(2, 4)
    mine = axes.devices[:, :2]
    everywhere = NamedSharding.devices_indices_map

    def indices_here(sharding, shape):
        return {d: index for d, index in everywhere(sharding, shape).items() if d in mine}

    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", indices_here)
    host = np.arange(64.0).reshape(8, 8)
    parts = parts_held_here(host, NamedSharding(axes, spec), transposed)
    assert len(parts) == len(expected)
    for part, index in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part, host[index])
        assert np.shares_memory(part, host)
