import json
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import CheckpointError
from engine.weights.hf import HFSource

from .checkpoints import write_index


def write_two_shards(directory):
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, directory / "one.safetensors")
    save_file({"b": np.arange(4, dtype=np.float16)}, directory / "two.safetensors")
    write_index(directory, {"a": "one.safetensors", "b": "two.safetensors"})


def test_tensors_of_all_shards_are_listed_and_read(tmp_path):
    write_two_shards(tmp_path)
    with closing(HFSource(tmp_path)) as source:
        assert {name: (info.shape, info.dtype, info.num_bytes) for name, info in source.tensors.items()} == {
            "a": ((2, 3), np.float32, 24),
            "b": ((4,), np.float16, 8),
        }
        np.testing.assert_array_equal(source.read("a"), [[0, 1, 2], [3, 4, 5]])
        np.testing.assert_array_equal(source.read("b"), [0, 1, 2, 3])


def test_bfloat16_is_read_as_bfloat16(tmp_path):
    values = np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16)
    save_file({"a": values}, tmp_path / "model.safetensors")
    with closing(HFSource(tmp_path)) as source:
        assert source.read("a").dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(source.read("a"), values)


def test_a_read_array_cannot_change_the_file(tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with closing(HFSource(tmp_path)) as source, pytest.raises(ValueError, match="read-only"):
        source.read("a")[:] = 7


def test_metadata_odd_lengths_and_empty_tensors(tmp_path):
    tensors = {"a": np.arange(3, dtype=np.int8), "b": np.ones((0, 4), np.float32), "c": np.arange(5, dtype=np.float32)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "note": "x"})
    with closing(HFSource(tmp_path)) as source:
        for name, values in tensors.items():
            np.testing.assert_array_equal(source.read(name), values)
            assert source.read(name).dtype == values.dtype


def test_a_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        HFSource(tmp_path)


def test_a_directory_with_both_layouts_is_refused(tmp_path):
    write_two_shards(tmp_path)
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds both"):
        HFSource(tmp_path)


@pytest.mark.parametrize("keep_bytes", [0, 4, 40, 90])
def test_a_truncated_file_is_named(tmp_path, keep_bytes):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(100, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        HFSource(tmp_path)


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        HFSource(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../outside.safetensors"}, r"said to be in '\.\./outside\.safetensors'; expected the plain name"),
        ({"a": "/outside.safetensors"}, "expected the plain name"),
        ({"a": "sub/one.safetensors"}, "expected the plain name"),
        ({"a": "one.bin"}, "expected the plain name"),
        ({"a": 3}, "expected the plain name"),
        ({"a": "absent.safetensors"}, r"absent\.safetensors: missing, though"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, r"one\.safetensors: lacks tensor 'c'"),
        ({"b": "two.safetensors", "a": "two.safetensors"}, r"two\.safetensors: lacks tensor 'a'"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, weight_map, message):
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "outside.safetensors")
    write_two_shards(directory)
    write_index(directory, weight_map)
    with pytest.raises(CheckpointError, match=message):
        HFSource(directory)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path):
    write_two_shards(tmp_path)
    save_file({"a": np.ones(3, np.float32), "c": np.ones(3, np.float32)}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"one\.safetensors: holds tensor 'c', which .* does not list"):
        HFSource(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), (json.dumps([1]), "expected a JSON object")])
def test_an_index_that_is_no_json_object_is_refused(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        HFSource(tmp_path)
