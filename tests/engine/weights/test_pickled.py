import contextlib
import io
import os
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.weights import pickled
from engine.weights.pickled import locate_tensor

from .grok1_checkpoints import QuantizedWeight8bit, pickle_tensor

FLOATS = np.arange(15, dtype=np.float32).reshape(3, 5)
INTS = np.arange(-9, 12, dtype=np.int8).reshape(7, 3)
SCALES = np.array([[1.5, 2.0, 0.25]], ml_dtypes.bfloat16)


def write(tmp_path, data: bytes):
    file = tmp_path / "tensor00000_000"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 3, 5), (64, 1024)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_a_pickled_array_is_located(tmp_path, shape, order, dtype):
    values = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 100, dtype, order=order)
    file = write(tmp_path, pickle_tensor(values))
    tensor = locate_tensor(file)
    assert tensor.scales is None
    assert tensor.values.dtype == dtype
    np.testing.assert_array_equal(tensor.values.map(file), values)


def test_a_quantised_tensor_is_located(tmp_path):
    file = write(tmp_path, pickle_tensor(QuantizedWeight8bit(INTS, SCALES)))
    tensor = locate_tensor(file)
    np.testing.assert_array_equal(tensor.values.map(file), INTS)
    np.testing.assert_array_equal(tensor.scales.map(file), SCALES)
    assert tensor.scales.dtype == ml_dtypes.bfloat16


def test_the_values_are_not_read(tmp_path):
    class CountingFile(io.BytesIO):
        num_read = 0

        def read(self, size=-1):
            data = super().read(size)
            self.num_read += len(data)
            return data

    data = pickle_tensor(np.zeros(1 << 20, np.float32))
    file = CountingFile(data)
    pickled._Machine(write(tmp_path, data), file).run()
    assert file.num_read < 300


class Harm:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def harmful_dtype(marker):
    # A dtype's state may hold metadata: a place where an object can hide inside an otherwise honest array.
    honest = pickle_tensor(np.zeros(3, np.float32))
    call = pickle.dumps(Harm(os.mkdir, marker), protocol=4)
    body = call[call.index(b"\x8c") : -1]
    # Without the frame, whose length would no longer be right.
    return honest[:2] + honest[11:].replace(b"NNN", b"NN" + body, 1)


