import contextlib
import io
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.weights.hf import HFSource
from engine.weights.torch_file import TorchSource

from .checkpoints import reference_dir
from .torch_builder import (
    ORDERED_DICT,
    STOP,
    STORAGE_NAMES,
    View,
    contiguous,
    items,
    number,
    parameter,
    sequence,
    state_dict,
    tensor,
    text,
    write_archive,
    write_state_dict,
    write_torch_index,
)

VALUES = np.arange(24, dtype=np.float32)
PLAIN = contiguous("0", VALUES, (4, 6))


def write(tmp_path, pickled, storages=None, **options):
    return write_archive(tmp_path / "pytorch_model.bin", pickled, storages or {"0": VALUES}, **options)


def read(file, name="a"):
    return TorchSource(file).read(name)


def test_the_reference_file_holds_the_same_as_its_safetensors():
    folder = reference_dir("hf/pi05-tiny")
    torch, safetensors = TorchSource(folder / "pytorch_model.bin"), HFSource(folder)
    assert torch.tensors.keys() == safetensors.tensors.keys()
    for name, info in safetensors.tensors.items():
        found = torch.tensors[name]
        assert (found.shape, found.dtype, found.num_bytes) == (info.shape, info.dtype, info.num_bytes)
        np.testing.assert_array_equal(torch.read(name), safetensors.read(name))


@pytest.mark.parametrize("dtype", STORAGE_NAMES, ids=str)
def test_every_element_type_is_read(tmp_path, dtype):
    values = (np.arange(15).reshape(3, 5) % 7 - 3).astype(dtype)
    source = TorchSource(write_state_dict(tmp_path / "pytorch_model.bin", {"a": values, "b": values + values}))
    assert source.read("a").dtype == dtype
    assert source.tensors["a"].num_bytes == values.nbytes
    np.testing.assert_array_equal(source.read("a"), values)
    np.testing.assert_array_equal(source.read("b"), values + values)


