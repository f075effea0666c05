import struct

import gguf
import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.weights.gguf_header import read_gguf_header

from .gguf_builder import write_gguf


@pytest.fixture
def file(tmp_path):
    return write_gguf(
        tmp_path / "model.gguf",
        {"llama.block_count": 3, "x.float": 0.25, "x.flag": True, "x.name": "näme", "x.words": ["a", "", "ç"]},
        {
            "first": np.arange(6, dtype=np.float32).reshape(2, 3),
            "second": (np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
            "third": np.ones(5, np.float16),
        },
    )


def test_metadata_of_every_kind_is_read(file):
    metadata = read_gguf_header(file).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["x.float"] == 0.25
    assert metadata["x.flag"] is True
    assert metadata["x.name"] == "näme"
    assert metadata["x.words"] == ["a", "", "ç"]


def test_tensors_lie_where_the_gguf_package_finds_them(file):
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    tensors = read_gguf_header(file).tensors
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.offset == expected[name].data_offset
        assert tensor.num_bytes == expected[name].n_bytes
        assert tensor.type == expected[name].tensor_type
        assert tensor.shape == tuple(expected[name].shape.tolist())[::-1]


def test_a_file_cut_anywhere_is_refused(file):
    whole = file.read_bytes()
    for length in range(len(whole) - 32):  # the last tensor is padded to 32 bytes
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read_gguf_header(file)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "GGUF version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "unknown type number 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1s", 1, b"\xff"), "not UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q1sII", 1, b"k", 4, 5) * 2,
            "'k' occurs twice",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),
            "array of arrays",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 9),
            "'t' has 9 axes",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 999, 0),
            "unknown type number 999",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0),
            "'t' of type Q8_0 has shape .33,.; expected rows of a multiple of 32",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 2**40, 0, 0),
            "truncated: tensor 't'",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0) * 2,
            "tensor 't' occurs twice",
        ),
        (b"", "cannot be read as a GGUF file"),
    ],
)
def test_a_foreign_or_damaged_header_is_refused(tmp_path, start, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(start)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(file)
