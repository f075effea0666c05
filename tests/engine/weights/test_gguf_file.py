from contextlib import closing

import gguf
import ml_dtypes
import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.weights.gguf_file import GGUFSource

from .gguf_builder import write_gguf

VALUES = np.random.default_rng(3).normal(size=(7, 64)).astype(np.float32)


@pytest.mark.parametrize("shape", [(7, 64), (32, 64), (48, 32), (1, 32), (64,), (2, 3, 32)])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_tensors_equal_the_gguf_packages_values(tmp_path, type_name, shape):
    type_ = gguf.GGMLQuantizationType[type_name]
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", {}, {"t": (values, type_)})
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_).reshape(shape)
    with closing(GGUFSource(file)) as source:
        assert source.tensors["t"].shape == shape
        assert source.tensors["t"].dtype == np.float32
        np.testing.assert_array_equal(source.read("t"), expected)


def test_q8_0_by_hand(tmp_path):
    # A block is a float16 scale, then 32 int8: value = scale * int8.
    values = np.arange(-16, 16, dtype=np.float32)[None] * (127 / 16)
    file = write_gguf(tmp_path / "model.gguf", {}, {"t": (values, gguf.GGMLQuantizationType.Q8_0)})
    with closing(GGUFSource(file)) as source:
        np.testing.assert_array_equal(source.read("t")[0, [0, 16, 31]], [-127.0, 0.0, 119.0])


def test_plain_tensors_keep_their_dtype(tmp_path):
    tensors = {"single": VALUES, "half": VALUES.astype(np.float16), "brain": (VALUES, gguf.GGMLQuantizationType.BF16)}
    file = write_gguf(tmp_path / "model.gguf", {}, tensors)
    with closing(GGUFSource(file)) as source:
        for name, dtype in (("single", np.float32), ("half", np.float16), ("brain", ml_dtypes.bfloat16)):
            assert source.tensors[name].dtype == dtype
            np.testing.assert_array_equal(source.read(name), VALUES.astype(dtype))


def test_nothing_is_read_after_close(tmp_path):
    source = GGUFSource(write_gguf(tmp_path / "model.gguf", {}, {"t": VALUES}))
    source.close()
    with pytest.raises(CheckpointError, match="after close"):
        source.read("t")