VIEWS = {
    "whole": (PLAIN, VALUES.reshape(4, 6)),
    "an offset": (contiguous("0", VALUES, (3, 5), 7), VALUES[7:22].reshape(3, 5)),
    "transposed": (PLAIN.but(shape=(6, 4), strides=(1, 6)), VALUES.reshape(4, 6).T),
    "every second column, from an offset": (
        PLAIN.but(offset=1, shape=(4, 3), strides=(6, 2)),
        VALUES.reshape(4, 6)[:, 1::2],
    ),
    "permuted": (PLAIN.but(shape=(3, 2, 4), strides=(1, 12, 3)), VALUES.reshape(2, 4, 3).transpose(2, 0, 1)),
    "expanded": (PLAIN.but(offset=5, shape=(3, 4), strides=(0, 1)), np.broadcast_to(VALUES[5:9], (3, 4))),
    "a scalar": (PLAIN.but(offset=9, shape=(), strides=()), VALUES[9]),
    "one row of any stride": (PLAIN.but(offset=18, shape=(1, 6), strides=(77, 1)), VALUES[18:].reshape(1, 6)),
    "the last element": (PLAIN.but(offset=23, shape=(1,), strides=(1,)), VALUES[23:]),
    "nothing": (PLAIN.but(shape=(0, 6), strides=(6, 1)), np.zeros((0, 6))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_storage_is_what_it_shows(tmp_path, name):
    view, expected = VIEWS[name]
    found = read(write(tmp_path, state_dict({"a": tensor(view)})))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)


def test_tensors_may_share_a_storage(tmp_path):
    views = {name: tensor(view) for name, (view, _) in VIEWS.items()}
    source = TorchSource(write(tmp_path, state_dict(views)))
    for name, (_, expected) in VIEWS.items():
        np.testing.assert_array_equal(source.read(name), expected)


def test_a_read_array_cannot_change_the_file(tmp_path):
    found = read(write(tmp_path, state_dict({"a": tensor(PLAIN)})))
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 7


METADATA = items({"_metadata": ORDERED_DICT + items({"": b"}" + text("version") + number(1) + b"s"})})

PICKLES = {
    "an ordered dict": state_dict({"a": tensor(PLAIN)}, ORDERED_DICT),
    "with the versions of its modules": b"\x80\x02"
    + ORDERED_DICT
    + items({"a": tensor(PLAIN)})
    + b"}"
    + METADATA
    + b"b"
    + STOP,
    "of parameters": state_dict({"a": parameter(PLAIN)}),
    "with metadata of tensors": state_dict({"a": tensor(PLAIN, b"}")}),
    "one item at a time": b"\x80\x02}" + text("a") + tensor(PLAIN) + b"s" + STOP,
    "with a memo": (
        b"\x80\x02}q\x00("
        + text("a")
        + b"q\x01"
        + tensor(PLAIN)
        + b"r\x00\x01\x00\x00"
        + text("b")
        + b"j\x00\x01\x00\x00u."
    ),
    "in protocol 4": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a"
    + tensor(PLAIN).replace(
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93"
    )
    + b"u"
    + STOP,
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_as_torch_writes_it_is_understood(tmp_path, name):
    np.testing.assert_array_equal(read(write(tmp_path, PICKLES[name])), VALUES.reshape(4, 6))


class Tensor:
    """What Python's own pickler meets in place of PyTorch's class."""

    def __init__(self, view):
        self.view = view


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pythons_own_pickler_writes_is_understood(tmp_path, monkeypatch, protocol):
    """As in PyTorch: a dict with an attribute, parameters in it, storages by reference."""

    def stand_in(module, name, kind):
        made = kind(name, (), {}) if kind is type else lambda *arguments: None
        made.__module__, made.__name__, made.__qualname__ = module, name, name
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module) or types.ModuleType(module))
        monkeypatch.setattr(sys.modules[module], name, made, raising=False)
        return made

    storage = stand_in("torch", "FloatStorage", type)
    rebuild_tensor = stand_in("torch._utils", "_rebuild_tensor_v2", None)
    rebuild_parameter = stand_in("torch._utils", "_rebuild_parameter", None)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", storage, value.key, "cpu", value.num_elements) if isinstance(value, View) else None

        def reducer_override(self, value):
            if not isinstance(value, Tensor):
                return NotImplemented
            view = value.view
            return rebuild_tensor, (view, view.offset, view.shape, view.strides, False, OrderedDict())

    class Parameter:
        def __reduce__(self):
            return rebuild_parameter, (Tensor(PLAIN), True, OrderedDict())

    saved = OrderedDict(a=Tensor(PLAIN), b=Parameter(), **{f"more.{i}": Tensor(PLAIN) for i in range(300)})
    saved._metadata = OrderedDict({"": {"version": 1}, "norm": {"version": 2}})
    data = io.BytesIO()
    Pickler(data, protocol).dump(saved)
    source = TorchSource(write(tmp_path, data.getvalue()))
    assert list(source.tensors) == list(saved)
    np.testing.assert_array_equal(source.read("b"), VALUES.reshape(4, 6))


def test_files_with_any_bytes_changed_are_read_or_refused(tmp_path):
    data = write(tmp_path, PICKLES["with the versions of its modules"]).read_bytes()
    random, outcomes = np.random.default_rng(0), set()
    for _ in range(400):
        changed = bytearray(data)
        for at in random.integers(len(data), size=random.integers(1, 4)):
            changed[at] = random.integers(256)
        (tmp_path / "changed.bin").write_bytes(changed)
        try:
            outcomes.add(len(TorchSource(tmp_path / "changed.bin").tensors))
        except CheckpointError:
            outcomes.add(None)
    assert outcomes == {None, 1}