HOSTILE = {
    "a call at the top": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=4),
    "a call in the old protocol": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=0),
    "a call in protocol 2": lambda marker: pickle.dumps(Harm(os.mkdir, marker), protocol=2),
    "eval": lambda marker: pickle.dumps(Harm(eval, f"__import__('os').mkdir({marker!r})"), protocol=4),
    "a call in place of the weight": lambda marker: pickle_tensor(QuantizedWeight8bit(Harm(os.mkdir, marker), SCALES)),
    "a call beside the scales": lambda marker: pickle_tensor(
        QuantizedWeight8bit(INTS, SCALES, extra=Harm(os.mkdir, marker))
    ),
    "a call in a dtype's metadata": harmful_dtype,
    "an instance in the old way": lambda marker: b"(S'" + marker.encode() + b"'\nios\nmkdir\n.",
    "an object built by its class": lambda marker: (
        b"\x80\x04cos\nmkdir\n(\x8c" + struct.pack("B", len(marker)) + marker.encode() + b"t\x81."
    ),
    "an extension code": lambda marker: b"\x80\x04\x82\x01.",
    "a persistent object": lambda marker: b"\x80\x04\x8c\x01xQ.",
    "an array of objects": lambda marker: pickle.dumps(np.array([Harm(os.mkdir, marker)], object), protocol=4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, name):
    marker = tmp_path / "ran"
    file = write(tmp_path, HOSTILE[name](str(marker)))
    with pytest.raises(CheckpointError, match="tensor00000_000: not a pickled tensor: "):
        locate_tensor(file)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["a call at the top", "a call in protocol 2", "a call in place of the weight", "a call in a dtype's metadata"],
)
def test_the_hostile_pickles_would_run_elsewhere(tmp_path, name):
    """The test above would prove nothing with pickles that are only malformed."""
    marker = tmp_path / "ran"

    class Trusting(pickle.Unpickler):
        def find_class(self, module, name):
            return QuantizedWeight8bit if name == "QuantizedWeight8bit" else super().find_class(module, name)

    with contextlib.suppress(TypeError, ValueError, pickle.UnpicklingError):
        Trusting(io.BytesIO(HOSTILE[name](str(marker)))).load()
    assert marker.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Harm(os.mkdir, "x"), protocol=4), "it refers to 'posix.mkdir'; only __main__.Quantized"),
        (pickle.dumps(Harm(os.mkdir, "x"), protocol=2), "it refers to 'posix.mkdir'"),
        (pickle.dumps(Harm(eval, "x"), protocol=4), "it refers to 'builtins.eval'"),
        (pickle.dumps(np.float64(3), protocol=4), "it refers to 'numpy.core.multiarray.scalar'"),
        (b"ios\nmkdir\n.", "it refers to 'os.mkdir'"),
        (pickle.dumps([1.5], protocol=4), "instruction EMPTY_LIST is none that"),
        (pickle.dumps(3, protocol=4), "it holds neither an array nor"),
        (pickle.dumps({"weight": 1, "scales": 2}, protocol=4), "it holds neither an array nor"),
        (pickle.dumps(np.zeros(3), protocol=4), "dtype 'f8'; expected 'f4', 'i1' or ml_dtypes.bfloat16"),
        (pickle.dumps(np.zeros(3, ">f4"), protocol=4), "not little-endian"),
        (pickle.dumps(np.zeros(3, ml_dtypes.float8_e4m3fn), protocol=4), "it refers to 'ml_dtypes.float8_e4m3fn'"),
        (pickle_tensor(QuantizedWeight8bit(INTS, 3)), "it holds neither an array nor"),
        (pickle_tensor(QuantizedWeight8bit(INTS)), "instruction SETITEM is none that"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "instruction BINUNICODE8 is none that"),
        (pickle_tensor(FLOATS) + b"x", "bytes, its pickle ends at"),
        (pickle_tensor(FLOATS).replace(b"K\x03K\x05", b"K\x03K\x06"), "has 60 bytes; expected 72"),
        (b"\x80\x04" + b"N" * 2000 + b".", "more than 1000 instructions"),
        (b"\x80\x04h\x07.", "its instructions up to byte 4 make no array"),
        (b"\x80\x04\x85.", "make no array"),
        (b"\x80\x04t.", "make no array"),
        (b"\x80\x04u.", "make no array"),
        (b"\x80\x04R.", "make no array"),
        (b"\x80\x04Nb.", "make no array"),
        (b"\x80\x04NN\x93.", "make no array"),
        (b"\xff", "is no pickle instruction"),
        (b"", "truncated"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(tmp_path, data, message):
    with pytest.raises(CheckpointError, match=message):
        locate_tensor(write(tmp_path, data))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = pickle_tensor(QuantizedWeight8bit(INTS, SCALES))
    for length in range(len(whole)):
        with pytest.raises(CheckpointError, match="not a pickled tensor"):
            locate_tensor(write(tmp_path, whole[:length]))


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path):
    whole = pickle_tensor(QuantizedWeight8bit(INTS, SCALES))
    for position in range(len(whole)):
        for changed in (whole[position] ^ 1, whole[position] ^ 0x80, 0xFF):
            file = write(tmp_path, whole[:position] + bytes([changed]) + whole[position + 1 :])
            with contextlib.suppress(CheckpointError):
                tensor = locate_tensor(file)
                assert tensor.values.offset + tensor.values.num_bytes <= len(whole)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="absent: cannot be read"):
        locate_tensor(tmp_path / "absent")