def test_an_element_count_beyond_31_bits_is_a_number(tmp_path):
    huge = View("0", "FloatStorage", 2**33, 0, (2**33,), (1,))
    with pytest.raises(CheckpointError, match=rf"storage '0' of tensor 'a' has 96 bytes; expected {2**35}"):
        TorchSource(write(tmp_path, state_dict({"a": tensor(huge)})))


def test_shards_are_read_by_their_index(tmp_path):
    write_state_dict(tmp_path / "one.bin", {"a": VALUES})
    write_state_dict(tmp_path / "two.bin", {"b": VALUES.reshape(4, 6) + 1})
    write_torch_index(tmp_path, {"a": "one.bin", "b": "two.bin"})
    source = TorchSource(tmp_path)
    assert {name: info.file.name for name, info in source.tensors.items()} == {"a": "one.bin", "b": "two.bin"}
    np.testing.assert_array_equal(source.read("b"), VALUES.reshape(4, 6) + 1)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../one.bin"}, "expected the plain name of a .bin file"),
        ({"a": "one.safetensors"}, "expected the plain name of a .bin file"),
        ({"a": "absent.bin"}, r"absent\.bin: missing, though pytorch_model\.bin\.index\.json lists it"),
        ({"a": "one.bin", "c": "one.bin"}, r"one\.bin: lacks tensor 'c'"),
        ({"a": "two.bin", "b": "two.bin"}, r"two\.bin: lacks tensor 'a'"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, weight_map, message):
    write_state_dict(tmp_path / "one.bin", {"a": VALUES})
    write_state_dict(tmp_path / "two.bin", {"b": VALUES})
    write_torch_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        TorchSource(tmp_path)


class Harm:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def call(marker, protocol=2):
    """The instructions of a call that makes a folder."""
    made = pickle.dumps(Harm(os.mkdir, marker), protocol=protocol)
    return made[2:-1] if protocol == 2 else made[11:-1]


HOSTILE = {
    "a call at the top": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=2),
    "a call at the top in protocol 0": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=0),
    "a call at the top in protocol 4": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=4),
    "eval": lambda marker: pickle.dumps(Harm(eval, f"__import__('os').mkdir({marker!r})"), protocol=2),
    "a call beside the tensors": lambda marker: state_dict({"a": tensor(PLAIN), "b": call(marker)}),
    "a call in a tensor's metadata": lambda marker: state_dict({"a": tensor(PLAIN, call(marker))}),
    "a call in the modules' versions": lambda marker: (
        b"\x80\x02" + ORDERED_DICT + items({"a": tensor(PLAIN)}) + b"}" + items({"_metadata": call(marker)}) + b"b."
    ),
    "a call whose result is dropped": lambda marker: b"\x80\x02" + call(marker) + b"0" + state_dict({"a": b"N"})[2:],
    "an instance in the old way": lambda marker: b"(S'" + marker.encode() + b"'\nios\nmkdir\n.",
    "an object built by its class": lambda marker: b"\x80\x02cos\nmkdir\n(" + text(marker) + b"t\x81.",
    "an extension code": lambda marker: b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, name):
    marker = tmp_path / "ran"
    file = write(tmp_path, HOSTILE[name](str(marker)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a state dict that can be read: "):
        TorchSource(file)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "a call at the top",
        "a call at the top in protocol 0",
        "a call at the top in protocol 4",
        "eval",
        "a call beside the tensors",
        "a call in a tensor's metadata",
        "a call in the modules' versions",
        "a call whose result is dropped",
        "an instance in the old way",
    ],
)
def test_the_hostile_pickles_would_run_elsewhere(tmp_path, name):
    """The test above would prove nothing with pickles that are only malformed."""
    marker = tmp_path / "ran"

    class Trusting(pickle.Unpickler):
        def find_class(self, module, name):
            return (lambda *arguments: {}) if module.startswith("torch") else super().find_class(module, name)

        def persistent_load(self, reference):
            return reference

    with contextlib.suppress(TypeError, ValueError, AttributeError, pickle.UnpicklingError):
        Trusting(io.BytesIO(HOSTILE[name](str(marker)))).load()
    assert marker.exists()


def stored(reference):
    """A tensor whose storage is referred to by these instructions."""
    arguments = sequence(reference + b"Q", number(0), sequence(number(1)), sequence(number(1)), b"\x89", ORDERED_DICT)
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps(Harm(os.mkdir, "x"), protocol=2), "it refers to 'posix.mkdir'; only collections.OrderedDict, "),
        (state_dict({"a": b"ctorch\nload\n"}), "it refers to 'torch.load'"),
        (state_dict({"a": tensor(PLAIN.but(storage="QInt8Storage"))}), "it refers to 'torch.QInt8Storage'"),
        (
            state_dict({"model": b"}" + items({"a": tensor(PLAIN)})}),
            "'model' is of type dict, no tensor; expected a fl",
        ),
        (state_dict({"a": tensor(PLAIN), "step": number(3)}), "'step' is of type int, no tensor"),
        (state_dict({}), "it holds no dict of tensors"),
        (b"\x80\x02" + tensor(PLAIN) + STOP, "it holds no dict of tensors"),
        (b"\x80\x02]" + STOP, "instruction EMPTY_LIST is none that a state dict of tensors has"),
        (state_dict({"a": tensor(PLAIN)})[:-1], "truncated or malformed"),
        (state_dict({"a": tensor(PLAIN)})[:60], "truncated or malformed"),
        (state_dict({"a": tensor(PLAIN)}) + b"x", "its pickle has .* bytes, and ends at"),
        (b"\x80\x02}(K\x01" + tensor(PLAIN) + b"u.", "a dict has a key of type int"),
        (b"\x80\x02}(" + (text("a") + tensor(PLAIN)) * 2 + b"u.", "'a' stands twice"),
        (b"\x80\x02}(" + text("a") + b"u.", "make no state dict"),
        (b"\x80\x02u.", "make no state dict"),
        (b"\x80\x02}h\x07s.", "make no state dict"),
        (b"\x80\x02R.", "make no state dict"),
        (b"\x80\x02}b.", "make no state dict"),
        (b"\x80\x02q\x00.", "make no state dict"),
        (b"\x80\x02c\\q\nx\n.", r"truncated or malformed|it refers to"),
        (b"", "truncated or malformed"),
        (b"\xff\xff", "truncated or malformed"),
        (state_dict({"a": stored(text("x"))}), "make no state dict"),
        (
            state_dict({"a": stored(sequence(text("storage"), text("x"), text("0"), text("cpu"), number(1)))}),
            "make no state dict",
        ),
        (state_dict({"a": tensor(PLAIN.but(num_elements=-1))}), "make no state dict"),
        (state_dict({"a": tensor(PLAIN, number(5))}), "make no state dict"),
        (
            state_dict({"a": tensor(PLAIN.but(offset=1))}),
            r"shape \[4, 6\], strides \[6, 1\] and offset 1 reaches beyond",
        ),
        (state_dict({"a": tensor(PLAIN.but(shape=(5, 6)))}), "reaches beyond its storage '0' of 24 elements"),
        (state_dict({"a": tensor(PLAIN.but(strides=(7, 1)))}), "reaches beyond"),
        (state_dict({"a": tensor(PLAIN.but(strides=(2**62, 1)))}), "reaches beyond"),
        (state_dict({"a": tensor(PLAIN.but(strides=(-6, 1)))}), "offset, sizes or strides that are none"),
        (state_dict({"a": tensor(PLAIN.but(offset=-1))}), "offset, sizes or strides that are none"),
        (state_dict({"a": tensor(PLAIN.but(shape=(4, -6)))}), "offset, sizes or strides that are none"),
        (state_dict({"a": tensor(PLAIN.but(shape=(2**70, 1)))}), "offset, sizes or strides that are none"),
        (state_dict({"a": tensor(PLAIN.but(strides=(1,)))}), "offset, sizes or strides that are none"),
        (state_dict({"a": tensor(PLAIN.but(num_elements=23, shape=(1,), strides=(1,)))}), "96 bytes; expected 92"),
        (state_dict({"a": tensor(PLAIN.but(storage="DoubleStorage"))}), "has 96 bytes; expected 192"),
        (state_dict({"a": tensor(PLAIN.but(key="1"))}), "lies in storage '1', which the archive does not hold"),
        (state_dict({"a": tensor(PLAIN.but(key="../data.pkl"))}), "lies in storage '../data.pkl', which the archive"),
    ],
)
def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path, pickled, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        TorchSource(write(tmp_path, pickled))
    assert "pytorch_model.bin: not a state dict that can be read: " in str(caught.value)


SOUND = state_dict({"a": tensor(PLAIN)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": zipfile.ZIP_DEFLATED}, "is compressed or encrypted; torch.save writes neither"),
        ({"byte_order": b"big"}, "its byte order is b'big'; expected little"),
        ({"others": [("other/data.pkl", SOUND)]}, "it holds 2 entries data.pkl; expected one"),
    ],
)
def test_an_archive_that_torch_does_not_write_is_refused(tmp_path, options, message):
    with pytest.raises(CheckpointError, match=message):
        TorchSource(write(tmp_path, SOUND, **options))


def test_an_archive_without_a_byte_order_is_of_this_machines_kind(tmp_path):
    np.testing.assert_array_equal(read(write(tmp_path, SOUND, byte_order=None, root="archive")), VALUES.reshape(4, 6))


def test_an_archive_bomb_is_not_unpacked(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1 << 26))
    assert file.stat().st_size < 1 << 17
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        TorchSource(file)


def test_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        file = write(tmp_path, SOUND, others=[("pytorch_model/data/0", VALUES.tobytes())])
    with pytest.raises(CheckpointError, match="two entries of one name"):
        TorchSource(file)


@pytest.mark.parametrize("keep", [0, 10, 200, 500, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = write(tmp_path, SOUND)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*no complete zip archive .*truncated"):
        TorchSource(file)


def central_entry(data, name):
    """Where the directory's record of an entry begins: its own copy of the name is the last in the file."""
    return data.rindex(name) - 46


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (42, 3, "there is no entry where"),
        (42, 0, "another entry lies where 'pytorch_model/data/0' should be"),
        (42, 1 << 30, "there is no entry where"),
        (8, 1, "compressed or encrypted"),
        (20, 95, "compressed or encrypted"),
    ],
)
def test_a_directory_that_points_elsewhere_is_refused(tmp_path, field, value, message):
    file = write(tmp_path, SOUND)
    data = bytearray(file.read_bytes())
    at = central_entry(data, b"pytorch_model/data/0") + field
    width = "<H" if field == 8 else "<I"
    data[at : at + struct.calcsize(width)] = struct.pack(width, value)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        TorchSource(file)


def test_a_storage_beyond_the_end_of_the_file_is_refused(tmp_path):
    huge = PLAIN.but(num_elements=2**28, shape=(2**28,), strides=(1,))
    file = write(tmp_path, state_dict({"a": tensor(huge)}))
    data = bytearray(file.read_bytes())
    at = central_entry(data, b"pytorch_model/data/0")
    data[at + 20 : at + 28] = struct.pack("<II", 2**30, 2**30)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="reaches beyond the end of the file"):
        TorchSource(file)


def test_the_old_format_is_refused_with_what_to_do(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2))
    with pytest.raises(CheckpointError, match=r"before PyTorch 1\.6\. Write it again: torch\.save\(torch\.load\("):
        TorchSource(file)


@pytest.mark.parametrize("data", [b"GGUF" + bytes(100), b"", ml_dtypes.bfloat16(1).tobytes()])
def test_a_foreign_file_is_refused(tmp_path, data):
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match="no complete zip archive"):
        TorchSource(tmp_path)
